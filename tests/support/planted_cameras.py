"""Cameras with one planted fault: a fault-injecting wrapper around the sensor of the camera twin.

A fault changes the counts of the pixels, the numbers before the converter or the codes behind it. Everything else,
light, speckle, anchor and recovery, is the twin's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from opusim.camera.exposure import Exposure
from opusim.description.schema import load_description
from opusim.devices.camera import CameraDevice
from opusim.randomness.streams import NoiseStream

Random = np.random.Generator
Counts = Callable[[Random, np.ndarray], np.ndarray]
Numbers = Callable[[Random, np.ndarray, int], np.ndarray]


def _poisson(random: Random, rates: np.ndarray) -> np.ndarray:
    return random.poisson(rates).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class SensorFault:
    """What a faulty sensor does in place of the twin's; numbers come with that of their first frame."""

    counts: Counts = _poisson  # electrons of frames with some expected electrons, shape (frames, pixels)
    analog: Numbers = lambda random, dn, first: dn  # before the converter, DN, from the sound ones
    codes: Numbers = lambda random, dn, first: dn  # behind the converter, from the sound ones


@dataclass(frozen=True, kw_only=True, eq=False)
class PlantedExposure(Exposure):
    """Stages of a camera with a planted fault."""

    fault: SensorFault = field(default_factory=SensorFault)
    random: Random = field(default_factory=np.random.default_rng)
    taken: list[int] = field(default_factory=lambda: [0])  # how many frames

    def _numbers(self, rates: np.ndarray, offset_e: np.ndarray) -> np.ndarray:
        sensor, first = self.sensor, self.taken[0]
        self.taken[0] += len(rates)
        electrons = np.minimum(self.fault.counts(self.random, rates), sensor.full_well_e or np.inf)
        electrons += offset_e + (sensor.read_noise_e or 0.0) * self.random.standard_normal(rates.shape)
        dn = self.fault.analog(self.random, sensor.black_level_dn + sensor.gain_dn_per_e * electrons, first)
        codes = np.clip(np.rint(dn), 0, sensor.top_dn)
        return np.asarray(self.fault.codes(self.random, codes, first))

    def _expose(self, field: torch.Tensor, pixel: np.ndarray, stream: NoiseStream) -> torch.Tensor:
        light = np.sum(np.square(field.double().numpy()), axis=0)
        return torch.from_numpy(self._numbers(pixel[0] * light + pixel[1], pixel[2]).astype(np.float32))

    def recover(
        self, y: torch.Tensor, field: torch.Tensor, total: Any, decode: Any, shift: Any, *rest: Any
    ) -> None:
        """See `Exposure`; the four frames of a row are p, a - p, n and a - n."""
        parts = field.double().numpy().reshape(2, 2, len(y), -1)  # (parts of the field, signs, rows, pixels)
        shown = np.stack([parts, np.asarray(total, dtype=np.float64)[:, None, None] - parts], axis=2)
        pixel = self._pixel
        rates = pixel[0] * np.sum(np.square(shown), axis=0) + pixel[1]  # (signs, complements, rows, pixels)
        frames = rates.transpose(2, 0, 1, 3).reshape(-1, rates.shape[-1])
        numbers = self._numbers(frames, pixel[2]).reshape(len(y), 2, 2, -1)
        found = numbers[:, 0, 0] - numbers[:, 0, 1] - numbers[:, 1, 0] + numbers[:, 1, 1]
        y.copy_(torch.from_numpy(decode[0] * found - shift[:, None] * decode[1]))


class PlantedCamera(CameraDevice):
    """The camera twin of a preset, instrument `number`, with a planted fault in its sensor or a sound one."""

    def __init__(
        self,
        fault: SensorFault | None,
        number: int,
        *,
        name: str = "camera_low_light",
        camera: dict[str, Any] | None = None,
        **window: Any,
    ) -> None:
        super().__init__(load_description(name, {"camera": camera or {}}), **window)
        self._fault = fault or SensorFault()
        self._random, self._taken = np.random.default_rng([20261127, number]), [0]

    def _exposure_at(self, exposure_us: float | None = None, temperature_c: float | None = None) -> Exposure:
        sound = super()._exposure_at(exposure_us, temperature_c)
        parts: dict[str, Any] = {"fault": self._fault, "random": self._random, "taken": self._taken}
        return PlantedExposure(**vars(sound), **parts)


def half_variance(random: Random, rates: np.ndarray) -> np.ndarray:
    """Counts with half the variance of Poisson's, as noise reduction in the camera leaves them."""
    return rates + (random.poisson(rates) - rates) * 0.5**0.5


def cascade(random: Random, rates: np.ndarray) -> np.ndarray:
    """Counts of counts, as an image intensifier makes them: twice the variance."""
    return random.poisson(random.poisson(rates)).astype(np.float64)


CAMERAS: dict[str, SensorFault | None] = {
    "sound": None,
    "half of the Poisson variance": SensorFault(counts=half_variance),
    "counts of counts": SensorFault(counts=cascade),
    # data at the upper end of words of 16 bits, and the same, the lowest bits filled with the highest
    "12 bits in words of 16": SensorFault(codes=lambda random, dn, first: 16 * dn),
    "12 bits in words of 16, repeated": SensorFault(codes=lambda random, dn, first: 16 * dn + np.floor(dn / 256)),
    "drifting black level": SensorFault(  # it wanders by half a DN over some 100 frames
        analog=lambda random, dn, first: dn + 0.5 * np.sin(2 * np.pi * (first + np.arange(len(dn))) / 97)[:, None]
    ),
    "gamma 0.45": SensorFault(  # of a display, above the black level
        analog=lambda random, dn, first: 100 + 3995 * np.maximum((dn - 100) / 3995, 0) ** 0.45
    ),
}  # fmt: skip
