from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.support.faults.base import FEEDBACKS, Fault, replaced


def _wide(init: Callable[..., None]) -> Callable[..., None]:
    def initialised(self: Any, source: Any, coefficients: tuple[float, ...], **options: Any) -> None:
        init(self, source, tuple(c / coefficients[0] for c in coefficients), **options)

    return initialised


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.randomness.streams:CorrelatedStream.__init__", _wide)


FAULT = Fault(
    name="noise_of_wide_columns",
    breaks="Correlated noise has coefficients whose first one is 1, so that a record counts more than accounted.",
    trainers=(*FEEDBACKS, "ulr"),
    checks=("noise: variance",),
    plant=plant,
    settings=("protection.bands=4",),
)
