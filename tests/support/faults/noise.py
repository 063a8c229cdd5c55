"""Faults of the noise that guarantees rest on."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream
from tests.support.faults.base import FEEDBACKS, STEPWISE, Fault, all_replaced, replaced
from tests.support.faults.streams import Wrapped, changed_noise, credited_noise, on_release

BY_STEP = ("record", "label-amplified", "last-iterate")
RELEASE = ("release",)


def drawn(change: Callable[[Tensor], Tensor]) -> Callable[[NoiseStream], NoiseStream]:
    """Return streams whose draws are changed."""

    class Changed(Wrapped):
        def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
            return change(super().normal(shape, device=device))

    return Changed


def always(kind: Callable[[NoiseStream], NoiseStream]) -> Callable[[str, NoiseStream], NoiseStream]:
    return lambda mode, stream: kind(stream)


def shared(pair: Callable[[Tensor], Tensor]) -> Callable[[NoiseStream], NoiseStream]:
    """Return streams that draw half of the numbers, of which `pair` makes twice as many."""

    class Shared(Wrapped):
        def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
            size = math.prod(shape)
            return pair(super().normal((-(-size // 2),), device=device))[:size].reshape(tuple(shape))

    return Shared


def _but_a_quarter(draw: Tensor) -> Tensor:
    draw.view(-1)[math.ceil(0.75 * draw.numel()) :] = 0.0
    return draw


class Stepwise(Wrapped):
    """Remembers its step and what it drew."""

    def __init__(self, stream: NoiseStream) -> None:
        super().__init__(stream)
        self.kept: list[Tensor] = []
        self.step, self.next = 0, 0

    def seek(self, step: int) -> None:
        super().seek(step)
        self.step, self.next = step, 0

    def again(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        """Draw, or repeat what was drawn at this place."""
        if self.next == len(self.kept):
            self.kept.append(super().normal(shape, device=device))
        self.next += 1
        return self.kept[self.next - 1].clone()


class NotTenth(Stepwise):
    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
        draw = super().normal(shape, device=device)
        return draw.zero_() if self.step % 10 == 9 else draw


class OnceForAll(Stepwise):
    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
        return self.again(shape, device)


class OnceForTwo(OnceForAll):
    def seek(self, step: int) -> None:
        super().seek(step)
        if step % 2 == 0:
            self.kept.clear()


def _constant(mode: str, stream: NoiseStream) -> NoiseStream:
    return SeededStream(0, "constant") if mode == "release" else stream


def _begun_anew(noise: list[Tensor]) -> list[Tensor]:
    numbers = max(noise, key=Tensor.numel).flatten()
    return [numbers[: own.numel()].clone().view_as(own) for own in noise]


def _first_layer_only(noise: list[Tensor]) -> list[Tensor]:
    return [own if number < 2 else own.zero_() for number, own in enumerate(noise)]  # a weight and a bias


def _wide(init: Callable[..., None]) -> Callable[..., None]:
    def initialised(self: Any, source: Any, coefficients: tuple[float, ...], **options: Any) -> None:
        init(self, source, tuple(c / coefficients[0] for c in coefficients), **options)

    return initialised


def _without_final(opens: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *arguments: Any) -> None:
        opens(self, *arguments)
        if isinstance(self.noise, SystemStream):
            self.final_std = 0.0

    return made


def _only_for_records(write: Callable[..., None]) -> Callable[..., None]:
    def written(self: Any, parts: Any, **others: Any) -> None:
        before, found = self._noise_std, list(parts)
        self._noise_std = before if any(part.records for part in found) else 0.0
        write(self, found, **others)
        self._noise_std = before

    return written


def _percentile(largest: Callable[[Tensor], float]) -> Callable[[Tensor], float]:
    return lambda rows: min(largest(rows), float(rows.norm(dim=1).quantile(0.95)))


_WRITERS = tuple(
    f"opusim.training.protections.{writer}._write"
    for writer in ("record:RecordGradients", "amplified_labels:AmplifiedLabels")
)
FAULTS = (
    Fault(
        name="noise_too_small", breaks="The credited noise has 1 / sqrt(2) of its standard deviation.",
        trainers=STEPWISE, protections=BY_STEP, checks=("noise: variance",),
        plant=lambda: credited_noise(always(drawn(lambda draw: draw.mul_(0.5**0.5)))),
    ),
    Fault(
        name="noise_reused",
        breaks="Every second step repeats the noise of the step before, so that their difference has none.",
        trainers=STEPWISE, protections=("record", "label-amplified"), checks=("noise: steps 1 apart",),
        plant=lambda: credited_noise(always(OnceForTwo)),
    ),
    Fault(
        name="noise_same_in_every_run",
        breaks="Release mode draws its noise from a constant seed, so that anybody can take it off.",
        trainers=STEPWISE, protections=BY_STEP, modes=RELEASE, checks=("noise: any two steps",),
        plant=lambda: credited_noise(_constant),
    ),
    Fault(
        name="noise_shared_by_coordinates",
        breaks="Neighbouring coordinates have one noise, which their difference is free of.",
        trainers=STEPWISE, checks=("noise: coordinates of a step",),
        plant=lambda: credited_noise(always(shared(lambda half: half.repeat_interleave(2)))),
    ),
    Fault(
        name="noise_shared_by_parameters",
        breaks="The noise of a step begins anew for each parameter, so that differences of parameters have none.",
        trainers=FEEDBACKS, checks=("noise: two parameters",), plant=lambda: changed_noise(_begun_anew),
    ),
    Fault(
        name="biases_without_noise",
        breaks="Weights receive noise, biases do not, so that their sums are released as they are.",
        trainers=FEEDBACKS, checks=("noise: variance in a parameter",),
        plant=lambda: credited_noise(always(drawn(lambda draw: draw.zero_() if draw.dim() == 1 else draw))),
    ),
    Fault(
        name="last_layer_without_noise", breaks="Only the first layer receives noise.", trainers=FEEDBACKS,
        checks=("noise: variance in a parameter",), plant=lambda: changed_noise(_first_layer_only),
    ),
    Fault(
        name="noise_of_wide_columns",
        breaks="The first coefficient of correlated noise is 1, so that a record counts more than accounted.",
        trainers=(*FEEDBACKS, "ulr"), checks=("noise: variance",),
        plant=lambda: replaced("opusim.randomness.streams:CorrelatedStream.__init__", _wide),
        settings=("protection.bands=4",),
    ),
    Fault(
        name="noise_missing_on_release", breaks="Only release mode adds no noise.", trainers=STEPWISE,
        protections=BY_STEP, modes=RELEASE, checks=("noise: variance",),
        plant=lambda: credited_noise(on_release(drawn(Tensor.zero_))),
    ),
    Fault(
        name="noise_halved_on_release", breaks="Only release mode has half of the stated standard deviation.",
        trainers=STEPWISE, protections=BY_STEP, modes=RELEASE, checks=("noise: variance",),
        plant=lambda: credited_noise(on_release(drawn(lambda draw: draw.mul_(0.5)))),
    ),
    Fault(
        name="noise_reused_on_release",
        breaks="Only release mode draws its noise once, and adds it at every step.", trainers=STEPWISE,
        protections=BY_STEP, modes=RELEASE, checks=("noise: any two steps",),
        plant=lambda: credited_noise(on_release(OnceForAll)),
    ),
    Fault(
        name="final_noise_missing_on_release",
        breaks="Only release mode leaves out the final noise, which hides the records of the last batch.",
        trainers=("convex",), protections=("last-iterate",), modes=RELEASE,
        checks=("noise: variance in a step",),
        plant=lambda: replaced("opusim.training.convex.trainer:ConvexTrainer.open", _without_final),
    ),
    Fault(
        name="steps_without_noise", breaks="Every tenth step has no noise.", trainers=STEPWISE,
        protections=BY_STEP, checks=("noise: variance in a step",),
        plant=lambda: credited_noise(always(NotTenth)),
    ),
    Fault(
        name="part_without_noise", breaks="A quarter of the numbers of every parameter has no noise.",
        trainers=FEEDBACKS, checks=("noise: variance in a part",),
        plant=lambda: credited_noise(always(drawn(_but_a_quarter))),
    ),
    Fault(
        name="part_repeated",
        breaks="One half of every parameter has the noise of the other, so that their difference has none.",
        trainers=FEEDBACKS, checks=("noise: coordinates of a step",),
        plant=lambda: credited_noise(always(shared(lambda half: torch.cat([half, half])))),
    ),
    Fault(
        name="empty_batches_without_noise",
        breaks="A batch without records gets no noise, which tells that it had none.",
        trainers=(*FEEDBACKS, "ulr"), protections=("record", "label-amplified"),
        checks=("empty batches: variance", "small batches: noise of a step"),
        plant=lambda: all_replaced(dict.fromkeys(_WRITERS, _only_for_records)), small_batches=True,
    ),
)  # fmt: skip
HALVED = Fault(
    name="noise_halved", breaks="The credited noise has half of its standard deviation.", trainers=STEPWISE,
    checks=("noise: variance",), plant=lambda: credited_noise(always(drawn(lambda draw: draw.mul_(0.5)))),
)  # fmt: skip
LEVERAGE = Fault(
    name="leverage_of_most_records",
    breaks="The noise is that of the leverage which 95 % of the records have, and not of the largest.",
    trainers=("ridge",), protections=("label-release",), checks=("noise: variance",),
    plant=lambda: replaced("opusim.training.protections.released_model:largest_norm", _percentile),
)  # fmt: skip
