from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class PartOnly(Wrapped):
    """The last quarter of each draw is 0."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        drawn = super().normal(shape, device=device)
        drawn.view(-1)[math.ceil(0.75 * drawn.numel()) :] = 0.0
        return drawn


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: PartOnly(stream))


FAULT = Fault(
    name="part_without_noise",
    breaks="A quarter of the numbers of every parameter has no noise.",
    trainers=FEEDBACKS,
    checks=("noise: variance in a part",),
    plant=plant,
)
