"""Guarantees of everything that ran: descriptions are merged, handed to their accountant, and stated together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module

from accounting import arguments
from accounting.errors import NoGuarantee
from accounting.guarantee import Guarantee
from accounting.mechanisms import Mechanism


def guarantees(mechanisms: Iterable[Mechanism], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """The guarantees of all mechanisms together, whatever their order.

    Args:
        mechanisms: What ran on the same data; at least one.
        delta: In [0, 1).
        enforced: Whether the code that ran them checked the assumptions.

    Returns:
        What their accountant states: one guarantee or several, claimed beside proven.

    Raises:
        NoGuarantee: No accountant covers these mechanisms together.
        ValueError: delta outside [0, 1).
    """
    arguments.share(delta=delta)
    merged = merge(mechanisms)
    if not merged:
        raise NoGuarantee("mechanisms: there is none, nothing was paid for; name at least one")
    homes = {mechanism.accountant for mechanism in merged}
    if len(homes) != 1:
        kinds = ", ".join(sorted({mechanism.kind for mechanism in merged}))
        raise NoGuarantee(f"mechanisms {kinds}: no accountant covers them together; state each apart")
    module, function = homes.pop().split(":")
    return list(getattr(import_module(module), function)(merged, delta=delta, enforced=enforced))


def merge(mechanisms: Iterable[Mechanism]) -> list[Mechanism]:
    """Equal descriptions as one with the sum of their steps, in an order that does not depend on the input's."""
    steps: dict[Mechanism, int] = {}
    for mechanism in mechanisms:
        one = mechanism.repeated(1)
        steps[one] = steps.get(one, 0) + mechanism.steps
    ordered = sorted(steps.items(), key=lambda item: json.dumps(item[0].to_json(), sort_keys=True))
    return [one.repeated(count) for one, count in ordered]
