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

Entries of the file (`opusim.accounting.ledger.journal`): the first has `mode`, `delta` and `enforced`. The others are

| keys | meaning |
| --- | --- |
| `first_step`, `steps`, `mechanisms` | a block of steps is paid for; the descriptions are of a single step |
| `name`, `mechanisms` | a release that happens once is paid for |
| `returned`: `first_step`, `steps` | the end of the block in the line before was never computed |
| `certificate` | mechanisms that name its digest rest on it (`opusim.accounting.ledger.content`) |
| `alarm`: `step`, `since`, `found`, `covered` | the device's monitor stopped the run before a step |
| `stopped`, `resumed` | written by earlier versions about a budget that a run spends gradually; read, and not used |

Payments cover what is computed, in release mode also each repetition of a step, whichever process is killed and when:
1. A step is computed only after `pay(step)` returned, which took this step out of the process's credit. The credit is
   the end of the block in the last line of steps that this process wrote; no other process ever has it.
2. `return_unused` first forgets the credit, then writes the line. The returned steps were in the credit, so no `pay`
   asked for them, and none can be answered from them later. Every such step is then paid for by a new line.
3. A kill before the line is complete returns nothing. A kill after it stops a process that computes nothing any more.
4. The reader accepts a return only as the end, and never as the whole, of the block in the line directly before, so
   each block is shortened at most once, and by steps that were paid for. Earlier versions refuse the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

from opusim.accounting.journal import Journal, Position, Witness, read_positioned

from opusim import checks
from opusim.accounting.composition import Budget, merge
from opusim.accounting.guarantee import BudgetExceeded, Guarantee, LedgerCorrupt, to_json
from opusim.accounting.ledger import (
    Alarm,
    CertificateFacts,
    Coverage,
    LedgerContent,
    Mode,
    Payment,
    content_of,
    require_certified,
    shortened,
)
from opusim.accounting.mechanism import Mechanism
from opusim.files import OwnProcess

LEDGER_FILE = "ledger.jsonl"


class Ledger:
    """Pays for steps before they are computed. The run folder's lock ensures that there is one writer.

    Args:
        path: The file; a new one is created, an existing one is continued.
        mode: "experiment" or "release", as the run's configuration says.
        delta: At which the run states its guarantees, in [0, 1).
        enforced: Whether the caller checks the mechanisms' assumptions.
        block: Steps reserved by one line, at least 1.
        budget: Stops the run before the step that would exceed it.
        witnesses: What other files know of the ledger; an older or different one is refused.
        repeatable: Whether a re-executed step repeats its release in experiment mode. In release mode none does.

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
    ) -> None:
        checks.integer(minimum=1, block=block)
        if mode not in ("experiment", "release"):
            raise ValueError(f"mode = {mode!r}: must be 'experiment' or 'release'")
        checks.in_unit_interval(closed="left", delta=delta)
        self._process = OwnProcess()
        self._block, self._budget = block, budget
        self._charges_again = mode == "release" or not repeatable
        opening = {"mode": mode, "delta": float(delta), "enforced": bool(enforced)}
        self._journal = Journal(path, witnesses=witnesses)
        try:
            if not self._journal.last:
                self._journal.append(opening)
            self._content = self._load()
            kept = {key: getattr(self._content, key) for key in opening}
            if kept != opening:
                raise ValueError(
                    f"{path}: the ledger was created with {kept}, not {opening}; start a new run folder"
                )
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
        """Declare that the state is that of all lines."""
        self._lines = self._journal.position.lines

    def _require_current(self) -> None:
        """Refuse a forked process, and take up lines that were appended just before Ctrl-C.

        Raises:
            RuntimeError: This process was forked from the one that opened the ledger.
        """
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
        return LedgerContent(
            mode=self._content.mode,
            delta=self._content.delta,
            enforced=self._content.enforced,
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
            *mechanisms: What the step releases, at least one.
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
            *mechanisms: What is released, at least one.

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
                    f"budget: {name!r} was paid for, and the process that paid was killed or left no checkpoint of "
                    f"all that it did. To resume would cost it again: more than epsilon {self._budget.epsilon:g} at "
                    f"delta {self._budget.delta:g}; it was not taken. Start a new run folder"
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
                        f"{self._journal.path}: step {step} was paid for as exactly rounded, and only the processor "
                        "rounds so; resume on the processor, or start a new run folder"
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
        witnesses: What other files know of the ledger.

    Raises:
        FileNotFoundError: There is no ledger.
        LedgerCorrupt: It was changed, truncated or reordered, or contradicts a witness; the message names file and
            line.
    """
    file = Path(path) / LEDGER_FILE if Path(path).is_dir() else Path(path)
    entries, position = read_positioned(file, witnesses=witnesses)
    return replace(content_of(file, entries), position=position)


def _covers(paid: tuple[Mechanism, ...], wanted: tuple[Mechanism, ...]) -> bool:
    """Whether mechanisms are those that were paid for, or exactly rounded ones that an earlier version did not round.

    The statement keeps the rounding of those on trust.
    """
    on_trust = [
        replace(one, exactly_rounded=False) if getattr(one, "exactly_rounded", False) else one  # type: ignore[call-arg]
        for one in wanted
    ]
    return paid in (wanted, tuple(on_trust))


def _require_mechanisms(mechanisms: tuple[Mechanism, ...]) -> None:
    if not mechanisms:
        raise ValueError(
            "mechanisms: must name at least one; a step that releases nothing need not be paid for"
        )
