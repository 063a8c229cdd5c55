"""What a ledger holds, from the entries of its journal (`accounting.ledger.ledger` says what they mean)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from accounting.composition import guarantees, merge
from accounting.errors import LedgerCorrupt
from accounting.guarantee import Guarantee
from accounting.ledger.evidence import Alarm, CertificateFacts, stated
from accounting.ledger.journal import Position
from accounting.mechanisms import CertifiedMechanism, Mechanism, mechanism_from_json
from opusim import checks

Mode = Literal["experiment", "release"]


@dataclass(frozen=True, kw_only=True)
class Payment:
    """A line of a ledger that pays.

    Attributes:
        first_step: The first step paid for, or None if the release happens once.
        steps: How many steps in a row.
        mechanisms: What each of them releases.
        name: The name of a release that happens once, else None.
    """

    first_step: int | None
    steps: int
    mechanisms: tuple[Mechanism, ...]
    name: str | None = None

    def before(self, step: int) -> Payment | None:
        """Return the part that pays for what was released before a step, or None; -1 is before anything."""
        if step < 0:
            return None
        if self.first_step is None or self.first_step + self.steps <= step:
            return self
        return replace(self, steps=step - self.first_step) if self.first_step < step else None

    @property
    def total(self) -> list[Mechanism]:
        """Everything that the line pays for, all steps together."""
        return [mechanism.repeated(self.steps * mechanism.steps) for mechanism in self.mechanisms]


@dataclass(frozen=True, kw_only=True)
class LedgerContent:
    """The content of a ledger, as read back.

    Attributes:
        mode: Experiment or release.
        delta: At which the run states its guarantees.
        enforced: Whether the code that ran checked the mechanisms' assumptions.
        payments: Every line that pays, less the steps that were returned.
        certificates: The certificates that mechanisms rest on.
        alarms: What the device's monitor stopped the run for.
        position: How far the file reached when it was read.
    """

    mode: Mode
    delta: float
    enforced: bool
    payments: tuple[Payment, ...]
    certificates: tuple[CertificateFacts, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    position: Position = field(default_factory=Position)

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Everything paid for, equal mechanisms merged."""
        return merge(mechanism for payment in self.payments for mechanism in payment.total)

    @property
    def doubts(self) -> tuple[Alarm, ...]:
        """The alarms after which something that counts was released under noise that may have been too weak.

        Steps do not count if all that is released was read before the first one.
        """
        upfront = all(mechanism.taken_upfront for mechanism in self.mechanisms)
        return tuple(alarm for alarm in self.alarms if alarm.doubts and (alarm.since < 0 or not upfront))

    def guarantees(self, *, delta: float | None = None) -> list[Guarantee]:
        """Return what the run guarantees, at its own delta or another.

        If the monitor found the device other than certified, the first one says that nothing covers the whole run, and
        the next one is about what was released before the device may have changed.

        Raises:
            NoGuarantee: Nothing was paid for, or no theorem covers all of it together.
        """
        return stated(
            self._guarantees,
            certificates=self.certificates,
            alarms=self.alarms,
            doubts=self.doubts,
            delta=self.delta if delta is None else delta,
        )

    def _guarantees(self, delta: float, before: int | None) -> list[Guarantee]:
        """Return the guarantees of everything paid for, or of the steps before one; none if there are none."""
        kept = [payment if before is None else payment.before(before) for payment in self.payments]
        mechanisms = [one for payment in kept if payment is not None for one in payment.total]
        if before is not None and not mechanisms:
            return []
        return guarantees(merge(mechanisms), delta=delta, enforced=self.enforced)


class Coverage:
    """The steps that are paid for, found by bisection."""

    def __init__(self, payments: Sequence[Payment]) -> None:
        self._firsts: list[int] = []
        self._payments: list[Payment] = []
        for payment in payments:
            self.add(payment)

    def add(self, payment: Payment) -> None:
        """Add a payment; one for a release that happens once covers no step."""
        if payment.first_step is None:
            return
        place = bisect.bisect_right(self._firsts, payment.first_step)
        self._firsts.insert(place, payment.first_step)
        self._payments.insert(place, payment)

    def exchange(self, old: Payment, new: Payment) -> None:
        """Replace a payment by one for fewer steps with the same first step."""
        place = next(place for place, payment in enumerate(self._payments) if payment is old)
        self._payments[place] = new

    def find(self, step: int) -> Payment | None:
        """Return the payment that covers a step, or None."""
        place = bisect.bisect_right(self._firsts, step) - 1
        if place < 0 or step >= self._firsts[place] + self._payments[place].steps:
            return None
        return self._payments[place]

    def room(self, step: int, wanted: int) -> int:
        """Return the number of steps from an unpaid one to the next paid one, at most those wanted."""
        place = bisect.bisect_right(self._firsts, step)
        return wanted if place == len(self._firsts) else min(wanted, self._firsts[place] - step)

    def first_gap(self) -> int:
        """Return the first step that is not paid for."""
        end = 0
        for first, payment in zip(self._firsts, self._payments, strict=True):
            if first > end:
                break
            end = max(end, first + payment.steps)
        return end


def content_of(path: Path, entries: Sequence[dict[str, Any]]) -> LedgerContent:
    """Return the content of a ledger from its journal's entries.

    Args:
        path: The file, for messages.
        entries: One for each line.

    Raises:
        LedgerCorrupt: There is no entry, or one is not allowed in its place; the message names the line.
    """
    if not entries:
        raise LedgerCorrupt(f"{path}: line 1: is missing: nothing was ever paid for")
    payments: list[Payment] = []
    certificates: list[CertificateFacts] = []
    alarms: list[Alarm] = []
    block_before = False
    for number, entry in enumerate(entries, start=1):
        try:
            if number == 1:
                mode, delta, enforced = _opening(entry)
            elif "returned" in entry:
                if mode != "release" or not block_before:
                    raise ValueError("returns steps, but the line before reserves none in release mode")
                returned = entry["returned"]
                payments[-1] = shortened(payments[-1], returned["first_step"], returned["steps"])
            elif "certificate" in entry:
                certificates.append(CertificateFacts.from_json(entry["certificate"]))
            elif "alarm" in entry:
                alarms.append(Alarm.from_json(entry["alarm"]))
            elif "stopped" not in entry and "resumed" not in entry:
                payments.append(_payment(entry))
                require_certified(payments[-1].mechanisms, certificates)
        except (KeyError, ValueError, TypeError) as error:
            raise LedgerCorrupt(f"{path}: line {number}: {error}") from error
        block_before = "first_step" in entry
    return LedgerContent(
        mode=mode,
        delta=delta,
        enforced=enforced,
        payments=tuple(payments),
        certificates=tuple(certificates),
        alarms=tuple(alarms),
    )


def require_certified(mechanisms: Sequence[Mechanism], certificates: Sequence[CertificateFacts]) -> None:
    """Refuse a mechanism that rests on a certificate of which no line before says what it assumes.

    Raises:
        ValueError: There is one, or it counts less than the certificate's beta.
    """
    known = {certificate.digest: certificate for certificate in certificates}
    for mechanism in mechanisms:
        digest = mechanism.certificate if isinstance(mechanism, CertifiedMechanism) else ""
        if digest and digest not in known:
            raise ValueError(f"certificate = {checks.short(digest)}: no line before describes it")
        if isinstance(mechanism, CertifiedMechanism) and digest and mechanism.beta < known[digest].beta:
            raise ValueError(
                f"beta = {mechanism.beta:g}: is less than that of the certificate, {known[digest].beta:g}"
            )


def shortened(payment: Payment, first_step: int, steps: int) -> Payment:
    """Return a block without its end.

    Raises:
        ValueError: The steps are not its end, or are all of it.
    """
    begin = payment.first_step
    if (
        begin is None
        or {type(first_step), type(steps)} != {int}
        or not begin < first_step < begin + payment.steps
        or first_step + steps != begin + payment.steps
    ):
        raise ValueError(
            f"returns {checks.short(steps)} steps from step {checks.short(first_step)}, which are not the end of the "
            "block in the line before"
        )
    return replace(payment, steps=first_step - begin)


def _opening(entry: dict[str, Any]) -> tuple[Mode, float, bool]:
    mode, delta, enforced = entry["mode"], entry["delta"], entry["enforced"]
    checks.choice(get_args(Mode), mode=mode)
    checks.in_unit_interval(closed="left", delta=delta)
    checks.instance(bool, enforced=enforced)
    return mode, float(delta), enforced


def _payment(entry: dict[str, Any]) -> Payment:
    mechanisms = tuple(mechanism_from_json(content) for content in entry["mechanisms"])
    if not mechanisms:
        raise ValueError("mechanisms = []: pays for nothing")
    if "name" in entry:
        checks.instance(str, name=entry["name"])
        return Payment(first_step=None, steps=1, mechanisms=mechanisms, name=entry["name"])
    first_step, steps = entry["first_step"], entry["steps"]
    if type(first_step) is not int or type(steps) is not int or first_step < 0 or steps < 1:
        raise ValueError(
            f"first_step = {checks.short(first_step)}, steps = {checks.short(steps)}: pays for no block of steps"
        )
    return Payment(first_step=first_step, steps=steps, mechanisms=mechanisms)
