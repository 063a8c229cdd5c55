"""A device that breaks on demand: every fault that a real one has, injected into a working one."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any

import torch

from opusim.description_schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError, DeviceBusy, DeviceUnavailable
from opusim.noise import NoiseModel

KIND = "faulty"
"""What descriptions call it, once `register_device(KIND, FaultyDevice)` was called."""
_HANG_S = 60.0


class Fault(StrEnum):
    """What goes wrong."""

    UNPLUGGED = "unplugged"
    """Every call fails, and the device cannot be opened again."""
    TIMEOUT = "time-out"
    """A call does not return."""
    BUSY = "busy"
    """Another program has taken the device."""
    FROZEN = "frozen frame"
    """The camera repeats its last frame."""
    SATURATED = "saturation"
    """Readings stop at an end of the scale."""
    DARK = "laser off"
    """Readings are noise alone."""
    NOISE_HALVED = "noise halved"
    """The noise has half its standard deviation: less private than stated."""
    HOTTER = "temperature step"
    """The noise has one and a half times its standard deviation."""
    SWAPPED = "medium swapped"
    """Another medium stands in the beam."""
    WRONG_SHAPE = "wrong shape"
    """A reading lacks an output."""
    NOT_A_NUMBER = "NaN"
    """An entry of a reading is NaN."""


class FaultyDevice(NoisyDevice):
    """A wrapper around a device of another kind, which fails from a stated step on until it is repaired.

    Options: ``kind``, that of the wrapped device; ``fault``, one of `Fault`; ``at_step``, the first step it is there;
    ``lasts_calls``, how many calls fail (UNPLUGGED, TIMEOUT and BUSY only; without it the fault stays until
    `FaultyDevice.repaired` is set to True).

    Args:
        description: one whose [options] say what goes wrong.
        **window: as for NoisyDevice.

    Raises:
        ConfigError: an option is missing or unknown.
    """

    repaired = False
    """Set on the class: whether somebody mended what was broken."""

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        options = dict(description.options)
        try:
            kind, self._fault = str(options.pop("kind")), Fault(options.pop("fault"))
            self._at_step = int(options.pop("at_step"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                description.name, "options", f"{error}: give kind, fault and at_step"
            ) from error
        self._calls_left = options.pop("lasts_calls", None)
        if options:
            raise ConfigError(description.name, f"options.{min(options)}", "unknown; remove it")
        self._inner = self._wrapped(description, kind, window)
        self._other = self._wrapped(_with_medium(description), kind, window)
        self._step = -1
        self._last: torch.Tensor | None = None

    def _wrapped(self, description: DeviceDescription, kind: str, window: dict[str, Any]) -> NoisyDevice:
        from opusim.devices.registry import device_factory

        changes: dict[str, Any] = {"kind": kind, "options": {}, "access": None, "monitor": None}
        return device_factory(description.name, kind)(description.model_copy(update=changes), **window)

    @property
    def described_noise(self) -> NoiseModel:
        """That of the wrapped device."""
        return self._inner.described_noise

    def _open(self) -> None:
        self._fail_to_answer()
        self._inner.open()
        self._other.open()

    def _close(self) -> None:
        self._inner.close()
        self._other.close()

    def _seek(self, step: int) -> None:
        self._step = step
        self._inner.seek(step)
        self._other.seek(step)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self._fail_to_answer()
        device = self._other if self._is(Fault.SWAPPED) else self._inner
        y = device.project(x)
        if self._is(Fault.NOISE_HALVED) or self._is(Fault.HOTTER):
            y = self._rescaled(x, y)
        if self._is(Fault.DARK):
            y = self._inner.draw(tuple(y.shape))
        return self._spoiled(y)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._fail_to_answer()
        noise = self._inner.draw(shape)
        if self._is(Fault.NOISE_HALVED) or self._is(Fault.HOTTER):
            noise = noise * self._scale()
        return self._spoiled(noise)

    def _rescaled(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The reading with other noise around the same signal."""
        signal = x @ self._inner.matrix().T  # type: ignore[attr-defined]  # simulated devices have it
        return signal + (y - signal) * self._scale()

    def _scale(self) -> float:
        return 0.5 if self._fault is Fault.NOISE_HALVED else 1.5

    def _spoiled(self, y: torch.Tensor) -> torch.Tensor:
        """The reading after what happens behind the camera."""
        if self._is(Fault.FROZEN) and y.numel():
            frame = y[:1] if self._last is None else self._last
            self._last = frame.clone()
            return frame.expand_as(y).clone() if frame.shape[1:] == y.shape[1:] else y
        if self._is(Fault.SATURATED):
            return y.clamp(max=float(y.std()))
        if self._is(Fault.WRONG_SHAPE):
            return y[..., :-1]
        if self._is(Fault.NOT_A_NUMBER) and y.numel():
            y = y.clone()
            y.view(-1)[0] = torch.nan
        return y

    def _fail_to_answer(self) -> None:
        if not (self._is(Fault.UNPLUGGED) or self._is(Fault.TIMEOUT) or self._is(Fault.BUSY)):
            return
        if self._calls_left is not None:
            if self._calls_left <= 0:
                return
            self._calls_left -= 1
        if self._fault is Fault.TIMEOUT:
            time.sleep(_HANG_S)
        if self._fault is Fault.BUSY:
            raise DeviceBusy(f"device {self.name!r} is used by another program; end it")
        raise DeviceUnavailable(f"device {self.name!r} is unplugged; check its cables")

    def _is(self, fault: Fault) -> bool:
        return self._fault is fault and self._step >= self._at_step and not type(self).repaired


def _with_medium(description: DeviceDescription) -> DeviceDescription:
    """The description with another medium."""
    if description.medium is None:
        return description
    medium = description.medium.model_copy(update={"seed": description.medium.seed + 1})
    return description.model_copy(update={"medium": medium})
