"""What the entries of a ledger say: payments, less what was returned of them, and which steps they cover."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accounting.composition import guarantees, merge
from accounting.errors import LedgerCorrupt
from accounting.guarantee import Guarantee
from accounting.mechanisms import Mechanism, mechanism_from_json

Mode = Literal["experiment", "release"]


@dataclass(frozen=True, kw_only=True)
class Payment:
    """One line of a ledger.

    Attributes:
        first_step: The first step paid for; None for something released once.
        steps: How many steps in a row.
        mechanisms: What each of them releases.
        name: Of something released once.
    """

    first_step: int | None
    steps: int
    mechanisms: tuple[Mechanism, ...]
    name: str | None = None

    @property
    def total(self) -> list[Mechanism]:
        """What the line pays for, all steps together."""
        return [mechanism.repeated(self.steps * mechanism.steps) for mechanism in self.mechanisms]


@dataclass(frozen=True, kw_only=True)
class LedgerContent:
    """A ledger as read back.

    Attributes:
        mode: Experiment or release.
        delta: At which the run states its guarantees.
        enforced: Whether the code that ran checked the mechanisms' assumptions.
        payments: Every line that pays, without what was returned of it.
        stopped: The checkpoint of a clean stop behind which nothing was written; None if there is none.
    """

    mode: Mode
    delta: float
    enforced: bool
    payments: tuple[Payment, ...]
    stopped: str | None = None

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Everything paid for, equal descriptions merged."""
        return merge(mechanism for payment in self.payments for mechanism in payment.total)

    def guarantees(self, *, delta: float | None = None) -> list[Guarantee]:
        """What the run guarantees, at its own delta or another.

        Raises:
            NoGuarantee: Nothing was paid for, or no accountant covers what was.
        """
        return guarantees(
            self.mechanisms, delta=self.delta if delta is None else delta, enforced=self.enforced
        )


class Coverage:
    """Which steps are paid for, looked up by bisection."""

    def __init__(self, payments: Sequence[Payment]) -> None:
        self._firsts: list[int] = []
        self._payments: list[Payment] = []
        for payment in payments:
            self.add(payment)

    def add(self, payment: Payment) -> None:
        """Take in a payment; one for something released once covers no step."""
        if payment.first_step is None:
            return
        place = bisect.bisect_right(self._firsts, payment.first_step)
        self._firsts.insert(place, payment.first_step)
        self._payments.insert(place, payment)

    def exchange(self, old: Payment, new: Payment) -> None:
        """Put a payment for fewer steps in another's place; both have the same first step."""
        place = next(place for place, payment in enumerate(self._payments) if payment is old)
        self._payments[place] = new

    def find(self, step: int) -> Payment | None:
        """The payment that covers a step, or None."""
        place = bisect.bisect_right(self._firsts, step) - 1
        if place < 0 or step >= self._firsts[place] + self._payments[place].steps:
            return None
        return self._payments[place]

    def room(self, step: int, wanted: int) -> int:
        """Steps from an unpaid one to the next paid one, at most those wanted."""
        place = bisect.bisect_right(self._firsts, step)
        return wanted if place == len(self._firsts) else min(wanted, self._firsts[place] - step)

    def first_gap(self) -> int:
        """The first step that is not paid for."""
        end = 0
        for first, payment in zip(self._firsts, self._payments, strict=True):
            if first > end:
                break
            end = max(end, first + payment.steps)
        return end


def content_of(path: Path, entries: Sequence[dict[str, Any]]) -> LedgerContent:
    """What the entries of a journal say.

    Args:
        path: The file, for messages.
        entries: One for each line.

    Raises:
        LedgerCorrupt: There is none, or one is no entry that may stand in its place; the message names the line.
    """
    if not entries:
        raise LedgerCorrupt(f"{path}: line 1: is missing: nothing was ever paid for")
    payments: list[Payment] = []
    stopped, block_before = None, False
    for number, entry in enumerate(entries, start=1):
        try:
            if number == 1:
                mode, delta, enforced = entry["mode"], float(entry["delta"]), bool(entry["enforced"])
            elif "returned" in entry:
                if mode != "release" or not block_before:
                    raise ValueError("returns steps, but the line before reserves none in release mode")
                returned = entry["returned"]
                payments[-1] = shortened(payments[-1], returned["first_step"], returned["steps"])
            elif "stopped" not in entry and "resumed" not in entry:
                payments.append(_payment(entry))
            stopped = str(entry["stopped"]["checkpoint"]) if "stopped" in entry else None
        except (KeyError, ValueError, TypeError) as error:
            raise LedgerCorrupt(f"{path}: line {number}: {error}") from error
        block_before = "first_step" in entry
    return LedgerContent(mode=mode, delta=delta, enforced=enforced, payments=tuple(payments), stopped=stopped)


def shortened(payment: Payment, first_step: int, steps: int) -> Payment:
    """A block without its end.

    Raises:
        ValueError: The steps are not its end, or are all of it.
    """
    begin = payment.first_step
    if (
        begin is None
        or not begin < first_step < begin + payment.steps
        or first_step + steps != begin + payment.steps
    ):
        raise ValueError(
            f"returns {steps!r} steps from step {first_step!r}, which are not the end of the block in the line before"
        )
    return replace(payment, steps=first_step - begin)


def _payment(entry: dict[str, Any]) -> Payment:
    mechanisms = tuple(mechanism_from_json(content) for content in entry["mechanisms"])
    if "name" in entry:
        return Payment(first_step=None, steps=1, mechanisms=mechanisms, name=entry["name"])
    first_step, steps = entry["first_step"], entry["steps"]
    if type(first_step) is not int or type(steps) is not int or first_step < 0 or steps < 1:
        raise ValueError(f"first_step = {first_step!r}, steps = {steps!r}: pays for no block of steps")
    return Payment(first_step=first_step, steps=steps, mechanisms=mechanisms)
