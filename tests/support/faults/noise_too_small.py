from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class Halved(Wrapped):
    """Half of the variance."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return super().normal(shape, device=device).mul_(0.5**0.5)


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: Halved(stream))


FAULT = Fault(
    name="noise_too_small",
    breaks="The credited noise has 1 / sqrt(2) of its standard deviation.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    checks=("noise: variance",),
    plant=plant,
)
