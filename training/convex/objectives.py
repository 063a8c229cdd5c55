"""Residuals of the convex objectives: what a record's logits leave to be desired, with a bound on its norm.

A record's gradient is x~ residual^T, of norm |x~| |residual|, so a bound on the residual is one on the gradient.
accounting.convex.constants has each residual's formula, its Lipschitz constant and its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.convex.constants import residual_bound
from training.convex.config import ConvexConfig
from training.networks.clipping import bounded_factors, finite_rows, row_norms


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective with its numbers.

    Attributes:
        name: squared, margin, one-against-rest or softmax.
        clip: C, or None where the residual bounds itself.
    """

    name: str
    clip: float | None

    @classmethod
    def of(cls, options: ConvexConfig) -> Objective:
        """The objective of a configuration."""
        return cls(name=options.objective, clip=options.residual_clip)

    def residual(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The clipped residual of each record, shape (batch, k); 0 for one whose logits are not finite.

        Args:
            logits: Shape (batch, k).
            labels: Class numbers, shape (batch,).
        """
        target = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
        residual = _RESIDUALS[self.name](logits, target)
        if self.clip is not None and self.name == "one-against-rest":  # scalar by scalar, which stays convex
            bound = self.clip / math.sqrt(logits.shape[1])
            residual = residual.clamp(-bound, bound)
        norms = row_norms(residual)
        residual = finite_rows(residual, torch.isfinite(norms))
        if self.clip is None or self.name == "one-against-rest":
            return residual
        return (residual * bounded_factors(norms, self.clip).unsqueeze(1)).to(residual.dtype)

    def bound(self, n_classes: int) -> float:
        """C: the largest norm of a residual, and so of a record's gradient."""
        return residual_bound(self.name, self.clip, n_classes)


def _squared(logits: Tensor, target: Tensor) -> Tensor:
    return logits - target


def _margin(logits: Tensor, target: Tensor) -> Tensor:
    """From the nearest point of the box z_y >= 1, z_c <= 0."""
    return torch.where(target > 0, (logits - 1.0).clamp_max(0.0), logits.clamp_min(0.0))


def _one_against_rest(logits: Tensor, target: Tensor) -> Tensor:
    return torch.sigmoid(logits) - target


def _softmax(logits: Tensor, target: Tensor) -> Tensor:
    return torch.softmax(logits, dim=1) - target


_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": _squared,
    "margin": _margin,
    "one-against-rest": _one_against_rest,
    "softmax": _softmax,
}
