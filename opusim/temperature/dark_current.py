"""Dark current of a sensor against its temperature: two laws, and their inverses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from opusim import checks

_MOST_DOUBLINGS = 64


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
        """Electrons per second and pixel at a temperature.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """

    @abstractmethod
    def temperature_c(self, current_e_per_s: float) -> float:
        """The temperature that gives a dark current: the inverse of `current_e_per_s`.

        Raises:
            ValueError: no temperature at which the sensor works gives it; the message says what can be had.
        """

    def _check_temperature(self, temperature_c: float) -> None:
        checks.in_range(self.temperature_min_c, self.temperature_max_c, temperature_c=temperature_c)

    def _check_reachable(self, current_e_per_s: float) -> None:
        """Refuses a current that no working temperature gives."""
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
        """The exponential of the interpolated logarithm."""
        self._check_temperature(temperature_c)
        return float(
            np.exp(np.interp(temperature_c, self.temperatures_c, np.log(self.dark_currents_e_per_s)))
        )

    def temperature_c(self, current_e_per_s: float) -> float:
        """The same line read the other way."""
        self._check_reachable(current_e_per_s)
        logs = np.log(self.dark_currents_e_per_s)
        return float(np.interp(math.log(current_e_per_s), logs, self.temperatures_c))
