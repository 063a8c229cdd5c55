from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _from_all(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def drawn(self: Any, step: int) -> np.ndarray:
        return np.flatnonzero(self._uniforms(self._generator(step)) < self.sampling_probability)

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.record:CyclicPoissonSampler._draw", _from_all)


FAULT = Fault(
    name="all_subsets_sampled",
    breaks="Under correlated noise every step draws from all records, so that one record's steps overlap.",
    trainers=(*FEEDBACKS, "ulr"),
    checks=("batch size: variance", "batch size: any two steps"),
    plant=plant,
    settings=("protection.bands=10",),
)
