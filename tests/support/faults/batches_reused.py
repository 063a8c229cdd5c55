from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced
from tests.support.faults.fixed_size_batches import BATCHES


def _pairs(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    last: dict[int, np.ndarray] = {}

    def drawn(self: Any, step: int) -> np.ndarray:
        if step % 2 == 0 or id(self) not in last:
            last[id(self)] = draw(self, step)
        return last[id(self)]

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced(BATCHES, _pairs)


FAULT = Fault(
    name="batches_reused",
    breaks="Every second step takes the batch of the step before, so that batches are not drawn afresh.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("batch size: any two steps",),
    plant=plant,
)
