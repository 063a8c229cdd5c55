from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import Wrapped, credited_noise

_FIRST_LAYER = 2
"""Draws of a step for a weight and a bias."""


class FirstLayerOnly(Wrapped):
    """No noise behind the draws of the first layer."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self.draws = 0

    def seek(self, step: int) -> None:
        super().seek(step)
        self.draws = 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        self.draws += 1
        drawn = super().normal(shape, device=device)
        return drawn if self.draws <= _FIRST_LAYER else drawn.zero_()


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: FirstLayerOnly(stream))


FAULT = Fault(
    name="last_layer_without_noise",
    breaks="Only the first layer receives noise.",
    trainers=FEEDBACKS,
    checks=("noise: variance in a parameter",),
    plant=plant,
)
