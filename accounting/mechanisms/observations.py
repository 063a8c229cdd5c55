"""What is observed of a label, how likely each label makes it, and what a step of noisy signals spends of it.

Randomized response over k labels: P(observed = b | true = a) = e^epsilon / (e^epsilon + k - 1) for b = a, else
1 / (e^epsilon + k - 1) (Warner 1965). With a prior it answers one of the m likeliest labels only (Ghazi et al. 2021,
algorithm 2): a label among them is randomized over these m, and any other becomes one of them with probability 1 / m.
A reading is r = B y + g with g ~ N(0, sigma^2). All log-likelihoods are post-processing of what was observed.

A step of noisy signals is mu-GDP for a label with mu from leverage scores (theorem label-leverage), and the run is
B-GDP if every record stops sending its signal before its sum of mu^2 exceeds B^2 (theorem label-budget).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Protocol

import numpy as np

from opusim import checks

_ROUNDING = 1e-9
"""Relative rounding of a sum of squares, charged to the record."""


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


def telling_labels(priors: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Return the labels that a response with a prior may take, bool, shape (n, k).

    These are the m likeliest ones, with the m >= 2 at which the response tells most of the label under the prior: the
    largest mutual information H(response) - H(response | label) of `respond_among`. The m at which the response is
    most often true (Ghazi et al. 2021) is mostly 1 once a prior is good, and such a response tells nothing. Of equally
    likely labels the first ones are taken.

    Args:
        priors: Of each label, at least 0, rows of sum 1, shape (n, k). They must not depend on the record's own label.
        epsilon: Above 0 and finite.

    Raises:
        ValueError: A prior is negative or not finite.
    """
    checks.positive(epsilon=epsilon)
    checks.shape((None, None), priors=priors)
    checks.non_negative(priors=priors)
    n, k = priors.shape
    order = np.argsort(-priors, axis=1, kind="stable")
    likely = np.take_along_axis(priors, order, axis=1)
    most, best = np.full(n, -math.inf), np.full(n, 2)
    for size in range(2, k + 1):
        found = _information(likely[:, :size], epsilon)
        better = found > most
        most[better], best[better] = found[better], size
    among = np.zeros((n, k), dtype=bool)
    np.put_along_axis(among, order, np.arange(k) < best[:, None], axis=1)
    return among


def _information(likely: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the mutual information of labels and responses among m of them, nats, shape (n,).

    Args:
        likely: Prior of these m >= 2 labels, shape (n, m).
        epsilon: Above 0.
    """
    size = likely.shape[1]
    stays = 1 / (1 + (size - 1) * math.exp(-epsilon))
    other = stays * math.exp(-epsilon)
    outside = np.maximum(1 - likely.sum(axis=1), 0.0)
    answers = other * (1 - outside[:, None]) + (stays - other) * likely + outside[:, None] / size
    inside = _entropy(np.array([stays] + [other] * (size - 1)))
    return np.asarray(_entropy(answers) - (1 - outside) * inside - outside * math.log(size))


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return -sum p log p over the last axis, nats."""
    return -np.sum(probabilities * np.log(np.maximum(probabilities, np.finfo(float).tiny)), axis=-1)


def respond_among(
    labels: np.ndarray, among: np.ndarray, *, epsilon: float, generator: UniformSource
) -> np.ndarray:
    """Return one randomized label for each label, among those that the record may take, shape (n,), dtype int64.

    Of m labels, the own one stays with probability e^epsilon / (e^epsilon + m - 1), else it becomes one of the m - 1
    others with equal probability. An own label that is not among them becomes any of the m with probability 1 / m.
    The ratio of two labels' probabilities is at most e^epsilon for every m and every set that depends on no label.

    Args:
        labels: Integers in [0, k), shape (n,).
        among: Which labels the record may take, at least one each, bool, shape (n, k); see `telling_labels`.
        epsilon: Above 0 and finite.
        generator: As for `respond`.

    Raises:
        ValueError: A label is out of range, or a record may take none.
    """
    given, (n, k) = np.asarray(labels), among.shape
    checks.positive(epsilon=epsilon)
    checks.shape((n,), labels=given)
    if given.dtype.kind not in "iu" or (n and not (given.min() >= 0 and given.max() < k)):
        raise ValueError(f"labels: must be integers in [0, {k})")
    sizes = among.sum(axis=1)
    if n and sizes.min() < 1:
        raise ValueError("among: a record may take no label at all; allow at least one")
    rows = np.arange(n)
    rank = np.cumsum(among, axis=1)[rows, given] - 1  # of an own label that is among them
    members = np.argsort(~among, axis=1, kind="stable")
    other = generator.random((n,))
    kept = generator.random((n,)) < 1 / (1 + (sizes - 1) * math.exp(-epsilon))
    moved = (rank + 1 + np.floor(other * (sizes - 1)).astype(np.int64)) % sizes
    inside = np.where(kept, rank, moved)
    chosen = np.where(among[rows, given], inside, np.floor(other * sizes).astype(np.int64))
    return members[rows, chosen].astype(np.int64)


def among_log_likelihood(observed: np.ndarray, among: np.ndarray, *, epsilon: float) -> np.ndarray:
    """Return log P(observed_i | true label a) of responses among some labels, shape (n, k).

    Args:
        observed: What `respond_among` returned, shape (n,).
        among: Its argument.
        epsilon: Its argument.
    """
    sizes = among.sum(axis=1, keepdims=True)
    stays = -np.log1p((sizes - 1) * math.exp(-epsilon))
    same = np.arange(among.shape[1]) == np.asarray(observed)[:, None]
    return np.where(among, np.where(same, stays, stays - epsilon), -np.log(sizes))


def among_targets(
    observed: np.ndarray, among: np.ndarray, priors: np.ndarray, *, epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return targets of a regression on responses, shape (n, k), and their weights, shape (n,).

    With a = e^epsilon / (e^epsilon + m - 1) and b = 1 / (e^epsilon + m - 1), u_c = ([observed = c] - b) / (a - b) has
    the mean [true = c], and 1 / m if the true label is not among the m. A target is u_c less 1 / m of the prior's mass
    outside, and outside it is the prior. So its mean is the one-hot label if all labels are among the m, and otherwise
    it errs only by what the prior errs in the mass outside. A weight is 1 over 1 plus the variance of u, summed over c.

    Args:
        observed: What `respond_among` returned, shape (n,).
        among: Its argument.
        priors: As for `telling_labels`.
        epsilon: Above 0 and finite.
    """
    sizes = among.sum(axis=1, keepdims=True)
    stays = 1 / (1 + (sizes - 1) * math.exp(-epsilon))
    other = stays * math.exp(-epsilon)
    gap = -stays * math.expm1(-epsilon)
    same = np.arange(among.shape[1]) == np.asarray(observed)[:, None]
    outside = np.where(among, 0.0, priors).sum(axis=1, keepdims=True)
    targets = np.where(among, (same - other) / gap - outside / sizes, priors)
    variance = (
        stays * (1 - stays) + (sizes - 1) * other * (1 - other)
    ) / gap**2  # 0 for m = 1, which says nothing
    return targets, 1 / (1 + variance[:, 0])


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


def label_distance(projection: np.ndarray) -> float:
    """Return Delta = max_ab ||B_a - B_b||: the error is p - y, so two labels differ by B_b - B_a.

    Args:
        projection: B, one column a label, shape (n, labels).
    """
    checks.finite(projection=projection)
    checks.shape((None, None), projection=projection)
    if projection.shape[1] < 2:
        raise ValueError(f"projection has {projection.shape[1]} column: at least two labels are needed")
    pairs = combinations(range(projection.shape[1]), 2)
    return float(max(np.linalg.norm(projection[:, a] - projection[:, b]) for a, b in pairs))
