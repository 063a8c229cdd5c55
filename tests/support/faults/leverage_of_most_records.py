from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from tests.support.faults.base import Fault, replaced


def _percentile(levelled: Any) -> Any:
    def found(cls: Any, x: Tensor, **options: Any) -> tuple[Any, float]:
        design, bound = levelled.__func__(cls, x, **options)
        shares = design.weights * design.norms(x)
        return design, bound * float(shares.quantile(0.95) / shares.max())

    return classmethod(found)


def plant() -> AbstractContextManager[None]:
    return replaced("training.protections.released_model:Design.levelled", _percentile)


FAULT = Fault(
    name="leverage_of_most_records",
    breaks="The noise is that of the leverage which 95 % of the records have, and not of the largest.",
    trainers=("ridge",),
    protections=("label-release",),
    checks=("noise: variance",),
    plant=plant,
)
