"""Choosing the best of a random number of trials, as frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from accounting.mechanisms import Mechanism, register_mechanism
from opusim import checks

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@register_mechanism
@dataclass(frozen=True, kw_only=True)
class PrivateSelection(Mechanism):
    """The best of K ~ Poisson(m) trials, each mu-GDP with its score; a step counts whole searches.

    Attributes:
        mean: m > 0, expected number of trials.
        mu: mu > 0 of one trial, for replacing a record.
        device_noise: Whether the trials' noise is a device's, of Gaussian law.
    """

    mean: float
    mu: float
    device_noise: bool = False

    kind: ClassVar[str] = "private_selection"
    accountant: ClassVar[str] = "accounting.selection.private_selection:guarantees"
    noise_field: ClassVar[str | None] = "mu"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(mean=self.mean, mu=self.mu)
        self._to_floats("mean", "mu")

    @property
    def noise(self) -> float:
        """1 / mu."""
        return 1 / self.mu

    def with_noise(self, noise: float) -> PrivateSelection:
        """The selection among trials of mu = 1 / noise."""
        return replace(self, mu=1 / noise)

    def describe(self) -> str:
        """What ran, in a few words."""
        searches = "" if self.steps == 1 else f", {self.steps:,} searches"
        return (
            f"the best of a Poisson number of trials (mean {self.mean:g}), each {self.mu:.4g}-GDP{searches}"
        )

    def event(self) -> DpEvent:
        """Repeat and select on a Gaussian, self-composed."""
        import dp_accounting as dp
        from dp_accounting import dp_event

        one = dp_event.RepeatAndSelectDpEvent(dp.GaussianDpEvent(1 / self.mu), self.mean, math.inf)
        return dp.SelfComposedDpEvent(one, self.steps)
