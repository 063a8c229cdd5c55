"""What a step did to the parameters: its rate, and a seed and a scalar for each direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One line of a step log.

    Attributes:
        rate: eta, the step's learning rate, a float32 value.
        seeds: Of the directions, each in [0, 2^64).
        scalars: s of each direction, float32 values: the noised sum over batch size and 2 phi.
    """

    rate: float
    seeds: tuple[int, ...]
    scalars: tuple[float, ...]

    @classmethod
    def rounded(cls, *, rate: float, seeds: tuple[int, ...], scalars: tuple[float, ...]) -> StepEntry:
        """The entry as a log holds it; a step moves by these numbers and no others."""
        with np.errstate(over="ignore"):
            return cls(
                rate=float(np.float32(rate)),
                seeds=seeds,
                scalars=tuple(float(np.float32(scalar)) for scalar in scalars),
            )

    @property
    def moves(self) -> tuple[float, ...]:
        """-eta s / n: how far the parameters go along each of the n directions."""
        return tuple(-self.rate * scalar / len(self.scalars) for scalar in self.scalars)

    def keep(self, weight_decay: float) -> float:
        """1 - eta lambda: what the decay leaves of the parameters."""
        return 1.0 - self.rate * weight_decay
