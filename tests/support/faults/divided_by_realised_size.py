from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import FEEDBACKS, Fault, all_replaced


def _by_batch(set_gradients: Callable[..., None]) -> Callable[..., None]:
    def divided(self: Any, parts: Any, **options: Any) -> None:
        found, stated = list(parts), self._divisor
        self._divisor = float(max(sum(part.records for part in found), 1))
        try:
            set_gradients(self, found, **options)
        finally:
            self._divisor = stated

    return divided


def plant() -> AbstractContextManager[None]:
    return all_replaced(
        {
            "opusim.training.protections.record:RecordGradients.set_gradients": _by_batch,
            "opusim.training.protections.amplified_labels:AmplifiedLabels.set_gradients": _by_batch,
        }
    )


FAULT = Fault(
    name="divided_by_realised_size",
    breaks="The noisy sum is divided by the batch's own size, which tells that size.",
    trainers=(*FEEDBACKS, "ulr"),
    protections=("record", "label-amplified"),
    checks=("batch size: variance",),
    plant=plant,
)
