"""What a ledger holds, from the entries of its journal (`opusim.accounting.ledger.ledger` says what they mean).

Its certificates and alarms are about the device whose noise is credited. A statement that rests on a certificate lists
it among its assumptions. An alarm that speaks against the certified noise divides a run: what was released before the
last check in order keeps its guarantee, and nothing covers what came after, since later steps build on it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from opusim.accounting.journal import Position

from opusim import checks
from opusim.accounting.composition import guarantees, merge
from opusim.accounting.guarantee import Assumption, Guarantee, LedgerCorrupt, Release, Status, from_json
from opusim.accounting.mechanism import CertifiedMechanism, Mechanism, mechanism_from_json

Mode = Literal["experiment", "release"]


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """A certificate of a device's noise, as a statement needs it.

    Attributes:
        digest: Of the whole certificate; mechanisms name it.
        device: Name of the device.
        date: Day of its frames, ISO 8601.
        age_days: Its age in days when the run first used it.
        beta: Probability that its numbers are wrong, in (0, 1).
        law: The certified law in one line.
        remarks: What it takes on trust and does not cover.
        every_steps: Steps from one check of the monitor to the next.
        finds: Loss of the noise's variance against the certified one, as a share, that a single check finds with
            probability 0.99, in the mean over the outputs.
        finds_output: The same for a single output whose others lose nothing; None if a check finds none, or if
            a ledger of an earlier version does not say.
    """

    digest: str
    device: str
    date: str
    age_days: int
    beta: float
    law: str
    remarks: tuple[str, ...]
    every_steps: int
    finds: float
    finds_output: float | None = None

    def __post_init__(self) -> None:
        checks.in_unit_interval(closed="neither", beta=self.beta)
        checks.integer(minimum=0, age_days=self.age_days)
        checks.integer(minimum=1, every_steps=self.every_steps)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What a statement that rests on it takes on trust."""
        age = f"{self.age_days} day{'' if self.age_days == 1 else 's'} old when first used"
        looks = "every step" if self.every_steps == 1 else f"every {self.every_steps}th step"
        single = (
            "no loss at a single output"
            if self.finds_output is None
            else f"{100 * self.finds_output:.2g} % less at a single output"
        )
        texts = (
            f"certificate {self.digest[:12]} of device {self.device!r}, dated {self.date}, {age}: {self.law}; it "
            f"is wrong with probability {self.beta:g}, which delta includes once",
            "the noise stayed at least as strong as certified from the calibration to the last step; the monitor "
            f"looked before {looks}, and with probability 0.99 one look finds {100 * self.finds:.2g} % less variance "
            f"in the mean over the outputs, and {single}",
            *self.remarks,
        )
        return tuple(Assumption(text=text) for text in texts)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What a device's monitor stopped a run for.

    Attributes:
        step: The step before which it stopped; that step was not done.
        since: First step whose noise may have been weaker than certified, at most `step`; -1 also doubts what was read
            before the first step.
        found: What the monitor found, as text.
        covered: Whether the noise that it found was still as strong as certified.
    """

    step: int
    since: int
    found: str
    covered: bool

    def __post_init__(self) -> None:
        checks.integer(minimum=-1, since=self.since)
        checks.integer(minimum=max(self.since, 0), step=self.step)

    @property
    def text(self) -> str:
        """What a statement says of it."""
        if self.covered:
            return f"the monitor stopped the run before step {self.step}, at noise as strong as certified: {self.found}"
        begin = "what was read at the start" if self.since < 0 else f"step {self.since}"
        return (
            f"the monitor stopped the run before step {self.step}: {self.found}; from {begin} on, noise may have been "
            "weaker than certified"
        )

    @property
    def doubts(self) -> bool:
        """Whether something was released under noise that may have been too weak."""
        return not self.covered and self.since < self.step


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
        at = self.delta if delta is None else delta
        whole = self._guarantees(at, None)
        if not self.doubts:
            return [self._with_certificates(one) for one in whole]
        alarm = min(self.doubts, key=lambda alarm: alarm.since)
        uncovered = [
            replace(
                one,
                epsilon=math.inf,
                epsilon_lower=None,
                status=Status.NONE,
                reason=f"{alarm.text}, and nothing covers what was released since",
            )
            if one.is_proven
            else one
            for one in whole
        ]
        early = [
            replace(
                self._with_certificates(one),
                mechanism=f"released before step {alarm.since}: {one.mechanism}",
            )
            for one in self._guarantees(at, alarm.since)
            if one.status is Status.PROVEN_UNDER_DEVICE_MODEL and one.release is not Release.LAST_ITERATE
        ]
        return uncovered + early

    def _with_certificates(self, guarantee: Guarantee) -> Guarantee:
        """Return a guarantee under a device model with the certificates among its assumptions."""
        if guarantee.status is not Status.PROVEN_UNDER_DEVICE_MODEL:
            return guarantee
        texts = [assumption for certificate in self.certificates for assumption in certificate.assumptions]
        texts += [Assumption(text=alarm.text) for alarm in self.alarms if alarm.covered]
        return replace(guarantee, assumptions=(*guarantee.assumptions, *texts))

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
                mode, delta, enforced = entry["mode"], entry["delta"], entry["enforced"]
                checks.choice(get_args(Mode), mode=mode)
                checks.in_unit_interval(closed="left", delta=delta)
                checks.instance(bool, enforced=enforced)
            elif "returned" in entry:
                if mode != "release" or not block_before:
                    raise ValueError("returns steps, but the line before reserves none in release mode")
                returned = entry["returned"]
                payments[-1] = shortened(payments[-1], returned["first_step"], returned["steps"])
            elif "certificate" in entry:
                certificates.append(from_json(CertificateFacts, entry["certificate"]))
            elif "alarm" in entry:
                alarms.append(from_json(Alarm, entry["alarm"]))
            elif "stopped" not in entry and "resumed" not in entry:
                payments.append(_payment(entry))
                require_certified(payments[-1].mechanisms, certificates)
        except (KeyError, ValueError, TypeError) as error:
            raise LedgerCorrupt(f"{path}: line {number}: {error}") from error
        block_before = "first_step" in entry
    return LedgerContent(
        mode=mode,
        delta=float(delta),
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
