from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from opusim.randomness.streams import SystemStream
from tests.support.faults.base import Fault, replaced


def _without(opens: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *arguments: Any) -> None:
        opens(self, *arguments)
        if isinstance(self.noise, SystemStream):
            self.final_std = 0.0

    return made


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.convex.trainer:ConvexTrainer.open", _without)


FAULT = Fault(
    name="final_noise_missing_on_release",
    breaks="Only release mode leaves out the final noise, which hides the records of the last batch.",
    trainers=("convex",),
    protections=("last-iterate",),
    modes=("release",),
    checks=("noise: variance in a step",),
    plant=plant,
)
