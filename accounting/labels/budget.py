"""A preset budget per record for its label: which records still send their signal, and what that guarantees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accounting.guarantee import Guarantee
from accounting.labels.gaussian import label_guarantee
from accounting.labels.leverage import LABEL_CHECKED, LABEL_TRUSTED
from accounting.labels.mechanisms import LabelBudget
from accounting.statement import stated
from opusim import checks

_SLACK = 1e-9
"""Relative rounding of a sum of squares, charged to the record."""

_CHECKED = ("a record over its budget keeps its noise and loses its signal",)
_PUBLISHED = (
    "the signal lies in its ball, and every bit of the credited noise is Gaussian and added after that"
)
_HARDWARE = (
    "the reading's noise is Gaussian, of one law for every label, and nothing but a public gain follows"
)
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of labels and batch, and at least as strong as stated"
)


class LabelFilter:
    """Keeps each record's sum of mu^2 within B^2 (adaptive composition of Gaussian mechanisms).

    A record that would exceed B keeps its noise and loses its signal: to leave it out would raise the leverage of
    the others. The decision rests on public numbers (mu is a maximum over labels), so it costs nothing itself.
    Proof: docs/privacy.md, section 5.

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

    def admit(self, records: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Charges one step to the records that can pay, and says which those are.

        Call it before the step is computed, and set the signal of the others to 0 in every layer, after which
        their mu is 0.

        Args:
            records: Indices of the batch's records, each at most once, shape (m,).
            mu: What the step would spend of each, at least 0, shape (m,).

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
                "records: one stands twice in the batch; its leverages do not add up, sample without"
            )
        if indices.size and not (indices.min() >= 0 and indices.max() < self._spent.size):
            raise ValueError(f"records: an index lies outside [0, {self._spent.size})")
        cost = np.square(np.asarray(mu, dtype=np.float64)) * (1 + _SLACK)
        if np.any(np.isnan(cost)) or np.any(np.asarray(mu) < 0):
            raise ValueError("mu: must be at least 0 and not NaN")
        total = self._spent[indices] + cost
        keeps = total <= self.budget_mu**2
        self._spent[indices[keeps]] = total[keeps] * (1 + 1e-15)
        return keeps

    def restore(self, spent: np.ndarray) -> None:
        """Takes back what `spent` gave, from a checkpoint.

        Raises:
            ValueError: Another number of records, or a sum above the budget or below 0.
        """
        values = np.asarray(spent, dtype=np.float64)
        checks.shape(self._spent.shape, spent=values)
        if not bool(np.all((values >= 0) & (values <= self.budget_mu**2 * (1 + _SLACK)))):
            raise ValueError(f"spent: must lie between 0 and budget_mu^2 = {self.budget_mu**2:g}")
        self._spent = values.copy()


def guarantees(mechanisms: Sequence[LabelBudget], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """sqrt(sum of steps B^2)-GDP for labels; the budget, never the largest spending.

    To report what was spent at most would be no statement of differential privacy: the spending of a run is not
    known before it.

    Args:
        mechanisms: At least one budget; each of its steps spends the whole of it.
        delta: In [0, 1).
        enforced: Whether the training code checked what code can check.
    """
    hardware = any(mechanism.order == "hardware" for mechanism in mechanisms)
    published = any(mechanism.order == "published" for mechanism in mechanisms)
    checked = [*_CHECKED, *([_PUBLISHED] if published else []), *LABEL_CHECKED]
    device = any(mechanism.device_noise for mechanism in mechanisms)
    trusted = [*([_HARDWARE] if hardware else []), *([_DEVICE_LAW] if device else []), *LABEL_TRUSTED]
    return [
        label_guarantee(
            mechanisms,
            delta=delta,
            source="docs/privacy.md, sections 4 and 5: leverage scores and a filter (adaptive Gaussian composition)",
            assumptions=stated(checked, trusted, enforced=enforced),
            device_model=hardware or device,
        )
    ]
