from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import changed_noise

_FIRST_LAYER = 2
"""Parameters of the first layer: a weight and a bias."""


def _first_layer_only(noise: list[Tensor]) -> list[Tensor]:
    return [own if number < _FIRST_LAYER else own.zero_() for number, own in enumerate(noise)]


def plant() -> AbstractContextManager[None]:
    return changed_noise(_first_layer_only)


FAULT = Fault(
    name="last_layer_without_noise",
    breaks="Only the first layer receives noise.",
    trainers=FEEDBACKS,
    checks=("noise: variance in a parameter",),
    plant=plant,
)
