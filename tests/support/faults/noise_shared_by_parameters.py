from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class BegunAnew(Wrapped):
    """Every parameter of a step takes the numbers of the first one."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self.numbers = torch.zeros(0)

    def seek(self, step: int) -> None:
        super().seek(step)
        self.numbers = torch.zeros(0)

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        size = math.prod(shape)
        if size > len(self.numbers):
            self.numbers = super().normal((size,), device=device)
        return self.numbers[:size].clone().reshape(tuple(shape))


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: BegunAnew(stream))


FAULT = Fault(
    name="noise_shared_by_parameters",
    breaks="The noise of a step begins anew for each parameter, so that differences of parameters are free of it.",
    trainers=FEEDBACKS,
    checks=("noise: two parameters",),
    plant=plant,
)
