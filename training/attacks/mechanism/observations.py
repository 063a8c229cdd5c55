"""What the self-test reads off its runs, before any statistic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class BatchLaw:
    """The accounted law of a batch's size.

    Attributes:
        mean: Mean number of records.
        variance: Its variance; 0 for batches of fixed size.
    """

    mean: float
    variance: float

    @classmethod
    def binomial(cls, n_records: int, probability: float) -> BatchLaw:
        """Binomial(n, q): every record enters with probability q, independently of the others."""
        return cls(mean=n_records * probability, variance=n_records * probability * (1 - probability))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The noisy sums of one run along its records' own directions, each in units of the largest contribution.

    Attributes:
        along: Component of each step's sum along a contribution, shape (steps,): the batch's size plus noise.
        along_std: Standard deviation of that noise.
        by_layer: Components along each layer's part of a contribution, shape (steps, layers).
        shares: The stated norm of each layer's part, shape (layers,).
    """

    along: np.ndarray
    along_std: float
    by_layer: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Released:
    """What one run released, as the self-test takes it apart.

    Attributes:
        noise: Components that no record touches over their accounted standard deviation, shape (steps, coordinates):
            independent N(0, 1) under the accounted mechanism.
        sums: The other components; None if each record is read once.
        batch: Law of the batches' sizes; None likewise.
        accounted: The mechanism in words.
        signal_noise: For noise whose covariance the features determine, its components along the layers' inputs and
            across the records' signals, whitened, shape (steps, others); None otherwise.
        parameters: The columns of `noise` that belong to each parameter, where several have noise of their own.
        prefixes: The first numbers of two parameters, without what records add, each pair of shape (steps, numbers):
            the first of a pair is N(0, I) whatever the second is.
    """

    noise: np.ndarray
    sums: Sums | None
    batch: BatchLaw | None
    accounted: str
    signal_noise: np.ndarray | None = None
    parameters: Mapping[str, slice] = field(default_factory=dict)
    prefixes: Sequence[tuple[np.ndarray, np.ndarray]] = ()
