"""The temperature law of a sensor's noise, and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opusim import checks

_MOST_DOUBLINGS = 64  # far beyond any sensor, and far below where a float overflows


@dataclass(frozen=True, kw_only=True)
class TemperatureLaw:
    """Dark current doubles every few kelvin and adds its shot noise to a floor.

    Law: sigma^2(T) = sigma_0^2 + k t I_ref 2^((T - T_ref) / T_d).

    The expected dark charge t I is the variance of its Poisson count, in electrons squared; k turns it into
    squared projection units. Valid where the dark charge is well below the full well and, as a Gaussian law,
    above about 100 electrons or beside a larger Gaussian read noise. Doubling every 5 to 8 K is the rule of
    thumb for silicon. At microsecond exposures the dark charge of an ordinary sensor is a small part of an
    electron: there, honest numbers make the temperature nearly irrelevant, and `dark_share` shows it.

    Attributes:
        sigma_0: noise without dark current (read noise and the like), projection units, at least 0.
        variance_per_e: k, squared projection units per electron, above 0.
        exposure_us: t, microseconds, above 0.
        dark_current_ref_e_per_s: I_ref, electrons per second and pixel at T_ref, at least 0.
        temperature_ref_c: T_ref, degrees Celsius.
        doubling_k: T_d, kelvin, above 0.
        temperature_min_c: lowest temperature at which the sensor works, degrees Celsius.
        temperature_max_c: highest one, at least the lowest.
    """

    sigma_0: float
    variance_per_e: float
    exposure_us: float
    dark_current_ref_e_per_s: float
    temperature_ref_c: float
    doubling_k: float
    temperature_min_c: float
    temperature_max_c: float

    def __post_init__(self) -> None:
        checks.non_negative(sigma_0=self.sigma_0, dark_current_ref_e_per_s=self.dark_current_ref_e_per_s)
        checks.positive(
            variance_per_e=self.variance_per_e, exposure_us=self.exposure_us, doubling_k=self.doubling_k
        )
        checks.in_range(-273.15, math.inf, temperature_min_c=self.temperature_min_c)
        checks.finite(temperature_ref_c=self.temperature_ref_c, temperature_max_c=self.temperature_max_c)
        checks.in_range(self.temperature_min_c, math.inf, temperature_max_c=self.temperature_max_c)

    def sigma(self, temperature_c: float) -> float:
        """Standard deviation at a temperature, projection units.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        return math.sqrt(self.sigma_0**2 + self._dark_variance(temperature_c))

    def dark_share(self, temperature_c: float) -> float:
        """Share of the variance that the dark current makes, in [0, 1]; 0 for no noise at all.

        Raises:
            ValueError: the sensor does not work at this temperature.
        """
        variance = self.sigma(temperature_c) ** 2
        return self._dark_variance(temperature_c) / variance if variance > 0 else 0.0

    def temperature(self, sigma: float) -> float:
        """The temperature, degrees Celsius, at which the standard deviation is sigma: the inverse of `sigma`.

        Raises:
            ValueError: no temperature at which the sensor works gives this sigma; the message says which it
                can give.
        """
        checks.positive(sigma=sigma)
        low, high = self.sigma(self.temperature_min_c), self.sigma(self.temperature_max_c)
        if not low <= sigma <= high or self.dark_current_ref_e_per_s == 0:
            raise ValueError(
                f"sigma = {sigma:g}: cannot be reached by temperature, {self.temperature_min_c:g} to "
                f"{self.temperature_max_c:g} degrees Celsius give {low:.6g} to {high:.6g}; "
                "change the exposure or the bias light, or add a digital share of noise"
            )
        reference = self.variance_per_e * self.exposure_us * 1e-6 * self.dark_current_ref_e_per_s
        dark = sigma**2 - self.sigma_0**2
        if dark <= 0:  # sigma equals the floor to the last digit
            return self.temperature_min_c
        wanted = self.temperature_ref_c + self.doubling_k * math.log2(dark / reference)
        return min(max(wanted, self.temperature_min_c), self.temperature_max_c)

    def _dark_variance(self, temperature_c: float) -> float:
        """The dark current's part, k t I(T), squared projection units."""
        checks.in_range(self.temperature_min_c, self.temperature_max_c, temperature_c=temperature_c)
        doublings = (temperature_c - self.temperature_ref_c) / self.doubling_k
        if doublings > _MOST_DOUBLINGS:
            raise ValueError(
                f"doubling_k = {self.doubling_k:g}: doubles the dark current {doublings:.0f} times up to "
                f"{temperature_c:g} degrees Celsius; give a larger doubling_k or a lower temperature_c"
            )
        current = self.dark_current_ref_e_per_s * 2**doublings
        return self.variance_per_e * self.exposure_us * 1e-6 * current
