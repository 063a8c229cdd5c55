"""Options of the ridge trainer: a linear model in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from opusim.description.section import BadKey
from training.config.kinds import ProtectionSection, TrainerSection
from training.config.sections import Effect, Given


class RidgeConfig(TrainerSection):
    """A linear model in closed form: ridge regression on one-hot labels, one step on all records."""

    implementation = "training.ridge.algorithm:RidgeTrainer"
    summary: ClassVar[str] = "A linear model in closed form, in one step; private for labels in one release."
    protections: ClassVar[tuple[str, ...]] = ("none", "label-release")
    device_keys: ClassVar[Mapping[str, str] | None] = {"protection.noise": "device"}
    examples: ClassVar[tuple[str, ...]] = (
        "--data digits",
        "--data fashion-mnist --set data.features=scattering --protect label-release --epsilon 1",
        "--data fashion-mnist --set data.features=hog --protect label-release --epsilon 1 --release",
    )
    effects: ClassVar[tuple[Effect, ...]] = (
        Effect(
            keys=("model", "optimizer"),
            needs="a trainer that descends (trainer.kind = 'bp', ...)",
            holds=lambda run: False,
        ),
    )

    kind: Literal["ridge"] = "ridge"
    """ridge: a linear model in closed form (full-batch, one step)."""
    ridge: float = Field(0.01, ge=1e-6, le=1e6)
    """lambda of S = sum_i w_i h_i h_i^T + lambda I, over the mean of the sum's diagonal; h_i are the features with a
    constant 1. More of it lowers the leverages, and so the noise that protects labels."""

    @classmethod
    def default_protection(cls, given: Given) -> str:
        """A budget asks for the protection of labels."""
        return "none" if given["protection"].get("epsilon") is None else "label-release"

    @classmethod
    def defaults(cls, given: Given) -> dict[str, dict[str, Any]]:
        """One step on all records."""
        return {"run": {"epochs": 1}, "sampler": {"scheme": "full-batch"}}

    def check(self, run: Any) -> None:
        """Refuse a second step, which would fit the same model again."""
        for key, found, wanted in (
            ("epochs", run.epochs, 1),
            ("sampler.scheme", run.sampler.scheme, "full-batch"),
        ):
            if found != wanted:
                raise BadKey(
                    key,
                    f"{found!r} is not for trainer.kind = 'ridge', whose one step takes all records; leave it out",
                )

    def uses_device(self, protection: ProtectionSection) -> bool:
        """With the device's noise."""
        return protection.noise == "device"
