"""Faults of what a record contributes to a step: clips, sums and divisors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.support.faults.base import FEEDBACKS, STEPWISE, Fault, all_replaced, replaced

WINDOW = 4
_RECORD, _LABELS = (
    "opusim.training.protections.record:RecordGradients",
    "opusim.training.protections.amplified_labels:AmplifiedLabels",
)


def _each_layer_to_c(before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def factors(self: Any, squares: Tensor) -> Tensor:
        return (self._clip_norm / squares.sqrt().clamp_min(1e-30)).clamp(max=1.0)

    return factors


def _of_the_mean(factors: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def found(self: Any, squares: Tensor) -> Tensor:
        if not squares.numel():
            return squares
        return factors(self, squares.sqrt().mean(dim=1, keepdim=True).square()).expand_as(squares)

    return found


def _wider(clip: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: clip(*values[:-1], 2**0.5 * values[-1])


def _wider_residuals(opens: Callable[..., None]) -> Callable[..., None]:
    def widened(self: Any, *arguments: Any) -> None:
        opens(self, *arguments)
        self.objective = replace(self.objective, clip=2**0.5 * self.objective.clip)

    return widened


def _wider_differences(clip: Callable[..., Any]) -> Callable[..., Any]:
    return lambda plus, minus, bound: clip(plus, minus, None if bound is None else 2**0.5 * bound)


def _without_a_clip(totals_of: Callable[..., list[list[Tensor]]]) -> Callable[..., list[list[Tensor]]]:
    def summed(uses: Any, *options: Any, **named: Any) -> list[list[Tensor]]:
        return [
            [
                use.delta.sum(dim=(0, 1)) if each is use.bias else total
                for each, total in zip(use.wrt, own, strict=True)
            ]
            for (use, _), own in zip(uses, totals_of(uses, *options, **named), strict=True)
        ]

    return summed


def _with_earlier_sums(finish: Callable[..., None]) -> Callable[..., None]:
    def finished(self: Any, total: Tensor, **options: Any) -> None:
        window = self.__dict__.setdefault("window", [])
        window.append(total.clone())
        del window[:-WINDOW]
        total += sum(window[:-1])
        finish(self, total, **options)

    return finished


def _by_batch(set_gradients: Callable[..., None]) -> Callable[..., None]:
    def divided(self: Any, parts: Any, **options: Any) -> None:
        found, stated = list(parts), self._divisor
        self._divisor = float(max(sum(part.records for part in found), 1))
        try:
            set_gradients(self, found, **options)
        finally:
            self._divisor = stated

    return divided


_WIDE = {
    "opusim.training.protections.clipping:Clipping.factors": _wider,
    "opusim.training.protections.amplified_labels:bounded_factors": _wider,
    "opusim.training.convex.trainer:ConvexTrainer.open": _wider_residuals,
    "opusim.training.zeroth_order.trainer:loss_differences": _wider_differences,
}
FAULTS = (
    Fault(
        name="clipped_by_layer",
        breaks="Each of L layers is clipped to C by itself, so that a record contributes up to sqrt(L) C.",
        trainers=(*FEEDBACKS, "ulr"), checks=("contribution: norm over layers",),
        plant=lambda: replaced(f"{_RECORD}._factors", _each_layer_to_c),
    ),
    Fault(
        name="clip_too_wide", breaks="A record contributes up to sqrt(2) C.", trainers=STEPWISE,
        protections=("record", "label-amplified"), checks=("sum: mean, in records",),
        plant=lambda: all_replaced(_WIDE),
    ),
    Fault(
        name="divided_by_realised_size",
        breaks="The noisy sum is divided by the batch's own size, which tells that size.",
        trainers=(*FEEDBACKS, "ulr"), protections=("record", "label-amplified"),
        checks=("batch size: variance",),
        plant=lambda: all_replaced({f"{one}.set_gradients": _by_batch for one in (_RECORD, _LABELS)}),
    ),
    Fault(
        name="clipped_together",
        breaks="All records of a batch have the factor of their mean norm, so that a long one exceeds the clip.",
        trainers=FEEDBACKS, checks=("records: contribution",),
        plant=lambda: replaced(f"{_RECORD}._factors", _of_the_mean), small_batches=True,
    ),
)  # fmt: skip
OF_ONE_RUN = (
    Fault(
        name="bias_unclipped",
        breaks="The clip is applied to the weights, and the biases' sums are those of unclipped contributions.",
        trainers=FEEDBACKS,
        checks=("contribution: norm over layers",),
        plant=lambda: replaced(
            "opusim.training.networks.contributions.uses:LinearUse.totals_of", _without_a_clip
        ),
    ),
    Fault(
        name="averaged_before_noise",
        breaks=f"The noise of a step covers the sums of the last {WINDOW}, so that a record counts {WINDOW} times.",
        trainers=(*FEEDBACKS, "ulr"),
        checks=("contribution: norm over layers",),
        plant=lambda: replaced(f"{_RECORD}._finish", _with_earlier_sums),
    ),
)
