"""Evaluate readings of constant inputs: a lower limit of their noise, its correlations, and tests of its law.

**Lower limit.** With n = readings - 1, S the sample covariance and v the unit vector that minimises v^T Sigma v for the
true Sigma, lambda_min(S) <= v^T S v = lambda_min(Sigma) chi2_n / n, so n lambda_min(S) / chi2_(n, 1 - beta) is a lower
limit of lambda_min(Sigma) at confidence 1 - beta, without a union over outputs. The smallest sample variance takes the
place of lambda_min(S) if outputs are known to be independent. Both hold only for Gaussian readings that are not
quantised and do not depend on each other. Source: docs/privacy-devices.md, section 7.

**Several inputs.** The limit is that of the smallest eigenvalue if there are enough readings, so that it holds for
correlated outputs too; otherwise it is that of the smallest output's variance, which assumes independent outputs. It is
the lowest over the inputs, at beta / inputs each. If successive readings correlate by phi, the one-step prediction
variance, (1 - phi^2) times the variance, takes its place. A variance proves nothing: the law stays an assumption, which
the tests must not contradict.

**Frames.** A reading is scale sum_f w_f I_f over its frames f. Light of L_f described electrons gives a mean of k L_f
DN, with k from the anchor, and a variance v(k L_f) on the straight line of flat frames; so a reading has the variance
scale^2 sum_f w_f^2 v(k L_f), less what coarse rounding may hide of it. Sample variances of n readings over it follow
chi-squared laws over n - 1. Up to a tenth less is tolerated: the line and the described light are known to a few per
cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import chdtr, chdtri, stdtr

from opusim import checks
from opusim.calibration.gaussian_shape import shape_p_values
from opusim.calibration.independence import independence_p_values, standardised
from opusim.calibration.photon_transfer import PhotonTransfer
from opusim.calibration.rare_faults import (
    Trusted,
    cut_tails,
    far_limits,
    missing_numbers,
    missing_readings,
    repeats,
    slow_noise,
)
from opusim.devices.camera import CameraDevice
from opusim.p_values import FAMILY_ALARM, PropertyTest, bonferroni, decide

_CORRELATED = 5.0  # standard errors of the correlation of successive readings
_STATISTICS_IN_TIME, _STATISTICS_OF_LAW = (
    25,
    6,
)  # the five of a lag, of five frequencies; of the law at one input


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
        beta: see there.
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
    def is_sound(self) -> bool:
        """Whether no test speaks against a property that the law needs."""
        return all(test.holds for test in self.tests if test.needed)

    @property
    def is_gaussian(self) -> bool:
        """Whether no test speaks against independent Gaussian readings, the same at every input."""
        return all(test.holds for test in self.tests)

    def trust(self, *, gaussian: bool) -> tuple[Trusted, ...]:
        """Return the smallest faults that so many readings show.

        Args:
            gaussian: whether the law in question is Gaussian; numbers of counts are not tested one by one.
        """
        shape, level = (self.readings, self.n_outputs), self.tests[0].level
        found = (
            missing_readings(self.inputs * self.readings),
            repeats(self.inputs * self.readings),
            slow_noise(self.readings, self.inputs * self.n_outputs, level / _STATISTICS_IN_TIME),
        )
        if not gaussian:
            return found
        limits, numbers = far_limits([shape] * self.inputs), self.inputs * self.readings * self.n_outputs
        share = level / (_STATISTICS_OF_LAW * self.inputs + 2)
        return *found, cut_tails(limits[-1], self.readings), missing_numbers(numbers, self.readings, share)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a limit of Gaussian noise rests on, and what the tests cannot see."""
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
        gaussian: whether the law in question is Gaussian; else independence only is needed.

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
    successive = _successive(parts)
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


def _successive(parts: Sequence[np.ndarray]) -> float:
    """Correlation of successive readings, averaged over outputs and inputs; taking off the mean makes it -1/n."""
    standard = [standardised(part) for part in parts]
    return float(np.mean([np.mean(z[1:] * z[:-1]) + 1 / len(z) for z in standard]))


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
    """Limit n variance / chi2_(n, 1 - beta), n = readings - 1, which the true smallest variance exceeds but for beta.

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


# Readings of a camera beside its flat frames

TOLERANCE = 0.1
_FULL = 0.7
"""Share of the saturation above which an output's described light may be clipped."""
_SURELY = 8.0
"""Standard errors of the line by which the law of a single output is lowered."""


def input_p_values(
    device: CameraDevice,
    transfer: PhotonTransfer,
    inputs: torch.Tensor,
    samples: np.ndarray,
    dn_per_e: float,
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
    kept = np.all(light_e < _FULL * exposure.sensor.saturation_e, axis=0)
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
