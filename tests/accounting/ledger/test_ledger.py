"""A ledger pays before a step is computed, notices changes, and replays to the run's own guarantee."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accounting.composition import Budget
from accounting.errors import BudgetExceeded, LedgerCorrupt
from accounting.ledger.ledger import Ledger, read_ledger
from accounting.records.additive_noise import PoissonGaussian

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)


def run(path: Path, steps: int, *, mode: str = "experiment", start: int = 0, block: int = 3) -> None:
    with Ledger(path, mode=mode, delta=1e-5, block=block) as ledger:
        for step in range(start, steps):
            ledger.pay(step, STEP, until=20)


def paid(path: Path) -> int:
    return sum(payment.steps for payment in read_ledger(path).payments)


def test_replay_gives_the_runs_guarantee(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
        for step in range(10):
            ledger.pay(step, STEP, until=10)
        ours = ledger.guarantees()
    assert read_ledger(path).guarantees() == ours
    assert paid(path) == 10


def test_a_reused_block_pays_for_its_own_steps_only(tmp_path: Path) -> None:
    """A resumed run that repeats a step of the second block pays for the first step behind that block."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
        ledger.pay(0, STEP)
        ledger.pay(4, STEP)
    with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
        for step in (5, 7):
            ledger.pay(step, STEP)
        assert paid(path) == 8
        ledger.pay(8, STEP)
    assert paid(path) == 12


def test_steps_that_are_known_to_fit_are_not_accounted_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Budget, "spent", lambda self, mechanisms: asked.append(list(mechanisms)) or 0.5)
    budget = Budget(epsilon=1.0, delta=1e-5)
    for steps in (20, 3, 20, 1):
        assert not budget.would_exceed([STEP], [STEP.repeated(steps)])
    assert asked == [[STEP.repeated(21)]]
    assert not budget.would_exceed([STEP], [STEP.repeated(21)])
    assert len(asked) == 2


def test_a_step_is_synced_before_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def recorded(*arguments: object, name: str = name, real: object = real) -> object:
            events.append(name)
            return real(*arguments)

        monkeypatch.setattr(os, name, recorded)
    with Ledger(tmp_path / "ledger.jsonl", mode="experiment", delta=1e-5) as ledger:
        events.clear()
        ledger.pay(0, STEP)
        events.append("compute")
    assert events[0] == "write"
    assert "fsync" in events[1 : events.index("replace")]
    assert events[-1] == "compute"


def test_a_repeated_step_is_paid_once_in_experiment_mode_and_again_in_release_mode(tmp_path: Path) -> None:
    for mode, total in (("experiment", 6), ("release", 10)):
        path = tmp_path / mode
        run(path, 6, mode=mode, block=1)
        run(path, 6, mode=mode, start=2, block=1)
        assert paid(path) == total


@pytest.mark.parametrize("place", [20, 120, 400])
def test_a_flipped_byte_is_refused(tmp_path: Path, place: int) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, 9)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(LedgerCorrupt, match="ledger.jsonl"):
        read_ledger(path)


def test_reordered_and_cut_ledgers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, 9)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(LedgerCorrupt):
        read_ledger(path)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LedgerCorrupt):
        Ledger(path, mode="experiment", delta=1e-5)


def test_a_line_that_was_being_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, 6)
    with path.open("ab") as file:
        file.write(b'{"half')
    run(path, 9, start=6)
    assert paid(path) == 9


def test_a_budget_stops_before_the_step_that_would_exceed_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    budget = Budget(epsilon=1.0, delta=1e-5)
    computed = 0

    def compute_until_stopped(ledger: Ledger) -> None:
        nonlocal computed
        for step in range(1000):
            ledger.pay(step, STEP)
            computed += 1

    with Ledger(path, mode="experiment", delta=1e-5, block=5, budget=budget) as ledger:
        with pytest.raises(BudgetExceeded):
            compute_until_stopped(ledger)
        (guarantee,) = ledger.guarantees()
    assert guarantee.epsilon <= 1.0
    assert 0 < computed < 1000
    assert paid(path) == computed


def test_a_step_whose_noise_is_not_repeated_is_charged_again(tmp_path: Path) -> None:
    """In an experiment on hardware, as in release mode; a resumed one whose noise repeats pays once."""
    for repeatable, wanted in ((True, 10), (False, 14)):
        path = tmp_path / f"{repeatable}.jsonl"
        for start in (0, 6):  # killed after step 9, with a checkpoint of 6 steps
            with Ledger(
                path, mode="experiment", delta=1e-5, block=1 if start else 10, repeatable=repeatable
            ) as ledger:
                for step in range(start, 10):
                    ledger.pay(step, STEP, until=10)
        assert paid(path) == wanted
