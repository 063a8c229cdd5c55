"""Test the law of noise, which independence tests do not see: Gaussian readings, and Poisson counts of frames.

Of n readings of an output, standardised (mean 0, mean square 1), Gaussian readings have a law without parameters:

- deviates of skewness (D'Agostino 1970) and fourth moment (Anscombe, Glynn 1983) are close to N(0, 1); their means and
  mean squares over outputs are compared with those of simulated Gaussian readings, drawn once from a fixed seed. The
  squares see outputs that differ from the Gaussian in opposite ways;
- the logarithm of the Anderson-Darling statistic A^2, mean and variance fitted, is compared in the same way; the
  largest over outputs has the tail of Stephens (1986);
- how many readings lie far out, and how many near the mean (`opusim.calibration.rare_faults`);
- two readings lie within w of each other with probability at most w / (sqrt(pi) sigma); a grid makes more such pairs;
- (n - 1) s^2 / sigma^2 is chi-squared, so log s^2 at different inputs differ with variance psi'((n - 1)/2) each.

Frames of counts have laws of their own.

**Third cumulants.** Digital numbers of Poisson counts of gain K, with Gaussian noise of variance c behind them, have
the third cumulant K (v - c) at the variance v, whatever the light. A straight line through the third cumulants of all
levels against their variances has the slope K, the gain that photon transfer finds. Counts whose variance is not
Poisson's but proportional to the light, as noise reduction in the camera and image intensifiers leave them, have
another slope: their variance yields a wrong gain with every line straight. A third cumulant of F frames at P pixels has
the variance (6 v^3 + 18 K^2 v^2 + K^4 v) / (F P) to leading order, which weighs the levels and gives the error.

**Tails.** Frames of the same pixels, means and gain are simulated by the certified law. If c of the simulated numbers
lie beyond a limit that the c-th of them sets, the number of measured ones beyond it is negative binomial (c, 1/2),
without any further assumption. Numbers near a pixel's mean are compared in the same way.

**Codes.** A converter's numbers take every code within the noise of its pixels. A code that is expected m times, by the
pixels' means and variance, is missing by chance with probability exp(-m).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import chdtr, chdtrc, digamma, log_ndtr, nbdtr, pdtrc, polygamma
from scipy.stats import kurtosistest, skewtest

from opusim.calibration.independence import standardised
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.calibration.rare_faults import far_out, near_limit, near_mean, one_value
from opusim.p_values import bonferroni, gamma_p_value, normal_p_value

_REFERENCE_NUMBERS, _MOST_REFERENCE, _LEAST_REFERENCE = 2_000_000, 4000, 500
_REFERENCE_SEED = 20261122
_WIDTHS = (1e-6, 1e-5, 1e-4, 3e-4)  # of close pairs, in standard deviations
_ROUNDINGS = 4.0  # roundings of the number type within which two readings count as equal
_COARSE = 1e-3  # roundings of the number type above this share of a standard deviation are a grid
_MARGIN = 1.1  # pairs of one output are not independent
_BLOCK = 512


def shape_p_values(segments: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the P-values of three properties of Gaussian readings that do not depend on the input.

    Args:
        segments: readings of one input each, shape (readings, n_outputs), at least 20 readings, of the number type in
            which the device gave them; the rounding of that type is allowed for.
    """
    varying = np.all([np.ptp(part, axis=0) > 0 for part in segments], axis=0)
    law: dict[str, float] = {} if np.all(varying) else {"constant outputs": 0.0}
    if not np.any(varying):
        return {"each output is Gaussian": law}
    segments = [np.asarray(part)[:, varying] for part in segments]
    for number, part in enumerate(segments, start=1):
        where = f" at input {number}" if len(segments) > 1 else ""
        law |= {f"{name}{where}": value for name, value in _law(part).items()}
    standard = [standardised(part) for part in segments]
    law |= {"readings far out": far_out(standard), "readings near the mean": near_mean(standard)}
    found = {"each output is Gaussian": law, "readings lie on no grid": _grid(segments)}
    if len(segments) > 1:
        found["noise is the same at every input"] = _equal_variances(segments)
    return found


# Law


def _law(part: np.ndarray) -> dict[str, float]:
    statistics, reference = _statistics(part), _reference(len(part))
    inverse = 1 / part.shape[1] + 1 / _reference_outputs(len(part))
    found = {}
    for name, values in statistics.items():
        mean, std = reference[name]
        found[name] = normal_p_value(float(values.mean() - mean) / (std * inverse**0.5))
        if name in _DEVIATES:
            mean, variance = reference[f"{name} squared"]
            square = float(np.mean(np.square(values)))
            found[f"{name}, its square"] = gamma_p_value(square, mean, variance * inverse)
    largest = float(np.exp(statistics[_AD].max()))
    found[f"largest {_AD}"] = bonferroni(_anderson_darling_p_value(largest, len(part)), part.shape[1])
    return found


_AD = "Anderson-Darling statistic"
_DEVIATES = ("skewness", "fourth moment")


def _statistics(part: np.ndarray) -> dict[str, np.ndarray]:
    """Of each output, shape (n_outputs,): the logarithm of A^2, and deviates that are close to N(0, 1)."""
    z = standardised(part)
    return {
        _AD: np.log(_anderson_darling(z)),
        "skewness": skewtest(z).statistic,
        "fourth moment": kurtosistest(z).statistic,
    }


def _anderson_darling(z: np.ndarray) -> np.ndarray:
    """A^2 of standardised columns, at least 1e-12; the variance is that with n - 1."""
    n = len(z)
    weights = (2 * np.arange(1, n + 1) - 1)[:, None]
    found = np.empty(z.shape[1])
    for start in range(0, z.shape[1], _BLOCK):
        ordered = np.sort(z[:, start : start + _BLOCK], axis=0) * ((n - 1) / n) ** 0.5
        logs = log_ndtr(ordered) + log_ndtr(-ordered[::-1])
        found[start : start + _BLOCK] = -n - np.sum(weights * logs, axis=0) / n
    return np.maximum(found, 1e-12)


def _anderson_darling_p_value(statistic: float, n: int) -> float:
    """Stephens in D'Agostino, Stephens, Goodness-of-Fit Techniques (1986), table 4.9; 1 below 0.6."""
    scaled = min(statistic * (1 + 0.75 / n + 2.25 / n**2), 100.0)
    return 1.0 if scaled < 0.6 else float(np.exp(1.2937 - 5.709 * scaled + 0.0186 * scaled**2))


@lru_cache(maxsize=8)
def _reference(n: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each statistic over simulated outputs; of squares the mean and the variance."""
    random = np.random.default_rng(_REFERENCE_SEED)
    statistics = _statistics(random.standard_normal((n, _reference_outputs(n))))
    found = {name: (float(values.mean()), float(values.std())) for name, values in statistics.items()}
    squares = {f"{name} squared": np.square(statistics[name]) for name in _DEVIATES}
    return found | {name: (float(values.mean()), float(values.var())) for name, values in squares.items()}


def _reference_outputs(n: int) -> int:
    """Return simulated outputs of n readings."""
    return min(max(_REFERENCE_NUMBERS // n, _LEAST_REFERENCE), _MOST_REFERENCE)


# Grid


def _grid(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """More pairs of nearly equal readings than a density allows, or a number type too coarse for the noise."""
    counts, expected, coarse = np.zeros(len(_WIDTHS) + 1), np.zeros(len(_WIDTHS) + 1), 0.0
    for part in segments:
        step = np.finfo(part.dtype).eps if np.issubdtype(part.dtype, np.floating) else 0.0
        n = len(part)
        for start in range(0, part.shape[1], _BLOCK):
            values = np.sort(np.asarray(part[:, start : start + _BLOCK], dtype=np.float64), axis=0)
            std, largest = values.std(axis=0), np.abs(values).max(axis=0)
            gaps, rounding = np.diff(values, axis=0), step * largest
            coarse = max(coarse, float(np.max(rounding / std)))
            widths = [_ROUNDINGS * rounding, *(np.maximum(w * std, _ROUNDINGS * rounding) for w in _WIDTHS)]
            for i, width in enumerate(widths):
                counts[i] += np.count_nonzero(gaps <= width)
                expected[i] += n * (n - 1) / 2 * np.sum((width + rounding) / (np.pi**0.5 * std))
    close = min(
        float(pdtrc(c - 1, _MARGIN * mean)) if c else 1.0 for c, mean in zip(counts, expected, strict=True)
    )
    return {
        "nearly equal readings": bonferroni(close, len(counts)),
        "roundings of the number type": 0.0 if coarse > _COARSE else 1.0,
        "one value at many outputs": bonferroni(min(map(one_value, segments)), len(segments)),
    }


# Inputs


def _equal_variances(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """Log variances at different inputs: their means over outputs, their spread, and the largest difference."""
    inputs, outputs = len(segments), segments[0].shape[1]
    half = np.array([(len(part) - 1) / 2 for part in segments])
    variances = np.stack([part.var(axis=0, ddof=1, dtype=np.float64) for part in segments])
    logs = np.log(variances) - (digamma(half) - np.log(half))[:, None]
    error2 = polygamma(1, half)
    weights = (1 / error2) / np.sum(1 / error2)
    rest = logs - weights @ logs
    deviates = rest.mean(axis=1) / np.sqrt(error2 * (1 - weights) / outputs)
    freedom = outputs * (inputs - 1)
    energy = float(np.sum(np.square(rest) / error2[:, None]))
    spread = 2 + float(np.max(polygamma(3, half) / error2**2))
    largest = float(np.max(np.abs(rest) / np.sqrt(error2 * (1 - weights))[:, None]))
    return {
        "mean over outputs": bonferroni(normal_p_value(float(np.max(np.abs(deviates)))), inputs),
        "spread over outputs": gamma_p_value(energy, freedom, freedom * spread),
        "largest of an output": bonferroni(_log_chi2_p_value(largest, float(half.min())), inputs * outputs),
    }


def _log_chi2_p_value(deviate: float, half: float) -> float:
    """Two-sided tail of the standardised log of chi-squared with 2 half degrees of freedom, the heavier tail twice."""
    centre, error = digamma(half) - np.log(half), float(polygamma(1, half)) ** 0.5
    low = chdtr(2 * half, 2 * half * np.exp(centre - deviate * error))
    high = chdtrc(2 * half, 2 * half * np.exp(centre + deviate * error))
    return 2 * float(max(low, high))


# Frames of counts

_LEAST_DN2 = 1.0  # variance of a level from which rounding changes no third cumulant
_LEAST_FRAMES = 8
_SEED = 20261128
_BEYOND = (1000, 300, 100, 30)  # simulated numbers beyond the limits
_MOST_BEYOND = 0.02  # share of all simulated numbers
_LEAST_SHARE = 0.5  # of the expected numbers of a code, which rest on a Gaussian law at each pixel
_LEAST_EXPECTED = 2.0


@dataclass(frozen=True, kw_only=True)
class ThirdCumulants:
    """What third cumulants of frames say of the counts' law.

    Attributes:
        ratio: slope of the third cumulants over the gain, 1 for Poisson counts.
        error: its standard error; infinite if fewer than three levels show it.
    """

    ratio: float
    error: float

    @property
    def p_value(self) -> float:
        """Two-sided, of Poisson counts; 1 if no level shows any."""
        return normal_p_value((self.ratio - 1) / self.error)


def third_cumulants(transfer: PhotonTransfer) -> ThirdCumulants:
    """Return the slope of the third cumulants, from levels whose noise is above a DN."""
    gain = transfer.estimates(0.5)["gain_dn_per_e"]
    gain_error = transfer.error_of(gain)[0]
    variances, cumulants, weights = [], [], []
    for rest in _double_centred(transfer):
        frames, pixels = rest.shape
        v = float(np.sum(np.square(rest))) / ((frames - 1) * (pixels - 1))
        third = float(np.sum(rest**3)) * frames / ((frames - 1) * (frames - 2))
        v_e = v / gain.value**2
        squares = 6 * v_e**3 * frames**2 / ((frames - 1) * (frames - 2)) + 18 * v_e**2 + v_e
        variances.append(v)
        cumulants.append(third * pixels / ((pixels - 1) * (pixels - 2)))
        weights.append(frames * pixels / (squares * gain.value**6))
    if len(variances) < 3 or gain.value <= 0:
        return ThirdCumulants(ratio=1.0, error=np.inf)
    x, y, w = (np.array(values) for values in (variances, cumulants, weights))
    x = x - w @ x / w.sum()
    leverage = float(w @ np.square(x))
    slope = float((w * x) @ y) / leverage / gain.value
    error = np.hypot(leverage**-0.5, slope * gain_error) / gain.value
    return ThirdCumulants(ratio=slope, error=float(error))


def _double_centred(transfer: PhotonTransfer) -> list[np.ndarray]:
    """Frames of each level whose noise is above a DN, without what a frame's pixels and a pixel's frames share."""
    if transfer.light.frames < _LEAST_FRAMES:
        return []
    found = []
    for level in [*transfer.light.looked_at[transfer.used()], *transfer.dark.looked_at]:
        dn = level.astype(np.float64)
        rest = dn - dn.mean(axis=1, keepdims=True) - dn.mean(axis=0) + dn.mean()
        if np.mean(np.square(rest)) > _LEAST_DN2:
            found.append(rest)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Tails:
    """Measured frames beside simulated ones of the certified law.

    Attributes:
        numbers: how many numbers there are of each.
        frames: of each pixel and level.
        far_p_value: of the numbers beyond limits; 1 if too few frames show them.
        near_p_value: of the numbers near their pixel's mean.
        limit: nearest of the farthest limits, standard deviations; 0 without any.
    """

    numbers: int
    frames: int
    far_p_value: float
    near_p_value: float
    limit: float


def tails(transfer: PhotonTransfer, power_varies: bool) -> Tails:
    """Compare the flat frames with simulated ones.

    Args:
        transfer: the flat series.
        power_varies: whether the simulation takes each frame's power from its mean.
    """
    frames = transfer.light.frames
    random, measured, simulated = np.random.default_rng(_SEED), [], []
    found = transfer.estimates(0.5)
    gain, black = found["gain_dn_per_e"].value, found["black_level_dn"].value
    if frames >= _LEAST_FRAMES and gain > 0:
        variances = transfer.light.variances()
        for level in transfer.used():
            if variances[level] > _LEAST_DN2:
                dn = transfer.light.looked_at[level]
                read = gain * found["read_noise_e"].value
                like = _like(dn, gain, black, read, random, power_varies, transfer.is_rounded)
                measured.append(_standard(dn, random, transfer.is_rounded))
                simulated.append(_standard(like, random, transfer.is_rounded))
    if not measured:
        return Tails(numbers=0, frames=frames, far_p_value=1.0, near_p_value=1.0, limit=0.0)
    seen, drawn = np.concatenate(measured), np.sort(np.concatenate(simulated))
    far, limits = [], [np.inf]
    for sign in (1.0, -1.0):
        ordered = drawn[::-1] if sign > 0 else drawn
        for count in (count for count in _BEYOND if count <= _MOST_BEYOND * drawn.size):
            limit = float(ordered[count - 1])
            beyond = int(np.count_nonzero(sign * seen > sign * limit))
            above = 1.0 - float(nbdtr(beyond - 1, count, 0.5)) if beyond else 1.0
            far.append(2 * min(float(nbdtr(beyond, count, 0.5)), above))
            limits.append(abs(limit))
    within = near_limit(frames)
    near, expected = (float(np.count_nonzero(np.abs(values) < within)) for values in (seen, drawn))
    return Tails(
        numbers=seen.size,
        frames=frames,
        far_p_value=bonferroni(min(far, default=1.0), max(len(far), 1)),
        near_p_value=normal_p_value((near - expected) / max(near + expected, 1.0) ** 0.5),
        limit=0.0 if len(limits) == 1 else _nearest_of_farthest(limits[1:]),
    )


def _nearest_of_farthest(limits: Sequence[float]) -> float:
    """Return the smaller of the farthest limits of both sides, whose limits follow each other."""
    half = len(limits) // 2
    return min(max(limits[:half]), max(limits[half:]))


def _like(
    dn: np.ndarray,
    gain: float,
    black: float,
    read_dn: float,
    random: np.random.Generator,
    power_varies: bool,
    is_rounded: bool,
) -> np.ndarray:
    """Return simulated frames of the pixels, means and gain of measured ones, shape (frames, pixels)."""
    means = dn.mean(axis=0, dtype=np.float64)
    rate = max((float(means.mean()) - black) / gain, 0.0)
    rates = np.full((len(dn), 1), rate)
    if power_varies:
        rates *= np.maximum(
            1 + (dn.mean(axis=1, dtype=np.float64) - means.mean())[:, None] / (gain * rate or 1), 0
        )
    counts = random.poisson(np.broadcast_to(rates, dn.shape))
    values = means + gain * (counts - rate) + read_dn * random.standard_normal(dn.shape)
    return np.asarray(np.rint(values) if is_rounded else values)


def _standard(dn: np.ndarray, random: np.random.Generator, is_rounded: bool) -> np.ndarray:
    """Return numbers less what their frame and pixel share, over their pixel's deviation; rounding is filled in."""
    values = dn + (random.random(dn.shape) - 0.5 if is_rounded else 0.0)
    rest = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    return np.asarray(rest / np.sqrt(np.mean(np.square(rest), axis=0))).ravel()


def codes_p_values(transfer: PhotonTransfer) -> dict[str, float]:
    """Return the p-values of codes that never occur; a statistic's name says how far codes lie apart."""
    levels = [*transfer.light.looked_at[:-1], *transfer.dark.looked_at]
    step = 0
    for level in levels:
        codes = np.unique(np.rint(level).astype(np.int64))
        step = int(np.gcd.reduce(np.append(np.diff(codes), step)))
    found = {f"all codes lie {step} apart": 0.0} if step > 1 else {}
    missing = [_missing_p_value(np.rint(level).astype(np.int64)) for level in levels]
    return found | {"codes that never occur": bonferroni(min(missing), len(missing))}


def _missing_p_value(codes: np.ndarray) -> float:
    """Return the p-value of the codes that no number of a level has, where pixels' means and noise let them occur."""
    variance = float(codes.var(axis=0, ddof=1).mean())
    if variance < _LEAST_DN2:
        return 1.0
    counts = np.bincount((codes - codes.min()).ravel())
    places = np.rint(codes.mean(axis=0)).astype(np.int64) - codes.min()
    reach = int(4 * variance**0.5) + 1
    kernel = np.exp(-np.square(np.arange(-reach, reach + 1)) / (2 * variance))
    at_means = len(codes) * np.bincount(places, minlength=counts.size)
    expected = _LEAST_SHARE * np.convolve(at_means, kernel / kernel.sum())[reach : reach + counts.size]
    judged = expected > _LEAST_EXPECTED
    empty = int(np.count_nonzero(counts[judged] == 0))
    return float(pdtrc(empty - 1, np.sum(np.exp(-expected[judged])))) if empty else 1.0
