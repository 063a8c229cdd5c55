"""What can be said about updates without protection: nothing finite, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.guarantee import Adjacency, Guarantee, Release, Status
from accounting.mechanisms import Mechanism


def guarantees(mechanisms: Sequence[Mechanism], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """One statement of status none about all of them together.

    Args:
        mechanisms: At least one `Unprotected`.
        delta: In [0, 1).
        enforced: Changes nothing: there is no assumption.
    """
    return [
        Guarantee(
            epsilon=math.inf,
            delta=delta,
            unit=mechanisms[0].unit,
            adjacency=Adjacency.ADD_OR_REMOVE_ONE,
            release=Release.EVERY_UPDATE,
            status=Status.NONE,
            mechanism="; ".join(mechanism.describe() for mechanism in mechanisms),
            source="no theorem",
            reason="records are neither clipped nor covered by central noise; protect them with --protect record",
        )
    ]
