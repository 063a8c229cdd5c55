from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _without_a_clip(totals: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    def summed(self: Any, *options: Any, **named: Any) -> list[torch.Tensor]:
        found = totals(self, *options, **named)
        unclipped = self.delta.sum(dim=(0, 1))
        return [
            unclipped if tensor is self.bias else own for tensor, own in zip(self.wrt, found, strict=True)
        ]

    return summed


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.networks.contributions.uses:LinearUse.totals", _without_a_clip)


FAULT = Fault(
    name="bias_unclipped",
    breaks="The clip is applied to the weights, and the biases' sums are those of unclipped contributions.",
    trainers=FEEDBACKS,
    checks=("contribution: norm over layers",),
    plant=plant,
)
