from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class MatricesOnly(Wrapped):
    """No noise on vectors."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        drawn = super().normal(shape, device=device)
        return drawn.zero_() if len(shape) == 1 else drawn


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: MatricesOnly(stream))


FAULT = Fault(
    name="biases_without_noise",
    breaks="Weights receive noise, biases do not, so that their sums are released as they are.",
    trainers=FEEDBACKS,
    checks=("noise: variance in a parameter",),
    plant=plant,
)
