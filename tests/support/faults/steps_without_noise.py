from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class NotTenth(Wrapped):
    """No noise at every tenth step."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self._step = 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        drawn = super().normal(shape, device=device)
        return drawn.zero_() if self._step % 10 == 9 else drawn

    def seek(self, step: int) -> None:
        super().seek(step)
        self._step = step


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: NotTenth(stream))


FAULT = Fault(
    name="steps_without_noise",
    breaks="Every tenth step has no noise.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    checks=("noise: variance in a step",),
    plant=plant,
)
