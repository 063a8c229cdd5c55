"""A whole run's configuration, and how it is read from a file, a mapping and lines key=value.

Errors name file, key and reason.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator

from opusim.accounting.composition import Budget
from opusim.accounting.guarantee import Adjacency
from opusim.description.schema import DeviceDescription
from opusim.description.section import BadKey, default_of, first_problem, flat, keys_of, merged, parse_setting
from opusim.errors import ConfigError
from opusim.files import parse_json, parse_toml, read_text
from opusim.randomness.seeds import derive_seed
from opusim.training.config.kinds import (
    DEFAULT_EPOCHS,
    DEFAULT_TRAINER,
    KINDS,
    PROTECTIONS,
    TRAINERS,
    ProtectionSection,
    TrainerSection,
    completed,
    given_keys,
    without_derived,
)
from opusim.training.config.sections import (
    CheckpointConfig,
    DataConfig,
    DeviceChoice,
    Effect,
    LossName,
    ModelConfig,
    OptimizerConfig,
    SamplerConfig,
    Section,
    SplitRule,
)

ModelT = TypeVar("ModelT", bound=BaseModel)
SectionT = TypeVar("SectionT", bound=TrainerSection)
SCHEMA_VERSION: Literal[2] = 2
"""Version of the configuration's format, and so of run folders."""
_FITTING_SPLITS: dict[Adjacency, tuple[SplitRule, ...]] = {
    Adjacency.ZERO_OUT: ("index", "id"),
    Adjacency.ADD_OR_REMOVE_ONE: ("content", "id"),
    Adjacency.REPLACE_ONE: ("index",),
}
_MISFITS: dict[str, str] = {
    "index": "an added record would push another one out of the training set",
    "content": "the number of training records would depend on what the records hold",
    "tail": "an added record would move the cut between the parts of the text",
    "id": "a replaced record may have another ID, so the number of training records would change",
}


class RunConfig(Section):
    """A whole run. `opusim.train` takes it; `config.json` of a run folder holds it resolved."""

    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("seed",),
            needs="mode = 'experiment'; a release run draws from the system and keeps no seed",
            holds=lambda run: run.mode == "experiment",
        ),
    )

    schema_version: Literal[2] = SCHEMA_VERSION
    """Version of this format."""
    mode: Literal["experiment", "release"] = "experiment"
    """experiment: seeded, not for release (batches and noise drawn in software can be rebuilt from the seed).
    release: noise and sampling from the operating system's entropy; no seed is stored."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation (but of a module from Python), sampling and simulated noise (experiment mode; refused in
    release mode)."""
    epochs: int = Field(DEFAULT_EPOCHS, ge=1, le=10**9)
    """Passes over the training records, at most 10^9; 1 by default for ridge."""
    loss: LossName = "cross-entropy"
    """Loss whose derivative is the error e: cross-entropy (classes, tokens), squared-error (also real numbers),
    binary-cross-entropy (labels that are 0 or 1), or the import path package.module:function of a function (output,
    target) that returns a loss for each record. By default squared-error for data.target = 'real' and
    binary-cross-entropy for 'labels'."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch, at most 1024; None takes torch's default. A resumed run repeats bit for bit at the same
    number, but for the noise of hardware."""
    torch_device: str = "cpu"
    """Where the network is trained: cpu, cuda, cuda:0, mps (never tried), or auto, which takes a card of CUDA if there
    is one."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sampler: SamplerConfig = SamplerConfig()
    trainer: Annotated[SerializeAsAny[TrainerSection], BeforeValidator(TRAINERS.validated)] = Field(
        default_factory=lambda: TRAINERS.validated({"kind": DEFAULT_TRAINER})
    )
    protection: Annotated[SerializeAsAny[ProtectionSection], BeforeValidator(PROTECTIONS.validated)] = Field(
        default_factory=lambda: PROTECTIONS.validated({"kind": "none"})
    )
    device: DeviceChoice = DeviceChoice()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def relation(self) -> Adjacency | None:
        """Which data sets the run's statements call neighbours, or None without protection."""
        return self.protection.relation_of(self.trainer)

    @property
    def of_users(self) -> bool:
        """Whether whole users are protected; sampler.batch_size then counts users."""
        return getattr(self.protection, "unit", "record") == "user"

    @property
    def group(self) -> int:
        """Rows that a step clips as one: k if users are protected, else 1."""
        return (getattr(self.protection, "records_per_user", None) or 1) if self.of_users else 1

    @property
    def tells_records(self) -> bool:
        """Whether the run may state its number of records; a release run that hides the number may not."""
        return self.mode == "experiment" or self.counts_are_public

    @property
    def counts_are_public(self) -> bool:
        """Whether every statement of the run treats the number of records as public; those about users never do."""
        hidden = self.of_users or self.relation is Adjacency.ADD_OR_REMOVE_ONE
        return self.protection.protects == "labels" or not hidden

    @property
    def fitting_splits(self) -> tuple[SplitRule, ...]:
        """Rules for holding records out that the relation allows, its default first."""
        if self.relation is None or self.protection.protects != "records":  # features are public
            return ("index", "content", "id")
        if self.of_users:  # a user is held out with all its records
            return ("id",)
        return _FITTING_SPLITS[self.relation]

    @property
    def split(self) -> SplitRule:
        """The rule by which records are held out."""
        return self.data.split or self.fitting_splits[0]

    @property
    def uses_device(self) -> bool:
        """Whether the run opens its device."""
        return self.trainer.uses_device(self.protection)

    @property
    def divides_by_batch_size(self) -> bool:
        """Whether a full batch's sum is divided by sampler.batch_size."""
        return self.protection.divisor is None and self.trainer.divides_by_batch_size(self.protection)

    @property
    def divisor(self) -> float:
        """The constant that a protected run divides its noisy sums by."""
        return self.protection.divisor or float(self.sampler.batch_size)

    @property
    def budget(self) -> Budget | None:
        """What the run may spend at most, or None if it has no epsilon."""
        options = self.protection
        return None if options.epsilon is None else Budget(epsilon=options.epsilon, delta=options.delta)

    def seed_for(self, purpose: str) -> int | None:
        """Return the seed of one purpose, or None in release mode, which seeds nothing."""
        return derive_seed(self.seed, purpose) if self.mode == "experiment" else None

    def replaced(self, **changes: Any) -> Self:
        """Return the configuration with some keys changed, validated as a whole.

        Args:
            **changes: Keys of the run. A section takes a mapping of its changed keys, or a whole section.

        Raises:
            ConfigError: A value is out of range, or does not fit the other keys.
            TypeError: There is no such key.
        """
        changed = self.unchecked(**changes)
        sections = {name: type(getattr(changed, name)) for name in ("trainer", "protection")}
        found = {name: getattr(changed, name) for name in changed.model_fields_set}
        values = {name: given_keys(value) or value for name, value in found.items()}
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            raise first_problem(error, type(self), "configuration", sections=sections) from error
        except BadKey as error:
            raise ConfigError("configuration", error.key, error.reason) from error

    def unchecked(self, **changes: Any) -> Self:
        """Return the configuration with some keys changed. The new values are not validated.

        It is for the controls of an audit, which run what a configuration refuses, such as a noise multiplier of 0.

        Args:
            **changes: See `replaced`.

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
        """BLAKE2b of the whole configuration, which ties a checkpoint to its run."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Fill in the defaults that follow from other keys."""
        if not isinstance(values, Mapping):
            return values
        version = values.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise BadKey(
                "schema_version",
                f"{version!r} is not {SCHEMA_VERSION}; read it with the opusim that wrote it",
            )
        return completed(values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # 1. The kinds fit each other, and the other sections fit them.
        trainer, protection = self.trainer, self.protection
        if protection.kind not in trainer.protections and trainer.kind not in protection.trainers:
            raise BadKey(
                "protection.kind",
                f"{protection.kind!r} is not for trainer.kind = {trainer.kind!r}; it takes "
                f"{', '.join(trainer.protections)}",
            )
        if protection.noise != "digital" and not self.uses_device:
            raise ValueError(
                f"protection.noise = {protection.noise!r} needs a device, but trainer.kind = {trainer.kind!r} has "
                "none; see `opusim train options device`, or take "
                + ("trainer.kind = 'pdfa'" if "noise" in protection.dropped else "'digital'")
            )
        protection.check(self)
        trainer.check(self)
        # 2. The relation allows the split and has its constants.
        if self.split not in self.fitting_splits:
            raise ValueError(split_refusal(self, self.split))
        _check_constants(self)
        # 3. The trainer takes the network and the loss.
        for key, value, known in (
            ("model.name", self.model.name, ("mlp",)),
            ("loss", self.loss, ("cross-entropy", "squared-error")),
        ):
            if value not in known and not trainer.any_module:
                raise BadKey(
                    key,
                    f"{value!r} is not for trainer.kind = {trainer.kind!r}, which takes "
                    f"{' or '.join(map(repr, known))}; use that, or trainer.kind = 'bp', 'dfa', 'tdfa' or 'pdfa'",
                )
        if self.loss.endswith("cross-entropy") and self.model.output_activation != "identity":
            raise ValueError(
                f"loss = {self.loss!r} takes logits, but model.output_activation = "
                f"'{self.model.output_activation}'; set it to 'identity' or take loss = 'squared-error'"
            )
        # 4. No key that does nothing was changed.
        require_used(self)
        return self


def _updated(section: ModelT, changes: Mapping[str, Any]) -> ModelT:
    """Return a section with other values, which are not checked again."""
    for name in changes:
        if name not in type(section).model_fields:
            raise TypeError(f"{type(section).__name__} has no key {name!r}")
    return section.model_copy(update=dict(changes))


def split_refusal(config: RunConfig, split: str) -> str:
    """Return why a rule for holding records out does not fit a run's relation, and which rules do."""
    fitting = " or ".join(repr(rule) for rule in config.fitting_splits)
    if config.of_users:
        return f"data.split = {split!r} would separate a user's records under protection.unit = 'user'; use {fitting}"
    remedy = "take protection.relation = 'zero_out' or 'replace_one'" if split == "tail" else f"use {fitting}"
    return f"data.split = {split!r} does not fit the relation {str(config.relation)!r}: {_MISFITS[split]}; {remedy}"


def _check_constants(config: RunConfig) -> None:
    """Refuse a run without the constants that may not come from the number of records."""
    probability = config.sampler.sampling_probability
    hidden = config.relation is Adjacency.ADD_OR_REMOVE_ONE
    if probability is None and not hidden:
        return
    missing = [] if probability is not None else ["sampler.sampling_probability"]
    if config.protection.divisor is None and "batch_size" not in config.sampler.model_fields_set:
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


def effects_of(config: RunConfig) -> list[Effect]:
    """Return the effects of all sections, in their order."""
    sections = [config, *(getattr(config, name) for name in type(config).model_fields)]
    return [effect for section in sections for effect in getattr(type(section), "effects", ())]


def unused(config: RunConfig) -> dict[str, str]:
    """The keys and sections that do nothing in a configuration, each with what it needs."""
    return {
        key: effect.needs
        for effect in effects_of(config)
        for key in effect.keys
        if _at(config, key) is not None and not effect.holds(config)
    }


def require_used(config: RunConfig, given: Collection[str] = ()) -> None:
    """Refuse (BadKey) a key that does nothing and is among the given dotted keys, or differs from its default.

    A resolved configuration names every key. Those that do nothing have their defaults there.
    """
    for key, needs in unused(config).items():
        named = [name for name in given if f"{name}.".startswith(f"{key}.")]
        section, _, name = key.rpartition(".")
        field = type(_at(config, section) if section else config).model_fields[name]
        found = named or _changed(key, _at(config, key), default_of(field))
        if found:
            value = _at(config, found[0])
            raise BadKey(
                found[0], f"{value!r} does nothing here: it needs {needs}; set that, or leave it out"
            )


def require_offered(config: RunConfig, origin: str = "configuration") -> None:
    """Refuse (ConfigError) what only stored runs may have, and say what to take instead."""
    for name in ("trainer", "protection"):
        section = getattr(config, name)
        for key, better in section.dropped.items():
            if (value := getattr(section, key)) in better:
                raise ConfigError(origin, f"{name}.{key}", f"{value!r} was dropped; {better[value]}")


def _changed(key: str, value: Any, default: Any) -> list[str]:
    """The dotted keys at and below `key` that differ from their defaults."""
    if not isinstance(value, BaseModel | dict):
        return [] if value == default else [key]
    parts, standard = (dict(part) if part else {} for part in (value, default))
    return [
        name for part, own in parts.items() for name in _changed(f"{key}.{part}", own, standard.get(part))
    ]


def _at(config: BaseModel, key: str) -> Any:
    """The value of a dotted key, or None if this configuration has no such key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig | None = None,
    settings: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Resolve a configuration: the file or mapping, then `changes`, then `key=value` settings.

    Args:
        source: A TOML file (or the config.json of a run), the name of a trainer, a mapping, a RunConfig, or None for
            the defaults.
        settings: Lines "dotted.key=value"; the value is read as TOML, a bare word as a string.
        changes: A nested mapping merged over the source.

    Raises:
        ConfigError: Missing file, malformed TOML, an unknown key, a value out of range, a key that does nothing in this
            configuration, or a value that only stored runs may have; one line that names file, key and reason.
    """
    if isinstance(source, RunConfig) and not settings and not changes:
        require_offered(source)
        return source  # validated when it was made
    base, is_resolved = _read(source)
    changed: dict[str, Any] = dict(changes or {})
    for setting in settings:
        changed = merged(changed, parse_setting(setting))
    given = changed if is_resolved else merged(base, changed)
    values = merged(_for_kinds(base, changed) if is_resolved else base, changed)
    origin = str(source) if isinstance(source, str | Path) else "configuration"
    config = _validated(
        values, origin, given=[key for key, value in flat(given).items() if value is not None]
    )
    require_offered(config, origin)
    return config


def stored_config(values: Mapping[str, Any]) -> RunConfig:
    """The resolved configuration in a run's `config.json`, which names every key; may raise ConfigError."""
    return _validated(_table(values, "configuration", "config"), "configuration", given=())


def named_trainer(source: str | Path) -> str | None:
    """The trainer.kind that a file gives, or None; raise ConfigError if it cannot be read."""
    trainer = _read(source)[0].get("trainer")
    kind = trainer.get("kind") if isinstance(trainer, Mapping) else None
    return None if kind is None else str(kind)


def _for_kinds(resolved: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without the keys that a changed kind lacks, or that follow from what is changed.

    A key that has another type in the new kind counts as one that it lacks.
    """
    values = dict(resolved)
    for name, kinds in KINDS.items():
        section, change = values.get(name), changed.get(name)
        kind = change.get("kind") if isinstance(change, Mapping) else None
        if isinstance(section, Mapping) and kind in kinds.names():
            known = kinds.find(kind).model_fields
            before = kinds.find(section["kind"]).model_fields
            values[name] = {
                key: value
                for key, value in section.items()
                if key == "kind" or (key in known and known[key].annotation == before[key].annotation)
            }
    try:
        return without_derived(values, changed)
    except BadKey:  # an unknown kind, which validation reports
        return values


def _validated(values: Mapping[str, Any], origin: str, *, given: Sequence[str]) -> RunConfig:
    try:
        config = RunConfig.model_validate(values)
        require_used(config, given)
    except ValidationError as error:
        sections: dict[str, type[BaseModel]] = {}  # of the kinds that the values name
        with suppress(BadKey):
            for name, section in completed(values).items():
                kind = section.get("kind") if name in KINDS and isinstance(section, Mapping) else None
                if kind is not None and kind in KINDS[name].names():
                    sections[name] = KINDS[name].find(kind)
        of_device = keys_of(DeviceDescription)
        for problem in error.errors(include_url=False):
            if problem["type"] == "extra_forbidden" and problem["loc"][0] in of_device:
                key = ".".join(map(str, problem["loc"]))
                raise ConfigError(origin, key, f"unknown key; did you mean 'device.{key}'?") from error
        raise first_problem(error, RunConfig, origin, sections=sections) from error
    except BadKey as error:
        raise ConfigError(origin, error.key, error.reason) from error
    return config


def _table(values: Any, origin: str, key: str) -> dict[str, Any]:
    """Return a table of keys, or refuse anything else."""
    if not isinstance(values, Mapping):
        raise ConfigError(origin, key, f"holds a {type(values).__name__}, not a table of keys")
    return dict(values)


def _read(source: str | Path | Mapping[str, Any] | RunConfig | None) -> tuple[dict[str, Any], bool]:
    """The keys, and whether they are those of a resolved configuration, which names all of them."""
    if source is None:
        return {}, False
    if isinstance(source, RunConfig):
        return source.model_dump(), True
    if isinstance(source, Mapping):
        return dict(source), False
    if source in KINDS["trainer"].names():
        return {"trainer": {"kind": source}}, False
    path = Path(source)
    try:
        text = read_text(path)
        if path.suffix != ".json":
            return parse_toml(text), False
        values = _table(parse_json(text), str(path), "syntax")
        is_stored = "config" in values  # the config.json of a run holds more than the configuration
        return _table(values["config"] if is_stored else values, str(path), "config"), is_stored
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check the path"
        raise ConfigError(str(path), "path", reason) from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "syntax", f"is not valid {path.suffix or 'TOML'}: {error}") from error
