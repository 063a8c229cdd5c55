from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import FEEDBACKS, Fault, all_replaced


def _only_for_records(write: Callable[..., None]) -> Callable[..., None]:
    def written(self: Any, network: Any, deltas: Any, inputs: Any, **others: Any) -> None:
        before = self._noise_std
        self._noise_std = before if len(deltas[0]) else 0.0
        write(self, network, deltas, inputs, **others)
        self._noise_std = before

    return written


def plant() -> AbstractContextManager[None]:
    writers = ("record:RecordGradients", "amplified_labels:AmplifiedLabels")
    return all_replaced({f"training.protections.{writer}._write": _only_for_records for writer in writers})


FAULT = Fault(
    name="empty_batches_without_noise",
    breaks="A batch without records gets no noise, which tells that it had none.",
    trainers=(*FEEDBACKS, "ulr"),
    protections=("record", "label-amplified"),
    checks=("empty batches: variance", "small batches: noise of a step"),
    plant=plant,
    small_batches=True,
)
