"""Writers of ledgers: failed writes, interrupts, forks; clean stops return what was reserved and no computed step."""

import copy
import errno
import json
import os
import pickle
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from opusim.accounting import journal
from opusim.accounting.composition import Budget
from opusim.accounting.guarantee import BudgetExceeded, LedgerCorrupt
from opusim.accounting.journal import Journal, Position, Witness, read_positioned
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.mechanisms.records import PoissonGaussian
from tests.support.forked import in_forked_process
from tests.support.private_loops import rewritten
from tests.support.shared_checks import with_marks

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)


def opened(path: Path, *, mode: str = "release", block: int = 4) -> Ledger:
    return Ledger(path, mode=mode, delta=1e-5, block=block)


def blocks(path: Path) -> list[tuple[int | None, int]]:
    return [(payment.first_step, payment.steps) for payment in read_ledger(path).payments]


@contextmanager
def half_a_line() -> Iterator[None]:
    """The disk takes 40 bytes and is full then."""
    real, calls = os.write, []

    def write(descriptor: int, content: memoryview) -> int:
        calls.append(content)
        if len(calls) == 1:
            return real(descriptor, bytes(content)[:40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "write", write):
        yield


@contextmanager
def limited(path: Path, more: int) -> Iterator[None]:
    """The system lets files grow by a few bytes only: a true error of a file system, EFBIG."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def failing(name: str) -> Any:
    return mock.patch.object(os, name, side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))


FAULTS: dict[str, Callable[[Path], object]] = {
    "half a line": lambda path: half_a_line(),
    "fsync": lambda path: failing("fsync"),
    "head": lambda path: failing("replace"),
    "no byte": lambda path: limited(path, 0),
    "some bytes": lambda path: limited(path, 60),
}


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_failed_write_nothing_is_paid_and_all_is_read(tmp_path: Path, fault: str, mode: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path, mode=mode)
    for step in range(4):
        ledger.pay(step, STEP, until=100)
    position = ledger.position
    with FAULTS[fault](path), pytest.raises(OSError, match=r"ledger\.jsonl"):
        ledger.pay(4, STEP, until=100)
    for step in (4, 5, 6, 8):
        with pytest.raises(OSError, match="takes nothing more in this process"):
            ledger.pay(step, STEP, until=100)
    assert ledger.position == position
    ledger.close()
    found = blocks(path)
    assert found in ([(0, 4)], [(0, 4), (4, 4)])  # a complete line pays for steps that were never computed
    assert len(read_positioned(path)[0]) >= position.lines
    with opened(path, mode=mode) as again:
        for step in range(4, 9):
            again.pay(step, STEP, until=100)
    assert blocks(path)[-1] == (8, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_ledger_whose_first_line_failed_can_be_opened_again(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with FAULTS[fault](path), pytest.raises(OSError, match=r"ledger\.jsonl"):
        opened(path)
    assert len(os.listdir("/proc/self/fd")) == before
    with opened(path) as ledger:
        ledger.pay(0, STEP, until=2)
    assert blocks(path) == [(0, 2)]


def test_a_failed_return_leaves_the_steps_paid(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    with failing("fsync"), pytest.raises(OSError, match="Input/output error"):
        ledger.return_unused()
    with pytest.raises(OSError, match="takes nothing more"):
        ledger.pay(1, STEP, until=100)
    ledger.close()
    assert blocks(path) == [(0, 4)]


@pytest.mark.parametrize("place", ["write", "fsync", "replace", "after the line", "after the journal"])
def test_after_an_interrupt_it_pays_on(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose cell is stopped within `pay` and run again."""
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    with monkeypatch.context() as patch:
        if place == "after the line":
            real = journal._write_head
            patch.setattr(journal, "_write_head", lambda *a: (real(*a), _interrupt()))
        elif place == "after the journal":
            append = Journal.append
            patch.setattr(Journal, "append", lambda *a: (append(*a), _interrupt()))
        else:
            call = getattr(os, place)
            patch.setattr(os, place, lambda *a: (call(*a), _interrupt()))
        with pytest.raises(KeyboardInterrupt):
            ledger.pay(4, STEP, until=100)
    for step in (4, 5):
        ledger.pay(step, STEP, until=100)
    ledger.return_unused()
    paid = ledger.content.payments
    ledger.close()
    assert read_ledger(path).payments == paid
    assert blocks(path)[0] == (0, 4)
    assert blocks(path)[-1] == (4, 2)  # a block that the interrupted call had paid for may stand before it


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_forked_process_cannot_pay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    before = path.read_bytes()
    for work in (
        lambda: ledger.pay(1, STEP, until=100),
        lambda: ledger.pay(4, STEP, until=100),
        lambda: ledger.pay_once("labels", STEP),
        lambda: ledger._journal.append({"name": "labels"}),
    ):
        found = in_forked_process(work)
        assert found.startswith(f"RuntimeError: {path} belongs to process {os.getpid()}, and process")
    assert in_forked_process(lambda: (ledger.return_unused(), ledger.close())[0]) == "None"
    assert path.read_bytes() == before
    for step in (1, 2, 3, 4):
        ledger.pay(step, STEP, until=100)
    ledger.close()
    assert blocks(path) == [(0, 4), (4, 4)]


def test_a_forked_process_may_read_and_may_keep_a_ledger_of_its_own(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.jsonl", tmp_path / "other.jsonl"

    def work() -> int:
        with opened(other) as own:
            own.pay(0, STEP, until=100)
        return len(ledger.content.payments) + len(read_ledger(path).payments)

    with opened(path) as ledger:
        ledger.pay(0, STEP, until=100)
        assert in_forked_process(work) == "2"
    assert blocks(other) == [(0, 4)]


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_is_not_copied(tmp_path: Path, made: Callable[[object], object]) -> None:
    with opened(tmp_path / "ledger.jsonl") as ledger, pytest.raises(TypeError, match="cannot be copied"):
        made(ledger)


TOTAL = 40
ONCE = LabelReadout(mu=0.5)


def begun(path: Path, **options: object) -> Ledger:
    return Ledger(path, mode="release", delta=1e-5, block=7, **options)  # type: ignore[arg-type]


def paid(path: Path) -> Counter[int]:
    """How often each step is paid for, as a reader finds it."""
    found: Counter[int] = Counter()
    for payment in read_ledger(path).payments:
        assert payment.first_step is not None
        found.update(range(payment.first_step, payment.first_step + payment.steps))
    return found


def live(path: Path, moments: random.Random) -> list[str]:
    """A release run through many processes, each killed, stopped cleanly or failing; says where it computed unpaid."""
    computed: Counter[int] = Counter()
    step, problems = 0, []
    while step < TOTAL:
        ledger, checkpoint = begun(path), step
        ledger.require_covers(step)
        for _ in range(moments.randrange(1, 12)):
            if step == TOTAL:
                break
            ledger.pay(step, STEP, until=TOTAL)
            computed[step] += 1
            step += 1
        end = moments.choice(["kill", "kill after the return", "clean stop"])
        if end != "kill":
            ledger.return_unused()
        if end != "clean stop":  # back to the checkpoint, of which this process wrote none
            step = checkpoint
        ledger.close()
        problems += [f"step {s}: {n} times" for s, n in computed.items() if paid(path)[s] < n]
        if end == "clean stop" and not problems and sum(paid(path).values()) < sum(computed.values()):
            problems.append("the sum does not cover")
        if moments.random() < 0.1:
            step = TOTAL  # given up
    return problems


@pytest.mark.parametrize("number", with_marks(range(20), range(6, 20)))
def test_payments_cover_what_was_computed_whatever_happens(tmp_path: Path, number: int, seed: int) -> None:
    assert live(tmp_path / "ledger.jsonl", random.Random(f"{seed} {number}")) == []


def test_a_planted_return_of_a_computed_step_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    return_unused = Ledger.return_unused

    def one_too_many(self: Ledger) -> None:
        start, end, held = self._credit
        self._credit = (start - 1, end, held)
        return_unused(self)

    monkeypatch.setattr(Ledger, "return_unused", one_too_many)
    found = []
    for number in range(5):
        try:
            found += live(tmp_path / f"{number}.jsonl", random.Random(number))
        except ValueError as error:  # LedgerCorrupt is one
            found.append(str(error))
    assert found


def test_planted_steps_of_what_was_returned_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_its_credit(self: Ledger) -> None:
        credit = self._credit
        return_unused(self)
        self._credit = credit

    return_unused = Ledger.return_unused
    monkeypatch.setattr(Ledger, "return_unused", keeps_its_credit)
    with begun(tmp_path / "ledger.jsonl") as ledger:
        for step in range(3):
            ledger.pay(step, STEP, until=TOTAL)
        ledger.return_unused()
        ledger.pay(3, STEP, until=TOTAL)
    # computed, not paid for: what the order in return_unused prevents
    assert paid(tmp_path / "ledger.jsonl")[3] == 0


def test_a_clean_stop_costs_what_was_computed_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for start, end in ((0, 3), (3, 12), (12, 20)):
        with begun(path) as ledger:
            for step in range(start, end):
                ledger.pay(step, STEP, until=20)
            ledger.return_unused()
            ledger.return_unused()  # nothing is left
            assert ledger.content.payments == read_ledger(path).payments
    assert paid(path) == Counter(range(20))
    (guarantee,) = read_ledger(path).guarantees()
    with begun(tmp_path / "unbroken.jsonl") as ledger:
        for step in range(20):
            ledger.pay(step, STEP, until=20)
        assert ledger.guarantees() == [guarantee]


def test_returned_steps_are_paid_for_again_and_free_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(tmp_path / "all.jsonl", mode="release", delta=1e-5) as ledger:
        for step in range(20):
            ledger.pay(step, STEP)
        budget = Budget(epsilon=ledger.guarantees()[0].epsilon, delta=1e-5)
    for start, end in ((0, 3), (3, 11), (11, 20)):
        with begun(path, budget=budget) as ledger:
            for step in range(start, end):
                ledger.pay(step, STEP, until=30)
            ledger.return_unused()
    with begun(path, budget=budget) as ledger, pytest.raises(BudgetExceeded):
        ledger.pay(20, STEP, until=30)


def test_experiment_mode_returns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="experiment", delta=1e-5, block=7) as ledger:
        ledger.pay(0, STEP, until=20)
        ledger.return_unused()
    assert paid(path) == Counter(range(7))


def test_a_second_payment_beyond_the_budget_says_what_ended_it(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.jsonl", Budget(epsilon=2.0, delta=1e-5)
    with begun(path, budget=budget) as ledger:
        ledger.pay_once("labels", ONCE)
    with begun(path, budget=budget) as ledger:
        message = "'labels' was paid for.*was killed.*exceed epsilon 2.*Start a new run folder"
        with pytest.raises(BudgetExceeded, match=message):
            ledger.pay_once("labels", ONCE)


def written(path: Path, *, multiplier: float = 2.0, steps: int = 20) -> Position:
    with begun(path) as ledger:
        for step in range(steps):
            ledger.pay(step, replace(STEP, noise_multiplier=multiplier), until=steps)
        return ledger.position


def test_a_witness_knows_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    position = written(path)
    assert read_positioned(path)[1] == position
    assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position
    witness = Witness(name="checkpoint step-5", position=position)
    last = Witness(name="summary.json", position=position, final=True)
    read_ledger(path, witnesses=[witness, last])
    with begun(path) as ledger:
        ledger.pay(20, STEP)
    read_ledger(path, witnesses=[witness, Witness(name="the first", position=Position())])
    with pytest.raises(LedgerCorrupt, match="line 5: was added after summary.json"):
        read_ledger(path, witnesses=[last])


def older(path: Path) -> None:
    rewritten(path.parent, lambda entries: entries[:2])


def dearer(path: Path) -> None:
    path.unlink()
    path.with_suffix(".head").unlink()
    written(path, multiplier=9.0)


@pytest.mark.parametrize(
    ("attack", "message"), [(older, "line 3: is missing: checkpoint step-5"), (dearer, "line 4: is not the line")]
)  # fmt: skip
def test_an_older_or_rewritten_ledger_is_refused(tmp_path: Path, attack: Callable, message: str) -> None:
    path = tmp_path / "ledger.jsonl"
    witness = Witness(name="checkpoint step-5", position=written(path))
    attack(path)
    read_ledger(path)  # by itself it is a ledger
    before = path.read_bytes()
    for read in (lambda: read_ledger(path, witnesses=[witness]), lambda: begun(path, witnesses=[witness])):
        with pytest.raises(LedgerCorrupt, match=message):
            read()
    assert path.read_bytes() == before


def test_require_covers_finds_a_step_that_is_not_paid_for(tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl", steps=4)
    with begun(tmp_path / "ledger.jsonl") as ledger:
        ledger.require_covers(4)
        with pytest.raises(LedgerCorrupt, match="step 4 was computed .5 steps were. but is not paid for"):
            ledger.require_covers(5)


def test_what_a_budget_compares_is_all_that_was_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after steps were returned and after the ledger was begun again; and no payment adds up all earlier ones."""
    path, budget = tmp_path / "ledger.jsonl", Budget(epsilon=1e3, delta=1e-5)
    for first in (0, 7):
        with begun(path, budget=budget) as ledger:
            for step in range(first, first + 7):
                ledger.pay(step, STEP, until=40)
                assert ledger._spent == ledger.content.mechanisms
            ledger.return_unused()
            assert ledger._spent == ledger.content.mechanisms
            assert sum(mechanism.steps for mechanism in ledger._spent) == first + 7
    with begun(path, budget=budget) as ledger:
        monkeypatch.delattr(Ledger, "content")
        for step in range(14, 20):
            ledger.pay(step, STEP, until=40)
