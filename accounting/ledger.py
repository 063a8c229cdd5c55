"""What a run has paid for: every step's mechanism is on disk, synced, before the step is computed.

    with Ledger(folder / "ledger.jsonl", mode="experiment", delta=1e-5, block=64) as ledger:
        for step in range(total):
            ledger.pay(step, mechanism, until=total)
            ...  # compute the step

A killed run may have paid for steps that it did not compute; it never computed one that it had not paid for. Steps
are reserved in blocks, one line for each, so a sync is not paid at every step.

- experiment mode: noise is keyed by the step, so a re-executed step repeats its release and is paid once.
- release mode: a re-executed step draws afresh and is charged again; after a restart so is what was left of a block.

Entries of the file (`accounting.journal`): the first has `mode`, `delta` and `enforced`; one of steps has
`first_step`, `steps` and `mechanisms`, the descriptions of a single step; one of something released once has `name`
and `mechanisms`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from accounting import arguments
from accounting.budget import Budget
from accounting.composition import guarantees, merge
from accounting.errors import LedgerCorrupt
from accounting.guarantee import Guarantee
from accounting.journal import Journal, read_journal
from accounting.mechanisms import Mechanism, mechanism_from_json

Mode = Literal["experiment", "release"]
LEDGER_FILE = "ledger.jsonl"


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
        payments: Every line that pays.
    """

    mode: Mode
    delta: float
    enforced: bool
    payments: tuple[Payment, ...]

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


class Ledger:
    """Pays for steps before they are computed. One writer; the run folder's lock sees to that.

    Args:
        path: The file; a new one is begun, an old one goes on.
        mode: "experiment" or "release", as the run's configuration says.
        delta: At which the run states its guarantees, in [0, 1).
        enforced: Whether the caller checks the mechanisms' assumptions.
        block: Steps reserved by one line, at least 1.
        budget: Stops the run before the step that would exceed it.

    Raises:
        LedgerCorrupt: The file was changed, cut or reordered.
        ValueError: An old ledger has another mode, delta or enforcement.
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
    ) -> None:
        arguments.count(block=block)
        if mode not in ("experiment", "release"):
            raise ValueError(f"mode = {mode!r}: must be 'experiment' or 'release'")
        arguments.share(delta=delta)
        self._journal = Journal(path)
        self._block, self._budget = block, budget
        opening = {"mode": mode, "delta": float(delta), "enforced": bool(enforced)}
        if not self._journal.entries:
            self._journal.append(opening)
        self._content = _content(Path(path), self._journal.entries)
        kept = {key: getattr(self._content, key) for key in opening}
        if kept != opening:
            self._journal.close()
            raise ValueError(
                f"{path}: the ledger was begun with {kept}, not {opening}; start a new run folder"
            )
        self._payments = list(self._content.payments)
        self._coverage = _Coverage(self._payments)
        self._credit: tuple[int, int, tuple[Mechanism, ...]] = (0, 0, ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._journal.close()

    @property
    def content(self) -> LedgerContent:
        """What is paid for so far."""
        return LedgerContent(
            mode=self._content.mode,
            delta=self._content.delta,
            enforced=self._content.enforced,
            payments=tuple(self._payments),
        )

    def guarantees(self, *, delta: float | None = None) -> list[Guarantee]:
        """What the run guarantees so far; replaying the file gives the same."""
        return self.content.guarantees(delta=delta)

    def pay(self, step: int, *mechanisms: Mechanism, until: int | None = None) -> None:
        """Make sure that a step is paid for; when this returns it may be computed.

        Args:
            step: The step's number, from 0.
            *mechanisms: What the step releases, at least one.
            until: Steps of the whole run: no block reaches beyond.

        Raises:
            BudgetExceeded: The step would exceed the budget; nothing was written.
            LedgerCorrupt: Experiment mode, and the step was paid for as something else.
            OSError: The line could not be written; the step must not be computed.
        """
        start, end, held = self._credit
        if start <= step < end and held == mechanisms:
            if self._content.mode == "release":
                if step == start:
                    self._credit = (start + 1, end, held)
                    return
            else:
                return
        self._reserve(step, mechanisms, until)

    def pay_once(self, name: str, *mechanisms: Mechanism) -> None:
        """Make sure that something released once, before any step, is paid for (such as a label table).

        In experiment mode the same name is paid once; in release mode every call is charged.

        Raises:
            BudgetExceeded: It would exceed the budget.
            LedgerCorrupt: Experiment mode, and the name was paid for as something else.
        """
        _require_mechanisms(mechanisms)
        earlier = [payment for payment in self._payments if payment.name == name]
        if earlier and self._content.mode == "experiment":
            if earlier[0].mechanisms != mechanisms:
                raise LedgerCorrupt(f"{self._journal.path}: {name!r} was paid for as another mechanism")
            return
        if self._budget:
            self._budget.require(self.content.mechanisms, mechanisms)
        self._write(Payment(first_step=None, steps=1, mechanisms=mechanisms, name=name))

    def require_covers(self, steps: int) -> None:
        """Check that the steps computed so far, 0 to steps - 1, are all paid for.

        Raises:
            LedgerCorrupt: One is not: the ledger belongs to another run, or was cut with its head.
        """
        missing = self._coverage.first_gap()
        if missing < steps:
            raise LedgerCorrupt(
                f"{self._journal.path}: step {missing} was computed ({steps} steps were) but is not paid for; "
                "the ledger is of another run or was cut; restore it from a copy"
            )

    def _reserve(self, step: int, mechanisms: tuple[Mechanism, ...], until: int | None) -> None:
        arguments.count(minimum=0, step=step)
        _require_mechanisms(mechanisms)
        wanted = max(1, min(self._block, (until - step) if until is not None else self._block))
        if self._content.mode == "experiment":
            paid = self._coverage.find(step)
            if paid is not None:
                self._reuse(step, mechanisms, paid)
                return
            wanted = self._coverage.room(step, wanted)
        if self._budget:
            spent = self.content.mechanisms
            ahead = 0 if until is None else until - step
            wanted = self._budget.affordable(spent, mechanisms, wanted, ahead=ahead)
            if wanted == 0:
                self._budget.require(spent, mechanisms)
        self._write(Payment(first_step=step, steps=wanted, mechanisms=mechanisms))
        used = 1 if self._content.mode == "release" else 0
        self._credit = (step + used, step + wanted, mechanisms)

    def _reuse(self, step: int, mechanisms: tuple[Mechanism, ...], paid: Payment) -> None:
        if paid.mechanisms != mechanisms:
            raise LedgerCorrupt(
                f"{self._journal.path}: step {step} was paid for as {paid.mechanisms[0].describe()!r}, "
                f"not {mechanisms[0].describe()!r}; start a new run folder"
            )
        first = paid.first_step or 0
        self._credit = (first, first + paid.steps, mechanisms)

    def _write(self, payment: Payment) -> None:
        entry: dict[str, Any] = {"mechanisms": [mechanism.to_json() for mechanism in payment.mechanisms]}
        if payment.first_step is None:
            entry = {"name": payment.name, **entry}
        else:
            entry = {"first_step": int(payment.first_step), "steps": int(payment.steps), **entry}
        self._journal.append(entry)
        self._payments.append(payment)
        self._coverage.add(payment)


class _Coverage:
    """Which steps are paid for, looked up by bisection."""

    def __init__(self, payments: Sequence[Payment]) -> None:
        self._firsts: list[int] = []
        self._payments: list[Payment] = []
        for payment in payments:
            self.add(payment)

    def add(self, payment: Payment) -> None:
        if payment.first_step is None:
            return
        place = bisect.bisect_right(self._firsts, payment.first_step)
        self._firsts.insert(place, payment.first_step)
        self._payments.insert(place, payment)

    def find(self, step: int) -> Payment | None:
        place = bisect.bisect_right(self._firsts, step) - 1
        if place < 0 or step >= self._firsts[place] + self._payments[place].steps:
            return None
        return self._payments[place]

    def room(self, step: int, wanted: int) -> int:
        """Steps from an unpaid one to the next paid one, at most those wanted."""
        place = bisect.bisect_right(self._firsts, step)
        return wanted if place == len(self._firsts) else min(wanted, self._firsts[place] - step)

    def first_gap(self) -> int:
        end = 0
        for first, payment in zip(self._firsts, self._payments, strict=True):
            if first > end:
                break
            end = max(end, first + payment.steps)
        return end


def read_ledger(path: str | Path) -> LedgerContent:
    """Read a ledger back, from the file or the run folder that holds it.

    Raises:
        FileNotFoundError: There is none.
        LedgerCorrupt: It was changed, cut or reordered; the message names file and line.
    """
    file = Path(path) / LEDGER_FILE if Path(path).is_dir() else Path(path)
    return _content(file, read_journal(file))


def _content(path: Path, entries: Sequence[dict[str, Any]]) -> LedgerContent:
    if not entries:
        raise LedgerCorrupt(f"{path}: line 1: is missing: nothing was ever paid for")
    payments = []
    for number, entry in enumerate(entries, start=1):
        try:
            if number == 1:
                mode, delta, enforced = entry["mode"], float(entry["delta"]), bool(entry["enforced"])
            else:
                payments.append(_payment(entry))
        except (KeyError, ValueError, TypeError) as error:
            raise LedgerCorrupt(f"{path}: line {number}: {error}") from error
    return LedgerContent(mode=mode, delta=delta, enforced=enforced, payments=tuple(payments))


def _payment(entry: dict[str, Any]) -> Payment:
    mechanisms = tuple(mechanism_from_json(content) for content in entry["mechanisms"])
    if "name" in entry:
        return Payment(first_step=None, steps=1, mechanisms=mechanisms, name=entry["name"])
    return Payment(first_step=entry["first_step"], steps=entry["steps"], mechanisms=mechanisms)


def _require_mechanisms(mechanisms: tuple[Mechanism, ...]) -> None:
    if not mechanisms:
        raise ValueError(
            "mechanisms: must name at least one; a step that releases nothing need not be paid for"
        )
