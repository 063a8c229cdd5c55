"""A device that fails on demand: the faults of real devices, injected into a working one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from opusim.camera.exposure import Exposure
from opusim.camera.speckle import Speckle
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.camera import CameraDevice
from opusim.devices.kinds import device_factory
from opusim.errors import ConfigError, DeviceBusy, DeviceUnavailable
from opusim.medium.transmission import TABLE_STEP
from opusim.noise import NoiseModel

KIND = "faulty"
"""Kind of a faulty device in descriptions, after `register_device(KIND, faulty_device)`."""
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
    """Readings stop at an end of the scale; at a camera the light rises by this factor, the amount (20)."""
    DARK = "laser off"
    """Readings are noise only."""
    NOISE_HALVED = "noise halved"
    """The noise's standard deviation is multiplied by the amount (0.5): less private than stated."""
    HOTTER = "temperature step"
    """The noise's standard deviation is multiplied by the amount (1.5)."""
    SWAPPED = "medium swapped"
    """Another medium stands in the beam."""
    LIGHT_CHANGED = "light changed"
    """The light is multiplied by the amount (0.9)."""
    DEAD_OUTPUTS = "dead outputs"
    """The amount (0.05) is the share of outputs that see no light any more."""
    HOT_OUTPUTS = "hot outputs"
    """The amount (0.05) is the share of outputs that are always full."""
    DECORRELATED = "medium decorrelated"
    """The medium's correlation with the earlier one is the amount (0.8). A camera's readings are products of its field
    with the anchor's, so they correlate by its square."""
    WRONG_SHAPE = "wrong shape"
    """A reading lacks an output."""
    NOT_A_NUMBER = "NaN"
    """An entry of a reading is NaN."""


_AMOUNTS = {
    **{Fault.SATURATED: 20.0, Fault.NOISE_HALVED: 0.5, Fault.HOTTER: 1.5, Fault.LIGHT_CHANGED: 0.9},
    **{Fault.DEAD_OUTPUTS: 0.05, Fault.HOT_OUTPUTS: 0.05, Fault.DECORRELATED: 0.8},
}
_RESCALED = (Fault.NOISE_HALVED, Fault.HOTTER)


def faulty_device(description: DeviceDescription, **window: Any) -> NoisyDevice:
    """Return a device of the kind that [options] names, which fails from a stated step on until it is repaired.

    Options: ``kind``, the kind of the device; ``fault``, one of `Fault`; ``at_step``, the first step with the fault;
    ``amount``, its strength, where `Fault` names one; ``lasts_calls``, how many calls fail (UNPLUGGED, TIMEOUT and BUSY
    only; without it the fault stays until `FaultyDevice.repaired` is set to True). Other options go to the device.

    In a `CameraDevice` the light, the medium or the pixels break, so its frames and its readings show the fault; it
    stays a `CameraDevice`. Every other device is wrapped, and its readings are spoiled.
    """
    plan = _Plan(description)
    factory = device_factory(description.name, plan.kind)
    if isinstance(factory, type) and issubclass(factory, CameraDevice):
        broken = type(f"Faulty{factory.__name__}", (_CameraFaults, factory), {})
        device: NoisyDevice = broken(description, **window)
        return device
    return FaultyDevice(description, **window)


class _Plan:
    """What goes wrong, how strongly and when, as a description's options say it."""

    def __init__(self, description: DeviceDescription) -> None:
        options = dict(description.options)
        try:
            self.kind, self.fault = str(options.pop("kind")), Fault(options.pop("fault"))
            self._at_step = int(options.pop("at_step"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                description.name, "options", f"{error}: give kind, fault and at_step"
            ) from error
        self.amount = float(options.pop("amount", _AMOUNTS.get(self.fault, 1.0)))
        self._calls_left = options.pop("lasts_calls", None)
        self._name = description.name
        self._last: torch.Tensor | None = None
        self.step = -1
        self.rest = options

    def active(self, *faults: Fault) -> bool:
        """Return whether one of these faults is there now."""
        return self.fault in faults and self.step >= self._at_step and not FaultyDevice.repaired

    def hit(self, n_outputs: int) -> np.ndarray:
        """Return which outputs the fault hits, bool: a share of `amount`, evenly spread."""
        return np.arange(n_outputs) * self.amount % 1.0 < self.amount - 1e-9

    def fail_to_answer(self) -> None:
        """Raise or hang if the device does not answer."""
        if not self.active(Fault.UNPLUGGED, Fault.TIMEOUT, Fault.BUSY):
            return
        if self._calls_left is not None:
            if self._calls_left <= 0:
                return
            self._calls_left -= 1
        if self.fault is Fault.TIMEOUT:
            time.sleep(_HANG_S)
        if self.fault is Fault.BUSY:
            raise DeviceBusy(f"device {self._name!r} is used by another program; end it")
        raise DeviceUnavailable(f"device {self._name!r} is unplugged; check its cables")

    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        """Return the reading after faults that occur after the camera."""
        if self.active(Fault.FROZEN) and y.numel():
            frame = y[:1] if self._last is None else self._last
            self._last = frame.clone()
            return frame.expand_as(y).clone() if frame.shape[1:] == y.shape[1:] else y
        if self.active(Fault.WRONG_SHAPE):
            return y[..., :-1]
        if self.active(Fault.NOT_A_NUMBER) and y.numel():
            y = y.clone()
            y.view(-1)[0] = torch.nan
        return y


class FaultyDevice(NoisyDevice):
    """A wrapper around a device of another kind than a camera, whose readings it spoils; see `faulty_device`."""

    repaired = False
    """Set on this class: whether the fault is repaired, in cameras too."""

    reads_noise = True

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._plan = _Plan(description)
        self._inner = self._wrapped(description, window)
        medium = description.medium  # the other device stands for a swapped medium
        other = None if medium is None else medium.model_copy(update={"seed": medium.seed + 1})
        self._other = self._wrapped(description.model_copy(update={"medium": other}), window)
        if isinstance(self._inner, CameraDevice):
            raise ConfigError(description.name, "options.kind", "is a camera; open it by `faulty_device`")
        if "matrix" not in self._inner.capabilities and self._plan.fault in (
            *_RESCALED,
            Fault.LIGHT_CHANGED,
            Fault.DECORRELATED,
        ):
            raise ConfigError(
                description.name,
                "options.fault",
                "needs a device with the capability 'matrix'; choose another",
            )

    def _wrapped(self, description: DeviceDescription, window: dict[str, Any]) -> NoisyDevice:
        plan = self._plan
        changes: dict[str, Any] = {"kind": plan.kind, "options": plan.rest, "access": None, "monitor": None}
        return device_factory(description.name, plan.kind)(description.model_copy(update=changes), **window)

    @property
    def described_noise(self) -> NoiseModel:
        """The law of the wrapped device."""
        return self._inner.described_noise

    def _open(self) -> None:
        self._plan.fail_to_answer()
        self._inner.open()
        self._other.open()

    def _close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._other.close()

    def _seek(self, step: int) -> None:
        self._plan.step = step
        self._inner.seek(step)
        self._other.seek(step)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        plan.fail_to_answer()
        device = self._other if plan.active(Fault.SWAPPED) else self._inner
        y = device.project(x)
        if plan.active(*_RESCALED):
            signal = _signal(self._inner, x)
            y = signal + (y - signal) * plan.amount
        if plan.active(Fault.LIGHT_CHANGED):
            y = y + (plan.amount - 1) * _signal(self._inner, x)
        if plan.active(Fault.DECORRELATED):
            other = math.sqrt(1 - plan.amount**2) * _signal(self._other, x)
            y = y + (plan.amount - 1) * _signal(self._inner, x) + other
        if plan.active(Fault.DARK):
            y = self._inner.draw(tuple(y.shape))
        return self._spoiled(y)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        self._plan.fail_to_answer()
        noise = self._inner.draw(shape)
        return self._spoiled(noise * self._plan.amount if self._plan.active(*_RESCALED) else noise)

    def _spoiled(self, y: torch.Tensor) -> torch.Tensor:
        if self._plan.active(Fault.SATURATED):
            y = y.clamp(max=float(y.std()))
        if self._plan.active(Fault.DEAD_OUTPUTS, Fault.HOT_OUTPUTS) and y.shape[-1] == self.n_outputs:
            hit = torch.from_numpy(self._plan.hit(self.n_outputs)).to(y.device)
            stuck = 0.0 if self._plan.fault is Fault.DEAD_OUTPUTS or not y.numel() else float(y.abs().max())
            y = y.masked_fill(hit, stuck)
        return self._plan.spoil(y)


class _CameraFaults(CameraDevice):
    """Faults mixed into a camera's class: light, medium and pixels break in the frames themselves."""

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        self._plan = _Plan(description)
        changes: dict[str, Any] = {"options": self._plan.rest}
        super().__init__(description.model_copy(update=changes), **window)
        self.description, self._sound = description, self.speckle
        self._broken: Speckle | None = None

    @property
    def exposure(self) -> Exposure:
        """The camera's stages, with the fault in them."""
        sound = super().exposure
        plan = self._plan
        if plan.active(Fault.LIGHT_CHANGED, Fault.SATURATED, Fault.DARK):
            factor = 1e-12 if plan.fault is Fault.DARK else plan.amount
            flux = sound.light.anchor_flux_per_s * factor
            return replace(sound, light=sound.light.model_copy(update={"anchor_flux_per_s": flux}))
        if plan.active(Fault.DEAD_OUTPUTS):
            return replace(sound, response=np.where(plan.hit(self.n_outputs), 0.0, sound.response))
        if plan.active(Fault.HOT_OUTPUTS):
            full = 2 * min(sound.sensor.saturation_e, 1e9)
            return replace(sound, offset_e=np.where(plan.hit(self.n_outputs), full, sound.offset_e))
        return sound

    def _open(self) -> None:
        self._plan.fail_to_answer()
        super()._open()

    def _seek(self, step: int) -> None:
        self._plan.step = step
        super()._seek(step)
        if self._plan.active(Fault.SWAPPED, Fault.DECORRELATED):
            if self._broken is None:
                share = 0.0 if self._plan.fault is Fault.SWAPPED else self._plan.amount
                self._broken = _MixedSpeckle(self._sound, share)
            self.speckle = self._broken
        else:
            self.speckle = self._sound

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        self._plan.fail_to_answer()
        y = super()._project(x)
        if self._plan.active(*_RESCALED):
            signal = _signal(self, x)
            y = signal + (y - signal) * self._plan.amount
        return self._plan.spoil(y)


class _MixedSpeckle(Speckle):
    """A medium that correlates with R by c at the same pixels: c R + sqrt(1 - c^2) R'."""

    def __init__(self, sound: Speckle, correlation: float) -> None:
        super().__init__(sound.law, sound.n_outputs, "faults", sound.pixels)
        self._own, self._others = correlation, math.sqrt(1 - correlation**2)
        self._other = Speckle(replace(sound.law, seed=sound.law.seed + 1), sound.n_outputs, "faults")

    def _pixel_tile(self, *where: Any) -> torch.Tensor:
        mixed = self._own * super()._pixel_tile(*where) + self._others * self._other._pixel_tile(*where)
        return mixed.div_(TABLE_STEP).round_().mul_(TABLE_STEP)


def _signal(device: NoisyDevice, x: torch.Tensor) -> torch.Tensor:
    """Return B x of a simulated device, without noise."""
    return x @ device.require("matrix").matrix().T
