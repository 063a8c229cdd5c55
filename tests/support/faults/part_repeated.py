from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class Repeated(Wrapped):
    """The second half of each draw repeats the first."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        size = math.prod(shape)
        half = super().normal((-(-size // 2),), device=device)
        return torch.cat([half, half])[:size].reshape(tuple(shape))


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: Repeated(stream))


FAULT = Fault(
    name="part_repeated",
    breaks="One half of every parameter has the noise of the other, so that their difference has none.",
    trainers=FEEDBACKS,
    checks=("noise: coordinates of a step",),
    plant=plant,
)
