"""What a monitor remembers of a device as it was opened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_SEED = 20261121
"""Of the reference vectors, which are the same for every device and run."""


_LEAST_NUMBERS = 2**16
"""Numbers that the blank readings of a first look hold at least, so that its error stays below a check's."""
_MOST_READINGS = 4096


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Means over the first look; none of it depends on data.

    Attributes:
        reference: mean readings of the reference vectors, shape (vectors, n_outputs).
        power: mean square of the reference signal, without noise.
        weights: one over the noise variance of each output, from one half of the blank readings; zeros without noise.
        variance: noise variance of each output, from the other half.
        reference_variance: noise variance of each output in readings of the reference vectors, averaged over them.
        spread: standard deviation of the square of one blank reading over its mean, outputs weighed by `weights`;
            sqrt 2 for Gaussian noise of one variance, larger where outputs or tails differ.
        repeat: logarithm of the probability that two blank readings agree at every output; large and negative but for
            narrow windows of coarse converters, and 0 without noise.
    """

    reference: np.ndarray
    power: float
    weights: np.ndarray
    variance: np.ndarray
    reference_variance: np.ndarray
    spread: float
    repeat: float

    def noise_ratio(self, variance: np.ndarray) -> float:
        """New noise variance over the old.

        Both are means over the outputs, weighed by what an independent half of the first look found, so that bright
        outputs do not hide the others.
        """
        return float((variance * self.weights).mean() / (self.variance * self.weights).mean())

    def to_array(self) -> np.ndarray:
        """Everything as one array, float64, shape (vectors + 6, n_outputs): to be kept with a run."""
        rows = [np.full_like(self.weights, number) for number in (self.power, self.spread, self.repeat)]
        return np.vstack([self.reference, *rows, self.weights, self.variance, self.reference_variance])

    @classmethod
    def from_array(cls, array: np.ndarray) -> Baseline:
        """What `to_array` made.

        Raises:
            ValueError: it has too few rows, as arrays of earlier versions have.
        """
        if len(array) < 7:
            raise ValueError(
                f"baseline has {len(array)} rows: must have at least 7; another version kept it, begin a new run"
            )
        *reference, power, spread, repeat, weights, variance, reference_variance = array
        return cls(
            reference=np.array(reference),
            power=float(power[0]),
            spread=float(spread[0]),
            repeat=float(repeat[0]),
            weights=weights,
            variance=variance,
            reference_variance=reference_variance,
        )


def measure_baseline(
    read: Callable[[torch.Tensor], np.ndarray], vectors: torch.Tensor, readings: int
) -> Baseline:
    """Takes the first look.

    Args:
        read: takes readings of ternary vectors, a row each.
        vectors: the reference vectors, shape (vectors, n_inputs).
        readings: of each vector, and half as many as of nothing at least; a narrow window takes up to 4,096 of nothing.
    """
    taken = np.stack([read(vectors) for _ in range(readings)])  # (readings, vectors, n_outputs)
    reference, outputs = taken.mean(axis=0), taken.shape[2]
    reference_variance = taken.var(axis=0, ddof=1).mean(axis=0)
    half = blank_readings(readings, outputs) // 2
    blank = read(torch.zeros(2 * half, vectors.shape[1]))
    first, second = blank[:half], blank[half:]
    weights = np.divide(1.0, noise_variance(first), out=np.zeros(outputs), where=noise_variance(first) > 0)
    power = float(np.mean(reference**2)) - float(reference_variance.mean()) / readings
    return Baseline(
        reference=reference,
        power=max(power, 1e-30),
        weights=weights,
        variance=noise_variance(second),
        reference_variance=reference_variance,
        spread=_spread(second, weights),
        repeat=_log_repeat(second),
    )


def _log_repeat(blank: np.ndarray) -> float:
    """See `Baseline.repeat`; from pairs of successive readings of each output, at least -1,000."""
    agreeing = np.mean(blank[1:] == blank[:-1], axis=0)
    return max(float(np.sum(np.log(np.maximum(agreeing, 1 / len(blank))))), -1e3)


def _spread(blank: np.ndarray, weights: np.ndarray) -> float:
    """Standard deviation of a squared blank reading over its mean, at least sqrt 2; see `Baseline`."""
    squares = weights * np.square(blank - blank.mean(axis=0))
    mean = float(squares.mean())
    return math.sqrt(2) if mean <= 0 else max(math.sqrt(2), float(squares.std()) / mean)


def blank_readings(readings: int, n_outputs: int) -> int:
    """How many readings of nothing a first look takes: twice as many as of a reference vector, or 65,536 numbers."""
    return 2 * max(readings, min(-(-_LEAST_NUMBERS // (2 * n_outputs)), _MOST_READINGS // 2))


def noise_variance(readings: np.ndarray) -> np.ndarray:
    """Unbiased variance of each output over readings of one vector, shape (readings, n_outputs)."""
    variance: np.ndarray = readings.var(axis=0, ddof=1)
    return variance


def reference_vectors(count: int, n_inputs: int) -> torch.Tensor:
    """Fixed ternary vectors without a zero, shape (count, n_inputs)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 2, (count, n_inputs), generator=generator).mul_(2).sub_(1).float()
