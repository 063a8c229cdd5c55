"""What every part of a run's configuration is: frozen, checked, each key with its meaning."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

_LARGEST = 1e12
"""Products of two such numbers stay far below the largest float32, 3e38."""


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused, numbers finite and at most 1e12."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    largest: ClassVar[dict[str, float]] = {}
    """Limits of single keys below that of all numbers."""

    @model_validator(mode="after")
    def _check_magnitudes(self) -> Self:
        for name in type(self).model_fields:
            value, limit = getattr(self, name), self.largest.get(name, _LARGEST)
            if isinstance(value, float) and abs(value) > limit:
                raise ValueError(
                    f"{name} = {value:g} exceeds {limit:g}, beyond which float32 overflows; lower it"
                )
        return self


class TrainerSection(Section):
    """The options of a trainer; the base of the section of every `trainer.kind`."""

    protections: ClassVar[tuple[str, ...]] = ("none", "record")
    """Values of protection.kind that this trainer takes."""

    def implementation(self) -> Any:
        """Return the subclass of `training.engine.algorithm.Algorithm` of this kind.

        It is imported here, so that reading a configuration imports neither torch nor a third party's code.
        """
        raise NotImplementedError(f"{type(self).__name__} must override implementation")

    def build(self, plan: Any) -> Any:
        """Return the algorithm of a `training.engine.plan.RunPlan`, bound to it."""
        return self.implementation()(plan, self)
