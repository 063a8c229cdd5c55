"""What the data say about a direction: each record's loss on its two sides, clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Differences:
    """A batch's loss differences along one direction.

    Attributes:
        values: l_i^+ - l_i^-, clipped to [-C, C] where there is a C, float64, shape (batch,).
        non_finite: Records with a loss that is no number, or infinite, on either side.
        clipped: Records whose difference lay outside [-C, C].
    """

    values: Tensor
    non_finite: int
    clipped: int


def loss_differences(plus: Tensor, minus: Tensor, clip: float | None) -> Differences:
    """clip(l_i^+ - l_i^-, -C, C), each record by itself.

    A loss that is NaN or infinite counts as the worst: on the plus side the difference is C, on the minus side -C, on
    both 0. Without a C such a record counts as 0. So |value| <= C whatever the model does.

    Args:
        plus: Losses at theta + phi z, shape (batch,).
        minus: Losses at theta - phi z, shape (batch,).
        clip: C > 0, or None.
    """
    bad_plus, bad_minus = ~torch.isfinite(plus), ~torch.isfinite(minus)
    bad = bad_plus | bad_minus
    values = torch.where(bad, 0.0, plus.double() - minus.double())
    outside = 0
    if clip is not None:
        outside = int((values.abs() > clip).sum())
        values = values.clamp(-clip, clip)
        values = values + clip * (bad_plus.double() - bad_minus.double())
    return Differences(values=values, non_finite=int(bad.sum()), clipped=outside)
