"""A whole run's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Discriminator, Field, model_validator

from accounting.guarantee import Adjacency
from training.config.completion import completed
from training.config.effect import require_used
from training.config.section import Section, TrainerSection
from training.config.sections import (
    CheckpointConfig,
    DataConfig,
    DeviceChoice,
    ModelConfig,
    OptimizerConfig,
    SamplerConfig,
    SplitRule,
)
from training.convex.config import ConvexConfig
from training.feedback.config import FeedbackConfig
from training.protections.config import ProtectionConfig
from training.ulr.config import UlrConfig
from training.zeroth_order.config import ZoConfig

LossName = Literal["cross-entropy", "squared-error"]
TrainerConfig = Annotated[FeedbackConfig | UlrConfig | ZoConfig | ConvexConfig, Discriminator("kind")]
"""The options of each family of trainers, told apart by their kind."""
ModelT = TypeVar("ModelT", bound=BaseModel)
SectionT = TypeVar("SectionT", bound=TrainerSection)

_FITTING_SPLITS: dict[Adjacency, tuple[SplitRule, ...]] = {
    Adjacency.ZERO_OUT: ("index", "id"),
    Adjacency.ADD_OR_REMOVE_ONE: ("content", "id"),
    Adjacency.REPLACE_ONE: ("index",),
}
_MISFITS: dict[str, str] = {
    "index": "an added record would push another one out of the training set",
    "content": "the number of training records would depend on what the records hold",
    "id": "a replaced record may have another ID, so the number of training records would change",
}


def split_refusal(config: RunConfig, split: str) -> str:
    """Why a rule for holding records out does not fit a run's relation, and what does."""
    fitting = " or ".join(repr(rule) for rule in config.fitting_splits)
    return (
        f"data.split = {split!r} does not fit the relation {str(config.relation)!r}: {_MISFITS[split]}; "
        f"use {fitting}"
    )


def _updated(section: ModelT, changes: Mapping[str, Any]) -> ModelT:
    """Return a section with other values, which are not checked again."""
    for name in changes:
        if name not in type(section).model_fields:
            raise TypeError(f"{type(section).__name__} has no key {name!r}")
    return section.model_copy(update=dict(changes))


class RunConfig(Section):
    """A whole run. `training.train` takes it, `config.json` of a run folder holds it resolved."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    mode: Literal["experiment", "release"] = "experiment"
    """experiment: seeded and reproducible, not for release (the noise can be rebuilt from the seed).
    release: noise and sampling from the operating system's entropy; no seed is stored."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation, sampling and simulated noise (experiment mode; refused in release mode)."""
    epochs: int = Field(15, ge=1)
    """Passes over the training records."""
    loss: LossName = "cross-entropy"
    """Loss whose derivative is the error e."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch, at most 1024; None takes torch's default. A resumed run repeats bit for bit at the same
    number."""
    torch_device: str = "cpu"
    """Where the network is trained: cpu, cuda, cuda:0."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampler: SamplerConfig = SamplerConfig()
    trainer: TrainerConfig = FeedbackConfig()
    protection: ProtectionConfig = ProtectionConfig()
    device: DeviceChoice = DeviceChoice()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def relation(self) -> Adjacency | None:
        """Which data sets the run's statements call neighbours, or None without protection."""
        if self.protection.kind == "none":
            return None
        if self.protection.kind != "record":
            return Adjacency.REPLACE_ONE
        return Adjacency(self.protection.relation or self.trainer.relations[0])

    @property
    def fitting_splits(self) -> tuple[SplitRule, ...]:
        """Rules for holding records out that the relation allows, its default first."""
        if self.relation is None or self.protection.kind.startswith("label"):  # features are public
            return ("index", "content", "id")
        return _FITTING_SPLITS[self.relation]

    @property
    def split(self) -> SplitRule:
        """The rule by which records are held out."""
        return self.data.split or self.fitting_splits[0]

    @property
    def uses_device(self) -> bool:
        """Whether the run opens its device."""
        return self.trainer.uses_device(self.protection)

    def replaced(self, **changes: Any) -> Self:
        """Return the configuration with some keys changed, whose values are taken as they are.

        Args:
            **changes: Keys of the run. A section takes a mapping of its changed keys, or another section in its place.

        Raises:
            TypeError: There is no such key.
        """
        updates: dict[str, Any] = {}
        for name, value in changes.items():
            section = getattr(self, name, None)
            if isinstance(value, Mapping) and isinstance(section, BaseModel):
                updates[name] = _updated(section, value)
            else:
                updates[name] = value
        return _updated(self, updates)

    def trainer_as(self, section: type[SectionT]) -> SectionT:
        """Return the section `trainer`, which must be one of this class.

        Raises:
            TypeError: It is another trainer's.
        """
        if not isinstance(self.trainer, section):
            raise TypeError(f"trainer.kind = {self.trainer.kind!r} has no {section.__name__}")
        return self.trainer

    def digest(self) -> str:
        """BLAKE2b of the whole configuration, by which a checkpoint knows the run it belongs to."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Fill in the defaults that follow from other keys."""
        return completed(values, FeedbackConfig().kind) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_relation(self) -> Self:
        chosen, allowed = self.protection.relation, self.trainer.relations
        if self.protection.kind == "record" and chosen is not None and chosen not in allowed:
            raise ValueError(
                f"protection.relation = {chosen!r} is not for trainer.kind = {self.trainer.kind!r}; "
                f"take one of {', '.join(allowed)}"
            )
        if self.split not in self.fitting_splits:
            raise ValueError(split_refusal(self, self.split))
        return self

    @model_validator(mode="after")
    def _check_constants(self) -> Self:
        """Constants that may not come from the number of records are there."""
        probability = self.sampler.sampling_probability
        hidden = self.relation is Adjacency.ADD_OR_REMOVE_ONE
        if probability is None and not hidden:
            return self
        missing = [] if probability is not None else ["sampler.sampling_probability"]
        if self.protection.divisor is None and "batch_size" not in self.sampler.model_fields_set:
            missing.append("protection.divisor (or sampler.batch_size)")
        if missing and hidden:
            raise ValueError(
                f"protection.relation = 'add_or_remove_one' needs {' and '.join(missing)}: constants of your choice, "
                "since the number of records is private; give them, or take protection.relation = 'zero_out', under "
                "which that number is public"
            )
        if missing:
            raise ValueError(
                f"sampler.sampling_probability = {probability:g} needs {missing[0]}, the constant that a batch's sum "
                "is divided by; give it, such as sampling_probability times the number of records"
            )
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.protection.kind not in self.trainer.protections:
            raise ValueError(
                f"protection.kind = {self.protection.kind!r} is not for trainer.kind = {self.trainer.kind!r}; it takes "
                f"{', '.join(self.trainer.protections)}"
            )
        if self.protection.noise == "device" and not self.uses_device:
            raise ValueError(
                f"protection.noise = 'device' needs a device, but trainer.kind = {self.trainer.kind!r} has none; "
                "see `opusim train options` for what the others take from one, or take 'digital'"
            )
        if self.loss == "cross-entropy" and self.model.output_activation != "identity":
            raise ValueError(
                f"loss = 'cross-entropy' takes logits, but model.output_activation = "
                f"'{self.model.output_activation}'; set it to 'identity' or take loss = 'squared-error'"
            )
        if self.protection.kind == "last-iterate" and self.mode == "release" and self.checkpoint.keep > 1:
            raise ValueError(
                f"checkpoint.keep = {self.checkpoint.keep} keeps iterates before the last one, which "
                "protection.kind = 'last-iterate' does not cover; leave it out"
            )
        require_used(self)
        return self
