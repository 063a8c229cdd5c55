from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import Fault, replaced


class _Unpermuted:
    """Sorted numbers for a permutation, and random ones for ties: every second call is a permutation's."""

    def __init__(self, source: Any) -> None:
        self._source, self._calls = source, 0

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        self._calls += 1
        found: np.ndarray = self._source.random(size)
        return np.sort(found, axis=1) if self._calls % 2 else found


def _unpermuted(answers: Callable[..., Any]) -> Callable[..., Any]:
    def answered(self: Any, labels: Any, source: Any) -> Any:
        return answers(self, labels, _Unpermuted(source))

    return answered


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.argmax_labels:ArgmaxReadout.answers", _unpermuted)


FAULT = Fault(
    name="labels_not_permuted",
    breaks="Labels are shown as they are, without a secret permutation.",
    trainers=("pdfa",),
    protections=("label-readout",),
    settings=("protection.noise=argmax",),
    checks=("response: classes moved to", "response: share of labels kept"),
    plant=plant,
)
