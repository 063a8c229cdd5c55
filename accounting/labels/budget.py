"""What a step of noisy signals spends of each record's label, and the budget that limits the sum.

The step is mu-GDP for a label with mu from leverage scores (theorem label-leverage), and the run is B-GDP if every
record stops sending its signal before its sum of mu^2 exceeds B^2 (theorem label-budget).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from opusim import checks

_ROUNDING = 1e-9
"""Relative rounding of a sum of squares, charged to the record."""


class PerRecordBudget:
    """Keeps each record's sum of mu^2 within B^2 (theorem label-budget).

    A record that would exceed B keeps its noise and loses its signal: leaving it out would raise the leverage of the
    others. The decision rests on public numbers (mu is a maximum over labels), so it costs nothing itself.

    Args:
        budget_mu: B > 0.
        n_records: Number of records in the data set.
    """

    def __init__(self, *, budget_mu: float, n_records: int) -> None:
        checks.positive(budget_mu=budget_mu)
        checks.integer(minimum=1, n_records=n_records)
        self.budget_mu = float(budget_mu)
        self._spent = np.zeros(n_records)  # sum of mu^2, rounded up

    @property
    def spent(self) -> np.ndarray:
        """Sum of mu^2 per record, shape (n_records,); a copy. Public, like every mu."""
        return self._spent.copy()

    def charge(self, records: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Charge one step to the records that can pay, and say which those are.

        Call it before the step is computed, and set the signal of the others to 0 in every layer; their mu is then 0.

        Args:
            records: Indices of the batch's records, each at most once, shape (m,).
            mu: What the step would spend of each record, at least 0, shape (m,).

        Returns:
            Whether each record keeps its signal, shape (m,), bool.

        Raises:
            ValueError: An index twice or out of range, or a mu negative or NaN.
        """
        indices = np.asarray(records)
        checks.shape((None,), records=indices)
        checks.shape(indices.shape, mu=np.asarray(mu))
        if np.unique(indices).size != indices.size:
            raise ValueError(
                "records: one occurs twice in the batch; its leverages do not add up; sample without replacement"
            )
        if indices.size and not (indices.min() >= 0 and indices.max() < self._spent.size):
            raise ValueError(f"records: an index lies outside [0, {self._spent.size})")
        cost = np.square(np.asarray(mu, dtype=np.float64)) * (1 + _ROUNDING)
        if np.any(np.isnan(cost)) or np.any(np.asarray(mu) < 0):
            raise ValueError("mu: must be at least 0 and not NaN")
        total = self._spent[indices] + cost
        keeps = total <= self.budget_mu**2
        self._spent[indices[keeps]] = total[keeps] * (1 + 1e-15)
        return keeps

    def restore(self, spent: np.ndarray) -> None:
        """Restore what `spent` returned, from a checkpoint.

        Raises:
            ValueError: The number of records differs, or a sum lies above the budget or below 0.
        """
        values = np.asarray(spent, dtype=np.float64)
        checks.shape(self._spent.shape, spent=values)
        if not bool(np.all((values >= 0) & (values <= self.budget_mu**2 * (1 + _ROUNDING)))):
            raise ValueError(f"spent: must lie between 0 and budget_mu^2 = {self.budget_mu**2:g}")
        self._spent = values.copy()


def step_mu_bound(
    distances: Sequence[float | np.ndarray], scores: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """Return mu_I = sqrt(sum_l Delta_l^2 max_j lev_lIj / sigma_l^2), shape (m,): what a step spends at most.

    Theorem label-leverage with the readings fixed, since the divergence is jointly convex.

    Args:
        distances: Per layer, Delta_l, a number or one for each record, shape (m,): 2 tB for a signal scaled to a
            ball, `label_distance` without one, sqrt(2) for e = p - y at the output. Times
            max_j |phi'_Ij| if the noise is added after the slope.
        scores: Per layer, the leverages, shape (m, n) or (m, 1).
        sigmas: Per layer, above 0.
    """
    checks.positive(sigmas=sigmas)
    for distance in distances:
        checks.non_negative(distances=distance)
    terms = [
        np.square(distance) * score.max(axis=1) / sigma**2
        for distance, score, sigma in zip(distances, scores, sigmas, strict=True)
    ]
    return np.sqrt(np.sum(terms, axis=0))


def label_distance(projection: np.ndarray) -> float:
    """Return Delta = max_ab ||B_a - B_b||: the error is p - y, so two labels differ by B_b - B_a.

    Args:
        projection: B, one column a label, shape (n, labels).
    """
    checks.finite(projection=projection)
    checks.shape((None, None), projection=projection)
    if projection.shape[1] < 2:
        raise ValueError(f"projection has {projection.shape[1]} column: at least two labels are needed")
    pairs = combinations(range(projection.shape[1]), 2)
    return float(max(np.linalg.norm(projection[:, a] - projection[:, b]) for a, b in pairs))
