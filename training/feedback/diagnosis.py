"""Say how well feedback works: compare it with backpropagation on one batch, and with no feedback on the first batches.

On a batch: alignment with backpropagation, share shown, signal to noise, frames. On the first batches: the losses of a
copy in which only what follows the last point learns.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opusim.devices.usage import Usage
from opusim.tables import as_records, column_widths, output_width
from opusim.training.feedback.choice import starting_at
from opusim.training.feedback.layout import Slice
from opusim.training.feedback.projection import Projection
from opusim.training.networks.record_independence import preserved_generators

BATCHES = 128
"""Batches that a control follows unless told otherwise. Good feedback may be behind for the first 64, while the top
learns how frequent each class or token is."""
LEAST_BATCHES = 16
_STANDARD_ERRORS, _SHARE, _LEAST_LEARNT = 3.0, 0.03, 0.1


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A backward pass's projected rows and readings, what each call of a point received, and the device's usage."""

    rows: Tensor
    reading: Tensor
    feedback: list[Tensor]
    used: Usage


@dataclass(frozen=True, kw_only=True)
class PointDiagnosis:
    """What one feedback point receives.

    Attributes:
        name: The point.
        signal_alignment: Cosine of its feedback with the true gradient dL/dh, over the batch; in [-1, 1].
        update_alignment: Cosine of the gradients of its block's parameters with those of backpropagation; in [-1, 1],
            NaN if the block has no parameters.
        signal_to_noise: Root mean square of its reading without noise over the noise's standard deviation; infinite
            without noise.
        scale: Root mean square of its output. Feedback that is not aligned lets it grow from point to point.
        change: Distance of its output from that of the point before, over the norm of the latter; near 0, the depth
            between them is unused. NaN at the first point and where the shapes differ.
    """

    name: str
    signal_alignment: float
    update_alignment: float
    signal_to_noise: float
    scale: float
    change: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How feedback compares with backpropagation on one batch; prints as a table.

    Attributes:
        points: One entry for each call of a point, from the input to the output.
        shown: Share of the entries of the error that the device is shown, in [0, 1]; 1 for a real projection.
        rows: Rows that are projected in a step.
        frames: Frames of the device in a step; 0 without a device.
        seconds: Device time of a step, s.
        start: Name of the layer that `start_from_feedback` suits and has not set, or None.
    """

    points: tuple[PointDiagnosis, ...]
    shown: float
    rows: int
    frames: int
    seconds: float
    start: str | None = None

    def __str__(self) -> str:
        columns = [
            "feedback point",
            "signal alignment",
            "update alignment",
            "signal to noise",
            "scale",
            "change",
        ]
        cells = [
            [
                p.name,
                *(f"{value:+.3f}" for value in (p.signal_alignment, p.update_alignment)),
                *(
                    f"{value:.3g}" if math.isfinite(value) else "-"
                    for value in (p.signal_to_noise, p.scale, p.change)
                ),
            ]
            for p in self.points
        ]
        device = (
            f" and {self.frames:,} frames a step ({self.seconds:.3g} s of device time)"
            if self.frames
            else " a step"
        )
        step = f"{self.rows:,} rows{device}, {self.shown:.0%} of the entries shown"
        if self.start is not None:
            step += f"\ntry {starting_at(self.start)}"
        widths = column_widths([columns, *cells], output_width())
        if widths is None:
            return f"{as_records('', columns, cells)}\n{step}"
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [columns, *cells]
        ]
        return "\n".join([*lines, step])


def cosine(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Return the cosine of two lists of tensors, each seen as one vector; None counts as zeros. NaN if one is 0."""
    dot = norm_1 = norm_2 = 0.0
    for a, b in zip(first, second, strict=True):
        norm_1 += 0.0 if a is None else float(a.double().square().sum())
        norm_2 += 0.0 if b is None else float(b.double().square().sum())
        if a is not None and b is not None:
            dot += float((a.double() * b.double()).sum())
    return dot / math.sqrt(norm_1 * norm_2) if norm_1 * norm_2 else math.nan


def compared(
    calls: Sequence[tuple[str, Tensor]],
    blocks: Sequence[Sequence[bool]],
    found: Sequence[Tensor | None],
    true: Sequence[Tensor | None],
    reference: Sequence[Tensor | None],
    *,
    seen: Reading,
    projection: Projection,
    slices: Sequence[Slice],
    start: str | None,
) -> Diagnosis:
    """Compare feedback with backpropagation.

    Args:
        calls: Name and output of each call of a point.
        blocks: Which parameters the block of each call has.
        found: The parameters' gradients with feedback.
        true: dL/dh of each call by backpropagation.
        reference: The parameters' gradients by backpropagation.
        seen: The projected rows and their readings.
        projection: The projection that read them.
        slices: The outputs of B of each call of a point.
        start: See `Diagnosis`.
    """
    power = projection.noise_power(seen.rows).expand(seen.reading.shape[1])
    points = list[PointDiagnosis]()
    before: Tensor | None = None
    for part, (name, h), block, gradient, feedback in zip(
        slices, calls, blocks, true, seen.feedback, strict=True
    ):
        after = h.detach().double()
        change = math.nan
        if before is not None and before.shape == after.shape:
            change = float((after - before).norm() / before.norm())
        before = after
        reading = seen.reading[:, part.offset : part.end].double()
        noise, ratio = float(power[part.offset : part.end].double().mean()), math.inf
        if noise:
            ratio = math.sqrt(max(float(reading.square().mean()) - noise, 0.0) / noise)
        points.append(
            PointDiagnosis(
                name=name,
                signal_alignment=cosine([feedback], [gradient]),
                update_alignment=cosine(
                    [g for g, own in zip(found, block, strict=True) if own],
                    [g for g, own in zip(reference, block, strict=True) if own],
                ),
                signal_to_noise=ratio,
                scale=float(after.square().mean().sqrt()),
                change=change,
            )
        )
    return Diagnosis(
        points=tuple(points),
        shown=projection.shown(seen.rows),
        rows=len(seen.rows),
        frames=seen.used.frames,
        seconds=seen.used.seconds,
        start=start,
    )


class Control:
    """A copy of a model and its optimizer without feedback (gain = 0), trained on the same batches from the same start.

    After `batches` batches, the losses of the last quarter are compared. Feedback counts as worse than none if the mean
    loss is higher by three standard errors of the batches' differences, and by 3 % of what the copy has learnt.

    Args:
        feedback: A `opusim.training.feedback.points.FeedbackAlignment`, before its first step.
        optimizer: Its optimizer.
        batches: Batches until the comparison, at least 16.

    Raises:
        TypeError, RuntimeError: The model or the optimizer cannot be copied.
    """

    def __init__(self, feedback: Any, optimizer: torch.optim.Optimizer, *, batches: int = BATCHES) -> None:
        if batches < LEAST_BATCHES:
            raise ValueError(f"batches = {batches}: must be at least {LEAST_BATCHES}")
        self._feedback, self._optimizer = feedback, optimizer
        copied, self._copied_optimizer = deepcopy((feedback, optimizer))
        copied.gain = 0.0
        self._copy: Any = copied  # None once it was compared
        self._batches = batches
        self._with: list[float] = []
        self._without: list[float] = []

    @property
    def running(self) -> bool:
        """Whether the comparison is still to come."""
        return self._copy is not None

    def follow(self, loss: Callable[[nn.Module], Tensor], found: Tensor) -> None:
        """Train the copy on a batch; warn if this was the last one and feedback is worse than none.

        Generators of random numbers are left as they were. Afterwards, further calls do nothing.

        Args:
            loss: Returns a model's mean loss on the batch.
            found: The loss of the model with feedback on this batch, before its update.

        Warns:
            UserWarning: Feedback is worse than none; says what to try.
        """
        copied = self._copy
        if copied is None:
            return
        groups = zip(self._copied_optimizer.param_groups, self._optimizer.param_groups, strict=True)
        for own, given in groups:  # a schedule changes rates
            own["lr"] = given["lr"]
        place = next(copied.parameters()).device
        with preserved_generators(place), torch.enable_grad():
            self._copied_optimizer.zero_grad()
            value = loss(copied.model)
            value.backward()
            self._copied_optimizer.step()
        self._with.append(float(found.detach()))
        self._without.append(float(value.detach()))
        if len(self._with) < self._batches:
            return
        self._copy = None
        if is_worse(self._with, self._without):
            last, chosen = self._batches // 4, self._feedback.chosen
            reached, without = (statistics.fmean(losses[-last:]) for losses in (self._with, self._without))
            start = self._feedback.unstarted
            remedies = [
                *([] if start is None else [starting_at(start)]),
                *(["normalised=True"] if not chosen["normalised"] else []),
                *(["fewer points"] if len(chosen["points"]) > 1 else []),
                *(["less noise of the device"] if self._feedback.noisy_device is not None else []),
                "a lower learning rate",
                "or train without feedback",
            ]
            warnings.warn(
                f"feedback is worse than none: over batches {self._batches - last + 1} to {self._batches} the loss is "
                f"{reached:.4g}, and {without:.4g} in a copy in which only what follows the last point learns "
                f"(gain=0); try {', '.join(remedies)}",
                stacklevel=2,
            )


def is_worse(with_feedback: Sequence[float], without: Sequence[float]) -> bool:
    """Return whether losses with feedback exceed those of the control in the last quarter of batches; see `Control`."""
    last = len(without) // 4
    differences = [a - b for a, b in zip(with_feedback[-last:], without[-last:], strict=True)]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / last**0.5
    start = statistics.fmean(without[: max(last // 4, 1)])
    learnt = start - statistics.fmean(without[-last:])
    return mean > _STANDARD_ERRORS * error and mean > _SHARE * max(learnt, _LEAST_LEARNT * abs(start))
