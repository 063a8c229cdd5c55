"""A lower limit on a device's Gaussian noise from calibration frames, and what speaks against using one.

The limit and the statistics are `opusim.noise.gaussian_readings`'s. Only for Gaussian, unquantised readings of frames
that do not depend on each other; a variance alone proves nothing. Source: docs/privacy.md, section 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accounting import arguments
from accounting.errors import NoGuarantee
from accounting.guarantee import Assumption
from opusim.noise import gaussianity_statistics, smallest_variance, variance_lower_limit

_LIMIT = 5.0
"""Standard errors from which a test speaks against the certificate."""
_ENOUGH = 500


@dataclass(frozen=True, kw_only=True)
class NoiseCertificate:
    """A certified standard deviation.

    Attributes:
        std: Smallest standard deviation in any direction (or of any output), lower limit, in units of the reading.
        beta: Probability that it is too large; added to delta.
        frames: Calibration frames it rests on.
    """

    std: float
    beta: float
    frames: int

    def __post_init__(self) -> None:
        arguments.non_negative(std=self.std)
        arguments.fraction(beta=self.beta)
        arguments.count(minimum=2, frames=self.frames)


def certify_gaussian(
    samples: np.ndarray, *, beta: float, independent_outputs: bool = False
) -> NoiseCertificate:
    """sqrt(n lambda_min(S) / chi2_{n, 1-beta}) from blank or reference frames.

    Args:
        samples: Readings of one constant input, which no private data touched, shape (frames, n_outputs).
        beta: In (0, 1).
        independent_outputs: Whether outputs are known to be independent; then the smallest sample variance replaces
            the smallest eigenvalue, and fewer frames do.

    Raises:
        NoGuarantee: Too few frames, or the samples contradict the law (`doubts`).
    """
    arguments.shape((None, None), samples=samples)
    arguments.finite(samples=samples)
    arguments.fraction(beta=beta)
    frames, outputs = samples.shape
    least = 3 if independent_outputs else outputs + 2
    if frames < least:
        raise NoGuarantee(
            f"frames = {frames}: {outputs} outputs need at least {least} to certify their noise"
        )
    against = [item.text for item in doubts(samples) if item.holds is False]
    if against:
        raise NoGuarantee(f"samples: no certificate, because this does not hold: {'; '.join(against)}")
    smallest = smallest_variance(samples, independent_outputs=independent_outputs)
    low = variance_lower_limit(smallest, readings=frames, beta=beta)
    return NoiseCertificate(std=low**0.5, beta=beta, frames=frames)


def doubts(samples: np.ndarray) -> tuple[Assumption, ...]:
    """What the certificate takes for granted, each tested on the samples at five standard errors.

    Fourth moment (a scale mixture or telegraph noise fails), correlation of successive frames, and grid of codes.
    A test that passes proves nothing; the law stays an assumption of the guarantee. Below 500 values the fourth
    moment is not tested: its own law is too skew then.

    Args:
        samples: Shape (frames, n_outputs), at least three frames.
    """
    arguments.count(minimum=3, frames=len(samples))
    found = gaussianity_statistics(samples)
    gaussian = bool(abs(found.fourth_moment) < _LIMIT)
    return (
        Assumption(text="fourth moment of a Gaussian", holds=gaussian if found.size >= _ENOUGH else None),
        Assumption(text="frames do not correlate", holds=bool(abs(found.successive_errors) < _LIMIT)),
        Assumption(text="readings are not quantised", holds=bool(found.distinct > 0.5)),
    )
