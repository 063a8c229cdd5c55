"""Test what independence tests do not see: a law that is not Gaussian, a grid, noise that depends on the input.

Of n readings of an output, standardised (mean 0, mean square 1), Gaussian readings have a law without parameters:

- deviates of skewness (D'Agostino 1970) and fourth moment (Anscombe, Glynn 1983) are close to N(0, 1); their means and
  mean squares over outputs are compared with those of simulated Gaussian readings, drawn once from a fixed seed. The
  squares see outputs that differ from the Gaussian in opposite ways;
- the logarithm of the Anderson-Darling statistic A^2, mean and variance fitted, is compared in the same way; the
  largest over outputs has the tail of Stephens (1986);
- two readings lie within w of each other with probability at most w / (sqrt(pi) sigma); a grid makes more such pairs;
- (n - 1) s^2 / sigma^2 is chi-squared, so log s^2 at different inputs differ with variance psi'((n - 1)/2) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import chdtr, chdtrc, digamma, log_ndtr, pdtrc, polygamma
from scipy.stats import kurtosistest, skewtest

from opusim.calibration.independence import standardised
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
