from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _weaker(respond: Callable[..., Any]) -> Callable[..., Any]:
    def answered(labels: Any, *, epsilon: float, n_labels: int, generator: Any) -> Any:
        return respond(labels, epsilon=1.2 * epsilon, n_labels=n_labels, generator=generator)

    return answered


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.noisy_labels:respond", _weaker)


FAULT = Fault(
    name="labels_kept_too_often",
    breaks="Randomized response answers at 1.2 times the accounted epsilon.",
    trainers=FEEDBACKS,
    protections=("label-randomized-response",),
    checks=("response: share of labels kept",),
    plant=plant,
)
