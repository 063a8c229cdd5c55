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

from opusim.p_values import bonferroni, chi_squared_p_value, cosine_p_value
from opusim.training.attacks.mechanism.checks import Check

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
        signal_noise: For noise whose covariance depends on the features, its whitened components along the layers'
            inputs and across the records' signals, shape (steps, others); None for other noise.
        parameters: The columns of `noise` that belong to each parameter, if several parameters have separate noise.
        prefixes: The first numbers of two parameters, without the records' contributions, as pairs of shape (steps,
            numbers). The first of a pair is N(0, I) for any value of the second.
    """

    noise: np.ndarray
    sums: Sums
    batch: BatchLaw
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
    parameters, checks = released[0].parameters, noise_checks(noise)
    if len(parameters) > 1:
        parts = [noise[..., columns] for columns in parameters.values()]
        finds = "a weight or a bias without noise, or with weaker noise"
        checks.append(Check.variance("noise: variance in a parameter", parts, finds))
        pairs = []
        for runs in zip(*(run.prefixes for run in released), strict=True):
            one, other = (np.concatenate(side) for side in zip(*runs, strict=True))
            pairs.append((cosine(one, other), one.size))
        checks.append(Check.correlation("noise: two parameters", pairs, "one noise for two parameters"))
    signals = [run.signal_noise for run in released if run.signal_noise is not None]
    if signals:
        along = np.stack(signals)  # along the layers' inputs
        finds = "noise weaker or stronger than accounted"
        checks += [
            Check.variance("noise on signals: variance", [along], finds),
            _any_two(along, "noise on signals: any two steps"),
            *(_lag(along, lag, "noise on signals") for lag in LAGS[:1]),
        ]
    checks += sum_checks([run.sums for run in released], released[0].batch)
    return shared(checks, level)


def sum_checks(sums: Sequence[Sums], batch: BatchLaw) -> list[Check]:
    """Check contributions and batch sizes."""
    whole, by_layer = (np.concatenate([getattr(run, name) for run in sums]) for name in ("along", "by_layer"))
    shares, std, count = sums[0].shares, sums[0].along_std, len(whole)
    variance = batch.variance + std**2
    found = [
        Check.normal(
            "sum: mean, in records",
            float(whole.mean()),
            batch.mean,
            math.sqrt(variance / count),
            "a wider clip, a larger sampling probability, another divisor",
        )
    ]
    means = by_layer.mean(axis=0) / batch.mean
    if not batch.variance:
        # batches of fixed size: the layer whose mean is farthest from its share; all layers have the same noise
        worst = int(np.argmax(np.abs(means - shares)))
        error = std * math.sqrt(by_layer.shape[1] / count) / batch.mean
        finds = "a layer that is not clipped"
        name, layers = "contribution: norm in a layer", len(shares)
        own = (float(means[worst]), float(shares[worst]), error, finds)
        return [*found, Check.normal(name, *own, comparisons=layers)]
    # the norm of a contribution over all layers, sqrt(sum_l mean_l^2) / mean batch
    wanted = float(np.linalg.norm(shares))
    error = math.sqrt((batch.variance * (wanted / batch.mean) ** 2 + (std / batch.mean) ** 2) / count)
    finds = "each layer clipped to the whole bound"
    norm = float(np.linalg.norm(means))
    found.append(Check.normal("contribution: norm over layers", norm, wanted, error, finds))
    # the variance of the sums; the excess kurtosis of the binomial is below 0.01 here and neglected
    squares = sum(float(np.sum(np.square(run.along - run.along.mean()))) for run in sums)
    degrees = count - len(sums)
    found.append(
        Check(
            name="batch size: variance",
            observed=squares / degrees,
            expected=variance,
            standard_error=variance * math.sqrt(2 / degrees),
            p_value=chi_squared_p_value(squares / variance, degrees),
            finds="batches of fixed size, division by the realised size",
        )
    )
    # the correlation of batch sizes: of the same step in two runs, and of any two steps
    sizes = np.stack([run.along for run in sums])  # (runs, steps)
    pairs = [(sizes[i], sizes[j]) for j in range(len(sizes)) for i in range(j)]
    for lag in range(1, sizes.shape[1]):
        steps = np.arange(sizes.shape[1] - lag)
        for phase in (0, 1):  # alternate blocks of `lag` steps, so that no two pairs share a step
            first = steps[steps // lag % 2 == phase]
            if first.size * len(sizes) >= _MIN_PAIRS:
                pairs.append((sizes[:, first].ravel(), sizes[:, first + lag].ravel()))
    correlations = [(pearson(a, b), len(a) - 1) for a, b in pairs]
    text = "a batch used again, or in another run"
    return [*found, Check.correlation("batch size: any two steps", correlations, text)]


# Numbers that should be independent N(0, 1)


def shared(checks: Sequence[Check], level: float) -> tuple[Check, ...]:
    """Give each check an equal share of the family level."""
    return tuple(replace(check, level=level / len(checks)) for check in checks)


def noise_checks(noise: np.ndarray) -> list[Check]:
    """Check numbers that should be independent N(0, 1), shape (runs, steps, coordinates)."""
    size, count = noise.size, max(1, min(_PARTS, noise.shape[2] // _LEAST_PART))
    steps = list(noise.reshape(-1, noise.shape[2]))  # an empty batch may be a step without noise
    parts = np.array_split(noise, count, axis=2)  # of a step, some neighbouring coordinates
    distance, centred = (
        kolmogorov_distance(noise),
        "noise that is not centred, records in coordinates that none ",
    )
    return [
        Check.variance("noise: variance", [noise], "noise weaker or stronger than accounted"),
        Check.variance("noise: variance in a step", steps, "a step without noise, or with less"),
        Check.variance("noise: variance in a part", parts, "a part of a step without noise"),
        Check.normal("noise: mean", float(noise.mean()), 0.0, 1 / math.sqrt(size), f"{centred}should touch"),
        Check(
            name="noise: distance from normal",
            observed=distance,
            expected=0.8687 / math.sqrt(size),  # mean and standard deviation of the limit law
            standard_error=0.2603 / math.sqrt(size),
            p_value=float(kolmogorov(distance * math.sqrt(size))),  # by the limit law of large n
            finds="another law with the same variance",
        ),
        *(_lag(noise, lag) for lag in LAGS),
        _any_two(noise, "noise: any two steps"),
        _between_coordinates(noise),
    ]


def _lag(noise: np.ndarray, lag: int, name: str = "noise") -> Check:
    """Check the correlation of steps t and t + lag, for each phase t mod (lag + 1), whose pairs share no step."""
    firsts = [np.arange(phase, noise.shape[1] - lag, lag + 1) for phase in range(lag + 1)]
    pairs = [(noise[:, first], noise[:, first + lag]) for first in firsts]
    found = [(cosine(a, b), a.size) for a, b in pairs]
    return Check.correlation(f"{name}: steps {lag} apart", found, "noise used again")


def _any_two(noise: np.ndarray, name: str) -> Check:
    """Check the largest cosine between two steps, of one run or of two."""
    rows = noise.reshape(-1, noise.shape[2])
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    found = (unit @ unit.T)[np.triu_indices(len(rows), 1)]
    r = float(found[np.argmax(np.abs(found))])
    p = bonferroni(cosine_p_value(r, noise.shape[2]), len(found))
    text = "noise used again at any distance, or in another run"
    return Check(name, r, 0.0, 1 / math.sqrt(noise.shape[2]), p, text)


def _between_coordinates(noise: np.ndarray) -> Check:
    """Check the mean product of two coordinates of a step, for every distance at which enough products are known.

    Products at one distance are uncorrelated and of variance 1, so that a sum of many is normal.
    """
    rows, size = noise.shape[0] * noise.shape[1], noise.shape[2]
    spectrum = np.fft.rfft(noise, 2 * size, axis=2)
    sums = np.fft.irfft(np.sum(np.square(np.abs(spectrum)), axis=(0, 1)), 2 * size)
    distances = np.arange(1, max(size - _LEAST_PRODUCTS // rows, 2))
    errors = 1 / np.sqrt(np.maximum(rows * (size - distances), 1))
    means = sums[distances] * errors**2
    worst = int(np.argmax(np.abs(means / errors)))
    finds = "one number for several coordinates, a part that repeats another"
    found = (float(means[worst]), 0.0, float(errors[worst]), finds)
    return Check.normal("noise: coordinates of a step", *found, comparisons=len(distances))


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


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sample correlation; for normal samples, `cosine_p_value` in n - 1 dimensions gives its p-value."""
    return cosine(a - a.mean(), b - b.mean())
