"""From what runs released to checks: each statistic with its law under the accounted mechanism."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from training.attacks.mechanism import statistics
from training.attacks.mechanism.observations import BatchLaw, Released, Sums
from training.attacks.mechanism.report import Check

LAGS = (1, 2, 3, 4)
_FEWEST_PAIRS = 20
"""Pairs of batch sizes behind a correlation, at least: of 20, one of 0.9 is found in several hundred at 1e-5."""
_PENDING = math.nan
"""Level of a check before the family is known."""


def checked(released: Sequence[Released], level: float) -> tuple[Check, ...]:
    """All checks that apply, sharing a family level (Bonferroni).

    Args:
        released: One entry a run, at least two runs of equal length.
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


def shared(checks: Sequence[Check], level: float) -> tuple[Check, ...]:
    """The checks at an equal share of the family level."""
    return tuple(replace(check, level=level / len(checks)) for check in checks)


def noise_checks(noise: np.ndarray) -> list[Check]:
    """Checks of what should be independent N(0, 1), shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise),
        _noise_mean(noise),
        _noise_law(noise),
        *(_lag(noise, lag) for lag in LAGS),
        _any_two(noise),
        _between_coordinates(noise),
    ]


def signal_noise_checks(noise: np.ndarray) -> list[Check]:
    """Checks of noise along the layers' inputs, shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise, "noise on signals: variance"),
        _any_two(noise, "noise on signals: any two steps"),
        *(_lag(noise, lag, "noise on signals") for lag in LAGS[:1]),
    ]


def sum_checks(sums: Sequence[Sums], batch: BatchLaw) -> list[Check]:
    """Checks of contributions and batches."""
    if not batch.variance:
        return [_mean_sum(sums, batch), _layer_sums(sums, batch)]
    return [
        _mean_sum(sums, batch),
        _largest_norm(sums, batch),
        _batch_variance(sums, batch),
        _batches_apart(sums),
    ]


def _noise_variance(noise: np.ndarray, name: str = "noise: variance") -> Check:
    total = float(np.sum(np.square(noise)))
    return Check(
        name=name,
        observed=total / noise.size,
        expected=1.0,
        standard_error=math.sqrt(2 / noise.size),
        p_value=chi_squared_p_value(total, noise.size),
        level=_PENDING,
        finds="noise weaker or stronger than accounted",
    )


def _parameter_variance(noise: np.ndarray, parameters: Mapping[str, slice]) -> Check:
    """The parameter whose noise has the least likely variance."""
    parts = [noise[..., columns] for columns in parameters.values()]
    found = [(chi_squared_p_value(float(np.sum(np.square(part))), part.size), part) for part in parts]
    p, part = min(found, key=lambda pair: pair[0])
    return Check(
        name="noise: variance in a parameter",
        observed=float(np.mean(np.square(part))),
        expected=1.0,
        standard_error=math.sqrt(2 / part.size),
        p_value=bonferroni(p, len(parts)),
        level=_PENDING,
        finds="a weight or a bias without noise, or with weaker noise",
    )


def _two_parameters(released: Sequence[Released]) -> Check:
    pairs = [
        tuple(np.concatenate(side) for side in zip(*runs, strict=True))
        for runs in zip(*(run.prefixes for run in released), strict=True)
    ]
    return _least_likely("noise: two parameters", [(a, b) for a, b in pairs], "one noise for two parameters")


def _noise_mean(noise: np.ndarray) -> Check:
    error = 1 / math.sqrt(noise.size)
    return Check(
        name="noise: mean",
        observed=float(noise.mean()),
        expected=0.0,
        standard_error=error,
        p_value=normal_p_value(float(noise.mean()) / error),
        level=_PENDING,
        finds="noise that is not centred, records in coordinates that none should touch",
    )


def _noise_law(noise: np.ndarray) -> Check:
    distance = statistics.kolmogorov_distance(noise)
    root = math.sqrt(noise.size)
    return Check(
        name="noise: distance from normal",
        observed=distance,
        expected=0.8687 / root,  # mean and standard deviation of the limit law
        standard_error=0.2603 / root,
        p_value=statistics.kolmogorov_p(distance, noise.size),
        level=_PENDING,
        finds="another law with the same variance",
    )


def _lag(noise: np.ndarray, lag: int, name: str = "noise") -> Check:
    """Correlation of steps t and t + lag, each phase t mod (lag + 1) by itself: its pairs share no step."""
    firsts = [np.arange(phase, noise.shape[1] - lag, lag + 1) for phase in range(lag + 1)]
    pairs = [(noise[:, first], noise[:, first + lag]) for first in firsts]
    return _least_likely(f"{name}: steps {lag} apart", pairs, "noise used again")


def _any_two(noise: np.ndarray, name: str = "noise: any two steps") -> Check:
    r, pairs = statistics.largest_pair(noise.reshape(-1, noise.shape[2]))
    p = bonferroni(cosine_p_value(r, noise.shape[2]), pairs)
    text = "noise used again at any distance, or in another run"
    return _correlation(name, r, noise.shape[2], p, text)


def _between_coordinates(noise: np.ndarray) -> Check:
    """Correlation of neighbouring coordinates, from the first and from the second on, and of the two halves."""
    size = noise.shape[2]
    pairs = [(noise[..., start : size - 1 : 2], noise[..., start + 1 : size : 2]) for start in (0, 1)]
    pairs.append((noise[..., : size // 2], noise[..., size // 2 : size // 2 * 2]))
    return _least_likely("noise: coordinates of a step", pairs, "one number for several")


def _least_likely(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], finds: str) -> Check:
    """The least likely of several correlations whose means are known to be 0."""
    found = []
    for a, b in pairs:
        r = statistics.cosine(a, b)
        found.append((float(cosine_p_value(r, a.size)), r, a.size))
    p, r, dimension = min(found, key=lambda pair: doubt(pair[0]))
    return _correlation(name, r, dimension, bonferroni(p, len(found)), finds)


def _correlation(name: str, r: float, dimension: int, p_value: float, finds: str) -> Check:
    return Check(
        name=name,
        observed=r,
        expected=0.0,
        standard_error=1 / math.sqrt(dimension),
        p_value=p_value,
        level=_PENDING,
        finds=finds,
    )


def _mean_sum(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    along = np.concatenate([run.along for run in sums])
    error = math.sqrt((batch.variance + sums[0].along_std ** 2) / len(along))
    return Check(
        name="sum: mean, in records",
        observed=float(along.mean()),
        expected=batch.mean,
        standard_error=error,
        p_value=normal_p_value((float(along.mean()) - batch.mean) / error),
        level=_PENDING,
        finds="a wider clip, a larger sampling probability, another divisor",
    )


def _largest_norm(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """Norm of a contribution over all layers, sqrt(sum_l mean_l^2) / mean batch, against 1."""
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
        level=_PENDING,
        finds="each layer clipped to the whole bound",
    )


def _layer_sums(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """The layer whose mean is farthest from its share, where batches have a fixed size."""
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
        level=_PENDING,
        finds="a layer that is not clipped",
    )


def _batch_variance(sums: Sequence[Sums], batch: BatchLaw) -> Check:
    """Variance of the sums about their means; a binomial's excess kurtosis is below 0.01 here and left out."""
    expected = batch.variance + sums[0].along_std ** 2
    squares = sum(float(np.sum(np.square(run.along - run.along.mean()))) for run in sums)
    degrees = sum(len(run.along) - 1 for run in sums)
    return Check(
        name="batch size: variance",
        observed=squares / degrees,
        expected=expected,
        standard_error=expected * math.sqrt(2 / degrees),
        p_value=chi_squared_p_value(squares / expected, degrees),
        level=_PENDING,
        finds="batches of fixed size, division by the realised size",
    )


def _batches_apart(sums: Sequence[Sums]) -> Check:
    """Correlation of batch sizes: of steps any number apart, and of the same step of two runs."""
    sizes = np.stack([run.along for run in sums])  # (runs, steps)
    pairs = [(sizes[i], sizes[j]) for j in range(len(sizes)) for i in range(j)]
    for lag in range(1, sizes.shape[1]):
        steps = np.arange(sizes.shape[1] - lag)
        for phase in (0, 1):  # alternate blocks of `lag` steps, so that no two pairs share a step
            first = steps[steps // lag % 2 == phase]
            if first.size * len(sizes) >= _FEWEST_PAIRS:
                pairs.append((sizes[:, first].ravel(), sizes[:, first + lag].ravel()))
    found = []
    for a, b in pairs:
        r = statistics.pearson(a, b)
        found.append((float(cosine_p_value(r, len(a) - 1)), r, len(a) - 1))
    p, r, dimension = min(found, key=lambda pair: doubt(pair[0]))
    text = "a batch used again, or in another run"
    return _correlation("batch size: any two steps", r, dimension, bonferroni(p, len(found)), text)
