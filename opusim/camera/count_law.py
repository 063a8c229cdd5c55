"""The counts of some vectors' readings as temperature, exposure, laser and bias light set them, and their noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusim import checks
from opusim.camera.exposure import Recovery
from opusim.camera.stages import Sensor
from opusim.temperature import DarkCurrent


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """How a camera is run, beside its description.

    Attributes:
        temperature_c: of the sensor, degrees Celsius; None for the description's.
        light: laser light as a multiple of the description's, above 0.
        exposure: exposure as a multiple of the description's, above 0.
        bias_e: bias light in a frame of the described exposure beyond the description's, electrons, at least 0.
    """

    temperature_c: float | None = None
    light: float = 1.0
    exposure: float = 1.0
    bias_e: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(light=self.light, exposure=self.exposure)
        checks.non_negative(bias_e=self.bias_e)


@dataclass(frozen=True, kw_only=True, eq=False)
class CountLaw:
    """Poisson counts with rates exposure (light L + bias + dark(T)) in every frame of every vector.

    Var[y] = Var of the recovery / (light exposure)^2, since the recovery divides by the anchor's intensity.

    Attributes:
        light_e: L, electrons of laser light, shape (4, vectors, n_outputs).
        bias_e: bias light of the description at each output, electrons, shape (n_outputs,).
        response: relative sensitivity of each output's pixel, shape (n_outputs,).
        offset_e: fixed offset of each output's pixel, electrons, shape (n_outputs,).
        exposure_us: the description's exposure, microseconds.
        temperature_c: the description's, or None if dark current is off.
        dark: the law of the dark current, or None if it is off.
        sensor: the stages behind the light.
        recovery: with the anchor known exactly.
    """

    light_e: np.ndarray
    bias_e: np.ndarray
    response: np.ndarray
    offset_e: np.ndarray
    exposure_us: float
    temperature_c: float | None
    dark: DarkCurrent | None
    sensor: Sensor
    recovery: Recovery

    def dark_e(self, point: OperatingPoint) -> float:
        """Dark charge of a frame, electrons.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        wanted = self.temperature_c if point.temperature_c is None else point.temperature_c
        if self.dark is None or wanted is None:
            return 0.0
        return float(self.dark.current_e_per_s(wanted) * self.exposure_us * point.exposure * 1e-6)

    def rates(self, point: OperatingPoint) -> np.ndarray:
        """Expected electrons, shape (4, vectors, n_outputs)."""
        light = point.light * self.light_e + self.bias_e + point.bias_e * self.response
        return np.asarray(point.exposure * light + self.dark_e(point))

    def std(self, point: OperatingPoint) -> float:
        """Root mean square over vectors and outputs of a reading's noise, projection units."""
        variance = self.recovery.variance(self.sensor.moments(self.rates(point), self.offset_e)[1])
        return float(np.sqrt(variance.mean()) / (point.light * point.exposure))
