from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _of_the_mean(factors: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def found(self: Any, squares: Tensor) -> Tensor:
        if not squares.numel():
            return squares
        return factors(self, squares.sqrt().mean(dim=1, keepdim=True).square()).expand_as(squares)

    return found


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.record:RecordGradients._factors", _of_the_mean)


FAULT = Fault(
    name="clipped_together",
    breaks="All records of a batch have the factor of their mean norm, so that a long one exceeds the clip.",
    trainers=FEEDBACKS,
    checks=("records: contribution",),
    plant=plant,
    small_batches=True,
)
