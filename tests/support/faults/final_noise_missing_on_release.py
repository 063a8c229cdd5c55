from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from opusim.randomness.streams import SystemStream
from tests.support.faults.base import Fault, replaced


def _without(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, network: Any, optimizer: Any, objective: Any, descent: Any, **others: Any) -> None:
        if isinstance(others.get("noise"), SystemStream):
            descent = replace(descent, final_std=0.0)
        init(self, network, optimizer, objective, descent, **others)

    return made


def plant() -> AbstractContextManager[None]:
    return replaced("opusim.training.convex.trainer:ConvexTrainer.__init__", _without)


FAULT = Fault(
    name="final_noise_missing_on_release",
    breaks="Only release mode leaves out the final noise, which hides the records of the last batch.",
    trainers=("convex",),
    protections=("last-iterate",),
    modes=("release",),
    checks=("noise: variance in a step",),
    plant=plant,
)
