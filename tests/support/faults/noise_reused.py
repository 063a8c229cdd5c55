from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class Repeated(Wrapped):
    """Steps 1, 3, 5, ... draw what the step before each drew."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self._kept: list[torch.Tensor] = []
        self._repeats, self._next = False, 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        if self._repeats and self._next < len(self._kept):
            self._next += 1
            return self._kept[self._next - 1].clone()
        drawn = super().normal(shape, device=device)
        if not self._repeats:
            self._kept.append(drawn.clone())
        return drawn

    def seek(self, step: int) -> None:
        super().seek(step)
        self._repeats, self._next = step % 2 == 1, 0
        if not self._repeats:
            self._kept.clear()


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: Repeated(stream))


FAULT = Fault(
    name="noise_reused",
    breaks="Every second step repeats the noise of the step before, so that their difference has none.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("noise: steps 1 apart",),
    plant=plant,
)
