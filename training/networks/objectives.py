"""What a module is trained for: the loss of each record, and the figures that make sense for its targets.

Targets: class numbers (n,); tokens (n, T), where -100 marks padding; real numbers (n, k); labels in {0, 1} (n, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from opusim.errors import ConfigError
from opusim.training.config.sections import LOSS_NAMES
from opusim.training.data.dataset import PADDING, Target, in_single_precision
from opusim.training.networks.user_code import load_object

Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of the records, shape (batch,), from outputs and targets."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss on one kind of target.

    Attributes:
        target: Kind of the targets.
        loss: Losses of the records.
        name: Name of the loss, or its import path.
    """

    target: Target
    loss: Loss
    name: str

    @classmethod
    def named(cls, name: str, target: Target) -> Objective:
        """Return the objective of a loss and a kind of target.

        Raises:
            ConfigError: The loss does not take such targets, or cannot be imported.
        """
        if name not in LOSS_NAMES:
            return cls(target=target, loss=load_object(name, key="loss"), name=name)
        if (name, target) not in _LOSSES:
            fitting = " or ".join(repr(loss) for loss, kind in _LOSSES if kind == target)
            raise ConfigError(
                "configuration",
                "loss",
                f"{name!r} takes no {_WORDS[target]}, which the data have; use {fitting}",
            )
        return cls(target=target, loss=_LOSSES[name, target], name=name)

    def per_record(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each record, shape (batch,).

        Args:
            output: What the module gives: (batch, k), for tokens (batch, T, k).
            y: Targets; for classes also probabilities of the classes, float, shape (batch, k).

        Raises:
            ValueError: A user-supplied loss returns another shape.
        """
        losses = self.loss(output.to(torch.promote_types(output.dtype, torch.float32)), y)
        if losses.shape != (len(output),):
            raise ValueError(
                f"loss = {self.name!r} returns {tuple(losses.shape)} for {len(output)} records; it must return a loss "
                f"for each record, shape ({len(output)},)"
            )
        return losses

    def correct(self, output: Tensor, y: Tensor) -> tuple[Tensor, int]:
        """Return how many classes, tokens or labels are correct, int64, and of how many; 0 of 0 for real numbers."""
        if self.target == "real":
            return torch.zeros((), dtype=torch.int64, device=y.device), 0
        if self.target == "labels":
            return ((output > 0) == (y > 0.5)).sum(), y.numel()
        right = (output.argmax(dim=-1) == y).sum()  # never at the padding, which is below 0
        return right, int((y != PADDING).sum()) if self.target == "tokens" else y.numel()


def measure(
    objective: Objective, outputs: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, at_once: int
) -> dict[str, float]:
    """Measure a model on records, some at a time.

    Args:
        objective: Loss and kind of target.
        outputs: Returns the model's outputs for records.
        x: Records, at least one.
        y: Their targets.
        at_once: Records of one forward pass.

    Returns:
        "loss", the mean over records, and for classes, tokens and labels "accuracy", the share of correct decisions;
        for tokens under cross-entropy "bits_per_token"; for reals "rmse", over all entries, and "r2", 1 minus the
        squared error over that of each column's mean, if the targets vary.
    """
    losses, correct, judged, tokens, bits, squares = [], 0, 0, 0, 0.0, 0.0
    for records, targets in zip(x.split(at_once), y.split(at_once), strict=True):
        output = outputs(in_single_precision(records))
        losses.append(objective.per_record(output, targets))
        right, number = objective.correct(output, targets)
        correct, judged = correct + int(right), judged + number
        if objective.target == "tokens":
            counts = (targets != PADDING).sum(dim=1)
            tokens, bits = tokens + int(counts.sum()), bits + float((losses[-1].double() * counts).sum())
        if objective.target == "real":
            squares += float((output.double() - targets).square().sum())
    figures = {"loss": float(torch.cat(losses).mean(dtype=torch.float64))}
    if judged:
        figures["accuracy"] = correct / judged
    if tokens and objective.name == "cross-entropy":
        figures["bits_per_token"] = bits / tokens / math.log(2)
    if objective.target == "real":
        figures |= _regression(squares, y)
    return figures


def _regression(squares: float, y: Tensor) -> dict[str, float]:
    figures = {"rmse": math.sqrt(squares / y.numel())}
    total = float((y.double() - y.double().mean(dim=0)).square().sum())
    return {**figures, "r2": 1 - squares / total} if total > 0 else figures


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def _token_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean over each record's positions that have a target."""
    losses = functional.cross_entropy(output.transpose(1, 2), y, ignore_index=PADDING, reduction="none")
    return losses.sum(dim=1) / (y != PADDING).sum(dim=1).clamp(min=1)


def _squared_error(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).flatten(1).square().sum(dim=1)


def _squared_error_of_classes(output: Tensor, y: Tensor) -> Tensor:
    targets = y if y.is_floating_point() else functional.one_hot(y, output.shape[1])
    return _squared_error(output, targets)


def _binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, y, reduction="none").sum(dim=1)


_LOSSES: dict[tuple[str, Target], Loss] = {
    ("cross-entropy", "class"): _cross_entropy,
    ("squared-error", "class"): _squared_error_of_classes,
    ("cross-entropy", "tokens"): _token_cross_entropy,
    ("squared-error", "real"): _squared_error,
    ("binary-cross-entropy", "labels"): _binary_cross_entropy,
    ("squared-error", "labels"): _squared_error,
}
_WORDS: dict[Target, str] = {
    "class": "class numbers",
    "tokens": "tokens",
    "real": "real numbers",
    "labels": "labels that are 0 or 1",
}
