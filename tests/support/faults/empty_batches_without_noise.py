from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import FEEDBACKS, Fault, all_replaced


def _only_for_records(write: Callable[..., None]) -> Callable[..., None]:
    def written(self: Any, parts: Any, **others: Any) -> None:
        before, found = self._noise_std, list(parts)
        self._noise_std = before if any(part.squared_norms().numel() for part in found) else 0.0
        write(self, found, **others)
        self._noise_std = before

    return written


def plant() -> AbstractContextManager[None]:
    writers = ("record:RecordGradients", "amplified_labels:AmplifiedLabels")
    return all_replaced(
        {f"opusim.training.protections.{writer}._write": _only_for_records for writer in writers}
    )


FAULT = Fault(
    name="empty_batches_without_noise",
    breaks="A batch without records gets no noise, which tells that it had none.",
    trainers=(*FEEDBACKS, "ulr"),
    protections=("record", "label-amplified"),
    checks=("empty batches: variance", "small batches: noise of a step"),
    plant=plant,
    small_batches=True,
)
