"""The checks of the self-test: each compares what runs released with its law under the accounted mechanism.

`Released` is what one run released, split into noise that no record touches and the sums along the records. `checked`
turns several of these into checks that share a family level. Labels that are randomized once have `response_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import kolmogorov, ndtr

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value, doubt, normal_p_value
from training.attacks.mechanism.report import Check

LAGS = (1, 2, 3, 4)
_PARTS, _LEAST_PART = 32, 8
"""Most parts of a step whose variances are compared, and the fewest coordinates of one."""
_LEAST_PRODUCTS = 1000
"""Fewest products at a distance: the tail of their sum at 1e-9 is then normal up to a third."""
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
        sums: The other components.
        batch: Law of the batch sizes.
        accounted: The mechanism, as text.
        signal_noise: For noise whose covariance depends on the features, its whitened components along the layers'
            inputs and across the records' signals, shape (steps, others); None for other noise.
        parameters: The columns of `noise` that belong to each parameter, if several parameters have separate noise.
        prefixes: The first numbers of two parameters, without the records' contributions, as pairs of shape (steps,
            numbers). The first of a pair is N(0, I) for any value of the second.
    """

    noise: np.ndarray
    sums: Sums
    batch: BatchLaw
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
    checks += sum_checks([run.sums for run in released], released[0].batch)
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


# Numbers that should be independent N(0, 1)


def shared(checks: Sequence[Check], level: float) -> tuple[Check, ...]:
    """Give each check an equal share of the family level."""
    return tuple(replace(check, level=level / len(checks)) for check in checks)


def noise_checks(noise: np.ndarray) -> list[Check]:
    """Check numbers that should be independent N(0, 1), shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise),
        _variance_in_a_step(noise),
        _variance_in_a_part(noise),
        _noise_mean(noise),
        _noise_law(noise),
        *(_lag(noise, lag) for lag in LAGS),
        _any_two(noise),
        _between_coordinates(noise),
    ]


def signal_noise_checks(noise: np.ndarray) -> list[Check]:
    """Check the noise along the layers' inputs, shape (runs, steps, coordinates)."""
    return [
        _noise_variance(noise, "noise on signals: variance"),
        _any_two(noise, "noise on signals: any two steps"),
        *(_lag(noise, lag, "noise on signals") for lag in LAGS[:1]),
    ]


def _noise_variance(noise: np.ndarray, name: str = "noise: variance") -> Check:
    total = float(np.sum(np.square(noise)))
    return Check(
        name=name,
        observed=total / noise.size,
        expected=1.0,
        standard_error=math.sqrt(2 / noise.size),
        p_value=chi_squared_p_value(total, noise.size),
        finds="noise weaker or stronger than accounted",
    )


def _variance_in_a_step(noise: np.ndarray) -> Check:
    """Check the step whose noise has the least likely variance: an empty batch may be one without noise."""
    steps = noise.reshape(-1, noise.shape[2])
    return least_likely_variance(
        "noise: variance in a step", list(steps), "a step without noise, or with less"
    )


def _variance_in_a_part(noise: np.ndarray) -> Check:
    """Check the part of a step, some neighbouring coordinates, whose noise has the least likely variance."""
    count = max(1, min(_PARTS, noise.shape[2] // _LEAST_PART))
    parts = np.array_split(noise, count, axis=2)
    return least_likely_variance("noise: variance in a part", parts, "a part of a step without noise")


def least_likely_variance(name: str, parts: Sequence[np.ndarray], finds: str) -> Check:
    """Check the least likely variance of several arrays of independent N(0, 1)."""
    found = [(chi_squared_p_value(float(np.sum(np.square(part))), part.size), part) for part in parts]
    p, part = min(found, key=lambda pair: doubt(pair[0]))
    return Check(
        name=name,
        observed=float(np.mean(np.square(part))),
        expected=1.0,
        standard_error=math.sqrt(2 / part.size),
        p_value=bonferroni(p, len(parts)),
        finds=finds,
    )


def _noise_mean(noise: np.ndarray) -> Check:
    error = 1 / math.sqrt(noise.size)
    return Check(
        name="noise: mean",
        observed=float(noise.mean()),
        expected=0.0,
        standard_error=error,
        p_value=normal_p_value(float(noise.mean()) / error),
        finds="noise that is not centred, records in coordinates that none should touch",
    )


def _noise_law(noise: np.ndarray) -> Check:
    distance = kolmogorov_distance(noise)
    root = math.sqrt(noise.size)
    return Check(
        name="noise: distance from normal",
        observed=distance,
        expected=0.8687 / root,  # mean and standard deviation of the limit law
        standard_error=0.2603 / root,
        p_value=kolmogorov_p(distance, noise.size),
        finds="another law with the same variance",
    )


def _lag(noise: np.ndarray, lag: int, name: str = "noise") -> Check:
    """Check the correlation of steps t and t + lag, for each phase t mod (lag + 1), whose pairs share no step."""
    firsts = [np.arange(phase, noise.shape[1] - lag, lag + 1) for phase in range(lag + 1)]
    pairs = [(noise[:, first], noise[:, first + lag]) for first in firsts]
    return least_likely(f"{name}: steps {lag} apart", pairs, "noise used again")


def _any_two(noise: np.ndarray, name: str = "noise: any two steps") -> Check:
    r, pairs = largest_pair(noise.reshape(-1, noise.shape[2]))
    p = bonferroni(cosine_p_value(r, noise.shape[2]), pairs)
    text = "noise used again at any distance, or in another run"
    return correlation(name, r, noise.shape[2], p, text)


def _between_coordinates(noise: np.ndarray) -> Check:
    """Check the mean product of two coordinates of a step, for every distance at which enough products are known.

    Products at one distance are uncorrelated and of variance 1, so that a sum of many is normal.
    """
    rows, size = noise.shape[0] * noise.shape[1], noise.shape[2]
    spectrum = np.fft.rfft(noise, 2 * size, axis=2)
    sums = np.fft.irfft(np.sum(np.square(np.abs(spectrum)), axis=(0, 1)), 2 * size)
    distances = np.arange(1, max(size - _LEAST_PRODUCTS // rows, 2))
    counts = np.maximum(rows * (size - distances), 1)
    deviations = sums[distances] / np.sqrt(counts)
    worst = int(np.argmax(np.abs(deviations)))
    return Check(
        name="noise: coordinates of a step",
        observed=float(deviations[worst]) / math.sqrt(counts[worst]),
        expected=0.0,
        standard_error=1 / math.sqrt(counts[worst]),
        p_value=bonferroni(normal_p_value(float(deviations[worst])), len(distances)),
        finds="one number for several coordinates, a part that repeats another",
    )


def least_likely(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], finds: str) -> Check:
    """Check the least likely of several correlations whose means are known to be 0."""
    found = []
    for a, b in pairs:
        r = cosine(a, b)
        found.append((float(cosine_p_value(r, a.size)), r, a.size))
    p, r, dimension = min(found, key=lambda pair: doubt(pair[0]))
    return correlation(name, r, dimension, bonferroni(p, len(found)), finds)


def correlation(name: str, r: float, dimension: int, p_value: float, finds: str) -> Check:
    """Return the check of a cosine whose mean is known to be 0."""
    return Check(
        name=name,
        observed=r,
        expected=0.0,
        standard_error=1 / math.sqrt(dimension),
        p_value=p_value,
        finds=finds,
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return <a, b> / (||a|| ||b||) of two arrays of one shape; 0 if one of them is 0."""
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.vdot(a, b)) / scale if scale else 0.0


def kolmogorov_distance(values: np.ndarray) -> float:
    """Return the largest distance of the empirical distribution function from that of N(0, 1)."""
    expected = ndtr(np.sort(values, axis=None))
    n = len(expected)
    ranks = np.arange(n + 1) / n
    return float(max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1])))


def kolmogorov_p(distance: float, n: int) -> float:
    """Return the p-value of a Kolmogorov distance of n independent values, by the limit law of large n."""
    return float(kolmogorov(distance * math.sqrt(n)))


def largest_pair(rows: np.ndarray) -> tuple[float, int]:
    """Return the cosine of largest magnitude between two rows (n, d), and the number of pairs."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    upper = np.triu_indices(len(rows), 1)
    found = (unit @ unit.T)[upper]
    return float(found[np.argmax(np.abs(found))]), len(found)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sample correlation; for normal samples, `cosine_p_value` in n - 1 dimensions gives its p-value."""
    return cosine(a - a.mean(), b - b.mean())
