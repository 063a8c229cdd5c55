"""Activations with closed-form derivatives, and losses per record, with and without derivatives.

An `Objective` is a loss on one kind of target, with the figures that fit this kind. Kinds of target: class numbers
(n,); tokens (n, T), where -100 marks padding; real numbers (n, k); labels in {0, 1} (n, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from opusim.errors import ConfigError
from opusim.training.config.sections import LOSS_NAMES
from opusim.training.data.dataset import PADDING, Target, in_single_precision
from opusim.training.networks.clipping import widest
from opusim.training.networks.user_code import load_object


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise activation phi and its derivative.

    Attributes:
        name: Name used in configurations.
        module: The torch module class that computes phi.
        function: phi(z), of the shape of z.
        multiply: Maps (signal, z, h = phi(z)) to signal phi'(z), in place and in one pass.
        slope_bounds: (inf |phi'|, sup |phi'|) over the real line: gamma_min and gamma_max of the PDFA
            paper, section 3.1.
    """

    name: str
    module: type[nn.Module]
    function: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    slope_bounds: tuple[float, float]


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation(
            name="tanh",
            module=nn.Tanh,
            function=torch.tanh,
            multiply=lambda s, z, h: torch.ops.aten.tanh_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="relu",
            module=nn.ReLU,
            function=torch.relu,
            multiply=lambda s, z, h: torch.ops.aten.threshold_backward(s, h, 0, grad_input=s),
            slope_bounds=(0.0, 1.0),
        ),
        Activation(
            name="sigmoid",
            module=nn.Sigmoid,
            function=torch.sigmoid,
            multiply=lambda s, z, h: torch.ops.aten.sigmoid_backward(s, h, grad_input=s),
            slope_bounds=(0.0, 0.25),
        ),
        # phi'' = (2 - z^2) N(z) = 0 at z = -sqrt(2), where phi' is smallest (-0.1289), and at sqrt(2), where it is
        # largest (1.1289); phi' = 0 at z = -0.7518, so inf |phi'| = 0.
        Activation(
            name="gelu",
            module=nn.GELU,
            function=nn.functional.gelu,
            multiply=lambda s, z, h: torch.ops.aten.gelu_backward(s, z, grad_input=s),
            slope_bounds=(0.0, 1.1289042),
        ),
        Activation(
            name="identity",
            module=nn.Identity,
            function=torch.positive,  # z itself
            multiply=lambda s, z, h: s,
            slope_bounds=(1.0, 1.0),
        ),
    )
}
"""Every activation by name."""


def activation_of(module: nn.Module) -> Activation:
    """Return the activation that a torch module computes; raise TypeError for others than those of opusim."""
    for activation in ACTIVATIONS.values():
        if type(module) is activation.module:
            if isinstance(module, nn.GELU) and module.approximate != "none":
                raise TypeError(
                    f"model: GELU(approximate={module.approximate!r}) has no closed-form derivative here; "
                    "use nn.GELU() in its exact form"
                )
            return activation
    supported = ", ".join(activation.module.__name__ for activation in ACTIVATIONS.values())
    raise TypeError(
        f"model: no closed-form layer gradient for {type(module).__name__}; "
        f"build the network from nn.Linear and the activations {supported}"
    )


@dataclass(frozen=True, kw_only=True)
class LossValue:
    """Losses of a batch and their derivative.

    Attributes:
        per_record: L_i of each record, shape (batch,).
        output_gradient: dL_i/dh_L, the error that feedback sends back, shape (batch, n_classes); not divided by the
            batch size.
    """

    per_record: Tensor
    output_gradient: Tensor


def cross_entropy(output: Tensor, labels: Tensor) -> LossValue:
    """-sum_k target_k log softmax(output)_k of logits (batch, k), whose derivative is softmax(output) - target.

    Labels are class numbers, int64, shape (batch,), or targets, float, rows of sum 1.
    """
    log_probabilities = torch.log_softmax(output, dim=1)
    if labels.is_floating_point():
        per_record = -(labels * log_probabilities).sum(dim=1)
        return LossValue(per_record=per_record, output_gradient=log_probabilities.exp().sub_(labels))
    index = labels.unsqueeze(1)
    gradient = log_probabilities.exp()
    gradient.scatter_add_(1, index, gradient.new_full((), -1.0).expand(index.shape))
    return LossValue(per_record=-log_probabilities.gather(1, index).squeeze(1), output_gradient=gradient)


def squared_error(output: Tensor, labels: Tensor) -> LossValue:
    """||output - target||^2 / 2, shape (batch, k), whose derivative is output - target; labels as `cross_entropy`."""
    if labels.is_floating_point():
        residual = output - labels
    else:
        index = labels.unsqueeze(1)
        residual = output.clone()
        residual.scatter_add_(1, index, residual.new_full((), -1.0).expand(index.shape))
    return LossValue(per_record=0.5 * residual.square().sum(dim=1), output_gradient=residual)


LOSSES = {"cross-entropy": cross_entropy, "squared-error": squared_error}
"""Losses with their derivative, by name."""


Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of the records, shape (batch,), from outputs and targets."""


def _chosen(output: Tensor, labels: Tensor) -> Tensor:
    return output.gather(1, labels.unsqueeze(1)).squeeze(1)


LOSS_VALUES: dict[str, Loss] = {
    "cross-entropy": lambda output, labels: torch.logsumexp(output, dim=1) - _chosen(output, labels),
    "squared-error": lambda output, labels: 0.5 * output.square().sum(dim=1) - _chosen(output, labels) + 0.5,
}
"""The losses of `LOSSES` at class numbers, without their derivative."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss of records, by its name or import path, on one kind of target."""

    target: Target
    loss: Loss
    name: str

    @classmethod
    def named(cls, name: str, target: Target) -> Objective:
        """Return the objective of a loss and a kind of target; raise ConfigError if they do not go together."""
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
        """Return the loss of each record, shape (batch,); raise ValueError if a user-supplied loss has another shape.

        Outputs have shape (batch, k), of tokens (batch, T, k). Targets of classes may be probabilities, shape (batch,
        k).
        """
        losses = self.loss(output.to(torch.promote_types(output.dtype, torch.float32)), y)
        if losses.shape != (len(output),):
            raise ValueError(
                f"loss = {self.name!r} returns {tuple(losses.shape)} for {len(output)} records; it must return a loss "
                f"for each record, shape ({len(output)},)"
            )
        return losses

    def correct(self, output: Tensor, y: Tensor) -> tuple[Tensor, int | Tensor]:
        """Return the number of correct classes, tokens or labels, and the number judged; 0 and 0 for real numbers.

        The first is an int64 scalar tensor; so is the second for tokens, and an int otherwise.
        """
        if self.target == "real":
            return torch.zeros((), dtype=torch.int64, device=y.device), 0
        if self.target == "labels":
            return ((output > 0) == (y > 0.5)).sum(), y.numel()
        right = (output.argmax(dim=-1) == y).sum()  # padding is below 0, so it never counts
        return right, (y != PADDING).sum() if self.target == "tokens" else y.numel()


def measure(
    objective: Objective, outputs: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, at_once: int
) -> dict[str, float]:
    """Measure a model on records, at least one, in batches of `at_once`.

    Returns "loss", the mean over records, and for classes, tokens and labels "accuracy", the share of correct
    decisions; for tokens under cross-entropy "bits_per_token"; for reals "rmse", over all entries, and "r2", 1 minus
    the squared error over that of each column's mean, if the targets vary.
    """
    losses = list[Tensor]()
    correct: int | Tensor = 0  # sums stay on a card until all batches ran
    judged: int | Tensor = 0
    bits: float | Tensor = 0.0
    squares: float | Tensor = 0.0
    for records, wanted in zip(x.split(at_once), y.split(at_once), strict=True):
        output = outputs(in_single_precision(records))
        targets, wide = wanted.to(output.device), widest(output.device)
        losses.append(objective.per_record(output, targets))
        right, number = objective.correct(output, targets)
        correct, judged = correct + right, judged + number
        if objective.target == "tokens":
            bits = bits + (losses[-1].to(wide) * (targets != PADDING).sum(dim=1)).sum()
        if objective.target == "real":
            squares = squares + (output.to(wide) - targets).square().sum()
    figures = {"loss": float(torch.cat(losses).cpu().mean(dtype=torch.float64))}
    if decisions := int(judged):
        figures["accuracy"] = int(correct) / decisions
        if objective.target == "tokens" and objective.name == "cross-entropy":
            figures["bits_per_token"] = float(bits) / decisions / math.log(2)
    if objective.target == "real":
        figures["rmse"] = math.sqrt(float(squares) / y.numel())
        total = float(((known := y.cpu().double()) - known.mean(dim=0)).square().sum())
        figures |= {"r2": 1 - float(squares) / total} if total > 0 else {}
    return figures


def _token_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean over each record's positions that have a target."""
    losses = functional.cross_entropy(output.transpose(1, 2), y, ignore_index=PADDING, reduction="none")
    return losses.sum(dim=1) / (y != PADDING).sum(dim=1).clamp(min=1)


def _squared_error(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).flatten(1).square().sum(dim=1)


_LOSSES: dict[tuple[str, Target], Loss] = {
    ("cross-entropy", "class"): partial(functional.cross_entropy, reduction="none"),
    ("squared-error", "class"): lambda output, y: _squared_error(
        output, y if y.is_floating_point() else functional.one_hot(y, output.shape[1])
    ),
    ("cross-entropy", "tokens"): _token_cross_entropy,
    ("squared-error", "real"): _squared_error,
    ("binary-cross-entropy", "labels"): lambda output, y: functional.binary_cross_entropy_with_logits(
        output, y, reduction="none"
    ).sum(dim=1),
    ("squared-error", "labels"): _squared_error,
}
_WORDS: dict[Target, str] = {
    "class": "class numbers",
    "tokens": "tokens",
    "real": "real numbers",
    "labels": "labels that are 0 or 1",
}
