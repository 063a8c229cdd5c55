"""One noisy linear model of public features: what it costs, and how large a record's share of it is in float64.

The design of the model (weights w_i, a triangular factor L of a positive definite S) comes from public features h_i.
`whitened_bound` bounds what one label can move after whitening by L, whatever float64 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from typing_extensions import Doc

from accounting import numerics
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee, Unit
from accounting.labels.mechanisms import DEVICE_LAW, PUBLIC_FEATURES, gaussian_label_guarantee
from accounting.mechanisms import CertifiedMechanism, DeviceNoise, Positive
from accounting.theorems import NOISE_IS_SECRET, Theorem
from opusim import checks

_UNIT = 2.0**-53
"""Largest relative error of one operation in float64."""

LABEL_RELEASE = Theorem(
    name="label-release",
    title="one noisy linear model of public features",
    statement="U = sum_i w_i h_i t(y_i)^T + sigma L Z is released, where t(y) is the one-hot label less a constant "
    "vector, Z has independent N(0, 1), and the features h_i, the weights w_i >= 0 and the invertible L do not depend "
    "on labels. It is mu-GDP for a label, mu = sqrt(2) max_i w_i |L^-1 h_i| / sigma, and no smaller mu holds. With "
    "S = L L^T the model S^-1 U, of covariance sigma^2 S^-1, is a function of U. S may be any positive definite "
    "matrix, records may repeat, and a record with w_i h_i = 0 costs nothing.",
    proof="Replacing label a of record I by b moves U by w_I h_I (e_a - e_b)^T, whatever the other labels are: the "
    "constant of t cancels. Whitened by L it is w_I L^-1 h_I (e_a - e_b)^T, of Frobenius norm sqrt(2) w_I |L^-1 h_I|, "
    "and the noise has independent N(0, sigma^2). Two Gaussians of one covariance at whitened distance mu have a "
    "log-likelihood ratio N(mu^2/2, mu^2). Two copies of a record are two labels, of which one is replaced. In float64 "
    "max_i w_i |L^-1 h_i| is bounded from the computed norms by the backward errors of a sum, a Cholesky factor and a "
    "triangular solve, and the rounding of the sum of the other records is added to it.",
    reference="Dong, Roth and Su 2019; Higham 2002 for the rounding",
    code="accounting.labels.linear_model.whitened_bound",
    page="privacy-labels.md, section 4",
    checked_by_code=(
        "the largest whitened share of a record is computed with the factor that colours the noise, and rounded up",
        "the noise is drawn once, and a resumed run takes the kept model",
        "training labels are used only through the noisy model",
    ),
    trusted=(PUBLIC_FEATURES, "no loss or accuracy on training labels leaves", NOISE_IS_SECRET),
)


@dataclass(frozen=True, kw_only=True)
class LabelRelease(CertifiedMechanism):
    """One noisy linear model of public features; `steps` counts how often one is drawn from the same labels."""

    mu: Annotated[
        Positive, Doc("Of one model, above 0: sqrt(2) times a label's largest share over the noise.")
    ]
    device_noise: DeviceNoise = False

    kind: ClassVar[str] = "label_release"
    audited: ClassVar[bool] = True
    taken_upfront: ClassVar[bool] = True
    unit: ClassVar[Unit] = Unit.LABEL
    noise_field: ClassVar[str | None] = "mu"
    noise_is_inverse: ClassVar[bool] = True

    def describe(self) -> str:
        """Return what ran, in a few words."""
        times = "one noisy linear model" if self.steps == 1 else f"{self.steps:,} noisy linear models"
        return f"{times} of public features, mu = {self.mu:g}"

    def as_noise(self) -> numerics.NoisySum:
        """See Mechanism.as_noise."""
        return numerics.NoisySum.of_mu(self.mu, self.steps)

    @classmethod
    def guarantees(cls, mechanisms: Sequence[Self], *, delta: float, enforced: bool) -> list[Guarantee]:
        """Return mu-GDP for labels, mu^2 the sum over all models."""
        device = any(mechanism.device_noise for mechanism in mechanisms)
        assumptions = LABEL_RELEASE.assumptions(enforced=enforced, trusted=(DEVICE_LAW,) if device else ())
        return [gaussian_label_guarantee(mechanisms, delta, LABEL_RELEASE, assumptions, device)]


def noise_of(mu: float, bound: float) -> float:
    """Return sigma = sqrt(2) bound / mu.

    Args:
        mu: Of the guarantee, above 0.
        bound: max_i w_i |L^-1 h_i|, at least 0.
    """
    checks.positive(mu=mu)
    checks.non_negative(bound=bound)
    return math.sqrt(2) * bound / mu


def whitened_bound(largest: float, *, trace: float, ridge: float, n_records: int, n_features: int) -> float:
    """Return a bound on what one label moves the sum that float64 forms, over sqrt(2) and after whitening by L.

    With gamma_m = m u / (1 - m u), u = 2^-53 (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorems
    3.5, 8.5 and 10.3): the computed S and its computed factor differ from sum_i w_i h_i h_i^T + lambda I by at most
    gamma_(n+3) and gamma_(d+1) times the trace, so that the smallest eigenvalue of L L^T is at least lambda less both.
    A computed whitened row solves (L + E) x = h with |E| <= gamma_d |L|. The rounding of the sum over all records is at
    most gamma_(n+3) sum_i w_i |h_i| <= gamma_(n+3) sqrt(n trace) under either label.

    Args:
        largest: The computed max_i w_i |L^-1 h_i|, at least 0.
        trace: The computed trace of S, with lambda.
        ridge: lambda, above 0.
        n_records: n, weights at most 1.
        n_features: d, with the constant.

    Raises:
        NoGuarantee: Rounding may cancel half of lambda.

    Example:
        >>> whitened_bound(0.1, trace=100.0, ridge=0.01, n_records=1000, n_features=10) / 0.1 - 1 < 1e-8
        True
    """
    checks.non_negative(largest=largest)
    checks.positive(trace=trace, ridge=ridge)
    trace *= 1 + _gamma(n_records + n_features)
    smallest = ridge - (_gamma(n_records + 3) + _gamma(n_features + 1)) * trace
    if smallest < ridge / 2:
        raise NoGuarantee(
            f"trainer.ridge: lambda = {ridge:g} is so small next to the sum of the features' squares, {trace:g}, that "
            f"rounding in float64 may cancel it; raise it at least {math.ceil(ridge / max(smallest, ridge / 100))}-fold"
        )
    of_solve = 2 * _gamma(n_features) * math.sqrt(trace / smallest)
    of_sum = 2 * _gamma(n_records + 3) * math.sqrt(n_records * trace / smallest)
    return largest * (1 + of_solve + _gamma(n_features + 6)) + of_sum / math.sqrt(2)


def _gamma(operations: int) -> float:
    """gamma_m = m u / (1 - m u)."""
    return operations * _UNIT / (1 - operations * _UNIT)
