from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise


class Halved(Wrapped):
    """Half of the standard deviation."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return super().normal(shape, device=device).mul_(0.5)


def plant() -> AbstractContextManager[None]:
    return credited_noise(lambda mode, stream: Halved(stream))


FAULT = Fault(
    name="noise_halved",
    breaks="The credited noise has half of its standard deviation.",
    trainers=STEPWISE,
    checks=("noise: variance",),
    plant=plant,
)
