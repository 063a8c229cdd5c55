"""Which delta is too large for the number of records: the one rule of every command and every statement.

A mechanism that publishes each record in full with probability delta is (0, delta)-differentially private, and expects
to publish n delta of n records. From delta = 1 / n on, a statement therefore allows that a whole record is published.
"""

from __future__ import annotations

from collections.abc import Sequence

from accounting.mechanisms import Mechanism

LARGE_DELTA = (
    "delta is at least 1 / records, so a mechanism that publishes one whole record or more, on average, can have the "
    "same delta at an epsilon of 0; choose a delta well below 1 / records"
)


def large_delta(delta: float, mechanisms: Sequence[Mechanism], *, records: float | None = None) -> str | None:
    """Return one line that warns of a delta of at least 1 / n, or None.

    Args:
        delta: Of the statement, in [0, 1).
        mechanisms: What is paid for. Their public constants tell n, if they have any (`Mechanism.public_records`).
        records: n, only if it is public; None takes that of the mechanisms.
    """
    n = public_number(mechanisms, records)
    if n is None or delta * n < 1 - 1e-9:
        return None
    return f"delta = {delta:g} with {n:,.6g} records (1 / records is {1 / n:.2g}): {LARGE_DELTA}"


def public_number(mechanisms: Sequence[Mechanism], records: float | None = None) -> float | None:
    """Return n: the number given, else the least that the mechanisms' constants tell, or None."""
    if records is not None:
        return float(records)
    told = [one.public_records for one in mechanisms]
    return min((n for n in told if n is not None), default=None)
