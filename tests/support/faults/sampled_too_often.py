from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced


def _more(one_batch: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def drawn(self: Any, generator: np.random.Generator) -> np.ndarray:
        return np.flatnonzero(self._uniforms(generator) < 1.25 * self.sampling_probability)

    return drawn


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.data.samplers:PoissonSampler._one_batch", _more)


FAULT = Fault(
    name="sampled_too_often",
    breaks="Records enter batches with 1.25 times the accounted probability.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("sum: mean, in records",),
    plant=plant,
)
