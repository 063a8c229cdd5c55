from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import STEPWISE, Fault, replaced

BATCHES = "opusim.training.data.samplers:PoissonSampler._draw"


def fixed_size(self: Any, step: int) -> np.ndarray:
    """As many records as a Poisson batch has on average."""
    size = round(self.n_records * self.sampling_probability)
    return self._generator(step).choice(self.n_records, size, replace=False, shuffle=False)


def _always(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return fixed_size


def plant() -> AbstractContextManager[None]:
    return replaced(BATCHES, _always)


FAULT = Fault(
    name="fixed_size_batches",
    breaks="Batches of fixed size are accounted for as Poisson batches.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("batch size: variance",),
    plant=plant,
)
