"""Loss and accuracy of a model on records."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.config.run import LossName
from training.data import Split
from training.networks.losses import LOSSES

_CHUNK = 4096


def model_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs h_L for records, computed a few thousand at a time.

    Args:
        model: Takes (batch, d), gives (batch, n_classes).
        x: Shape (n, d).
    """
    with torch.no_grad():
        return torch.cat([model(chunk) for chunk in x.split(_CHUNK)])


def evaluate_split(model: nn.Module, split: Split, loss: LossName) -> dict[str, float]:
    """Mean loss and accuracy, as {"loss": ..., "accuracy": ...}; the accuracy lies in [0, 1].

    Args:
        model: Takes (batch, d), gives (batch, n_classes).
        split: At least one record.
        loss: Which loss.
    """
    output = model_outputs(model, split.x)
    per_record = LOSSES[loss](output, split.y).per_record
    return {
        "loss": float(per_record.mean(dtype=torch.float64)),
        "accuracy": float((output.argmax(dim=1) == split.y).double().mean()),
    }
