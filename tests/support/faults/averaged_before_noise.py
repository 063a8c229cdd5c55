from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from tests.support.faults.base import FEEDBACKS, Fault, replaced

WINDOW = 4


def _with_earlier_sums(finish: Callable[..., None]) -> Callable[..., None]:
    def finished(self: Any, total: Tensor, **options: Any) -> None:
        window = self.__dict__.setdefault("window", [])
        window.append(total.clone())
        del window[:-WINDOW]
        for earlier in window[:-1]:
            total += earlier
        finish(self, total, **options)

    return finished


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.record:RecordGradients._finish", _with_earlier_sums)


FAULT = Fault(
    name="averaged_before_noise",
    breaks=f"The noise of one step covers the sums of the last {WINDOW}, so that a record counts {WINDOW} times.",
    trainers=(*FEEDBACKS, "ulr"),
    checks=("contribution: norm over layers",),
    plant=plant,
)
