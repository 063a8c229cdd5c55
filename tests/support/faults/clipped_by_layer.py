from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _each_layer_to_c(before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def factors(self: Any, squares: torch.Tensor) -> torch.Tensor:
        return (self._clip_norm / squares.sqrt().clamp_min(1e-30)).clamp(max=1.0)

    return factors


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.record:RecordGradients._factors", _each_layer_to_c)


FAULT = Fault(
    name="clipped_by_layer",
    breaks="Each of L layers is clipped to C by itself, so that a record contributes up to sqrt(L) C.",
    trainers=(*FEEDBACKS, "ulr"),
    checks=("contribution: norm over layers",),
    plant=plant,
)
