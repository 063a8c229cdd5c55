"""What may be released about whole records: clipped and noised sums, or updates without any protection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accounting.guarantee import Adjacency
from accounting.mechanisms import Mechanism, counted, leaving_out, register_mechanism
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True, kw_only=True)
class ClippedRecords(Mechanism):
    """Common to all relations: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor.

    Attributes:
        noise_multiplier: z > 0, the noise's standard deviation over clip_norm.
        sampling_probability: q in (0, 1].
        clip_norm: C > 0.
        divisor: The constant that the noisy sum is divided by, above 0; post-processing, so it costs nothing.
        device_noise: Whether the credited noise is a device's, of Gaussian law.
        beta: Probability that the certificate of the device's noise is wrong, in [0, 1); one certificate covers all
            steps.
    """

    noise_multiplier: float
    sampling_probability: float
    clip_norm: float
    divisor: float
    device_noise: bool = False
    beta: float = 0.0

    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            noise_multiplier=self.noise_multiplier, clip_norm=self.clip_norm, divisor=self.divisor
        )
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        checks.in_unit_interval(closed="left", beta=self.beta)
        self._to_floats("noise_multiplier", "sampling_probability", "clip_norm", "divisor", "beta")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"records clipped to {self.clip_norm:g}, {'device' if self.device_noise else 'Gaussian'} noise with "
            f"multiplier {self.noise_multiplier:g}, Poisson batches (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Gaussian; z over C, which dp_accounting's PLD takes for every relation."""
        import dp_accounting as dp

        step = dp.PoissonSampledDpEvent(self.sampling_probability, dp.GaussianDpEvent(self.noise_multiplier))
        return dp.SelfComposedDpEvent(step, self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class RecordCentral(ClippedRecords):
    """Per-record clipping and central noise: [sum over a Poisson batch of clipped updates + N(0, (z C)^2)] / divisor.

    The other parameters are those of `ClippedRecords`.

    Attributes:
        relation: add_or_remove_one where q, the number of steps, the noise and the divisor are constants; zero_out
            where one of them was computed from the number of records, which is then public.
    """

    relation: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    kind: ClassVar[str] = "record_central"
    accountant: ClassVar[str] = "accounting.records.central:guarantees"
    absent_means: ClassVar[Mapping[str, Any]] = {"relation": Adjacency.ZERO_OUT}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "relation", leaving_out(self.relation))


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class Unprotected(Mechanism):
    """Updates that carry no protection of records.

    Attributes:
        what: What ran, in a few words, such as "bp without protection".
    """

    what: str

    kind: ClassVar[str] = "unprotected"
    accountant: ClassVar[str] = "accounting.records.unprotected:guarantees"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.what.strip():
            raise ValueError("what = '': must say what ran, such as 'bp without protection'")

    def describe(self) -> str:
        """What ran, in a few words."""
        return f"{self.what}, {counted(self.steps, 'step')}"

    def event(self) -> DpEvent:
        """No privacy at all."""
        import dp_accounting as dp

        return dp.NonPrivateDpEvent()
