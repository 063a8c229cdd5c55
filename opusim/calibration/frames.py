r"""Take frames under uniform light, reduce them to sums, and estimate constants with confidence limits.

**Grouped jackknife** (`jackknife`): limits of any smooth function of sums over pixels, without a law of the noise.
Pixels are independent and fall into G groups. With theta the estimate from all of them, theta_g the one without group g
and theta_. the mean of those, the estimate G theta - (G - 1) theta_. has its first-order bias removed, its standard
error is s with s^2 = (G - 1)/G sum (theta_g - theta_.)^2, and (estimate - truth)/s is close to Student's t with G - 1
degrees of freedom (Quenouille 1956, Tukey 1958; Miller 1974). Tests count how often the limits hold.

**Decorrelation** (`decorrelation_time`): how long the medium keeps its speckle, from frames of one pattern at two
times.

**Quantised noise** (`dark_noise_dn`): the temporal noise of dark frames, also if the converter's steps are coarser than
the noise. A pixel of mean theta and noise s gives code c with probability Phi((c + 1/2 - theta)/s) - Phi((c - 1/2 -
theta)/s). Below 0.75 DN the variance of codes does not measure s: it depends on the place of theta between two steps,
and rounding does not add 1/12. In that range s is fitted to the codes' probabilities by maximum likelihood, with means
N(o, tau^2) over pixels (the fixed pattern) integrated out: a mean fitted for every pixel would bias s. From 0.75 DN on,
s^2 = variance - 1/12, off by less than 2 parts in 10^5 for every theta. If the dark charge is large, a count's law
replaces the Gaussian, and the noise is far above a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp, ndtr
from scipy.stats import norm, t

from opusim import checks

TakeFrames = Callable[..., np.ndarray]
"""Called as take(count, photons=, exposure_us=, temperature_c=); gives DN, shape (count, pixels)."""
COUNT, MEAN, VARIANCE, MEAN_SQUARE = range(4)
PIXELS_LOOKED_AT = 4096
"""Pixels whose single frames are kept."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One setting of light and exposure.

    Attributes:
        photons: mean photons on a pixel in the exposure, at least 0.
        exposure_us: microseconds, or None for the device's exposure.
        temperature_c: degrees Celsius, or None for the device's temperature.
    """

    photons: float
    exposure_us: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatSeries:
    """Sums over pixels of each level.

    Attributes:
        levels: the settings.
        frames: frames of each level, F, at least 2.
        sums: shape (groups, levels, 4): over the pixels of a group, their number and the sums of the temporal mean
            [DN], of the unbiased temporal variance [DN^2], without what all pixels of a frame share, and of the
            squared temporal mean. Groups are interleaved.
        frame_means: mean over pixels of each frame, DN, shape (levels, frames).
        looked_at: frames of each level at the first pixels, shape (levels, frames, pixels); tests of independence use
            them.
    """

    levels: tuple[Level, ...]
    frames: int
    sums: np.ndarray
    frame_means: np.ndarray
    looked_at: np.ndarray

    def means(self) -> np.ndarray:
        """Return the mean of each level over all pixels, DN."""
        total = self.sums.sum(0)
        return np.asarray(total[:, MEAN] / total[:, COUNT])

    def variances(self) -> np.ndarray:
        """Return the temporal variance of each level over all pixels, DN^2."""
        total = self.sums.sum(0)
        return np.asarray(total[:, VARIANCE] / total[:, COUNT])

    def seconds(self) -> np.ndarray:
        """Return the exposures of the levels, seconds."""
        return np.array([float(level.exposure_us or 0) * 1e-6 for level in self.levels])

    @property
    def pixels(self) -> float:
        """Number of pixels."""
        return float(self.sums[:, 0, COUNT].sum())


def take_series(take: TakeFrames, levels: Sequence[Level], *, frames: int, groups: int = 40) -> FlatSeries:
    """Take frames at every level and keep their sums over at least 10 groups of pixels.

    Half of each level's frames are taken in the order of the levels, half in the opposite order, so that a drift that
    is linear in time moves all levels alike.
    """
    checks.integer(frames=frames, minimum=2)
    there = [_Half.of(take(frames - frames // 2, **vars(level)), groups) for level in levels]
    back = [_Half.of(take(frames // 2, **vars(level)), groups) for level in reversed(levels)]
    halves = list(zip(there, reversed(back), strict=True))
    return FlatSeries(
        levels=tuple(levels),
        frames=frames,
        sums=np.stack([_sums(first, second, groups) for first, second in halves], axis=1),
        frame_means=np.stack([np.concatenate([a.frame_means, b.frame_means]) for a, b in halves]),
        looked_at=np.stack([np.concatenate([a.looked_at, b.looked_at]) for a, b in halves]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Half:
    """Frames of one level, reduced.

    Attributes:
        frame_means: shape (frames,).
        mean: temporal mean of each pixel, shape (pixels,).
        squares: of each pixel, sum over frames of the squared deviation from its mean, without frame means.
        looked_at: shape (frames, at most `PIXELS_LOOKED_AT`).
    """

    frame_means: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    looked_at: np.ndarray

    @classmethod
    def of(cls, frames: np.ndarray, groups: int) -> _Half:
        checks.integer(pixels=frames.shape[1], minimum=2 * groups, remedy="open a device with more outputs")
        dn = frames.astype(np.float64)
        frame_means, mean = dn.mean(axis=1), dn.mean(axis=0)
        rest = dn - frame_means[:, None] - mean + frame_means.mean()
        return cls(
            frame_means=frame_means,
            mean=mean,
            squares=np.sum(np.square(rest), axis=0),
            looked_at=np.array(frames[:, :PIXELS_LOOKED_AT]),
        )


def sums_of(frames: np.ndarray, kept: np.ndarray, groups: int) -> np.ndarray:
    """Sums (groups, 4) of one setting's frames, DN, over the kept pixels in groups of pixels; see `FlatSeries.sums`."""
    half = len(frames) // 2
    first, second = (_Half.of(part[:, kept], groups) for part in (frames[:half], frames[half:]))
    return _sums(first, second, groups, kept % groups)


def _sums(first: _Half, second: _Half, groups: int, group: np.ndarray | None = None) -> np.ndarray:
    """Return the sums of both halves of a level, shape (groups, 4); group g defaults to pixels g, g + groups, ..."""
    a, b, pixels = len(first.frame_means), len(second.frame_means), first.mean.size
    mean = (a * first.mean + b * second.mean) / (a + b)
    step = first.mean - second.mean
    squares = first.squares + second.squares + np.square(step - step.mean()) * a * b / (a + b)
    variance = squares / (a + b - 1) * pixels / (pixels - 1)  # a degree of freedom for each frame's mean
    columns = [np.ones_like(mean), mean, variance, np.square(mean)]
    where = np.arange(mean.size) % groups if group is None else group
    return np.stack([np.bincount(where, weights=column, minlength=groups) for column in columns], axis=1)


GROUPS = 40
"""Groups of pixels or outputs of a jackknife."""
Statistic = Callable[[np.ndarray], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number from frames with two-sided confidence limits.

    Attributes:
        value: the estimate.
        low: lower limit.
        high: upper limit; each is passed with probability (1 - confidence) / 2.
    """

    value: float
    low: float
    high: float

    def covers(self, truth: float) -> bool:
        """Return whether the truth lies within the limits."""
        return self.low <= truth <= self.high

    def root(self) -> Estimate:
        """Return the estimate of the square root; negative numbers become 0, which keeps the limits' rate."""
        return Estimate(**{key: max(value, 0.0) ** 0.5 for key, value in vars(self).items()})


def jackknife(sums: np.ndarray, statistic: Statistic, *, confidence: float) -> dict[str, Estimate]:
    """Return the estimates of a statistic's named numbers, from sums over at least 10 groups of pixels."""
    groups = len(sums)
    checks.integer(groups=groups, minimum=10, remedy="record more pixels")
    checks.in_range(0.01, 1 - 1e-12, confidence=confidence)
    total = np.sum(sums, axis=0)
    whole = statistic(total)
    without = [statistic(total - part) for part in sums]
    quantile = float(t.isf((1 - confidence) / 2, groups - 1))
    found = {}
    for name, theta in whole.items():
        values = np.array([part[name] for part in without])
        error = float(np.sqrt((groups - 1) / groups * np.sum(np.square(values - values.mean()))))
        value = float(groups * theta - (groups - 1) * values.mean())
        found[name] = Estimate(value=value, low=value - quantile * error, high=value + quantile * error)
    return found


def sparse_patterns(n_inputs: int, rows: int, seed: int = 1) -> np.ndarray:
    """Return random binary patterns with one mirror in ten on, at least one: uint8, shape (rows, n_inputs).

    With few mirrors on, a field is almost independent of the anchor, by whose intensity the pixels were chosen; so it
    is a circular Gaussian to within the share of mirrors that is on.
    """
    random = np.random.default_rng(seed)
    patterns = np.zeros((rows, n_inputs), dtype=np.uint8)
    for row in patterns:
        row[random.choice(n_inputs, size=max(1, n_inputs // 10), replace=False)] = 1
    return patterns


def decorrelation_time(
    first: np.ndarray, again: np.ndarray, later: np.ndarray, *, elapsed_s: float, confidence: float
) -> Estimate:
    """Return the time tau after which the field's correlation has fallen to 1/e, from intensities.

    cov(I(0), I(t)) / cov(I(0), I'(0)) = |rho(t)|^2 = exp(-2 t / tau) over pixels, for circular Gaussian fields
    (Siegert); I and I' (`again`) are two frames at time 0, whose noises are independent, so that noise falls out.
    Frames (patterns, pixels) show equally many mirrors on each; the elapsed time is best about a third of tau.
    """
    checks.positive(elapsed_s=elapsed_s)
    checks.shape(first.shape, again=again, later=later)
    checks.integer(patterns=len(first), minimum=2)
    # without the fixed pattern
    a, b, c = (frames - frames.mean(axis=0, dtype=np.float64) for frames in (first, again, later))
    columns = np.stack([np.ones_like(a), a, b, c, a * b, a * c])  # (6, patterns, pixels)
    sums = np.stack([columns[:, :, g::GROUPS].sum(axis=2) for g in range(GROUPS)])

    def log_ratio(total: np.ndarray) -> dict[str, float]:
        # each (patterns,): patterns differ in their means
        mean_a, mean_b, mean_c, ab, ac = total[1:] / total[0]
        same, apart = float(np.mean(ab - mean_a * mean_b)), float(np.mean(ac - mean_a * mean_c))
        if same <= 0 or apart <= 0:
            raise ValueError(
                f"elapsed_s = {elapsed_s:g}: the frames do not correlate; take the later ones sooner"
            )
        return {"rate": float(-np.log(apart / same)) / (2 * elapsed_s)}

    rate = jackknife(sums, log_ratio, confidence=confidence)["rate"]
    return Estimate(
        value=1 / rate.value if rate.value > 0 else np.inf,
        low=1 / rate.high if rate.high > 0 else np.inf,
        high=1 / rate.low if rate.low > 0 else np.inf,
    )


FINE_DN = 0.75
"""Least noise that the variance measures."""
_LEAST_TOGGLING = 30
_REACH = 5.0  # standard deviations of the fixed pattern that the integral covers
_STEP = 1e-3  # of the parameters, for derivatives
_FLAT, _FREE = 1e-9, 0.01  # relative curvature, and share of the noise in a direction, that count as none


def dark_noise_dn(frames: np.ndarray, *, confidence: float, is_rounded: bool = True) -> Estimate:
    """Return the standard deviation of a pixel from frame to frame, DN, corrected for rounding.

    ValueError: fewer than 4 frames, or codes that do not determine the noise: almost none differ, or all lie about one
    step.
    """
    checks.shape((None, None), frames=frames)
    checks.integer(frames=len(frames), minimum=4)
    variances = np.asarray(frames, dtype=np.float64).var(axis=0, ddof=1)
    if not is_rounded or variances.mean() > FINE_DN**2 + 1 / 12:
        return root_mean(variances - is_rounded / 12, confidence)
    if np.count_nonzero(variances) < _LEAST_TOGGLING:
        raise ValueError(
            f"frames: fewer than {_LEAST_TOGGLING} pixels show more than one code; take more frames or pixels, or a "
            "little constant light that moves means to a step"
        )
    return _fitted(frames, confidence)


def root_mean(squares: np.ndarray, confidence: float) -> Estimate:
    """Return the root of the mean of squares, one for each pixel, from a jackknife over 40 groups."""
    sums = np.stack([[squares[g::GROUPS].sum(), squares[g::GROUPS].size] for g in range(GROUPS)])
    found = jackknife(sums, lambda total: {"square": float(total[0] / total[1])}, confidence=confidence)
    return found["square"].root()


def _fitted(frames: np.ndarray, confidence: float) -> Estimate:
    """Return the most likely s, with Wald limits of log s from the sandwich covariance over pixels; see the module."""
    # how often each pixel gave each code, (kinds, codes); equal pixels are kept once, as a kind
    dn, repeats = np.rint(frames).astype(np.int64), len(frames)
    codes = np.arange(dn.min(), dn.max() + 1).astype(float)
    table = np.stack([(dn == code).sum(axis=0) for code in codes], axis=1)
    counts, pixels = (each.astype(float) for each in np.unique(table, axis=0, return_counts=True))
    # the rough mean, log of the fixed pattern's and log of the temporal standard deviation
    means = counts @ codes / repeats
    temporal = counts @ np.square(codes) / repeats - np.square(means)
    mean, noise = pixels @ means / pixels.sum(), pixels @ temporal / pixels.sum()
    pattern = pixels @ np.square(means - mean) / pixels.sum() - noise / repeats
    start = np.array([mean, math.log(max(pattern, 0.05**2)) / 2, math.log(max(noise, 0.15**2)) / 2])
    width = math.exp(start[2] - start[1]) / math.sqrt(repeats)  # of a pixel's likelihood, in deviates
    points = int(min(max(2 * _REACH / (0.5 * width), 60), 2000)) | 1
    deviates = np.linspace(-_REACH, _REACH, points)
    weights = -np.square(deviates) / 2
    edges = np.append(codes - 0.5, codes[-1] + 0.5)[:, None]

    def each(parameters: np.ndarray) -> np.ndarray:
        """Return each kind's log-likelihood of a pixel: the mean over deviates z of the probability at o + tau z."""
        pattern, noise = math.exp(parameters[1]), math.exp(parameters[2])
        below = ndtr((edges - parameters[0] - pattern * deviates) / noise)  # (codes + 1, deviates)
        logs = np.log(np.maximum(np.diff(below, axis=0), 1e-300))
        return np.asarray(logsumexp(counts @ logs + weights, axis=1) - logsumexp(weights))

    found = minimize(
        lambda p: -float(pixels @ each(p)),
        start,
        method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-7, "maxiter": 2000},
    ).x
    # The sandwich covariance H^-1 J H^-1, with H the Hessian of the log-likelihood and J the scores' second moment, by
    # central differences.
    steps = _STEP * np.eye(found.size)

    def scores(point: np.ndarray) -> np.ndarray:  # (kinds, parameters)
        return np.stack([(each(point + s) - each(point - s)) / (2 * _STEP) for s in steps], axis=1)

    hessian = np.stack([pixels @ (scores(found + s) - scores(found - s)) / (2 * _STEP) for s in steps])
    curvatures, directions = np.linalg.eigh(-(hessian + hessian.T) / 2)
    flat = curvatures < _FLAT * curvatures[-1]
    if np.any(np.abs(directions[2, flat]) > _FREE):
        # where all pixels see one step, codes tell only the ratio of noise, pattern and distance to the step
        raise ValueError(
            "frames: their codes lie on both sides of one step only, which tells no noise; take frames under another "
            "constant light, or more pixels"
        )
    bent = directions[:, ~flat]  # without a pattern, log tau is free
    inverse, here = (bent / curvatures[~flat]) @ bent.T, scores(found)
    error = math.sqrt((inverse @ (here.T * pixels) @ here @ inverse)[2, 2])
    margin = float(norm.isf((1 - confidence) / 2)) * error
    return Estimate(
        value=math.exp(found[2]), low=math.exp(found[2] - margin), high=math.exp(found[2] + margin)
    )
