"""What temperature does to a read-out: dark current, thermal noise of resistors, and the inverse of both.

At microsecond exposures the dark charge of an ordinary image sensor is a small part of an electron. Realistic numbers
then make the temperature nearly irrelevant; `TemperatureLaw.dark_share` shows it. Photodiodes have dark currents of
nanoamperes, and a resistor has thermal noise: on such a read-out temperature matters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from opusim import checks

BOLTZMANN_J_PER_K = 1.380649e-23
"""k, exact in the SI of 2019."""
CHARGE_C = 1.602176634e-19
"""q, coulomb, likewise."""
ZERO_C_K = 273.15
"""0 degrees Celsius, kelvin."""
_EV_K = CHARGE_C / BOLTZMANN_J_PER_K  # kelvin of an electronvolt, 11,604.5
_MOST_DOUBLINGS = 64
"""Doublings of a dark current, at most: far beyond any sensor, far below the overflow of a float."""

_HALVINGS = 60
"""Bisection steps on a temperature, which leave its last bits."""


def kelvin(temperature_c: float) -> float:
    """Return degrees Celsius in kelvin."""
    return temperature_c + ZERO_C_K


def arrhenius_exponent(temperature_c: float, reference_c: float) -> float:
    """Return -(1 / k) (1 / T - 1 / T_ref), the exponent of Arrhenius' factor for an activation energy of 1 eV."""
    return _EV_K * (1 / (reference_c + ZERO_C_K) - 1 / (temperature_c + ZERO_C_K))


def thermal_charge_e2_per_k(load_ohm: float, exposure_us: float) -> float:
    """Return the variance of the charge that a resistor's thermal noise adds in an exposure, electrons^2 per kelvin.

    2 k t / (R q^2): the current noise 4 k T / R [A^2/Hz] (Johnson, Phys. Rev. 32, 97; Nyquist, Phys. Rev. 32, 110,
    1928), integrated over t, which has the noise bandwidth 1 / (2 t).
    """
    checks.positive(load_ohm=load_ohm, exposure_us=exposure_us)
    return 2 * BOLTZMANN_J_PER_K * exposure_us * 1e-6 / (load_ohm * CHARGE_C**2)


def _above_absolute_zero(**temperatures_c: float) -> None:
    for name, value in temperatures_c.items():
        if not math.isfinite(value) or (value + ZERO_C_K) <= 0:
            raise ValueError(
                f"{name} = {value:g}: must be above -273.15, absolute zero; give degrees Celsius"
            )


def _require_reachable(
    temperatures_c: tuple[float, float], limits: tuple[float, float], **wanted: float
) -> None:
    """Refuse a value that no temperature gives."""
    (coldest, hottest), (low, high), ((name, value),) = temperatures_c, limits, wanted.items()
    if not low <= value <= high or low == high:
        raise ValueError(
            f"{name} = {value:g}: cannot be reached by temperature, {coldest:g} to {hottest:g} degrees Celsius give "
            f"{low:.6g} to {high:.6g}; change the exposure or the bias light, or add a digital share of noise"
        )


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
        """Return electrons per second and pixel at a temperature; ValueError if the sensor does not work there."""

    @abstractmethod
    def temperature_c(self, current_e_per_s: float) -> float:
        """Return the temperature that gives a dark current; ValueError, which says what can be had, if none does."""

    def credited(self) -> DarkCurrent:
        """Return the law of the least current that a guarantee may rest on: this one, unless it is a rule of thumb."""
        return self

    def _check_growth(self, doublings: Callable[[], float], *, remedy: str) -> None:
        """Refuse working temperatures that contradict each other, and a current that grows beyond float range."""
        _above_absolute_zero(temperature_min_c=self.temperature_min_c)
        checks.finite(temperature_max_c=self.temperature_max_c)
        checks.in_range(self.temperature_min_c, math.inf, temperature_max_c=self.temperature_max_c)
        checks.in_range(-math.inf, _MOST_DOUBLINGS, doublings=doublings(), remedy=remedy)

    def _check_temperature(self, temperature_c: float) -> None:
        checks.in_range(self.temperature_min_c, self.temperature_max_c, temperature_c=temperature_c)

    def _check_reachable(self, current_e_per_s: float) -> None:
        """Refuse a current that no working temperature gives."""
        checks.positive(current_e_per_s=current_e_per_s)
        low = self.current_e_per_s(self.temperature_min_c)
        high = self.current_e_per_s(self.temperature_max_c)
        working_c = self.temperature_min_c, self.temperature_max_c
        _require_reachable(working_c, (low, high), current_e_per_s=current_e_per_s)


@dataclass(frozen=True, kw_only=True)
class DoublingDarkCurrent(DarkCurrent):
    """I(T) = I_ref 2^((T - T_ref) / T_d): EMVA 1288 release 3.1, section 2.1.4.

    Silicon doubles every 5 to 8 K (harvestimaging.com, 2009). A rule of thumb over some tens of kelvin: it exceeds the
    Arrhenius law of the same current and slope at T_ref by the factor 2^((T - T_ref)^2 / (T T_d)), T in kelvin, at
    every other temperature (48 % at 60 degrees for T_ref = 25 and T_d = 6.5). No guarantee rests on that excess
    (`credited`).

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
        _above_absolute_zero(temperature_ref_c=self.temperature_ref_c)
        self._check_growth(
            lambda: (self.temperature_max_c - self.temperature_ref_c) / self.doubling_k,
            remedy="give a larger doubling_k or a lower temperature_max_c",
        )

    def credited(self) -> ArrheniusDarkCurrent:
        """Return the Arrhenius law with this current and slope at T_ref, E = k T_ref^2 ln 2 / T_d; never above this."""
        return ArrheniusDarkCurrent(
            dark_current_ref_e_per_s=self.dark_current_ref_e_per_s,
            temperature_ref_c=self.temperature_ref_c,
            activation_ev=(self.temperature_ref_c + ZERO_C_K) ** 2 * math.log(2) / (self.doubling_k * _EV_K),
            temperature_min_c=self.temperature_min_c,
            temperature_max_c=self.temperature_max_c,
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
class ArrheniusDarkCurrent(DarkCurrent):
    """I(T) = I_ref exp(-(E / k) (1 / T - 1 / T_ref)), T in kelvin.

    Silicon: E is near the band gap, 1.1 eV, where diffusion makes the current (warm sensors) and near half of it where
    the depletion region does (cold ones): Widenhorn et al., Proc. SPIE 4669, 193 (2002).

    Attributes:
        dark_current_ref_e_per_s: I_ref, electrons per second and pixel at T_ref, at least 0; 0 switches it off.
        temperature_ref_c: T_ref, degrees Celsius, above -273.15.
        activation_ev: E, electronvolts, above 0.
        temperature_min_c: lowest working temperature, degrees Celsius, above -273.15.
        temperature_max_c: highest one, at least the lowest.
    """

    dark_current_ref_e_per_s: float
    temperature_ref_c: float
    activation_ev: float
    temperature_min_c: float
    temperature_max_c: float

    def __post_init__(self) -> None:
        checks.non_negative(dark_current_ref_e_per_s=self.dark_current_ref_e_per_s)
        checks.positive(activation_ev=self.activation_ev)
        _above_absolute_zero(temperature_ref_c=self.temperature_ref_c)
        self._check_growth(
            lambda: self._exponent(self.temperature_max_c) / math.log(2),
            remedy="give a smaller activation_ev or a lower temperature_max_c",
        )

    def current_e_per_s(self, temperature_c: float) -> float:
        """I_ref exp(-(E / k) (1 / T - 1 / T_ref))."""
        self._check_temperature(temperature_c)
        return self.dark_current_ref_e_per_s * math.exp(self._exponent(temperature_c))

    def temperature_c(self, current_e_per_s: float) -> float:
        """1 / (1 / T_ref - (k / E) ln(I / I_ref))."""
        self._check_reachable(current_e_per_s)
        logarithm = math.log(current_e_per_s / self.dark_current_ref_e_per_s)
        inverse_k = 1 / (self.temperature_ref_c + ZERO_C_K) - logarithm / (self.activation_ev * _EV_K)
        return min(max(1 / inverse_k - ZERO_C_K, self.temperature_min_c), self.temperature_max_c)

    def _exponent(self, temperature_c: float) -> float:
        return self.activation_ev * arrhenius_exponent(temperature_c, self.temperature_ref_c)


@dataclass(frozen=True, kw_only=True)
class TableDarkCurrent(DarkCurrent):
    """I(T) from measured points: its logarithm is interpolated linearly between them, not extrapolated.

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
        """Return the inverse of that interpolation."""
        self._check_reachable(current_e_per_s)
        logs = np.log(self.dark_currents_e_per_s)
        return float(np.interp(math.log(current_e_per_s), logs, self.temperatures_c))


@dataclass(frozen=True, kw_only=True)
class TemperatureLaw:
    """Dark current adds its shot noise, and a resistor its thermal noise, to a floor.

    Law: Var(T) = floor_variance + variance_per_e (t I(T) + thermal_e2_per_k T), the last T in kelvin.

    The expected dark charge t I is the variance of its Poisson count, in electrons squared; variance_per_e turns it
    into squared projection units. For a camera's counts it is exact, since dark counts add to the others, unless the
    noise of a frame is below 0.4 DN: rounding then changes with temperature, and the floor holds at the device's own
    only. As a Gaussian law it is valid if the dark charge is well below the full well and either above about 100
    electrons or small against a Gaussian read noise.

    Attributes:
        floor_variance: variance without dark current (light, bias light, read noise, rounding), squared projection
            units, at least 0.
        variance_per_e: variance that one electron of dark charge adds, squared projection units, above 0.
        exposure_us: t, microseconds, above 0.
        dark: I(T).
        thermal_e2_per_k: variance of the charge that thermal noise adds (`thermal_charge_e2_per_k`), electrons^2 per
            kelvin, at least 0; 0 switches it off.
    """

    floor_variance: float
    variance_per_e: float
    exposure_us: float
    dark: DarkCurrent
    thermal_e2_per_k: float = 0.0

    def __post_init__(self) -> None:
        checks.non_negative(floor_variance=self.floor_variance, thermal_e2_per_k=self.thermal_e2_per_k)
        checks.positive(variance_per_e=self.variance_per_e, exposure_us=self.exposure_us)

    @property
    def temperatures_c(self) -> tuple[float, float]:
        """The lowest and the highest working temperature, degrees Celsius."""
        return self.dark.temperature_min_c, self.dark.temperature_max_c

    def credited(self) -> Self:
        """Return the law with the least dark current that a guarantee may rest on."""
        return replace(self, dark=self.dark.credited())

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
        return math.sqrt(self._steady_variance(temperature_c) + self._dark_variance(temperature_c))

    def dark_share(self, temperature_c: float) -> float:
        """Return the share of the variance that the dark current makes, in [0, 1]; 0 if there is no noise at all.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        part = self._dark_variance(temperature_c)
        return part / (self._steady_variance(temperature_c) + part) if part > 0 else 0.0

    def thermal_share(self, temperature_c: float) -> float:
        """Return the share of the variance that thermal noise makes, in [0, 1]; 0 if there is no noise at all.

        Raises:
            ValueError: the read-out does not work at this temperature.
        """
        part = self._thermal_variance(temperature_c)
        return part / self.std(temperature_c) ** 2 if part > 0 else 0.0

    def temperature_c(self, std: float) -> float:
        """Return the temperature, degrees Celsius, that gives a standard deviation: the inverse of `std`.

        Raises:
            ValueError: no temperature at which the sensor works gives it; the message says which values can be had.
        """
        checks.positive(std=std)
        coldest, hottest = self.temperatures_c
        low, high = self.std(coldest), self.std(hottest)
        _require_reachable((coldest, hottest), (low, high), std=std)
        if self.thermal_e2_per_k:  # a noise that grows with the temperature: halve its range to the last bits
            for _ in range(_HALVINGS):
                middle = (coldest + hottest) / 2
                coldest, hottest = (middle, hottest) if self.std(middle) < std else (coldest, middle)
            return (coldest + hottest) / 2
        charge = (std**2 - self.floor_variance) / self.variance_per_e
        charge = min(max(charge, self.dark_e(coldest)), self.dark_e(hottest))
        return self.dark.temperature_c(charge / (self.exposure_us * 1e-6))

    def _steady_variance(self, temperature_c: float) -> float:
        """Return the variance without the dark current's part, squared projection units."""
        return self.floor_variance + self._thermal_variance(temperature_c)

    def _thermal_variance(self, temperature_c: float) -> float:
        """Return the thermal noise's part, squared projection units."""
        return self.variance_per_e * self.thermal_e2_per_k * (temperature_c + ZERO_C_K)

    def _dark_variance(self, temperature_c: float) -> float:
        """Return the dark current's part, squared projection units."""
        current = self.dark.current_e_per_s(temperature_c)
        return self.variance_per_e * self.exposure_us * 1e-6 * current


@dataclass(frozen=True, kw_only=True)
class TemperatureTable:
    """Noise of readings at some temperatures, and how large the readings are there.

    Attributes:
        temperatures: at least two, strictly increasing, degrees Celsius.
        stds: standard deviation (root mean square over outputs) at each, projection units.
        sizes: root mean square of the matrix's entries at each, projection units.
    """

    temperatures: tuple[float, ...]
    stds: tuple[float, ...]
    sizes: tuple[float, ...]

    @property
    def temperatures_c(self) -> tuple[float, float]:
        """The lowest and the highest temperature, degrees Celsius."""
        return self.temperatures[0], self.temperatures[-1]

    def std(self, temperature_c: float) -> float:
        """Return the standard deviation, linear between the temperatures.

        Raises:
            ValueError: the temperature lies outside.
        """
        checks.in_range(*self.temperatures_c, temperature_c=temperature_c)
        return float(np.interp(temperature_c, self.temperatures, self.stds))

    def size(self, temperature_c: float) -> float:
        """Return the root mean square of the matrix's entries, linear between the temperatures.

        Raises:
            ValueError: the temperature lies outside.
        """
        checks.in_range(*self.temperatures_c, temperature_c=temperature_c)
        return float(np.interp(temperature_c, self.temperatures, self.sizes))

    def temperature_c(self, std: float) -> float:
        """Return the temperature, degrees Celsius, that gives a standard deviation: the inverse of `std`.

        Raises:
            ValueError: no temperature gives it, or the noise does not grow at every step of the table.
        """
        checks.positive(std=std)
        low, high = self.stds[0], self.stds[-1]
        if np.any(np.diff(self.stds) <= 0) or not low <= std <= high:
            raise ValueError(
                f"std = {std:g}: cannot be reached by temperature, {self.temperatures_c[0]:g} to "
                f"{self.temperatures_c[1]:g} degrees Celsius give {min(self.stds):.6g} to {max(self.stds):.6g}; "
                "change the noise of a product"
            )
        return float(np.interp(std, self.stds, self.temperatures))
