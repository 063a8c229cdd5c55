"""Losses with the error e = dL/dz_L that feedback alignment sends back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossValue:
    """Losses of a batch and their derivative.

    Attributes:
        per_record: Loss of each record, shape (batch,).
        output_gradient: dL_i/dh_L of each record's own loss with respect to the network's output,
            shape (batch, n_classes); not divided by the batch size.
    """

    per_record: Tensor
    output_gradient: Tensor


def cross_entropy(output: Tensor, labels: Tensor) -> LossValue:
    """-sum_k target_k log softmax(output)_k, whose derivative is softmax(output) - target.

    Args:
        output: Logits, shape (batch, n_classes).
        labels: Class numbers, int64, shape (batch,), for one-hot targets; or the targets, float, rows of sum 1, shape
            (batch, n_classes).
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
    """||output - target||^2 / 2, whose derivative is output - target.

    Args:
        output: Network outputs, shape (batch, n_classes).
        labels: As for `cross_entropy`.
    """
    if labels.is_floating_point():
        residual = output - labels
        return LossValue(per_record=0.5 * residual.square().sum(dim=1), output_gradient=residual)
    index = labels.unsqueeze(1)
    residual = output.clone()
    residual.scatter_add_(1, index, residual.new_full((), -1.0).expand(index.shape))
    return LossValue(per_record=0.5 * residual.square().sum(dim=1), output_gradient=residual)


LOSSES = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def cross_entropy_values(output: Tensor, labels: Tensor) -> Tensor:
    """The losses of `cross_entropy` at class numbers, shape (batch,), for whoever needs no derivative."""
    return torch.logsumexp(output, dim=1) - output.gather(1, labels.unsqueeze(1)).squeeze(1)


def squared_error_values(output: Tensor, labels: Tensor) -> Tensor:
    """The losses of `squared_error` at class numbers, shape (batch,): (||output||^2 - 2 output_y + 1) / 2."""
    chosen = output.gather(1, labels.unsqueeze(1)).squeeze(1)
    return 0.5 * output.square().sum(dim=1) - chosen + 0.5


LOSS_VALUES = {"cross-entropy": cross_entropy_values, "squared-error": squared_error_values}
