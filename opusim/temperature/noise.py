"""How a camera's temperature sets the noise of its readings, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from opusim import checks
from opusim.errors import ConfigError
from opusim.temperature.dark_current import DarkCurrent

if TYPE_CHECKING:
    from opusim.devices.camera import CameraDevice


@dataclass(frozen=True, kw_only=True)
class TemperatureNoise:
    """Var(T) = floor_variance + variance_per_e I(T) t, averaged over outputs: exact, since dark counts add to others.

    Exact but for rounding where frames' noise is below 0.4 DN: `floor_variance` holds it as it is at the device's own
    temperature.

    Attributes:
        floor_variance: without dark current, squared projection units: light, bias light, read noise and rounding.
        variance_per_e: what an electron of dark charge in each of the four frames adds.
        exposure_us: t, microseconds.
        dark: I(T).
    """

    floor_variance: float
    variance_per_e: float
    exposure_us: float
    dark: DarkCurrent

    def __post_init__(self) -> None:
        checks.non_negative(floor_variance=self.floor_variance)
        checks.positive(variance_per_e=self.variance_per_e, exposure_us=self.exposure_us)

    def dark_e(self, temperature_c: float) -> float:
        """Dark charge of a frame, electrons.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        return self.dark.current_e_per_s(temperature_c) * self.exposure_us * 1e-6

    def std(self, temperature_c: float) -> float:
        """Root mean square over outputs of the standard deviation, projection units."""
        return math.sqrt(self.floor_variance + self.variance_per_e * self.dark_e(temperature_c))

    def dark_share(self, temperature_c: float) -> float:
        """Share of the variance that the dark current makes, in [0, 1]."""
        part = self.variance_per_e * self.dark_e(temperature_c)
        return part / (self.floor_variance + part) if part > 0 else 0.0

    def temperature_c(self, std: float) -> float:
        """The temperature, degrees Celsius, that gives a standard deviation: the inverse of `std`.

        Raises:
            ValueError: no temperature at which the sensor works gives it; the message says what can be had.
        """
        checks.positive(std=std)
        low, high = self.std(self.dark.temperature_min_c), self.std(self.dark.temperature_max_c)
        if not low <= std <= high or low == high:
            raise ValueError(
                f"std = {std:g}: cannot be reached by temperature, {self.dark.temperature_min_c:g} to "
                f"{self.dark.temperature_max_c:g} degrees Celsius give {low:.6g} to {high:.6g}; change the exposure "
                "or the bias light, or add a digital share of noise"
            )
        ends = self.dark_e(self.dark.temperature_min_c), self.dark_e(self.dark.temperature_max_c)
        charge = min(max((std**2 - self.floor_variance) / self.variance_per_e, ends[0]), ends[1])
        return self.dark.temperature_c(charge / (self.exposure_us * 1e-6))


def temperature_noise(device: CameraDevice, x: torch.Tensor) -> TemperatureNoise:
    """The law of an open camera for readings of some vectors.

    Args:
        device: open; its description has dark current and shot noise.
        x: ternary, shape (vectors, n_inputs); the law averages over vectors and outputs.

    Raises:
        ConfigError: the description has no dark current, or counts without shot noise.
        DeviceUnavailable: the device is closed.
    """
    camera, sensor = device.description.camera, device.exposure.sensor
    law = None if camera is None else camera.dark_law()
    if law is None:
        raise ConfigError(
            device.name, "camera.dark", "is off, so temperature sets no noise; give dark current"
        )
    if not sensor.shot_noise:
        raise ConfigError(
            device.name, "camera.sensor.shot_noise", "is off, so dark current makes no noise; switch it on"
        )
    now = float(device.reading_variance(x).mean())
    per_e = float(4 * sensor.gain_dn_per_e**2 * np.mean(np.square(device.recovery.decode()[0])))
    floor = now - per_e * device.exposure.dark_current_e
    return TemperatureNoise(
        floor_variance=max(floor, 0.0),
        variance_per_e=per_e,
        exposure_us=device.exposure.light.exposure_us,
        dark=law,
    )
