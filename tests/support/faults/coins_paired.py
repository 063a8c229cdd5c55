from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced


def _opposed(uniforms: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def drawn(self: Any, generator: Any) -> np.ndarray:
        found = uniforms(self, generator)
        odd = found[1::2]
        odd[:] = 1.0 - found[::2][: len(odd)]
        return found

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.data.samplers:PoissonSampler._uniforms", _opposed)


FAULT = Fault(
    name="coins_paired",
    breaks="One coin decides for two records, which are never in a batch together; sizes of batches show little of it.",
    trainers=STEPWISE,
    checks=("records: coins of two",),
    plant=plant,
    small_batches=True,
)
