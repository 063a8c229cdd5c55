"""Evaluate readings of constant inputs: a lower limit of their noise, its correlations, and tests of its law.

**Lower limit.** With n = readings - 1, S the sample covariance and v the unit vector that minimises v^T Sigma v for the
true Sigma, lambda_min(S) <= v^T S v = lambda_min(Sigma) chi2_n / n, so n lambda_min(S) / chi2_(n, 1 - beta) is a lower
limit of lambda_min(Sigma) at confidence 1 - beta, without a union over outputs. The smallest sample variance takes the
place of lambda_min(S) if outputs are known to be independent. Both hold only for Gaussian readings that are not
quantised and do not depend on each other. Source: docs/privacy-labels.md, section 10.

**Several inputs.** With enough readings the limit is the smallest eigenvalue's and holds for correlated outputs too;
else it is that of the smallest output's variance, which assumes independent outputs. It is the lowest over the inputs,
at beta / inputs each. If successive readings correlate by phi, the one-step prediction variance, (1 - phi^2) times the
variance, takes its place. A variance proves nothing: the law stays an assumption, which the tests must not contradict.

**Frames.** A reading is scale sum_f w_f I_f over its frames f. Light of L_f described electrons gives a mean of k L_f
DN, with k from the anchor, and a variance v(k L_f) on the straight line of flat frames; so a reading has the variance
scale^2 sum_f w_f^2 v(k L_f), less what coarse rounding may hide of it. Sample variances of n readings over it follow
chi-squared laws over n - 1. Up to a tenth less is tolerated: the line and the described light are known to a few per
cent.

**Law.** Of n readings of an output, standardised (mean 0, mean square 1), Gaussian readings have a law without
parameters:

- deviates of skewness (D'Agostino 1970) and fourth moment (Anscombe, Glynn 1983) are close to N(0, 1); their means and
  mean squares over outputs are compared with those of simulated Gaussian readings, drawn once from a fixed seed. The
  squares see outputs that differ from the Gaussian in opposite ways;
- the logarithm of the Anderson-Darling statistic A^2, mean and variance fitted, is compared in the same way; the
  largest over outputs has the tail of Stephens (1986);
- how many readings lie far out, and how many near the mean (`opusim.calibration.independence`);
- two readings lie within w of each other with probability at most w / (sqrt(pi) sigma); a grid makes more such pairs;
- (n - 1) s^2 / sigma^2 is chi-squared, so log s^2 at different inputs differ with variance psi'((n - 1)/2) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.special import chdtr, chdtrc, chdtri, digamma, log_ndtr, pdtrc, polygamma, stdtr
from scipy.stats import kurtosistest, skewtest

from opusim import checks
from opusim.calibration.independence import (
    ROUNDINGS,
    cut_tails,
    far_limits,
    far_out,
    independence_p_values,
    missing_numbers,
    missing_readings,
    near_mean,
    one_value,
    slow_noise,
    standardised,
)
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.devices.camera import CameraDevice
from opusim.devices.certificate import TrustedProperty
from opusim.p_values import FAMILY_ALARM, PropertyTest, bonferroni, decide, gamma_p_value, normal_p_value

_CORRELATED = 5.0  # standard errors of the correlation of successive readings
# five statistics in time, one of them over five frequencies; six of the law at one input
_STATISTICS_IN_TIME, _STATISTICS_OF_LAW = 25, 6


_REFERENCE_NUMBERS, _MOST_REFERENCE, _LEAST_REFERENCE = 2_000_000, 4000, 500
_REFERENCE_SEED = 20261122
_WIDTHS = (1e-6, 1e-5, 1e-4, 3e-4)  # of close pairs, in standard deviations
_COARSE = 1e-3  # roundings of the number type above this share of a standard deviation are a grid
_MARGIN = 1.1  # pairs of one output are not independent
_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class ReadingNoise:
    """What readings of constant inputs say of the noise.

    Attributes:
        readings: how many of each input.
        inputs: how many inputs.
        n_outputs: outputs of each reading.
        mean_std: root mean variance over outputs and inputs, units of the reading.
        smallest_std: smallest standard deviation of an output at an input, estimate.
        smallest_std_low: its lower limit at confidence 1 - beta, for Gaussian readings only.
        beta: probability that this limit is too high.
        uses_eigenvalue: whether the limit is of the smallest eigenvalue, which correlated outputs may share.
        successive: correlation of successive readings.
        tests: of the properties that a law needs; the needed ones decide.
    """

    readings: int
    inputs: int
    n_outputs: int
    mean_std: float
    smallest_std: float
    smallest_std_low: float
    beta: float
    uses_eigenvalue: bool
    successive: float
    tests: tuple[PropertyTest, ...]

    @property
    def is_gaussian(self) -> bool:
        """Whether no test speaks against independent Gaussian readings, the same at every input."""
        return all(test.holds for test in self.tests)

    def trust(self, *, gaussian: bool) -> tuple[TrustedProperty, ...]:
        """Return the smallest faults that this number of readings shows.

        Args:
            gaussian: whether the law in question is Gaussian; numbers of counts are not tested one by one.
        """
        shape, level = (self.readings, self.n_outputs), self.tests[0].level
        found = (
            missing_readings(self.inputs * self.readings),
            TrustedProperty(
                text="noise does not repeat",
                fault="a repeat after up to",
                size=float(self.inputs * self.readings),
                unit="readings",
            ),
            slow_noise(self.readings, self.inputs * self.n_outputs, level / _STATISTICS_IN_TIME),
        )
        if not gaussian:
            return found
        limits, numbers = far_limits([shape] * self.inputs), self.inputs * self.readings * self.n_outputs
        share = level / (_STATISTICS_OF_LAW * self.inputs + 2)
        return *found, cut_tails(limits[-1], self.readings), missing_numbers(numbers, self.readings, share)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of a limit of Gaussian noise, which the tests cannot check."""
        outputs = (
            "the limit holds for correlated outputs too"
            if self.uses_eigenvalue
            else f"{self.readings} readings cannot bound the smallest eigenvalue of {self.n_outputs} outputs, so "
            "independent outputs are assumed"
        )
        return (
            "assumed law: Gaussian readings, independent between outputs and in time, of one variance at every input, "
            f"unchanged after calibration; {outputs}. The tests do not see noise that changes after calibration, "
            "repeats after more readings than were taken, depends on inputs that were not tried or comes from a "
            "generator, nor one output that is a sum of many others",
        )


def evaluate_readings(
    samples: np.ndarray | Sequence[np.ndarray],
    *,
    beta: float,
    alarm: float = FAMILY_ALARM,
    gaussian: bool = True,
) -> ReadingNoise:
    """Evaluate readings of one input, or of several.

    Args:
        samples: shape (readings, n_outputs) or (inputs, readings, n_outputs), finite, at least 30 readings of an input,
            in order of time and of the number type in which the device gave them.
        beta: probability that the lower limit is too high, in (0, 1).
        alarm: probability that sound readings fail a test, in (0, 1).
        gaussian: whether the law in question is Gaussian; else only independence is needed.

    Raises:
        ValueError: too few readings, or a beta out of range.
    """
    values = np.asarray(samples)
    values = values[None] if values.ndim == 2 else values
    checks.shape((None, None, None), samples=values)
    checks.finite(samples=values)
    inputs, readings, outputs = values.shape
    checks.integer(readings=readings, minimum=30, remedy="take more readings")
    parts = list(values)
    shape = shape_p_values(parts)
    variances = np.stack([np.asarray(part, dtype=np.float64).var(axis=0, ddof=1) for part in parts])
    # the correlation of successive readings, averaged over outputs and inputs; taking off the mean makes it -1/n
    standard = [standardised(part) for part in parts]
    successive = float(np.mean([np.mean(z[1:] * z[:-1]) + 1 / len(z) for z in standard]))
    return ReadingNoise(
        readings=readings,
        inputs=inputs,
        n_outputs=outputs,
        mean_std=float(np.sqrt(variances.mean())),
        smallest_std=float(np.sqrt(variances.min())),
        smallest_std_low=std_lower_limit(parts, successive=successive, beta=beta),
        beta=beta,
        uses_eigenvalue=_bounds_eigenvalue(values[0]),
        successive=successive,
        tests=decide(
            independence_p_values(parts, ranked=not gaussian) | shape,
            alarm=alarm,
            not_needed=() if gaussian else tuple(shape),
        ),
    )


def std_lower_limit(parts: Sequence[np.ndarray], *, successive: float = 0.0, beta: float) -> float:
    """Return the limit that the smallest standard deviation of every input exceeds with probability 1 - beta.

    Args:
        parts: readings of each input, shape (readings, n_outputs), as many of each.
        successive: correlation of successive readings; it counts if it lies five standard errors from 0.
        beta: in (0, 1).
    """
    fresh = max(0.0, 1 - successive**2) if abs(successive) > _CORRELATED / np.size(parts) ** 0.5 else 1.0
    smallest = min(
        smallest_variance(part, independent_outputs=not _bounds_eigenvalue(part)) for part in parts
    )
    return float(
        variance_lower_limit(fresh * smallest, readings=len(parts[0]), beta=beta / len(parts)) ** 0.5
    )


def _bounds_eigenvalue(part: np.ndarray) -> bool:
    """Return whether there are readings enough to bound the smallest eigenvalue of the outputs' covariance."""
    return part.shape[1] + 2 <= len(part)


def smallest_variance(samples: np.ndarray, *, independent_outputs: bool) -> float:
    """Return the smallest sample variance of an output, or lambda_min(S), the smallest in any direction.

    Args:
        samples: readings of one input, shape (readings, n_outputs), finite.
        independent_outputs: whether outputs are known to be independent; else n_outputs + 2 readings are needed.

    Returns:
        Squared units of the reading, at least 0.

    Raises:
        ValueError: too few readings.
    """
    checks.shape((None, None), samples=samples)
    readings, outputs = samples.shape
    least = 3 if independent_outputs else outputs + 2
    checks.integer(
        readings=readings, minimum=least, remedy=f"{outputs} outputs need as many to bound their noise"
    )
    centred = np.asarray(samples, dtype=np.float64) - np.mean(samples, axis=0)
    n = readings - 1
    if independent_outputs:
        return float(np.min(np.sum(np.square(centred), axis=0)) / n)
    return max(float(np.linalg.eigvalsh(centred.T @ centred / n)[0]), 0.0)


def variance_lower_limit(variance: float, *, readings: int, beta: float) -> float:
    """Limit n variance / chi2_(n, 1 - beta), n = readings - 1, which the true one exceeds except with probability beta.

    Args:
        variance: from `smallest_variance`, at least 0.
        readings: how many it rests on, at least 2.
        beta: in (0, 1).
    """
    checks.non_negative(variance=variance)
    checks.integer(readings=readings, minimum=2)
    checks.in_range(1e-300, 1 - 1e-12, beta=beta)
    n = readings - 1
    return float(variance * n / chdtri(n, beta))


# Law of readings


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
    largest, n = float(np.exp(statistics[_AD].max())), len(part)
    # Stephens in D'Agostino, Stephens, Goodness-of-Fit Techniques (1986), table 4.9; 1 below 0.6
    scaled = min(largest * (1 + 0.75 / n + 2.25 / n**2), 100.0)
    tail = 1.0 if scaled < 0.6 else float(np.exp(1.2937 - 5.709 * scaled + 0.0186 * scaled**2))
    found[f"largest {_AD}"] = bonferroni(tail, part.shape[1])
    return found


_AD = "Anderson-Darling statistic"
_DEVIATES = ("skewness", "fourth moment")


def _statistics(part: np.ndarray) -> dict[str, np.ndarray]:
    """Return for each output, shape (n_outputs,): the logarithm of A^2, and deviates that are close to N(0, 1)."""
    z, n = standardised(part), len(part)
    # A^2, at least 1e-12; the variance is that with n - 1
    weights, squares = (2 * np.arange(1, n + 1) - 1)[:, None], np.empty(z.shape[1])
    for start in range(0, z.shape[1], _BLOCK):
        ordered = np.sort(z[:, start : start + _BLOCK], axis=0) * ((n - 1) / n) ** 0.5
        logs = log_ndtr(ordered) + log_ndtr(-ordered[::-1])
        squares[start : start + _BLOCK] = -n - np.sum(weights * logs, axis=0) / n
    return {
        _AD: np.log(np.maximum(squares, 1e-12)),
        "skewness": skewtest(z).statistic,
        "fourth moment": kurtosistest(z).statistic,
    }


@lru_cache(maxsize=8)
def _reference(n: int) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of each statistic over simulated outputs; for squares mean and variance."""
    random = np.random.default_rng(_REFERENCE_SEED)
    statistics = _statistics(random.standard_normal((n, _reference_outputs(n))))
    found = {name: (float(values.mean()), float(values.std())) for name, values in statistics.items()}
    squares = {f"{name} squared": np.square(statistics[name]) for name in _DEVIATES}
    return found | {name: (float(values.mean()), float(values.var())) for name, values in squares.items()}


def _reference_outputs(n: int) -> int:
    """Return how many outputs of n readings are simulated."""
    return min(max(_REFERENCE_NUMBERS // n, _LEAST_REFERENCE), _MOST_REFERENCE)


def _grid(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the p-values of pairs of nearly equal readings, and of a number type too coarse for the noise."""
    counts, expected, coarse = np.zeros(len(_WIDTHS) + 1), np.zeros(len(_WIDTHS) + 1), 0.0
    for part in segments:
        step = np.finfo(part.dtype).eps if np.issubdtype(part.dtype, np.floating) else 0.0
        n = len(part)
        for start in range(0, part.shape[1], _BLOCK):
            values = np.sort(np.asarray(part[:, start : start + _BLOCK], dtype=np.float64), axis=0)
            std, largest = values.std(axis=0), np.abs(values).max(axis=0)
            gaps, rounding = np.diff(values, axis=0), step * largest
            coarse = max(coarse, float(np.max(rounding / std)))
            widths = [ROUNDINGS * rounding, *(np.maximum(w * std, ROUNDINGS * rounding) for w in _WIDTHS)]
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


def _equal_variances(segments: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the p-values of log variances at different inputs: means over outputs, spread, largest difference."""
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
    # the two-sided tail of the standardised log of chi-squared with 2 h degrees of freedom, the heavier tail twice
    h = float(half.min())
    centre, error = digamma(h) - np.log(h), float(polygamma(1, h)) ** 0.5
    tails = (
        chdtr(2 * h, 2 * h * np.exp(centre - largest * error)),
        chdtrc(2 * h, 2 * h * np.exp(centre + largest * error)),
    )
    return {
        "mean over outputs": bonferroni(normal_p_value(float(np.max(np.abs(deviates)))), inputs),
        "spread over outputs": gamma_p_value(energy, freedom, freedom * spread),
        "largest of an output": bonferroni(2 * float(max(tails)), inputs * outputs),
    }


# Readings of a camera beside its flat frames

TOLERANCE = 0.1
FULL = 0.7
"""Share of the saturation above which an output's described light may be clipped."""
_SURELY = 8.0
"""Standard errors of the line by which the law of a single output is lowered."""


def input_p_values(
    device: CameraDevice, transfer: PhotonTransfer, inputs: torch.Tensor, samples: np.ndarray, dn_per_e: float
) -> dict[str, float]:
    """Return the one-sided p-value of each input's variance in the mean over outputs, and of the quietest output.

    Args:
        device: open, without a reference beam.
        transfer: the flat series.
        inputs: float32, shape (inputs, n_inputs).
        samples: their readings, shape (inputs, readings, n_outputs), at mean power.
        dn_per_e: mean digital numbers for each described electron of light.
    """
    exposure, recovery = device.exposure, device.recovery
    light_e = np.maximum((device.frame_rates(inputs) - exposure.dark_e) / exposure.mean_power, 0.0)
    light_dn = max(dn_per_e, 0.0) * light_e  # (frames, inputs, n_outputs)
    rounding = exposure.sensor.rounding_limit_dn2(light_e + np.min(exposure.dark_e))
    stated = recovery.variance(np.maximum(transfer.variance_at(light_dn) - rounding, 0.0))
    start, slope = recovery.variance(np.ones_like(light_dn)), recovery.variance(light_dn)
    kept = np.all(light_e < FULL * exposure.sensor.saturation_e, axis=0)
    freedom, variances = samples.shape[1] - 1, samples.var(axis=1, ddof=1, dtype=np.float64)
    found: dict[str, float] = {}
    for number, here in enumerate(kept):
        if not np.any(here):
            continue
        variance, law = variances[number, here], np.maximum(stated[number, here], 1e-300)
        means = np.array([[start[number, here].mean(), slope[number, here].mean()]])
        line, degrees = transfer.error_of(transfer.sums_of_line(means)[0])
        least, own = (1 - TOLERANCE) * law, float(variance.mean()) * (2 / (freedom * variance.size)) ** 0.5
        error = max(float(np.hypot(own, (1 - TOLERANCE) * line)), 1e-300)
        found[f"input {number + 1}"] = float(stdtr(degrees, (variance.mean() - least.mean()) / error))
        surely = least * max(0.0, 1 - _SURELY * line / float(law.mean()))
        ratios = freedom * variance / np.maximum(surely, 1e-300)
        quietest = float(chdtr(freedom, ratios.min()))
        found[f"quietest output of input {number + 1}"] = bonferroni(quietest, variance.size)
    return found or {"no output below saturation": 1.0}
