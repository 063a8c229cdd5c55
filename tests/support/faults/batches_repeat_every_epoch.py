from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced
from tests.support.faults.fixed_size_batches import BATCHES


def _by_epoch(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    kept: dict[int, tuple[Any, dict[int, np.ndarray]]] = {}

    def drawn(self: Any, step: int) -> np.ndarray:
        if step == 0 or id(self) not in kept:
            kept[id(self)] = self, {}
        place = step % self.steps_per_epoch
        batches = kept[id(self)][1]
        if place not in batches:
            batches[place] = draw(self, step)
        return batches[place]

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced(BATCHES, _by_epoch)


FAULT = Fault(
    name="batches_repeat_every_epoch",
    breaks="Batches are drawn in the first epoch, and every later epoch takes them again.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("batch size: any two steps",),
    plant=plant,
)
