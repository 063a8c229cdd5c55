"""k-ary randomized response: the law that changes labels, and what a changed label still tells.

P(observed = b | true = a) = e^epsilon / (e^epsilon + k - 1) for b = a, else 1 / (e^epsilon + k - 1): epsilon-DP for
the label, with delta 0. Source: Warner 1965; Kairouz et al. 2014.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from opusim import checks


def keep_probability(epsilon: float, n_labels: int) -> float:
    """e^epsilon / (e^epsilon + k - 1), the probability that a label stays.

    Args:
        epsilon: At least 0 and finite.
        n_labels: k >= 2.
    """
    checks.non_negative(epsilon=epsilon)
    checks.integer(minimum=2, n_labels=n_labels)
    return 1 / (1 + (n_labels - 1) * math.exp(-epsilon))


class UniformSource(Protocol):
    """Gives independent uniform numbers in [0, 1), such as a `numpy.random.Generator`."""

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        """Float64, of the given shape."""


def respond(labels: np.ndarray, *, epsilon: float, n_labels: int, generator: UniformSource) -> np.ndarray:
    """One randomized label for each label, independently, shape (n,), dtype int64.

    To draw twice for one record spends epsilon twice: draw once and keep.

    Args:
        labels: Integers in [0, n_labels), shape (n,).
        epsilon: At least 0 and finite.
        n_labels: k >= 2.
        generator: Source of randomness; for a release, the operating system's own (`opusim.randomness.streams`).

    Raises:
        ValueError: A label out of range.
    """
    stays = keep_probability(epsilon, n_labels)
    given = np.asarray(labels)
    checks.shape((None,), labels=given)
    if given.dtype.kind not in "iu" or (given.size and not (given.min() >= 0 and given.max() < n_labels)):
        raise ValueError(f"labels: must be integers in [0, {n_labels})")
    shift = 1 + np.floor(generator.random(given.shape) * (n_labels - 1)).astype(np.int64)  # one of the others
    kept = generator.random(given.shape) < stays
    return np.where(kept, given, (given + shift) % n_labels).astype(np.int64)


def response_log_likelihood(observed: np.ndarray, *, epsilon: float, n_labels: int) -> np.ndarray:
    """Log P(observed_i | true label a), shape (n, k): the input of `label_once.posterior_targets`.

    Args:
        observed: What `respond` gave, shape (n,).
        epsilon: The one that it was given.
        n_labels: k >= 2.
    """
    stays = keep_probability(epsilon, n_labels)
    same = np.arange(n_labels)[None, :] == np.asarray(observed)[:, None]
    return np.where(same, math.log(stays), math.log(stays) - epsilon)
