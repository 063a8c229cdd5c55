"""What a device has used: frames, programmings, seconds of device time, joules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from opusim import checks
from opusim.description.schema import FrameSettings


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """Numbers of a call, a step or a run that add up."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{key: value + getattr(other, key) for key, value in vars(self).items()})

    def times(self, repeats: float) -> Self:
        """Return the numbers of `repeats` repetitions."""
        checks.non_negative(repeats=repeats)
        return type(self)(**{key: repeats * value for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Usage(_Counted):
    """A frozen account of device work; two of them add, and subtract for the work in between.

    The figures are those of the device described, not of the computer that simulates it. They reveal batch
    sizes, so they stay out of a private release.

    Attributes:
        frames: frames shown to the medium, at least 0.
        seconds: the frames' periods and the time of programmings, at least 0.
        joules: the frames' periods times the power drawn, and the energy of programmings, at least 0.
        host_seconds: time that the host and its driver add to the frames' periods, as far as the description tells, at
            least 0. A call takes seconds + host_seconds end to end.
        programmings: matrices written, at least 0.
    """

    frames: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    host_seconds: float = 0.0
    programmings: int = 0

    def __post_init__(self) -> None:
        checks.integer(frames=self.frames, programmings=self.programmings, minimum=0)
        checks.non_negative(seconds=self.seconds, joules=self.joules, host_seconds=self.host_seconds)

    def __sub__(self, earlier: Usage) -> Usage:
        spent = {key: value - getattr(earlier, key) for key, value in vars(self).items()}
        rounded = {key: max(0.0, spent[key]) for key in ("seconds", "joules", "host_seconds")}
        return Usage(**spent | rounded)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Usage:
        """Return the account that `to_json` wrote."""
        return cls(**content)


@dataclass(frozen=True, kw_only=True)
class DeviceWork(_Counted):
    """Work that a device is about to do: readings, and the calls that take them; two of them add.

    The numbers are means if the work is random, as that of random batches is.

    Attributes:
        projections: ternary projections and blank readings, at least 0.
        frames: frames of other readings, such as intensities, at least 0.
        calls: calls that take them, at least 0; each costs the host's time.
    """

    projections: float = 0.0
    frames: float = 0.0
    calls: float = 0.0

    def __post_init__(self) -> None:
        checks.non_negative(projections=self.projections, frames=self.frames, calls=self.calls)

    @classmethod
    def of_noise(cls, numbers: float, n_outputs: int) -> DeviceWork:
        """Return the work of one draw of noise: as many blank readings of n_outputs numbers as fill it."""
        return cls(projections=math.ceil(numbers / n_outputs), calls=1)

    def usage(self, settings: FrameSettings, *, n_outputs: int) -> Usage:
        """Return the usage of the work, as far as the description tells, to the nearest frame.

        Args:
            settings: the section ``[frames]`` of the description.
            n_outputs: outputs of the window, whose frames may take longer to read out, at least 1.
        """
        shown = self.projections * settings.frames_per_projection + self.frames
        seconds = shown * settings.period_us(n_outputs) * 1e-6
        host_us = shown * (settings.host_us_per_frame or 0.0) + self.calls * (
            settings.host_us_per_call or 0.0
        )
        return Usage(
            frames=round(shown),
            seconds=seconds,
            joules=seconds * settings.power_w,
            host_seconds=host_us * 1e-6,
        )


class UsageMeter:
    """Counts frames and programmings of a window, and turns them into seconds and joules by ``[frames]``."""

    def __init__(self, settings: FrameSettings, n_outputs: int) -> None:
        self._settings = settings
        self._period_s = settings.period_us(n_outputs) * 1e-6
        self._frames = self._calls = self._programmings = 0
        self._longer_s = self._programming_s = self._programming_j = 0.0

    def count(self, frames: int, exposure_us: float = 0.0) -> None:
        """Add the frames of a call, at least 0; one whose exposure exceeds the period takes as long as its exposure."""
        if not (
            type(frames) is int and frames >= 0 and type(exposure_us) is float and 0 <= exposure_us < math.inf
        ):
            checks.integer(frames=frames, minimum=0)
            checks.non_negative(exposure_us=exposure_us)
        self._frames += int(frames)
        self._calls += 1
        self._longer_s += int(frames) * max(0.0, exposure_us * 1e-6 - self._period_s)

    def count_programming(self, *, seconds: float, joules: float) -> None:
        """Add the writing of a matrix: its time and its energy, at least 0."""
        checks.non_negative(seconds=seconds, joules=joules)
        self._programmings += 1
        self._programming_s += seconds
        self._programming_j += joules

    def snapshot(self) -> Usage:
        """Return what was spent so far."""
        seconds = self._frames * self._period_s + self._longer_s
        settings = self._settings
        per_frame, per_call = (
            (each or 0.0) * 1e-6 for each in (settings.host_us_per_frame, settings.host_us_per_call)
        )
        return Usage(
            frames=self._frames,
            seconds=seconds + self._programming_s,
            joules=seconds * self._settings.power_w + self._programming_j,
            host_seconds=self._frames * per_frame + self._calls * per_call,
            programmings=self._programmings,
        )
