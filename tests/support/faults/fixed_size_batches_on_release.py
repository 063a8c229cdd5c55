from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced
from tests.support.faults.fixed_size_batches import BATCHES, fixed_size


def _without_seed(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def drawn(self: Any, step: int) -> np.ndarray:
        return fixed_size(self, step) if self.seed is None else draw(self, step)

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced(BATCHES, _without_seed)


FAULT = Fault(
    name="fixed_size_batches_on_release",
    breaks="Only release mode takes batches of fixed size, accounted for as Poisson batches.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    modes=("release",),
    checks=("batch size: variance",),
    plant=plant,
)
