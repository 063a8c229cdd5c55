"""Options of the convex trainer: a gated ReLU model under noisy gradient descent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from training.config.section import TrainerSection
from training.protections.config import ProtectionConfig, Relation


class ConvexConfig(TrainerSection):
    """A convex approximation of a two-layer ReLU network; sampler.scheme says how it descends."""

    protections: ClassVar[tuple[str, ...]] = ("none", "record", "last-iterate")
    """See TrainerSection."""
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one", "zero_out", "add_or_remove_one")
    """What protection.relation may be under protection.kind = 'record'; the first is its default."""

    kind: Literal["convex"] = "convex"
    """convex: the gated ReLU model (disjoint-cyclic and full-batch for the last iterate, poisson for every update)."""
    hyperplanes: int = Field(128, ge=1)
    """Random hyperplanes P, whose sides are a record's gates; the model has P weights a feature and class."""
    gates: Literal["seed", "device"] = "seed"
    """Where the hyperplanes come from: a generator, or the device's own matrix, read once and stored with the model."""
    gate_readings: int = Field(16, ge=1)
    """Readings of each unit vector that are averaged for gates = 'device'."""
    centre: bool = True
    """Whether each record's own mean feature is subtracted from it first."""
    objective: Literal["squared", "margin", "one-against-rest", "softmax"] = "margin"
    """squared: distance to the one-hot label; margin: distance to the logits that are at least 1 for the label and at
    most 0 for all others; both with the residual clipped. one-against-rest: k logistic losses; softmax: one."""
    clip: float | None = Field(None, ge=1e-12, le=1e12)
    """Largest norm C of a record's residual, and so of its gradient; None: 0.5 for squared and margin, none for the
    other two. Clipped softmax of three classes and more is not convex and costs a larger epsilon."""
    regularisation: float = Field(0.0, ge=0.0)
    """lambda of lambda/2 |v|^2; 0 is covered."""
    final_noise: float | None = Field(None, ge=0.0)
    """Noise of the last step over that of a step at the first learning rate; None takes sqrt(steps an epoch - 1) for
    the last iterate and 0 otherwise. It hides the last batch's records, so that all other steps need less."""

    @property
    def residual_clip(self) -> float | None:
        """clip, or its default for this objective."""
        if self.clip is None and self.objective in ("squared", "margin"):
            return 0.5
        return self.clip

    def implementation(self) -> Any:
        """See TrainerSection.implementation."""
        from training.convex.algorithm import ConvexAlgorithm

        return ConvexAlgorithm

    def uses_device(self, protection: ProtectionConfig) -> bool:
        """Whether the run opens its device."""
        return "device" in (self.gates, protection.noise)

    @model_validator(mode="after")
    def _check_gates(self) -> Self:
        if self.gates == "seed" and self.gate_readings != 16:
            raise ValueError(
                f"gate_readings = {self.gate_readings} is for gates = 'device', but gates = 'seed'; leave it out"
            )
        return self
