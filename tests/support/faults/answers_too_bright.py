from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import Fault, replaced


def _brighter(taken: Callable[..., Any]) -> Callable[..., Any]:
    def frames(self: Any, labels: Any, light: float) -> Any:
        return taken(self, labels, 1.5 * light)

    return frames


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.protections.argmax_labels:LabelFrames.taken", _brighter)


FAULT = Fault(
    name="answers_too_bright",
    breaks="Labels are shown to the camera with 1.5 times the accounted light.",
    trainers=("pdfa",),
    protections=("label-readout",),
    settings=("protection.noise=argmax",),
    checks=("response: share of labels kept",),
    plant=plant,
)
