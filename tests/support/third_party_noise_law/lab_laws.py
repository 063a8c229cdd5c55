"""A noise law of another package: Laplace noise, as a detector with bursts might have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from opusim import NoiseModel, checks


@dataclass(frozen=True, kw_only=True, eq=False)
class LaplaceNoise(NoiseModel):
    """Independent Laplace noise at every output, of density exp(-|v| / scale) / (2 scale)."""

    law: ClassVar[str] = "lab_laplace"
    scale: float  # in units of the reading, above 0
    beta: float = 0.0  # probability that the scale is wrong, if it is calibrated

    def __post_init__(self) -> None:
        checks.positive(scale=self.scale)

    def variance_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return 2 scale^2 twice: the law leaves nothing open."""
        variance = np.asarray(2 * self.scale**2)
        return variance, variance

    def describe(self) -> str:
        """Return the law in one line of text."""
        return f"Laplace of scale {self.scale:g}"
