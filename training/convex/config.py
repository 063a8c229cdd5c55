"""Options of the convex trainer: a gated ReLU model under noisy gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from opusim.training.config.kinds import Flag, ProtectionSection, TrainerSection
from opusim.training.config.sections import Effect, Given, Relation


class ConvexConfig(TrainerSection):
    """A convex approximation of a two-layer ReLU network; sampler.scheme says how it descends."""

    implementation = "opusim.training.convex.trainer:ConvexTrainer"
    summary: ClassVar[str] = "A ReLU network as a convex problem: noisy descent, private at the last iterate."
    protections: ClassVar[tuple[str, ...]] = ("none", "record", "last-iterate")
    relations: ClassVar[tuple[Relation, ...]] = ("replace_one", "zero_out", "add_or_remove_one")
    plain_descent = True
    device_keys: ClassVar[Mapping[str, str] | None] = {
        "trainer.gates": "device",
        "protection.noise": "device",
    }
    examples: ClassVar[tuple[str, ...]] = (
        "--data mnist --epsilon 3",
        "--data mnist --epsilon 3 --method poisson",
        "--data digits --epsilon 8 --device gaussian --release",
    )
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            name="method",
            help="cyclic (fixed batches; default) or full (one batch): private at the last iterate; poisson: every "
            "update released.",
            words={
                "cyclic": {"sampler.scheme": "disjoint-cyclic", "protection.kind": "last-iterate"},
                "full": {"sampler.scheme": "full-batch", "protection.kind": "last-iterate"},
                "poisson": {"sampler.scheme": "poisson", "protection.kind": "record"},
            },
        ),
    )
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("trainer.final_noise",),
            needs="protection.kind",
            holds=lambda run: run.protection.protects != "nothing",
        ),
        Effect(
            keys=("trainer.gate_readings",),
            needs="trainer.gates = 'device'",
            holds=lambda run: run.trainer.gates == "device",
        ),
    )

    kind: Literal["convex"] = "convex"
    """convex: the gated ReLU model (disjoint-cyclic and full-batch for the last iterate, poisson for every update)."""
    hyperplanes: int = Field(128, ge=1)
    """Random hyperplanes P, whose sides are a record's gates; the model has P weights a feature and class."""
    gates: Literal["seed", "device"] = "seed"
    """Where the hyperplanes come from: a generator, or the device's own matrix, which is read once and stored with
    the model."""
    gate_readings: int = Field(16, ge=1)
    """Readings of each unit vector that are averaged for gates = 'device'."""
    centre: bool = True
    """Whether each record's own mean feature is subtracted from it first."""
    objective: Literal["squared", "margin", "one-against-rest", "softmax"] = "margin"
    """Loss of a record: squared, margin, one-against-rest or softmax. squared: distance to the one-hot label; margin:
    distance to the logits that are at least 1 for the label and at most 0 for all others; both with the residual
    clipped. one-against-rest: k logistic losses; softmax: one."""
    clip: float | None = Field(None, ge=1e-12, le=1e12)
    """Largest norm C of a record's residual, and so of its gradient; None: 0.5 for squared and margin, no limit
    for the other two. Clipped softmax of three or more classes is not convex and costs a larger epsilon."""
    regularisation: float = Field(0.0, ge=0.0)
    """lambda of lambda/2 |v|^2; the theorem covers 0."""
    final_noise: float | None = Field(None, ge=0.0)
    """Noise of the last step over that of a step at the first learning rate; None takes sqrt(steps an epoch - 1) for
    the last iterate and 0 otherwise. It hides the last batch's records, so that all other steps need less."""

    @property
    def residual_clip(self) -> float | None:
        """clip, or its default for this objective."""
        if self.clip is None and self.objective in ("squared", "margin"):
            return 0.5
        return self.clip

    @classmethod
    def default_protection(cls, given: Given) -> str:
        """A budget or a noise multiplier asks for the last iterate, or with Poisson batches for records."""
        protection = given["protection"]
        if protection.get("epsilon") is None and protection.get("noise_multiplier") is None:
            return "none"
        return "record" if given["sampler"].get("scheme") == "poisson" else "last-iterate"

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """Disjoint cyclic batches of 250, no momentum, and a rate below the 2 / beta that the theorem asks for."""
        sampler: dict[str, Any] = {"scheme": "disjoint-cyclic"}
        if given["sampler"].get("scheme") != "full-batch":
            sampler["batch_size"] = 250
        return {"optimizer": {"lr": 1.9, "momentum": 0.0}, "sampler": sampler}

    def uses_device(self, protection: ProtectionSection) -> bool:
        """With the device's gates or noise."""
        return "device" in (self.gates, protection.noise)

    def divides_by_batch_size(self, protection: ProtectionSection) -> bool:
        """Never: a full batch is divided by the number of records."""
        return False
