"""The settings of a transform, attached to its result."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any, Self

import numpy as np

from opusim.lightonml.types import FeaturesFormat

Roi = tuple[tuple[int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The circumstances of one transform.

    Attributes:
        device: Name of the device.
        unit: Unit of the numbers: "DN" (a camera's digital numbers), or "projection units".
        frametime_us: Time from frame to frame, microseconds.
        exposure_us: Exposure, microseconds, or None for devices without a camera.
        start: When the transform began.
        end: When it ended.
        frames: Frames that the device showed.
        n_ones: Mirrors that were on in a vector's frame, on average.
        fmt_type: How features became mirrors.
        fmt_factor: Side of a macro-pixel, in mirrors.
        input_roi: Offset and size of the region that shows features, in mirrors; all others are off.
    """

    device: str
    unit: str
    frametime_us: float
    exposure_us: float | None
    start: dt.datetime
    end: dt.datetime
    frames: int
    n_ones: float
    fmt_type: FeaturesFormat
    fmt_factor: int
    input_roi: Roi

    def as_dict(self) -> dict[str, Any]:
        """Return all that is known, under the names of the attributes; the format by its name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found["fmt_type"] = self.fmt_type.name
        return {name: value for name, value in found.items() if value is not None}

    def as_flat_dict(self) -> dict[str, Any]:
        """Return `as_dict` with the four numbers of the region under keys of their own."""
        found = self.as_dict()
        for part, numbers in zip(("position", "shape"), found.pop("input_roi"), strict=True):
            found |= {f"input_roi_{part}_{axis}": number for axis, number in enumerate(numbers)}
        return found

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """Return the context that `as_dict` or `as_flat_dict` gave."""
        values = dict(found)
        if "input_roi" not in values:
            values["input_roi"] = tuple(
                tuple(values.pop(f"input_roi_{part}_{axis}") for axis in (0, 1))
                for part in ("position", "shape")
            )
        return cls(**values | {"fmt_type": FeaturesFormat[values["fmt_type"]]})

    def __str__(self) -> str:
        return str(self.as_dict())


class ContextArray(np.ndarray):
    """An array with the `context` of its transform; slices, copies and pickles keep it.

    Args:
        values: Any array.
        context: The context of the transform that made them.
    """

    context: Context | None

    def __new__(cls, values: Any, context: Context | None) -> Self:
        """View an array as one with a context."""
        view = np.asarray(values).view(cls)
        view.context = context
        return view

    def __array_finalize__(self, source: Any) -> None:
        self.context = getattr(source, "context", None)

    def __reduce__(self) -> Any:
        parts: Any = super().__reduce__()
        rebuild, arguments, state = parts
        return rebuild, arguments, (state, self.context)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.context = state[1]
