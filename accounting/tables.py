"""Guarantees as rows of text, for tables on screen and on paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from opusim.accounting.guarantee import Adjacency, Guarantee
from opusim.tables import print_table


def guarantee_rows(guarantees: Iterable[Guarantee], *, seed_stored: bool = False) -> list[dict[str, str]]:
    """Return one row per guarantee: status, epsilon, delta, protects, released, mechanism, notes.

    Args:
        guarantees: The guarantees.
        seed_stored: Whether the run keeps the seed of its noise (experiment mode), which a finite epsilon forbids.
    """
    return [
        {
            "status": guarantee.status.value,
            "epsilon": number(guarantee.epsilon),
            "delta": f"{guarantee.delta:g}",
            "protects": f"{guarantee.unit.value}, {guarantee.adjacency.value}",
            "released": guarantee.release.value,
            "mechanism": guarantee.mechanism,
            "notes": "; ".join(_notes(guarantee, seed_stored)),
        }
        for guarantee in guarantees
    ]


def number(epsilon: float) -> str:
    """Return an epsilon as text: three decimals, whole numbers from 1,000 on, three digits below 0.01 or from 10^6."""
    if math.isinf(epsilon):
        return "infinite"
    if 1e3 <= epsilon < 1e6:
        return f"{epsilon:,.0f}"
    return f"{epsilon:.3f}" if 0.01 <= epsilon < 1e3 or epsilon == 0 else f"{epsilon:.3g}"


def print_rows(rows: Sequence[dict[str, str]], *, without: Sequence[str] = ()) -> None:
    """Print rows with equal keys as a table that breaks no word.

    Args:
        rows: At least one.
        without: Keys to leave out.
    """
    columns = [key for key in rows[0] if key not in without]
    print_table("", columns, [[row[key] for key in columns] for row in rows])


def _notes(guarantee: Guarantee, seed_stored: bool) -> list[str]:
    notes = [guarantee.reason] if guarantee.reason else []
    if guarantee.adjacency is Adjacency.ZERO_OUT:
        notes.append("at a public number of records")
    if seed_stored and math.isfinite(guarantee.epsilon):
        notes.append("holds for the same run in release mode: here the seed of the noise is stored")
    notes += [f"does not hold: {assumption.text}" for assumption in guarantee.failed_assumptions]
    if guarantee.formula_value is not None:
        notes.append(f"the paper's formula, its hypotheses taken as given: {guarantee.formula_value:.3g}")
    return notes
