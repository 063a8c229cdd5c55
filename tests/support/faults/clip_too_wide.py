from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.support.faults.base import STEPWISE, Fault, all_replaced


def _wider(clip: Callable[..., Any]) -> Callable[..., Any]:
    def widened(*values: Any) -> Any:
        return clip(*values[:-1], 2**0.5 * values[-1])

    return widened


def _wider_residuals(opens: Callable[..., None]) -> Callable[..., None]:
    def widened(self: Any, *arguments: Any) -> None:
        opens(self, *arguments)
        self.objective = replace(self.objective, clip=2**0.5 * self.objective.clip)

    return widened


def _wider_differences(clip: Callable[..., Any]) -> Callable[..., Any]:
    def widened(plus: Any, minus: Any, bound: float | None) -> Any:
        return clip(plus, minus, None if bound is None else 2**0.5 * bound)

    return widened


def plant() -> AbstractContextManager[None]:
    return all_replaced(
        {
            "opusim.training.protections.clipping:Clipping.factors": _wider,
            "opusim.training.protections.amplified_labels:bounded_factors": _wider,
            "opusim.training.convex.trainer:ConvexTrainer.open": _wider_residuals,
            "opusim.training.zeroth_order.trainer:loss_differences": _wider_differences,
        }
    )


FAULT = Fault(
    name="clip_too_wide",
    breaks="A record contributes up to sqrt(2) C.",
    trainers=STEPWISE,
    protections=("record", "label-amplified"),
    checks=("sum: mean, in records",),
    plant=plant,
)
