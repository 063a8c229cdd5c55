"""The ledger of a run: every step's mechanism is on disk, synced, before the step is computed.

    with Ledger(folder / "ledger.jsonl", mode="experiment", delta=1e-5, block=64) as ledger:
        for step in range(total):
            ledger.pay(step, mechanism, until=total)
            ...  # compute the step

A killed run may have paid for steps that it did not compute; it never computed one that it had not paid for. Steps
are reserved in blocks, one line each, so that not every step waits for a sync.

- experiment mode: noise is keyed by the step, so a re-executed step repeats its release and is paid once, unless it
  reads a device that repeats no noise: then it is charged again, as in release mode.
- release mode: a re-executed step draws new noise and is charged again. A kill also loses the rest of a block. A
  process that stops cleanly returns that rest (`Ledger.return_unused`).

Entries of the file (`opusim.accounting.journal`): the first has `mode`, `delta` and `enforced`, and may have
`enforcement`. The others are

| keys | meaning |
| --- | --- |
| `first_step`, `steps`, `mechanisms` | a block of steps is paid for; the descriptions are of a single step |
| `name`, `mechanisms` | a release that happens once is paid for |
| `returned`: `first_step`, `steps` | the end of the block in the line before was never computed |
| `certificate` | mechanisms that name its digest rest on it |
| `alarm`: `step`, `since`, `found`, `covered` | the device's monitor stopped the run before a step |
| `enforcement`: `by`, `processes`, `hypotheses`, `program` | what pays from here on, and checks at each step |
| `stopped`, `resumed` | written by earlier versions about a budget that a run spends gradually; ignored |

Payments cover what is computed, in release mode also each repetition of a step, whichever process is killed and when:
1. A step is computed only after `pay(step)` returned, which took this step out of the process's credit. The credit is
   the end of the block in the last line of steps that this process wrote; no other process ever has it.
2. `return_unused` first forgets the credit, then writes the line. The returned steps were in the credit, so no `pay`
   asked for them, and none can be answered from them later. Every such step is then paid for by a new line.
3. A kill before the line is complete returns nothing. A kill after it stops a process that computes nothing any more.
4. The reader accepts a return only as the end, and never as the whole, of the block in the line directly before, so
   each block is shortened at most once, and by steps that were paid for. Earlier versions refuse the line.

`enforced` says that the code checks whatever code can check of its mechanisms. A private loop checks less of some and
more of others, so it names each hypothesis. A hypothesis counts as checked only if every such line names it and no step
was paid for before the first one. A line that was added later, or a loop that an earlier version began, thus adds none.

Certificates and alarms are about the device whose noise is credited. A statement that rests on a certificate lists it
among its assumptions. An alarm that speaks against the certified noise divides a run: what was released before the last
check in order keeps its guarantee, and nothing covers what came after, since later steps build on it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, get_args

from opusim import checks
from opusim.accounting.composition import Budget, guarantees, merge
from opusim.accounting.guarantee import (
    Assumption,
    BudgetExceeded,
    Guarantee,
    LedgerCorrupt,
    NoGuarantee,
    Release,
    Status,
    from_json,
    to_json,
)
from opusim.accounting.journal import Journal, Position, Witness, read_positioned
from opusim.accounting.mechanism import CertifiedMechanism, Mechanism, mechanism_from_json
from opusim.files import OwnProcess

Mode = Literal["experiment", "release"]


@dataclass(frozen=True, kw_only=True)
class CertificateFacts:
    """A certificate of a device's noise, as a statement needs it.

    Attributes:
        digest: Digest of the whole certificate; mechanisms name it.
        device: Name of the device.
        date: Day of its frames, ISO 8601.
        age_days: Its age in days when the run first used it.
        beta: Probability that its numbers are wrong, in (0, 1).
        law: The certified law in one line.
        remarks: Limits of the certificate: what it takes on trust or does not cover.
        every_steps: Steps from one check of the monitor to the next.
        finds: Loss of variance, as a share of the certified one and averaged over the outputs, that a single check
            finds with probability 0.99.
        finds_output: The same for a loss at one output only; None if no check finds it, or an earlier version wrote
            the ledger.
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
    """An alarm with which a device's monitor stopped a run.

    Attributes:
        step: The step before which it stopped; that step was not done.
        since: First step whose noise may have been weaker than certified, at most `step`; -1 also doubts what was read
            before the first step.
        found: The monitor's finding, as text.
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
class Program:
    """What a program is that takes the steps; names and public constants only.

    Attributes:
        versions: Of Python and of the packages that numbers depend on.
        script: Path of the program's file; empty in an interactive session.
        sha256: Digest of that file; empty without one.
        module: Class of the module and of its parts.
        optimizer: Class of the optimizer, with its learning rates and the settings that are not the class's defaults.
        files: SHA-256 of the user's files that define module, criterion, data set and collate function, by path, which
            begins at the script's folder if the file is below it. Without the script, and without what they import.
        fixed_batches: Whether batches are filled up to a fixed number of rows; None if the line does not say.
        criterion: Class of the criterion, or name of the function; empty if the line does not say.
    """

    versions: dict[str, str]
    script: str
    sha256: str
    module: str
    optimizer: str
    files: dict[str, str] = field(default_factory=dict)
    fixed_batches: bool | None = None
    criterion: str = ""


@dataclass(frozen=True, kw_only=True)
class Enforcement:
    """What code that pays for steps checks at each of them; a step that fails a check releases nothing.

    Attributes:
        by: The code and its version, such as "make_private of opusim 0.3.0".
        processes: How many processes take the steps together, at least 1.
        hypotheses: What it checks, as the texts of assumptions.
        program: The program that calls it; None if the line does not name it.
    """

    by: str
    processes: int
    hypotheses: tuple[str, ...]
    program: Program | None = None

    def __post_init__(self) -> None:
        checks.integer(minimum=1, processes=self.processes)


@dataclass(frozen=True, kw_only=True)
class Payment:
    """A line of a ledger that pays.

    Attributes:
        first_step: The first step paid for, or None if the release happens once.
        steps: How many steps in a row.
        mechanisms: Mechanisms that each step releases.
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
        delta: Delta at which the run states its guarantees.
        enforced: Whether the code that ran checked the mechanisms' assumptions.
        payments: Every line that pays, less the steps that were returned.
        certificates: The certificates that mechanisms rest on.
        alarms: Alarms with which the device's monitor stopped the run.
        enforcements: What the code that paid says that it checked, in the order of lines; None in front of them if
            steps were paid for before the first one.
        position: How far the file reached when it was read.
    """

    mode: Mode
    delta: float
    enforced: bool
    payments: tuple[Payment, ...]
    certificates: tuple[CertificateFacts, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    enforcements: tuple[Enforcement | None, ...] = ()
    position: Position = field(default_factory=Position)

    @property
    def checked(self) -> frozenset[str]:
        """The hypotheses that every line of enforcement names; none if a step was paid for before the first one."""
        named = [frozenset(() if one is None else one.hypotheses) for one in self.enforcements]
        return frozenset.intersection(*named) if named else frozenset()

    @property
    def mechanisms(self) -> list[Mechanism]:
        """Everything paid for, equal mechanisms merged."""
        return merge(mechanism for payment in self.payments for mechanism in payment.total)

    @property
    def doubts(self) -> tuple[Alarm, ...]:
        """The alarms that leave released results in doubt: their noise may have been too weak.

        If everything was read before the first step, only alarms about that reading count.
        """
        upfront = all(mechanism.taken_upfront for mechanism in self.mechanisms)
        return tuple(alarm for alarm in self.alarms if alarm.doubts and (alarm.since < 0 or not upfront))

    def require_paid(self, what: str) -> None:
        """Refuse (NoGuarantee) a ledger, named `what`, that has paid for nothing yet."""
        if not self.payments:
            raise NoGuarantee(f"{what}: no step was paid for yet; train first")

    def guarantees(self, *, delta: float | None = None) -> list[Guarantee]:
        """Return what the run guarantees, at its own delta or another.

        If the monitor found weaker noise than certified, the first ones say that nothing covers the whole run, and the
        next ones cover what was released before the device may have changed.

        Raises:
            NoGuarantee: Nothing was paid for, or no theorem covers all of it together.
        """
        self.require_paid("ledger")
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
        """Return the guarantees of everything paid for, or of what was released before a step; [] if nothing was."""
        kept = [payment if before is None else payment.before(before) for payment in self.payments]
        mechanisms = [one for payment in kept if payment is not None for one in payment.total]
        if before is not None and not mechanisms:
            return []
        return guarantees(merge(mechanisms), delta=delta, enforced=self.enforced)


class Coverage:
    """The steps that are paid for, found by bisection; a release that happens once covers none."""

    def __init__(self, payments: Sequence[Payment]) -> None:
        self._payments = sorted((one for one in payments if one.first_step is not None), key=_first)

    def add(self, payment: Payment) -> None:
        """Add a payment."""
        if payment.first_step is not None:
            bisect.insort(self._payments, payment, key=_first)

    def exchange(self, old: Payment, new: Payment) -> None:
        """Replace a payment by one for fewer steps with the same first step."""
        place = next(place for place, payment in enumerate(self._payments) if payment is old)
        self._payments[place] = new

    def find(self, step: int) -> Payment | None:
        """Return the payment that covers a step, or None."""
        place = bisect.bisect_right(self._payments, step, key=_first) - 1
        found = self._payments[place] if place >= 0 else None
        return found if found is not None and step < _first(found) + found.steps else None

    def room(self, step: int, wanted: int) -> int:
        """Return the number of steps from an unpaid one to the next paid one, at most those wanted."""
        place = bisect.bisect_right(self._payments, step, key=_first)
        return wanted if place == len(self._payments) else min(wanted, _first(self._payments[place]) - step)

    def first_gap(self) -> int:
        """Return the first step that is not paid for."""
        end = 0
        for payment in self._payments:
            if _first(payment) > end:
                break
            end = max(end, _first(payment) + payment.steps)
        return end


def _first(payment: Payment) -> int:
    return payment.first_step or 0


def content_of(path: Path, entries: Sequence[dict[str, Any]]) -> LedgerContent:
    """Return the content of a ledger from its journal's entries, one for each line.

    LedgerCorrupt names the line of an entry that is not allowed in its place; there must be one.
    """
    if not entries:
        raise LedgerCorrupt(f"{path}: line 1: is missing: nothing was ever paid for")
    payments: list[Payment] = []
    certificates: list[CertificateFacts] = []
    alarms: list[Alarm] = []
    enforcements: list[Enforcement | None] = []
    block_before = False
    for number, entry in enumerate(entries, start=1):
        try:
            if number == 1:
                mode, delta, enforced = entry["mode"], entry["delta"], entry["enforced"]
                checks.choice(get_args(Mode), mode=mode)
                checks.in_unit_interval(closed="left", delta=delta)
                checks.instance(bool, enforced=enforced)
            if "enforcement" in entry:
                enforcement = from_json(Enforcement, entry["enforcement"])
                enforcements += [*([None] if payments and not enforcements else []), enforcement]
            elif "returned" in entry:
                if mode != "release" or not block_before:
                    raise ValueError("returns steps, but the line before reserves none in release mode")
                returned = entry["returned"]
                payments[-1] = shortened(payments[-1], returned["first_step"], returned["steps"])
            elif "certificate" in entry:
                certificates.append(from_json(CertificateFacts, entry["certificate"]))
            elif "alarm" in entry:
                alarms.append(from_json(Alarm, entry["alarm"]))
            elif number > 1 and "stopped" not in entry and "resumed" not in entry:
                mechanisms = tuple(mechanism_from_json(each) for each in entry["mechanisms"])
                if not mechanisms:
                    raise ValueError("mechanisms = []: pays for nothing")
                name, first_step, steps = entry.get("name"), None, 1
                if "name" in entry:
                    checks.instance(str, name=name)
                else:
                    first_step, steps = entry["first_step"], entry["steps"]
                    if {type(first_step), type(steps)} != {int} or first_step < 0 or steps < 1:
                        raise ValueError(
                            f"first_step = {checks.short(first_step)}, steps = {checks.short(steps)}: pays for no "
                            "block of steps"
                        )
                payments.append(Payment(first_step=first_step, steps=steps, mechanisms=mechanisms, name=name))
                require_certified(mechanisms, certificates)
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
        enforcements=tuple(enforcements),
    )


def require_certified(mechanisms: Sequence[Mechanism], certificates: Sequence[CertificateFacts]) -> None:
    """Refuse (ValueError) a mechanism whose certificate no earlier line describes."""
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
    """Return a block without its end; raise ValueError if the steps are not its end, or are all of it."""
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


LEDGER_FILE = "ledger.jsonl"


class Ledger:
    """Pays for steps before they are computed. The run folder's lock ensures that there is one writer.

    Args:
        path: The file; a new one is created, an existing one is continued.
        mode: "experiment" or "release", as the run's configuration says.
        delta: Delta at which the run states its guarantees, in [0, 1).
        enforced: Whether the caller checks the mechanisms' assumptions.
        block: Steps reserved by one line, at least 1.
        budget: Stops the run before the step that would exceed it.
        witnesses: Witnesses that the ledger must fit; an older or different ledger is refused.
        repeatable: Whether a re-executed step repeats its release in experiment mode. In release mode none does.
        enforcement: What the caller checks from here on; if the last such line says the same, none is written.

    Raises:
        LedgerCorrupt: The file was changed, truncated or reordered, or contradicts a witness.
        ValueError: The existing ledger has another mode, delta or enforcement.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mode: Mode,
        delta: float,
        enforced: bool = False,
        block: int = 1,
        budget: Budget | None = None,
        witnesses: Sequence[Witness] = (),
        repeatable: bool = True,
        enforcement: Enforcement | None = None,
    ) -> None:
        checks.integer(minimum=1, block=block)
        if mode not in ("experiment", "release"):
            raise ValueError(f"mode = {mode!r}: must be 'experiment' or 'release'")
        checks.in_unit_interval(closed="left", delta=delta)
        self._process = OwnProcess()
        self._block, self._budget = block, budget
        self._charges_again = mode == "release" or not repeatable
        opening = {"mode": mode, "delta": float(delta), "enforced": bool(enforced)}
        noted = {} if enforcement is None else {"enforcement": to_json(enforcement)}
        self._journal = Journal(path, witnesses=witnesses)
        try:
            if not self._journal.last:
                self._journal.append(opening | noted)
            self._content = self._load()
            kept = {key: getattr(self._content, key) for key in opening}
            if kept != opening:
                raise ValueError(
                    f"{path}: the ledger was created with {kept}, not {opening}; start a new run folder"
                )
            if enforcement not in (None, *self._content.enforcements[-1:]):
                self._journal.append(noted)
                self._content = self._load()
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies, which would pay for their steps with the same lines."""
        raise TypeError(
            "a Ledger cannot be copied or pickled: its copy would use what was paid once; open another one"
        )

    def _load(self) -> LedgerContent:
        """Take the state from the journal's entries."""
        content = content_of(self._journal.path, self._journal.entries)
        self._payments = list(content.payments)
        self._certificates, self._alarms = list(content.certificates), list(content.alarms)
        self._spent = content.mechanisms if self._budget else []  # what a budget compares, kept up to date
        self._coverage = Coverage(self._payments)
        self._credit: tuple[int, int, tuple[Mechanism, ...]] = (0, 0, ())
        self._noted()
        return content

    def _noted(self) -> None:
        """Remember that the state includes all lines."""
        self._lines = self._journal.position.lines

    def _require_current(self) -> None:
        """Refuse (RuntimeError) a forked process, and take up lines that were appended just before Ctrl-C."""
        self._process.require(self._journal.path)
        if self._lines != self._journal.position.lines:
            self._load()

    @property
    def position(self) -> Position:
        """How far the file reaches, for a witness."""
        return self._journal.position

    @property
    def content(self) -> LedgerContent:
        """What has been paid for so far."""
        if self._process.is_this:  # else it is what was paid when this process was forked
            self._require_current()
        return replace(
            self._content,
            payments=tuple(self._payments),
            certificates=tuple(self._certificates),
            alarms=tuple(self._alarms),
            position=self.position,
        )

    def guarantees(self, *, delta: float | None = None) -> list[Guarantee]:
        """Return what the run guarantees so far; reading the file gives the same."""
        return self.content.guarantees(delta=delta)

    def pay(self, step: int, *mechanisms: Mechanism, until: int | None = None) -> None:
        """Ensure that a step is paid for; when this returns, it may be computed.

        Args:
            step: The step's number, from 0.
            *mechanisms: Mechanisms that the step releases, at least one.
            until: Steps of the whole run; no block reaches beyond.

        Raises:
            BudgetExceeded: The step would exceed the budget; nothing was written.
            LedgerCorrupt: Experiment mode, and the step was paid for as something else.
            OSError: The line could not be written, now or earlier; the step must not be computed.
            RuntimeError: This process was forked from the one that opened the ledger.
        """
        self._process.require(self._journal.path)
        start, end, held = self._credit
        if start <= step < end and held == mechanisms:
            if self._charges_again:
                if step == start:
                    self._credit = (start + 1, end, held)
                    return
            else:
                return
        self._reserve(step, mechanisms, until)

    def pay_once(self, name: str, *mechanisms: Mechanism) -> None:
        """Ensure that a release that happens once is paid for, such as a label table.

        If steps repeat, the same name is paid once. Otherwise every call is charged.

        Args:
            name: Its name in the ledger.
            *mechanisms: Mechanisms that are released, at least one.

        Raises:
            BudgetExceeded: It would exceed the budget.
            LedgerCorrupt: The name was paid for as another mechanism.
            OSError: The line could not be written, now or earlier; nothing must be computed.
            RuntimeError: This process was forked from the one that opened the ledger.
        """
        self._require_current()
        _require_mechanisms(mechanisms)
        earlier = [payment for payment in self._payments if payment.name == name]
        if earlier and not self._charges_again:
            if not _covers(earlier[-1].mechanisms, mechanisms):
                raise LedgerCorrupt(f"{self._journal.path}: {name!r} was paid for as another mechanism")
            return
        if self._budget:
            if earlier and self._budget.would_exceed(self._spent, mechanisms):
                raise BudgetExceeded(
                    f"budget: {name!r} was paid for, but the process that paid was killed or left no checkpoint of "
                    f"its last step. Resuming would pay again and exceed epsilon {self._budget.epsilon:g} at delta "
                    f"{self._budget.delta:g}; nothing was paid. Start a new run folder"
                )
            self._budget.require(self._spent, mechanisms)
        self._write(Payment(first_step=None, steps=1, mechanisms=mechanisms, name=name))

    def return_unused(self) -> None:
        """Return the steps that this process reserved but did not ask `pay` for; only in release mode.

        In experiment mode a resumed run finds its reserved steps paid for and does not need them returned. A forked
        process returns nothing.

        Raises:
            OSError: The line could not be written; the steps stay paid for.
        """
        if not self._process.is_this:
            return
        self._require_current()
        start, end, _ = self._credit
        self._credit = (0, 0, ())
        if self._content.mode != "release" or start >= end or "first_step" not in self._journal.last:
            return
        payment, kept = self._payments[-1], shortened(self._payments[-1], start, end - start)
        self._journal.append({"returned": {"first_step": start, "steps": end - start}})
        self._payments[-1] = kept
        self._spent = merge(m for each in self._payments for m in each.total) if self._budget else []
        self._coverage.exchange(payment, kept)
        self._noted()

    def note_certificate(self, certificate: CertificateFacts) -> None:
        """Record a certificate that mechanisms will name; one that is known already writes no line."""
        self._require_current()
        if all(known.digest != certificate.digest for known in self._certificates):
            self._journal.append({"certificate": to_json(certificate)})
            self._certificates.append(certificate)
            self._noted()

    def note_alarm(self, alarm: Alarm) -> None:
        """Record that the device's monitor stopped the run; call it after `return_unused`.

        Raises:
            OSError: The line could not be written.
        """
        self._require_current()
        self._journal.append({"alarm": to_json(alarm)})
        self._alarms.append(alarm)
        self._noted()

    def require_covers(self, steps: int) -> None:
        """Check that the steps computed so far, 0 to steps - 1, are all paid for.

        Raises:
            LedgerCorrupt: One is not: the ledger belongs to another run, or was truncated with its head.
        """
        missing = self._coverage.first_gap()
        if missing < steps:
            raise LedgerCorrupt(
                f"{self._journal.path}: step {missing} was computed ({steps} steps were) but is not paid for; "
                "the ledger belongs to another run or was truncated; restore it from a copy"
            )

    def _reserve(self, step: int, mechanisms: tuple[Mechanism, ...], until: int | None) -> None:
        self._require_current()
        self._credit = (0, 0, ())
        checks.integer(minimum=0, step=step)
        _require_mechanisms(mechanisms)
        wanted = max(1, min(self._block, (until - step) if until is not None else self._block))
        if not self._charges_again:
            paid = self._coverage.find(step)
            if paid is not None:
                if not _covers(paid.mechanisms, mechanisms):
                    raise LedgerCorrupt(
                        f"{self._journal.path}: step {step} was paid for as rounded more exactly than this device "
                        "does; resume on the device that it was started on, or start a new run folder"
                        if _covers(mechanisms, paid.mechanisms)
                        else f"{self._journal.path}: step {step} was paid for as {paid.mechanisms[0].describe()!r}, "
                        f"not {mechanisms[0].describe()!r}; start a new run folder"
                    )
                first = paid.first_step or 0
                self._credit = (first, first + paid.steps, mechanisms)
                return
            wanted = self._coverage.room(step, wanted)
        if self._budget:
            ahead = 0 if until is None else until - step
            wanted = self._budget.affordable(self._spent, mechanisms, wanted, ahead=ahead)
            if wanted == 0:
                self._budget.require(self._spent, mechanisms)
        self._write(Payment(first_step=step, steps=wanted, mechanisms=mechanisms))
        used = 1 if self._charges_again else 0
        self._credit = (step + used, step + wanted, mechanisms)

    def _write(self, payment: Payment) -> None:
        require_certified(payment.mechanisms, self._certificates)
        entry: dict[str, Any] = {"mechanisms": [mechanism.to_json() for mechanism in payment.mechanisms]}
        if payment.first_step is None:
            entry = {"name": payment.name, **entry}
        else:
            entry = {"first_step": int(payment.first_step), "steps": int(payment.steps), **entry}
        self._journal.append(entry)
        self._payments.append(payment)
        if self._budget:
            self._spent = merge([*self._spent, *payment.total])
        self._coverage.add(payment)
        self._noted()


def read_ledger(path: str | Path, *, witnesses: Sequence[Witness] = ()) -> LedgerContent:
    """Read a ledger back, from the file or the run folder that holds it.

    The ledger of a run folder is checked against its checkpoints by `opusim.load_run(folder).guarantees` and by
    `opusim account run`; this function reads only the ledger and its head.

    Args:
        path: The file or the folder.
        witnesses: Witnesses that the ledger must fit.

    Raises:
        FileNotFoundError: There is no ledger.
        LedgerCorrupt: It was changed, truncated or reordered, or contradicts a witness; the message names file and
            line.
    """
    file = Path(path) / LEDGER_FILE if Path(path).is_dir() else Path(path)
    entries, position = read_positioned(file, witnesses=witnesses)
    return replace(content_of(file, entries), position=position)


def _covers(paid: tuple[Mechanism, ...], wanted: tuple[Mechanism, ...]) -> bool:
    """Return whether the paid mechanisms are the wanted ones, or an earlier version's, which rounded or counted less.

    A statement then takes the rounding on trust.
    """
    earlier = [wanted]
    for name in ("counts_sums", "exactly_rounded"):
        earlier.append(
            tuple(replace(one, **{name: False}) if getattr(one, name, False) else one for one in earlier[-1])
        )
    return paid in earlier


def _require_mechanisms(mechanisms: tuple[Mechanism, ...]) -> None:
    if not mechanisms:
        raise ValueError(
            "mechanisms: must name at least one; a step that releases nothing need not be paid for"
        )
