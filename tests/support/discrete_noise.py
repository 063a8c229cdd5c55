"""A noise law that opusim does not have, as another package would add it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from opusim import checks
from opusim.noise import NoiseModel


@dataclass(frozen=True, kw_only=True, eq=False)
class DiscreteNoise(NoiseModel):
    """Independent noise on a finite set of values: P(noise = values[i]) = exp(log_masses[i]).

    The masses at one offset are no guarantee by themselves for a quantised read-out: a consumer takes the
    supremum over offsets.
    """

    law: ClassVar[str] = "discrete"
    values: np.ndarray  # in units of the reading, strictly increasing
    log_masses: np.ndarray  # finite; the masses sum to 1 within 1e-9

    def __post_init__(self) -> None:
        checks.finite(values=self.values, log_masses=self.log_masses, remedy="leave out values of mass 0")
        values, log_masses = np.asarray(self.values, float), np.asarray(self.log_masses, float)
        checks.shape((None,), values=values)
        checks.shape(values.shape, log_masses=log_masses, remedy="one logarithm for each value")
        if values.size == 0 or bool(np.any(np.diff(values) <= 0)):
            raise ValueError("values: must be strictly increasing and not empty; sort them, merge equal ones")
        total = float(np.sum(np.exp(log_masses)))
        if abs(total - 1.0) > 1e-9:
            raise ValueError(
                f"log_masses: the masses sum to {total!r}, must be 1 within 1e-9; subtract its logarithm"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "log_masses", log_masses)

    def mean(self) -> float:
        """Sum of values times masses."""
        return float(np.exp(self.log_masses) @ self.values)

    def variance(self) -> np.ndarray:
        """Sum of (values - mean)^2 times masses, shape ()."""
        return np.asarray(np.exp(self.log_masses) @ np.square(self.values - self.mean()))

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The variance twice: the law leaves nothing open."""
        return self.variance(), self.variance()

    def describe(self) -> str:
        """The law in one line of text."""
        low, high, variance = self.values[0], self.values[-1], float(self.variance())
        return f"discrete, {self.values.size} values between {low:g} and {high:g}, variance {variance:g}"
