"""What a monitor remembers of a device as it was opened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_SEED = 20261121
"""Of the reference vectors, which are the same for every device and run."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Means over the first look; none of it depends on data.

    Attributes:
        reference: mean readings of the reference vectors, shape (vectors, n_outputs).
        power: mean square of the reference signal, without noise.
        weights: one over the noise variance of each output, from one half of the blank readings; zeros without noise.
        variance: noise variance of each output, from the other half.
    """

    reference: np.ndarray
    power: float
    weights: np.ndarray
    variance: np.ndarray

    def noise_ratio(self, variance: np.ndarray) -> tuple[float, float]:
        """New noise variance over the old, and its standard error.

        Both are means over the outputs, weighed by what an independent half of the first look found, so that bright
        outputs do not hide the others; the scatter over the outputs tells the error, whatever the law.
        """
        new, old = variance * self.weights, self.variance * self.weights
        ratio = float(new.mean() / old.mean())
        errors = [float(part.std() / part.mean()) / math.sqrt(part.size) for part in (new, old)]
        return ratio, ratio * math.hypot(*errors)

    def to_array(self) -> np.ndarray:
        """Everything as one array, float64, shape (vectors + 3, n_outputs): to be kept with a run."""
        power = np.full_like(self.weights, self.power)
        return np.vstack([self.reference, power, self.weights, self.variance])

    @classmethod
    def from_array(cls, array: np.ndarray) -> Baseline:
        """What `to_array` made."""
        *reference, power, weights, variance = array
        return cls(reference=np.array(reference), power=float(power[0]), weights=weights, variance=variance)


def measure_baseline(
    read: Callable[[torch.Tensor], np.ndarray], vectors: torch.Tensor, readings: int
) -> Baseline:
    """Takes the first look.

    Args:
        read: takes readings of ternary vectors, a row each.
        vectors: the reference vectors, shape (vectors, n_inputs).
        readings: of each vector, and of nothing.
    """
    blank = read(torch.zeros(2 * readings, vectors.shape[1]))
    first, second = noise_variance(blank[:readings]), noise_variance(blank[readings:])
    taken = np.stack([read(vectors) for _ in range(readings)])
    reference = taken.mean(axis=0)
    noise = float(noise_variance(taken.reshape(readings, -1)).mean()) / readings
    power = max(float(np.mean(reference**2)) - noise, 1e-30)
    weights = np.divide(1.0, first, out=np.zeros_like(first), where=first > 0)
    return Baseline(reference=reference, power=power, weights=weights, variance=second)


def noise_variance(readings: np.ndarray) -> np.ndarray:
    """Unbiased variance of each output over readings of one vector, shape (readings, n_outputs)."""
    variance: np.ndarray = readings.var(axis=0, ddof=1)
    return variance


def reference_vectors(count: int, n_inputs: int) -> torch.Tensor:
    """Fixed ternary vectors without a zero, shape (count, n_inputs)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 2, (count, n_inputs), generator=generator).mul_(2).sub_(1).float()
