"""A mechanism of another package: both augmented views of a record are summed, so a record moves the sum by 2 C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from typing_extensions import Doc

from accounting import numerics
from accounting.mechanism import Positive, SamplingProbability, counted
from opusim import AdditiveNoise, Theorem

THEOREM = Theorem(
    name="two-views",
    title="two clipped views of each record",
    statement="Two views of each record, each clipped to C, plus N(0, (z C)^2), are the sampled Gaussian with z / 2.",
    proof="One record moves the sum by at most 2 C, by the triangle inequality.",
    reference="theorem sampled-gaussian",
    code="two_views.TwoViews",
    checked_by_code=(
        "every view is clipped to C",
        "the noise of every step is fresh",
        "batches are Poisson sampled",
    ),
    trusted=("batches stay secret",),
)


@dataclass(frozen=True, kw_only=True)
class TwoViews(AdditiveNoise):
    """Sum over a Poisson batch of two clipped views of each record, plus Gaussian noise."""

    noise_multiplier: Annotated[Positive, Doc("z, above 0: standard deviation over the clip of one view.")]
    sampling_probability: SamplingProbability

    kind: ClassVar[str] = "two_views"
    noise_field: ClassVar[str | None] = "noise_multiplier"
    theorem: ClassVar[Theorem] = THEOREM

    def describe(self) -> str:
        """Return what ran, in a few words."""
        return f"two views, multiplier {self.noise_multiplier:g}, {counted(self.steps, 'step')}"

    def as_noise(self) -> numerics.NoisySum:
        """Return the noise in numbers."""
        return numerics.NoisySum(
            law="gaussian",
            scale=self.noise_multiplier / 2,
            probability=self.sampling_probability,
            steps=self.steps,
        )
