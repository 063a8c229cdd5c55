from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _constant(randomize: Callable[..., Any]) -> Callable[..., Any]:
    def answered(labels: Any, mechanism: Any, generator: Any, *, pay: Any) -> Any:
        return randomize(labels, mechanism, np.random.default_rng(0), pay=pay)

    return answered


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.noisy_labels:randomize", _constant)


FAULT = Fault(
    name="labels_same_in_every_run",
    breaks="Randomized response draws from a constant seed, so that anybody can undo it.",
    trainers=FEEDBACKS,
    protections=("label-randomized-response",),
    checks=("response: equal in two runs",),
    plant=plant,
)
