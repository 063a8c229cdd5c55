from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _without_a_clip(set_gradient: Callable[..., None]) -> Callable[..., None]:
    def written(self: Any, delta: torch.Tensor, h: torch.Tensor, divisor: float, clip: Any) -> None:
        set_gradient(self, delta, h, divisor, clip)
        if clip is not None and self.module.bias is not None:
            self.module.bias.grad = delta.sum(dim=0) / divisor

    return written


def plant() -> AbstractContextManager[None]:
    return replaced("training.networks.layers:LinearJacobian.set_gradient", _without_a_clip)


FAULT = Fault(
    name="bias_unclipped",
    breaks="The clip is applied to the weights, and the biases' sums are those of unclipped contributions.",
    trainers=FEEDBACKS,
    checks=("contribution: norm over layers",),
    plant=plant,
)
