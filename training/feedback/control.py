"""Check in the first batches of training whether feedback is worse than none: a copy in which only the top learns."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from training.networks.record_independence import preserved_generators

if TYPE_CHECKING:
    from training.feedback.points import FeedbackAlignment

BATCHES = 64
"""Batches that a check takes unless told otherwise."""
LEAST_BATCHES = 16
_STANDARD_ERRORS, _SHARE = 3.0, 0.1


class Control:
    """A copy of a model and its optimizer without feedback (gain = 0), trained on the same batches from the same start.

    After so many batches the losses of the last quarter are compared. Feedback counts as worse than none if the mean
    loss is higher by three standard errors of the batches' differences, and by a tenth of what the copy has learnt.

    Args:
        feedback: The model, before its first step.
        optimizer: Its optimizer.
        batches: Batches until the comparison, at least 16.

    Raises:
        TypeError, RuntimeError: The model or the optimizer cannot be copied.
    """

    def __init__(
        self, feedback: FeedbackAlignment, optimizer: torch.optim.Optimizer, *, batches: int = BATCHES
    ) -> None:
        if batches < LEAST_BATCHES:
            raise ValueError(f"batches = {batches}: must be at least {LEAST_BATCHES}")
        self._feedback, self._optimizer = feedback, optimizer
        copied, self._copied_optimizer = deepcopy((feedback, optimizer))
        copied.gain = 0.0
        self._copy: FeedbackAlignment | None = copied
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
        if len(self._with) == self._batches:
            self._copy = None
            if is_worse(self._with, self._without):
                warnings.warn(self._line(), stacklevel=2)

    def _line(self) -> str:
        last = self._batches // 4
        reached, without = (statistics.fmean(losses[-last:]) for losses in (self._with, self._without))
        chosen = self._feedback.chosen
        several, plain = len(chosen["points"]) > 1, not chosen["normalised"]
        remedies = [
            *(["normalised=True"] if plain else []),
            *(["fewer points"] if several else []),
            "a lower learning rate",
            "or train without feedback",
        ]
        return (
            f"feedback is worse than none: over batches {self._batches - last + 1} to {self._batches} the loss is "
            f"{reached:.4g}, and {without:.4g} in a copy in which only what follows the last point learns (gain=0); "
            f"try {', '.join(remedies)}"
        )


def is_worse(with_feedback: Sequence[float], without: Sequence[float]) -> bool:
    """Whether losses with feedback are higher than without in the last quarter of the batches; see `Control`.

    Args:
        with_feedback: Losses of the batches in order, before each update.
        without: The same of the control.
    """
    last = len(without) // 4
    differences = [a - b for a, b in zip(with_feedback[-last:], without[-last:], strict=True)]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / last**0.5
    start = statistics.fmean(without[: max(last // 4, 1)])
    learnt = start - statistics.fmean(without[-last:])
    return mean > _STANDARD_ERRORS * error and mean > _SHARE * max(learnt, _SHARE * abs(start))
