"""The checks of the self-test: each compares what runs released with its law under the accounted mechanism.

`Released` is what one run released, split into noise that no record touches and the sums along the records. `checked`
turns several of these into checks that share a family level. Labels that are randomized once have `response_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import scipy.stats

from accounting import LabelArgmax, RandomizedResponse
from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from training.attacks.mechanism.noise import (
    LAGS,
    correlation,
    least_likely,
    least_likely_variance,
    noise_checks,
    pearson,
    shared,
    signal_noise_checks,
)
from training.attacks.mechanism.report import Check

_MIN_PAIRS = 20
"""Smallest number of pairs of batch sizes in a correlation: with 20, a correlation of 0.9 is found at a p-value of 1e-5
even among several hundred."""


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
        """Return the law Binomial(n, q): each record enters with probability q, independently of the others."""
        return cls(mean=n_records * probability, variance=n_records * probability * (1 - probability))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The noisy sums of one run along its records' directions, in units of the largest contribution.

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
    """What one run released, split for the checks.

    Attributes:
        noise: Components that no record touches, divided by their accounted standard deviation, shape (steps,
            coordinates). They are independent N(0, 1) under the accounted mechanism.
        sums: The other components, or None if each record is read once.
        batch: Law of the batch sizes, or None if each record is read once.
        accounted: The mechanism, as text.
        signal_noise: For noise whose covariance depends on the features, its whitened components along the layers'
            inputs and across the records' signals, shape (steps, others); None for other noise.
        parameters: The columns of `noise` that belong to each parameter, if several parameters have separate noise.
        prefixes: The first numbers of two parameters, without the records' contributions, as pairs of shape (steps,
            numbers). The first of a pair is N(0, I) for any value of the second.
    """

    noise: np.ndarray
    sums: Sums | None
    batch: BatchLaw | None
    accounted: str
    signal_noise: np.ndarray | None = None
    parameters: Mapping[str, slice] = field(default_factory=dict)
    prefixes: Sequence[tuple[np.ndarray, np.ndarray]] = ()


def checked(released: Sequence[Released], level: float) -> tuple[Check, ...]:
    """Return all checks that apply, with a shared family level (Bonferroni).

    Args:
        released: One entry per run; at least two runs of equal length.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    noise = np.stack([run.noise for run in released])  # (runs, steps, coordinates)
    checks = noise_checks(noise)
    if len(released[0].parameters) > 1:
        checks += [_parameter_variance(noise, released[0].parameters), _two_parameters(released)]
    signals = [run.signal_noise for run in released if run.signal_noise is not None]
    if signals:
        checks += signal_noise_checks(np.stack(signals))
    sums, batch = [run.sums for run in released if run.sums is not None], released[0].batch
    if sums and batch is not None:
        checks += sum_checks(sums, batch)
    return shared(checks, level)


def sum_checks(sums: Sequence[Sums], batch: BatchLaw) -> list[Check]:
    """Check contributions and batch sizes."""
    if not batch.variance:
        return [_mean_sum(sums, batch), _layer_sums(sums, batch)]
    return [
        _mean_sum(sums, batch),
        _largest_norm(sums, batch),
        _batch_variance(sums, batch),
        _batches_apart(sums),
    ]


def _parameter_variance(noise: np.ndarray, parameters: Mapping[str, slice]) -> Check:
    """Check the parameter whose noise has the least likely variance."""
    parts = [noise[..., columns] for columns in parameters.values()]
    finds = "a weight or a bias without noise, or with weaker noise"
    return least_likely_variance("noise: variance in a parameter", parts, finds)


def _two_parameters(released: Sequence[Released]) -> Check:
    pairs = [
        tuple(np.concatenate(side) for side in zip(*runs, strict=True))
        for runs in zip(*(run.prefixes for run in released), strict=True)
    ]
    return least_likely("noise: two parameters", [(a, b) for a, b in pairs], "one noise for two parameters")


def _mean_sum(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    along = np.concatenate([run.along for run in sums])
    error = math.sqrt((batch.variance + sums[0].along_std ** 2) / len(along))
    return Check(
        name="sum: mean, in records",
        observed=float(along.mean()),
        expected=batch.mean,
        standard_error=error,
        p_value=normal_p_value((float(along.mean()) - batch.mean) / error),
        finds="a wider clip, a larger sampling probability, another divisor",
    )


def _largest_norm(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """Check the norm of a contribution over all layers, sqrt(sum_l mean_l^2) / mean batch, against 1."""
    means = np.concatenate([run.by_layer for run in sums]).mean(axis=0)
    shares = sums[0].shares
    wanted = float(np.linalg.norm(shares))
    count = sum(len(run.along) for run in sums)
    own = sums[0].along_std / batch.mean
    error = math.sqrt((batch.variance * (wanted / batch.mean) ** 2 + own**2) / count)
    observed = float(np.linalg.norm(means)) / batch.mean
    return Check(
        name="contribution: norm over layers",
        observed=observed,
        expected=wanted,
        standard_error=error,
        p_value=normal_p_value((observed - wanted) / error),
        finds="each layer clipped to the whole bound",
    )


def _layer_sums(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """Check the layer whose mean is farthest from its share, for batches of fixed size."""
    values = np.concatenate([run.by_layer for run in sums])
    error = sums[0].along_std * math.sqrt(values.shape[1] / len(values))  # all layers have the same noise
    gaps = values.mean(axis=0) / batch.mean - sums[0].shares
    worst = int(np.argmax(np.abs(gaps)))
    error /= batch.mean
    return Check(
        name="contribution: norm in a layer",
        observed=float(gaps[worst] + sums[0].shares[worst]),
        expected=float(sums[0].shares[worst]),
        standard_error=error,
        p_value=bonferroni(normal_p_value(float(gaps[worst]) / error), len(gaps)),
        finds="a layer that is not clipped",
    )


def _batch_variance(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """Check the variance of the sums; the excess kurtosis of the binomial is below 0.01 here and neglected."""
    expected = batch.variance + sums[0].along_std ** 2
    squares = sum(float(np.sum(np.square(run.along - run.along.mean()))) for run in sums)
    degrees = sum(len(run.along) - 1 for run in sums)
    return Check(
        name="batch size: variance",
        observed=squares / degrees,
        expected=expected,
        standard_error=expected * math.sqrt(2 / degrees),
        p_value=chi_squared_p_value(squares / expected, degrees),
        finds="batches of fixed size, division by the realised size",
    )


def _batches_apart(sums: Sequence[Sums]) -> Check:
    """Check the correlation of batch sizes: of any two steps, and of the same step in two runs."""
    sizes = np.stack([run.along for run in sums])  # (runs, steps)
    pairs = [(sizes[i], sizes[j]) for j in range(len(sizes)) for i in range(j)]
    for lag in range(1, sizes.shape[1]):
        steps = np.arange(sizes.shape[1] - lag)
        for phase in (0, 1):  # alternate blocks of `lag` steps, so that no two pairs share a step
            first = steps[steps // lag % 2 == phase]
            if first.size * len(sizes) >= _MIN_PAIRS:
                pairs.append((sizes[:, first].ravel(), sizes[:, first + lag].ravel()))
    found = []
    for a, b in pairs:
        r = pearson(a, b)
        found.append((float(cosine_p_value(r, len(a) - 1)), r, len(a) - 1))
    p, r, dimension = min(found, key=lambda pair: doubt(pair[0]))
    text = "a batch used again, or in another run"
    return correlation("batch size: any two steps", r, dimension, bonferroni(p, len(found)), text)


def response_checks(
    shifts: Sequence[np.ndarray], mechanism: RandomizedResponse | LabelArgmax, level: float
) -> tuple[Check, ...]:
    """Check randomized response: each label is kept with probability p, else replaced uniformly by another class.

    Args:
        shifts: Shift of each record's class, shape (records,), for each run.
        mechanism: The accounted mechanism.
        level: Probability of any alarm under the accounted mechanism, in (0, 1).
    """
    k = int(mechanism.n_classes)
    stays = 1 / (1 + (k - 1) * math.exp(-float(mechanism.step_epsilon)))
    runs = np.stack(shifts)
    kept = runs == 0
    return shared([_kept(kept, stays), _others(runs, k), *_repeats(kept, runs, stays, k)], level)


def _kept(kept: np.ndarray, stays: float) -> Check:
    found = scipy.stats.binomtest(int(kept.sum()), kept.size, stays)
    return Check(
        name="response: share of labels kept",
        observed=float(kept.mean()),
        expected=stays,
        standard_error=math.sqrt(stays * (1 - stays) / kept.size),
        p_value=float(found.pvalue),
        finds="labels that stay more often than accounted",
    )


def _others(runs: np.ndarray, k: int) -> Check:
    """Check the classes of replaced labels by Pearson's chi-squared."""
    counts = np.bincount(runs[runs > 0], minlength=k)[1:]
    expected = max(float(counts.sum()) / (k - 1), 1e-300)
    total, degrees = float(np.sum(np.square(counts - expected)) / expected), k - 2
    return Check(
        name="response: classes moved to",
        observed=total,
        expected=float(degrees),
        standard_error=math.sqrt(2 * degrees),
        p_value=1.0 if not degrees else float(scipy.stats.chi2.sf(total, degrees)),
        finds="moves that depend on the label",
    )


def _repeats(kept: np.ndarray, runs: np.ndarray, stays: float, k: int) -> list[Check]:
    """Check labels kept in records up to four apart, and equal answers in two runs (normal approximations)."""
    n = kept.shape[1]
    values = (kept - kept.mean()) / math.sqrt(stays * (1 - stays))
    lagged = [(float(np.sum(values[:, :-lag] * values[:, lag:])), len(kept) * (n - lag)) for lag in LAGS]
    total, pairs = max(lagged, key=lambda found: abs(found[0]) / math.sqrt(found[1]))
    same = stays**2 + (1 - stays) ** 2 / (k - 1)
    error = math.sqrt(same * (1 - same) / n)
    equal = max(
        (float(np.mean(a == b)) for a, b in combinations(runs, 2)), key=lambda found: abs(found - same)
    )
    n_pairs = len(runs) * (len(runs) - 1) // 2
    return [
        Check(
            name="response: records apart",
            observed=total / pairs,
            expected=0.0,
            standard_error=1 / math.sqrt(pairs),
            p_value=bonferroni(normal_p_value(total / math.sqrt(pairs)), len(LAGS)),
            finds="one draw for several records",
        ),
        Check(
            name="response: equal in two runs",
            observed=equal,
            expected=same,
            standard_error=error,
            p_value=bonferroni(normal_p_value((equal - same) / error), n_pairs),
            finds="answers that do not change from run to run",
        ),
    ]
