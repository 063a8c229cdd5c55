"""What zeroth-order training releases: one noised scalar for each direction, as frozen descriptions."""

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
class ZoScalars(Mechanism):
    """Common to both laws: sum over a Poisson batch of clipped loss differences, plus noise, for each direction.

    The directions of one step look at one batch, so they are released together: sampling amplifies their joint
    release once, and they do not compose like steps with batches of their own.

    Attributes:
        sampling_probability: q in (0, 1].
        clip_norm: C > 0, the largest magnitude of a record's loss difference.
        divisor: The stated batch size that the noisy sum is divided by, above 0; post-processing.
        directions: Scalars released from each batch, at least 1.
        relation: add_or_remove_one where q, the number of steps, the noise and the divisor are constants; zero_out
            where one of them was computed from the number of records, which is then public.
    """

    sampling_probability: float
    clip_norm: float
    divisor: float
    directions: int = 1
    relation: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    absent_means: ClassVar[Mapping[str, Any]] = {"relation": Adjacency.ZERO_OUT}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(clip_norm=self.clip_norm, divisor=self.divisor)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        checks.integer(minimum=1, directions=self.directions)
        object.__setattr__(self, "directions", int(self.directions))
        object.__setattr__(self, "relation", leaving_out(self.relation))
        self._to_floats("sampling_probability", "clip_norm", "divisor")

    def _batches(self) -> str:
        """The sampling, in a few words."""
        return (
            f"{counted(self.directions, 'direction')} on each Poisson batch (q = {self.sampling_probability:g}), "
            f"{counted(self.steps, 'step')}, divided by {self.divisor:g}"
        )


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class ZoGaussian(ZoScalars):
    """Zeroth-order training, Gaussian: clipped loss differences summed over a Poisson batch, plus N(0, (z C)^2).

    Attributes:
        noise_multiplier: z > 0, the noise's standard deviation over clip_norm.
        sampling_probability: q in (0, 1].
        clip_norm: C > 0, the largest magnitude of a record's loss difference.
        divisor: The stated batch size that the noisy sum is divided by, above 0; post-processing.
        directions: Scalars released from each batch, at least 1.
        relation: add_or_remove_one where q, the number of steps, the noise and the divisor are constants; zero_out
            where one of them was computed from the number of records, which is then public.
        device_noise: Whether the credited noise is a device's, of Gaussian law.
    """

    noise_multiplier: float
    device_noise: bool = False

    kind: ClassVar[str] = "zo_gaussian"
    accountant: ClassVar[str] = "accounting.zeroth_order.scalar_noise:gaussian_guarantees"
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(noise_multiplier=self.noise_multiplier)
        self._to_floats("noise_multiplier")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"loss differences clipped to {self.clip_norm:g}, {'device' if self.device_noise else 'Gaussian'} noise "
            f"with multiplier {self.noise_multiplier:g}, {self._batches()}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Gaussian with multiplier z / sqrt(directions), for either relation."""
        import dp_accounting as dp

        one = dp.GaussianDpEvent(self.noise_multiplier / self.directions**0.5)
        return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(self.sampling_probability, one), self.steps)


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class ZoLaplace(ZoScalars):
    """Zeroth-order training, Laplace: clipped loss differences summed over a Poisson batch, plus Laplace noise.

    Attributes:
        scale: b > 0, the Laplace scale over clip_norm.
        sampling_probability: q in (0, 1].
        clip_norm: C > 0, the largest magnitude of a record's loss difference.
        divisor: The stated batch size that the noisy sum is divided by, above 0; post-processing.
        directions: Scalars released from each batch, at least 1.
        relation: add_or_remove_one where q, the number of steps, the noise and the divisor are constants; zero_out
            where one of them was computed from the number of records, which is then public.
    """

    scale: float

    kind: ClassVar[str] = "zo_laplace"
    accountant: ClassVar[str] = "accounting.zeroth_order.scalar_noise:laplace_guarantees"
    noise_field: ClassVar[str | None] = "scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(scale=self.scale)
        self._to_floats("scale")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"loss differences clipped to {self.clip_norm:g}, Laplace noise with scale {self.scale:g}, "
            f"{self._batches()}"
        )

    def event(self) -> DpEvent:
        """Self-composed Poisson-sampled Laplace, the directions composed within the sample."""
        import dp_accounting as dp

        one: DpEvent = dp.LaplaceDpEvent(self.scale)
        if self.directions > 1:
            one = dp.SelfComposedDpEvent(one, self.directions)
        return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(self.sampling_probability, one), self.steps)
