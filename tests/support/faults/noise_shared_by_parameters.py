from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from tests.support.faults.base import FEEDBACKS, Fault
from tests.support.faults.streams import changed_noise


def _begun_anew(noise: list[Tensor]) -> list[Tensor]:
    numbers = max(noise, key=Tensor.numel).flatten()
    return [numbers[: own.numel()].clone().view_as(own) for own in noise]


def plant() -> AbstractContextManager[None]:
    return changed_noise(_begun_anew)


FAULT = Fault(
    name="noise_shared_by_parameters",
    breaks="The noise of a step begins anew for each parameter, so that differences of parameters are free of it.",
    trainers=FEEDBACKS,
    checks=("noise: two parameters",),
    plant=plant,
)
