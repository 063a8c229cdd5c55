from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise, on_release


class Halved(Wrapped):
    """Half of the standard deviation."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return super().normal(shape, device=device).mul_(0.5)


def plant() -> AbstractContextManager[None]:
    return credited_noise(on_release(Halved))


FAULT = Fault(
    name="noise_halved_on_release",
    breaks="Only release mode has half of the stated standard deviation.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    modes=("release",),
    checks=("noise: variance",),
    plant=plant,
)
