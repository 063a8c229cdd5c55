"""What temperature does to a sensor: its dark current, the noise that this adds, and the inverse of both.

At microsecond exposures the dark charge of an ordinary sensor is a small part of an electron. Realistic numbers then
make the temperature nearly irrelevant; `TemperatureLaw.dark_share` shows it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from opusim import checks

_MOST_DOUBLINGS = 64
"""Far beyond any sensor, and far below the exponent at which a float overflows."""


class DarkCurrent(ABC):
    """Electrons per second and pixel that appear without light, growing with temperature, never negative.

    Attributes:
        temperature_min_c: lowest temperature at which the sensor works, degrees Celsius.
        temperature_max_c: highest one.
    """

    temperature_min_c: float
    temperature_max_c: float

    @abstractmethod
    def current_e_per_s(self, temperature_c: float) -> float:
        """Return electrons per second and pixel at a temperature.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """

    @abstractmethod
    def temperature_c(self, current_e_per_s: float) -> float:
        """Return the temperature that gives a dark current: the inverse of `current_e_per_s`.

        Raises:
            ValueError: no temperature at which the sensor works gives it; the message says what can be had.
        """

    def _check_temperature(self, temperature_c: float) -> None:
        checks.in_range(self.temperature_min_c, self.temperature_max_c, temperature_c=temperature_c)

    def _check_reachable(self, current_e_per_s: float) -> None:
        """Refuse a current that no working temperature gives."""
        checks.positive(current_e_per_s=current_e_per_s)
        low = self.current_e_per_s(self.temperature_min_c)
        high = self.current_e_per_s(self.temperature_max_c)
        if not low <= current_e_per_s <= high or low == high:
            raise ValueError(
                f"current_e_per_s = {current_e_per_s:g}: cannot be reached by temperature, "
                f"{self.temperature_min_c:g} to {self.temperature_max_c:g} degrees Celsius give {low:.6g} to "
                f"{high:.6g}; change the exposure or the bias light, or add a digital share of noise"
            )


@dataclass(frozen=True, kw_only=True)
class DoublingDarkCurrent(DarkCurrent):
    """I(T) = I_ref 2^((T - T_ref) / T_d): EMVA 1288 release 3.1, section 2.1.4.

    Silicon doubles every 5 to 8 K (harvestimaging.com, 2009). A rule of thumb over some tens of kelvin.

    Attributes:
        dark_current_ref_e_per_s: I_ref, electrons per second and pixel at T_ref, at least 0; 0 switches it off.
        temperature_ref_c: T_ref, degrees Celsius.
        doubling_k: T_d, kelvin, above 0.
        temperature_min_c: lowest working temperature, degrees Celsius.
        temperature_max_c: highest one, at least the lowest.
    """

    dark_current_ref_e_per_s: float
    temperature_ref_c: float
    doubling_k: float
    temperature_min_c: float
    temperature_max_c: float

    def __post_init__(self) -> None:
        checks.non_negative(dark_current_ref_e_per_s=self.dark_current_ref_e_per_s)
        checks.positive(doubling_k=self.doubling_k)
        checks.in_range(-273.15, math.inf, temperature_min_c=self.temperature_min_c)
        checks.finite(temperature_ref_c=self.temperature_ref_c, temperature_max_c=self.temperature_max_c)
        checks.in_range(self.temperature_min_c, math.inf, temperature_max_c=self.temperature_max_c)
        checks.in_range(
            -math.inf,
            _MOST_DOUBLINGS,
            doublings=(self.temperature_max_c - self.temperature_ref_c) / self.doubling_k,
            remedy="give a larger doubling_k or a lower temperature_max_c",
        )

    def current_e_per_s(self, temperature_c: float) -> float:
        """I_ref 2^((T - T_ref) / T_d)."""
        self._check_temperature(temperature_c)
        return self.dark_current_ref_e_per_s * 2 ** (
            (temperature_c - self.temperature_ref_c) / self.doubling_k
        )

    def temperature_c(self, current_e_per_s: float) -> float:
        """T_ref + T_d log2(I / I_ref)."""
        self._check_reachable(current_e_per_s)
        doublings = math.log2(current_e_per_s / self.dark_current_ref_e_per_s)
        wanted = self.temperature_ref_c + self.doubling_k * doublings
        return min(max(wanted, self.temperature_min_c), self.temperature_max_c)


@dataclass(frozen=True, kw_only=True)
class TableDarkCurrent(DarkCurrent):
    """I(T) from measured points, its logarithm interpolated linearly between them, none beyond them.

    Attributes:
        temperatures_c: at least two, strictly increasing, degrees Celsius.
        dark_currents_e_per_s: one each, above 0 and strictly increasing, electrons per second and pixel.
    """

    temperatures_c: tuple[float, ...]
    dark_currents_e_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.finite(temperatures_c=self.temperatures_c)
        checks.positive(dark_currents_e_per_s=self.dark_currents_e_per_s)
        for name in ("temperatures_c", "dark_currents_e_per_s"):
            points = np.asarray(getattr(self, name))
            if points.size < 2 or bool(np.any(np.diff(points) <= 0)):
                raise ValueError(
                    f"{name} = {points.tolist()}: must be at least two points, strictly increasing"
                )
        if len(self.temperatures_c) != len(self.dark_currents_e_per_s):
            raise ValueError(
                f"dark_currents_e_per_s has {len(self.dark_currents_e_per_s)} points: must have one for each of the "
                f"{len(self.temperatures_c)} temperatures_c"
            )
        object.__setattr__(self, "temperature_min_c", float(self.temperatures_c[0]))
        object.__setattr__(self, "temperature_max_c", float(self.temperatures_c[-1]))

    def current_e_per_s(self, temperature_c: float) -> float:
        """Return the exponential of the interpolated logarithm."""
        self._check_temperature(temperature_c)
        return float(
            np.exp(np.interp(temperature_c, self.temperatures_c, np.log(self.dark_currents_e_per_s)))
        )

    def temperature_c(self, current_e_per_s: float) -> float:
        """Return the same line read the other way."""
        self._check_reachable(current_e_per_s)
        logs = np.log(self.dark_currents_e_per_s)
        return float(np.interp(math.log(current_e_per_s), logs, self.temperatures_c))


@dataclass(frozen=True, kw_only=True)
class TemperatureLaw:
    """Dark current adds its shot noise to a floor.

    Law: Var(T) = floor_variance + variance_per_e t I(T).

    The expected dark charge t I is the variance of its Poisson count, in electrons squared; variance_per_e turns it
    into squared projection units. As a law of a camera's counts it is exact, since dark counts add to the others, but
    for rounding if the noise of a frame is below 0.4 DN: the floor then holds at the device's own temperature. As a
    Gaussian law it is valid if the dark charge is well below the full well and either above about 100 electrons or
    small against a Gaussian read noise.

    Attributes:
        floor_variance: variance without dark current (light, bias light, read noise, rounding), squared projection
            units, at least 0.
        variance_per_e: variance that one electron of dark charge adds, squared projection units, above 0.
        exposure_us: t, microseconds, above 0.
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
        """Return the dark charge of a frame, electrons.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        return self.dark.current_e_per_s(temperature_c) * self.exposure_us * 1e-6

    def std(self, temperature_c: float) -> float:
        """Return the standard deviation (root mean square over outputs) at a temperature, projection units.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        return math.sqrt(self.floor_variance + self._dark_variance(temperature_c))

    def dark_share(self, temperature_c: float) -> float:
        """Return share of the variance that the dark current makes, in [0, 1]; 0 if there is no noise at all.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        part = self._dark_variance(temperature_c)
        return part / (self.floor_variance + part) if part > 0 else 0.0

    def temperature_c(self, std: float) -> float:
        """Return the temperature, degrees Celsius, that gives a standard deviation: the inverse of `std`.

        Raises:
            ValueError: no temperature at which the sensor works gives it; the message says which values can be had.
        """
        checks.positive(std=std)
        coldest, hottest = self.dark.temperature_min_c, self.dark.temperature_max_c
        low, high = self.std(coldest), self.std(hottest)
        if not low <= std <= high or low == high:
            raise ValueError(
                f"std = {std:g}: cannot be reached by temperature, {coldest:g} to {hottest:g} degrees Celsius give "
                f"{low:.6g} to {high:.6g}; change the exposure or the bias light, or add a digital share of noise"
            )
        charge = (std**2 - self.floor_variance) / self.variance_per_e
        charge = min(max(charge, self.dark_e(coldest)), self.dark_e(hottest))
        return self.dark.temperature_c(charge / (self.exposure_us * 1e-6))

    def _dark_variance(self, temperature_c: float) -> float:
        """Return the dark current's part, squared projection units."""
        current = self.dark.current_e_per_s(temperature_c)
        return self.variance_per_e * self.exposure_us * 1e-6 * current
