from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from tests.support.faults.base import STEPWISE, Fault
from tests.support.faults.streams import Wrapped, credited_noise, on_release


class Missing(Wrapped):
    """No noise."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return super().normal(shape, device=device).zero_()


def plant() -> AbstractContextManager[None]:
    return credited_noise(on_release(Missing))


FAULT = Fault(
    name="noise_missing_on_release",
    breaks="Only release mode adds no noise.",
    trainers=STEPWISE,
    protections=("record", "label-amplified", "last-iterate"),
    modes=("release",),
    checks=("noise: variance",),
    plant=plant,
)
