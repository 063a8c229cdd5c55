"""The geometry of label noise: a positive definite matrix over a layer's inputs, and its leverages.

P = sum_r w_r h_r h_r^T + lambda I over public rows h_r, which include the bias's constant 1; lambda is a stated share
of the mean of the sum's diagonal. The leverage of a row is h^T P^-1 h, computed in float64. The noise is drawn with the
same factor L (P = L L^T) from which the leverages are computed.
Source: docs/privacy-labels.md, sections 1 and 3 (leverage scores).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOOR_OF_SINGLE_PRECISION = 1e-4
"""Least lambda, over the mean of the diagonal, at which the sum may be rounded to float32: 1,600 times its rounding."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """P by its Cholesky factor.

    Attributes:
        factor: L, lower triangular, float64, shape (d, d).
    """

    factor: Tensor

    @classmethod
    def of_rows(
        cls, rows: Tensor, *, weights: Tensor | None = None, floor: float, scale: float = 1.0
    ) -> Metric:
        """Return P of public rows, times a number.

        Any positive definite matrix of public numbers is a sound P, as long as noise and leverages have the same
        factor. The sum is therefore formed in the precision of the rows if lambda is far above its rounding.

        Args:
            rows: h_r with the bias's constant, shape (n, d).
            weights: w_r >= 0, shape (n,), or None for 1 / n each.
            floor: lambda over the mean of the sum's diagonal, above 0.
            scale: Number that P is multiplied by, above 0.
        """
        if weights is None and floor >= _FLOOR_OF_SINGLE_PRECISION:
            p = (rows.t() @ rows).double().div_(len(rows))
            if torch.isfinite(p.diagonal()).all():
                factor, failed = torch.linalg.cholesky_ex(_with_ridge(p, floor).mul_(scale))
                if not failed:
                    return cls(factor=factor)
        h = rows.double()
        weighted = h / len(h) if weights is None else h * weights.double()[:, None]
        return cls(factor=torch.linalg.cholesky(_with_ridge(h.t() @ weighted, floor).mul_(scale)))

    @classmethod
    def of_lower(cls, p: Tensor) -> Metric:
        """Return P of its lower triangle, float64, shape (d, d)."""
        return cls(factor=torch.linalg.cholesky(p.tril() + p.tril(-1).t()))

    def leverages(self, rows: Tensor) -> Tensor:
        """Return h^T P^-1 h of each row, float64, shape (batch,).

        Args:
            rows: h with the bias's constant, shape (batch, d).
        """
        return self.whiten(rows).square().sum(dim=1)

    def whiten(self, rows: Tensor) -> Tensor:
        """Return L^-1 h of each row, float64, shape (batch, d).

        Args:
            rows: h with the bias's constant, shape (batch, d).
        """
        return torch.linalg.solve_triangular(self.factor, rows.double().t(), upper=False).t()

    def colour(self, white: Tensor) -> Tensor:
        """Return rows with covariance P, made of rows of independent N(0, 1), float64, shape (n, d)."""
        return white.double() @ self.factor.t()


def _with_ridge(p: Tensor, floor: float) -> Tensor:
    """Add lambda to the diagonal of a matrix, in place; returns it."""
    p.diagonal().add_(floor * p.diagonal().mean().clamp_min(torch.finfo(p.dtype).tiny))
    return p


def equalised_weights(rows: Tensor, *, rounds: int, floor: float) -> Tensor:
    """Return Kiefer-Wolfowitz weights of the D-optimal design, float64, sum 1, shape (n,).

    Each round multiplies w_r by lev_r / sum_k w_k lev_k; the largest leverage falls towards its minimum d. The
    weights depend only on public features.

    Args:
        rows: h_r with the bias's constant, shape (n, d).
        rounds: At least 0.
        floor: As in `Metric.of_rows`.
    """
    weights = rows.new_full((len(rows),), 1 / len(rows), dtype=torch.float64)
    for _ in range(rounds):
        weights = weights * Metric.of_rows(rows, weights=weights, floor=floor).leverages(rows)
        weights = weights / weights.sum()
    return weights
