"""The accountant of dp_accounting for privacy loss distributions, as a private loop asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

RELATIONS = {
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}


class PldAccountant:
    """Prices clipped sums of Poisson batches with Gaussian noise."""

    def epsilon(self, mechanisms: Sequence[Mapping[str, Any]], *, delta: float) -> float:
        """Return epsilon of all mechanisms together, each of which ran `steps` times."""
        (relation,) = {mechanism["relation"] for mechanism in mechanisms}
        accountant = PLDAccountant(RELATIONS[relation])
        for mechanism in mechanisms:
            if mechanism["kind"] != "record_central":
                raise ValueError(f"kind {mechanism['kind']!r} is not priced here")
            noise = GaussianDpEvent(mechanism["noise_multiplier"])
            step = PoissonSampledDpEvent(mechanism["sampling_probability"], noise)
            accountant.compose(step, mechanism["steps"])
        return float(accountant.get_epsilon(delta))
