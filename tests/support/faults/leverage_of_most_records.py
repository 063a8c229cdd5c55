from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from tests.support.faults.base import Fault, replaced


def _percentile(largest: Callable[[Tensor], float]) -> Callable[[Tensor], float]:
    return lambda rows: min(largest(rows), float(rows.norm(dim=1).quantile(0.95)))


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.released_model:largest_norm", _percentile)


FAULT = Fault(
    name="leverage_of_most_records",
    breaks="The noise is that of the leverage which 95 % of the records have, and not of the largest.",
    trainers=("ridge",),
    protections=("label-release",),
    checks=("noise: variance",),
    plant=plant,
)
