"""One noisy linear model of public features: what it costs, and the noise that a label's largest share of it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from typing_extensions import Doc

from accounting import numerics
from accounting.guarantee import Guarantee, Unit
from accounting.labels.mechanisms import DEVICE_LAW, PUBLIC_FEATURES, gaussian_label_guarantee
from accounting.mechanisms import CertifiedMechanism, DeviceNoise, ExactlyRounded, Positive
from accounting.theorems import SEED_IS_SECRET, Theorem, about_rounding
from opusim import checks

LABEL_RELEASE = Theorem(
    name="label-release",
    title="one noisy linear model of public features",
    statement="R = sum_i a_i e(y_i)^T + sigma Z is released, where e(y) is the one-hot label, Z has independent N(0, "
    "1), and the vectors a_i do not depend on labels. It is mu-GDP for a label, mu = sqrt(2) max_i |a_i| / sigma, and "
    "no smaller mu holds. With S = sum_i w_i h_i h_i^T + lambda I = L L^T of public features h_i and a_i = w_i L^-1 "
    "h_i, the model L^-T (R - sum_i a_i 1^T / k), of covariance sigma^2 S^-1, is a function of R. L may be any "
    "invertible matrix, records may repeat, and a record with a_i = 0 costs nothing.",
    proof="Replacing label a of record I by b moves the sum by a_I (e_a - e_b)^T, whatever the other labels are, of "
    "Frobenius norm sqrt(2) |a_I|, and the noise has independent N(0, sigma^2). Two Gaussians of one covariance at "
    "whitened distance mu have a log-likelihood ratio N(mu^2/2, mu^2). Two copies of a record are two labels, of which "
    "one is replaced. The a_i are the vectors as computed, rounded toward zero to multiples of a power of two, so that "
    "float64 forms their sums exactly, whatever the order; how S and L were computed does not matter.",
    reference="Dong, Roth and Su 2019",
    code="accounting.labels.linear_model.noise_of",
    page="privacy-labels.md, section 4",
    checked_by_code=(
        "the largest share of a record is computed from the rows that are summed, and rounded up",
        "the noise is drawn once, and a resumed run takes the kept model",
        "training labels are used only through the noisy model",
    ),
    trusted=(PUBLIC_FEATURES, "no loss or accuracy on training labels leaves", SEED_IS_SECRET),
)


@dataclass(frozen=True, kw_only=True)
class LabelRelease(CertifiedMechanism):
    """One noisy linear model of public features; `steps` counts how often one is drawn from the same labels."""

    mu: Annotated[
        Positive, Doc("Of one model, above 0: sqrt(2) times a label's largest share over the noise.")
    ]
    device_noise: DeviceNoise = False
    exactly_rounded: ExactlyRounded = True

    absent_means: ClassVar[Mapping[str, Any]] = {
        **CertifiedMechanism.absent_means,
        "exactly_rounded": False,
    }
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
        assumptions = (
            *LABEL_RELEASE.assumptions(enforced=enforced, trusted=(DEVICE_LAW,) if device else ()),
            *about_rounding(not device and all(one.exactly_rounded for one in mechanisms), enforced=enforced),
        )
        return [gaussian_label_guarantee(mechanisms, delta, LABEL_RELEASE, assumptions, device)]


def noise_of(mu: float, bound: float) -> float:
    """Return sigma = sqrt(2) bound / mu.

    Args:
        mu: Of the guarantee, above 0.
        bound: max_i |a_i|, at least 0.
    """
    checks.positive(mu=mu)
    checks.non_negative(bound=bound)
    return math.sqrt(2) * bound / mu
