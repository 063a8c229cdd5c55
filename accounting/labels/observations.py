"""What is observed of a label, and how likely each label makes it: randomized response and noisy readings.

Randomized response over k labels: P(observed = b | true = a) = e^epsilon / (e^epsilon + k - 1) for b = a, else
1 / (e^epsilon + k - 1) (Warner 1965). A reading is r = B y + g with g ~ N(0, sigma^2). Both log-likelihoods are
post-processing of what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from opusim import checks


def keep_probability(epsilon: float, n_labels: int) -> float:
    """Return e^epsilon / (e^epsilon + k - 1), the probability that a label stays.

    Args:
        epsilon: At least 0 and finite.
        n_labels: k >= 2.
    """
    checks.non_negative(epsilon=epsilon)
    checks.integer(minimum=2, n_labels=n_labels)
    return 1 / (1 + (n_labels - 1) * math.exp(-epsilon))


class UniformSource(Protocol):
    """A source of independent uniform numbers in [0, 1), such as a `numpy.random.Generator`."""

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        """Return float64 numbers of the given shape."""


def respond(labels: np.ndarray, *, epsilon: float, n_labels: int, generator: UniformSource) -> np.ndarray:
    """Return one randomized label for each label, drawn independently, shape (n,), dtype int64.

    Drawing twice for one record spends epsilon twice: draw once and keep the result.

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
    """Return log P(observed_i | true label a), shape (n, k).

    Args:
        observed: What `respond` returned, shape (n,).
        epsilon: Its argument.
        n_labels: k >= 2.
    """
    stays = keep_probability(epsilon, n_labels)
    same = np.arange(n_labels)[None, :] == np.asarray(observed)[:, None]
    return np.where(same, math.log(stays), math.log(stays) - epsilon)


def reading_log_likelihood(
    readings: Sequence[np.ndarray], codes: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """Return log p(r_i | label a) + const = -sum_l ||r_i^l - B^l_a||^2 / (2 sigma_l^2), shape (m, labels).

    Args:
        readings: Per reading, shape (m, n_l).
        codes: Per reading, B^l, shape (n_l, labels).
        sigmas: Per reading, above 0.
    """
    checks.positive(sigmas=sigmas)
    total = np.zeros((len(readings[0]), codes[0].shape[1]))
    for reading, code, sigma in zip(readings, codes, sigmas, strict=True):
        checks.shape((len(total), code.shape[0]), readings=reading)
        r, b = np.asarray(reading, float), np.asarray(code, float)
        total += (r @ b - np.sum(np.square(b), axis=0) / 2) / sigma**2  # ||r||^2 is common to all labels
    return total
