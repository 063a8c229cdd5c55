from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class Doubled(Wrapped):
    """Each number stands for two neighbours."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        size = math.prod(shape)
        half = super().normal((-(-size // 2),), device=device)
        return half.repeat_interleave(2)[:size].reshape(tuple(shape))


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: Doubled(stream))


FAULT = Fault(
    name="noise_shared_by_coordinates",
    breaks="Neighbouring coordinates have one noise, which their difference is free of.",
    trainers=STEPWISE,
    checks=("noise: coordinates of a step",),
    plant=plant,
)
