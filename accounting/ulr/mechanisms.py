"""Unified likelihood ratio training as published, and the sampled Gaussian mechanism with rejection that it builds on.

Symbols: q sampling rate, N lower limit of the data set's size, N_B smallest batch that is accepted, sigma_0 the noise's
standard deviation over the clip norm C.
The paper: "Forward Learning with Differential Privacy" (DP-ULR).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accounting.mechanisms import Mechanism, counted, register_mechanism
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PublishedUlr(Mechanism):
    """Algorithm 1 of the DP-ULR paper with the constants of its eq. 11.

    Attributes:
        target_std: sigma_0 > 0.
        sampling_probability: q in (0, 1], before rejection.
        n_records: N >= 1, the data set's lower limit.
        min_batch_size: N_B >= 1.
        modules: Modules that are clipped and released apart, at least 1.
        largest_module: Parameters of the largest of them, at least 1.
        sampled: Whether batches were sampled independently and drawn again below N_B, as the theorem has it (the
            paper's own runs take shuffled batches).
    """

    target_std: float
    sampling_probability: float
    n_records: int
    min_batch_size: int
    modules: int
    largest_module: int
    sampled: bool = False

    kind: ClassVar[str] = "ulr_published"
    accountant: ClassVar[str] = "accounting.ulr.published:guarantees"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(target_std=self.target_std, target_std_squared=self.target_std * self.target_std)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        _check_batches(self.n_records, self.min_batch_size)
        checks.integer(minimum=1, modules=self.modules, largest_module=self.largest_module)
        self._to_floats("target_std", "sampling_probability")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"DP-ULR as published, sigma_0 {self.target_std:g}, q = {self.sampling_probability:g}, batches of at least "
            f"{self.min_batch_size}, {counted(self.modules, 'module')}, {counted(self.steps, 'step')}"
        )

    def event(self) -> DpEvent:
        """No privacy for whole records, whatever the paper claims."""
        import dp_accounting as dp

        return dp.NonPrivateDpEvent()


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class RejectionGaussian(Mechanism):
    """Sum over a Poisson batch, drawn again below N_B records, of vectors of norm at most C, plus N(0, (z C)^2).

    Attributes:
        noise_multiplier: z > 0.
        sampling_probability: q in (0, 1], before rejection.
        n_records: N >= 1, a public lower limit of the data set's size.
        min_batch_size: N_B >= 1, at most N.
    """

    noise_multiplier: float
    sampling_probability: float
    n_records: int
    min_batch_size: int

    kind: ClassVar[str] = "rejection_gaussian"
    accountant: ClassVar[str] = "accounting.ulr.rejection:guarantees"
    noise_field: ClassVar[str | None] = "noise_multiplier"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.in_unit_interval(closed="right", sampling_probability=self.sampling_probability)
        _check_batches(self.n_records, self.min_batch_size)
        self._to_floats("noise_multiplier", "sampling_probability")

    def describe(self) -> str:
        """What ran, in a few words."""
        return (
            f"Gaussian noise, multiplier {self.noise_multiplier:g}, on Poisson batches "
            f"(q = {self.sampling_probability:g}) drawn again below {self.min_batch_size} of {self.n_records:,}, "
            f"{counted(self.steps, 'step')}"
        )

    def event(self) -> DpEvent:
        """dp_accounting knows no rejection: an event that none of its accountants takes."""
        import dp_accounting as dp

        return dp.UnsupportedDpEvent()


def _check_batches(n_records: int, min_batch_size: int) -> None:
    checks.integer(minimum=1, n_records=n_records, min_batch_size=min_batch_size)
    if min_batch_size > n_records:
        raise ValueError(f"min_batch_size = {min_batch_size}: must be at most n_records = {n_records}")
