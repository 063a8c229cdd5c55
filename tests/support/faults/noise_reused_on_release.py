from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opusim.randomness.streams import NoiseStream
from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise, on_release


class Reused(Wrapped):
    """Every step draws what the first one drew."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self._kept: list[torch.Tensor] = []
        self._next = 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        if self._next == len(self._kept):
            self._kept.append(super().normal(shape, device=device))
        self._next += 1
        return self._kept[self._next - 1].clone()

    def seek(self, step: int) -> None:
        super().seek(step)
        self._next = 0


def plant() -> AbstractContextManager[None]:
    return credited_noise(on_release(Reused))


FAULT = Fault(
    name="noise_reused_on_release",
    breaks="Only release mode draws its noise once, and adds it at every step.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    modes=("release",),
    checks=("noise: any two steps",),
    plant=plant,
)
