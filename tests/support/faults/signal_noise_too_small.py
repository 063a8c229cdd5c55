from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class HalvedBatches(Wrapped):
    """Half of the variance in what is drawn first, third, ...: the records' signals, before each layer's weights."""

    def seek(self, step: int) -> None:
        super().seek(step)
        self._draws = 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        self._draws += 1
        drawn = super().normal(shape, device=device)
        return drawn.mul_(0.5**0.5) if self._draws % 2 else drawn


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: HalvedBatches(stream))


FAULT = Fault(
    name="signal_noise_too_small",
    breaks="The noise on the records' signals has 1 / sqrt(2) of its standard deviation; that on the weights is right.",
    trainers=FEEDBACKS,
    protections=("label-budget",),
    checks=("noise on signals: variance",),
    plant=plant,
)
