"""What every part of a run's configuration is: frozen, checked, each key with its meaning."""

from __future__ import annotations

from typing import ClassVar, Self

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
