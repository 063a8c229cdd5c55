"""A ledger pays before a step is computed, notices changes, and replays to the run's own guarantee."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opusim.accounting.composition import Budget
from opusim.accounting.guarantee import BudgetExceeded, LedgerCorrupt
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import PoissonGaussian, RecordCentral

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)


def run(path: Path, steps: int, *, mode: str = "experiment", start: int = 0, block: int = 3) -> None:
    with Ledger(path, mode=mode, delta=1e-5, block=block) as ledger:
        for step in range(start, steps):
            ledger.pay(step, STEP, until=20)


def paid(path: Path) -> int:
    return sum(payment.steps for payment in read_ledger(path).payments)


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


RECORDS = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=10)
ROUNDED = replace(RECORDS, exactly_rounded=True)


def test_steps_that_an_earlier_version_paid_for_are_taken_unrounded(tmp_path: Path) -> None:
    """A resumed run finds the rest of its block; what it pays for from then on is exactly rounded."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
        ledger.pay(0, RECORDS)
        ledger.pay_once("once", RECORDS)
    with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
        for step in range(1, 5):
            ledger.pay(step, ROUNDED)
        ledger.pay_once("once", ROUNDED)
        with pytest.raises(LedgerCorrupt, match="paid for as rounded more exactly than this device"):
            ledger.pay(4, RECORDS)
        with pytest.raises(LedgerCorrupt, match="was paid for as 'records clipped to 1"):
            ledger.pay(4, replace(ROUNDED, noise_multiplier=1.9))
    payments = read_ledger(path).payments
    assert [each.mechanisms[0] for each in payments] == [RECORDS, RECORDS, ROUNDED]
    (stated,) = read_ledger(path).guarantees()
    assert any("not attacked" in each.text for each in stated.assumptions)


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


def test_flipped_bytes_reordered_and_cut_ledgers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, 9)
    sound = path.read_bytes()
    lines = sound.splitlines(keepends=True)
    flipped = [sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :] for place in (20, 120, 400)]
    for content in (*flipped, b"".join([lines[0], lines[2], lines[1], *lines[3:]])):
        path.write_bytes(content)
        with pytest.raises(LedgerCorrupt, match="ledger.jsonl"):
            read_ledger(path)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(LedgerCorrupt):
        Ledger(path, mode="experiment", delta=1e-5)


def test_a_line_that_was_being_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(path, 6)
    path.write_bytes(path.read_bytes() + b'{"half')
    run(path, 9, start=6)
    assert paid(path) == 9


def test_a_budget_stops_before_the_step_that_would_exceed_it(tmp_path: Path) -> None:
    path, computed = tmp_path / "ledger.jsonl", list[int]()
    budget = Budget(epsilon=1.0, delta=1e-5)
    with Ledger(path, mode="experiment", delta=1e-5, block=5, budget=budget) as ledger:
        with pytest.raises(BudgetExceeded):
            [(ledger.pay(step, STEP), computed.append(step)) for step in range(1000)]
        (guarantee,) = ledger.guarantees()
    assert guarantee.epsilon <= 1.0
    assert 0 < len(computed) < 1000
    assert paid(path) == len(computed)


def test_a_step_whose_noise_is_not_repeated_is_charged_again(tmp_path: Path) -> None:
    """In an experiment on hardware, as in release mode; a resumed one whose noise repeats pays once."""
    for repeatable, wanted in ((True, 10), (False, 14)):
        path = tmp_path / f"{repeatable}.jsonl"
        for start in (0, 6):  # killed after step 9, with a checkpoint of 6 steps
            options = {"delta": 1e-5, "block": 1 if start else 10, "repeatable": repeatable}
            with Ledger(path, mode="experiment", **options) as ledger:
                for step in range(start, 10):
                    ledger.pay(step, STEP, until=10)
        assert paid(path) == wanted


def blocks(path: Path) -> list[tuple[int | None, int]]:
    return [(payment.first_step, payment.steps) for payment in read_ledger(path).payments]


def test_a_block_ends_at_the_next_paid_step_and_at_the_end_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for step, until in ((8, 11), (2, None), (7, None), (0, 11), (11, 11), (13, 12), (20, 40)):
        with Ledger(path, mode="experiment", delta=1e-5, block=4) as ledger:
            ledger.pay(step, STEP, until=until)
    assert blocks(path) == [(8, 3), (2, 4), (7, 1), (0, 2), (11, 1), (13, 1), (20, 4)]


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_block_pays_for_its_mechanism_only(tmp_path: Path, mode: str) -> None:
    """An equal mechanism is the same; another one is refused where steps repeat, and charged where they do not."""
    path, other = tmp_path / "ledger.jsonl", replace(STEP, noise_multiplier=3.0)
    with Ledger(path, mode=mode, delta=1e-5, block=4) as ledger:
        for step in range(3):
            ledger.pay(step, replace(STEP))  # another object, as a resumed process makes it
        assert blocks(path) == [(0, 4)]
        if mode == "experiment":
            with pytest.raises(LedgerCorrupt, match="step 3 was paid for as .*start a new run folder"):
                ledger.pay(3, other)
        else:
            ledger.pay(3, other)
    assert blocks(path) == [(0, 4)] if mode == "experiment" else [(0, 4), (3, 4)]


def test_release_mode_takes_the_steps_of_a_block_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, mode="release", delta=1e-5, block=4) as ledger:
        for step in (0, 1, 1, 2, 4):
            ledger.pay(step, STEP)
    assert blocks(path) == [(0, 4), (1, 4), (4, 4)]


def test_a_release_that_happens_once_is_paid_once_where_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        with Ledger(path, mode="experiment", delta=1e-5) as ledger:
            ledger.pay_once("labels", replace(STEP))
            ledger.pay_once("scores", replace(STEP))
            with pytest.raises(LedgerCorrupt, match="'labels' was paid for as another mechanism"):
                ledger.pay_once("labels", STEP.repeated(2))
            with pytest.raises(ValueError, match="mechanisms: must name at least one"):
                ledger.pay_once("more")
    assert [payment.name for payment in read_ledger(path).payments] == ["labels", "scores"]


def test_a_run_that_fits_is_accounted_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps ahead are those to the end of the run, beside what was paid."""
    asked: list[int] = []

    def spent(self: Budget, mechanisms: Sequence[Mechanism]) -> float:
        asked.append(sum(mechanism.steps for mechanism in mechanisms))
        return 0.01 * asked[-1]

    monkeypatch.setattr(Budget, "spent", spent)
    for start, end in ((0, 8), (8, 20)):
        budget = Budget(epsilon=0.2, delta=1e-5)
        with Ledger(tmp_path / "l", mode="experiment", delta=1e-5, block=4, budget=budget) as ledger:
            for step in range(start, end):
                ledger.pay(step, STEP, until=20)
        assert asked == [20]
        asked.clear()
    with Ledger(tmp_path / "m", mode="experiment", delta=1e-5, budget=budget) as ledger:
        ledger.pay(0, STEP)  # nothing is known of the end
    assert asked == []  # one step of twenty that fit
    again = Budget(epsilon=0.2, delta=1e-5)
    with Ledger(tmp_path / "m", mode="experiment", delta=1e-5, budget=again) as ledger:
        ledger.pay(1, STEP)
    assert asked == [2]


def test_part_of_a_block_is_reserved_if_no_more_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "spent", lambda _, mechanisms: 0.1 * sum(one.steps for one in mechanisms))
    budget = Budget(epsilon=0.65, delta=1e-5)
    with Ledger(tmp_path / "l", mode="release", delta=1e-5, block=4, budget=budget) as ledger:
        for step in range(6):
            ledger.pay(step, STEP, until=30)
        with pytest.raises(BudgetExceeded, match="spent 0.6"):
            ledger.pay(6, STEP, until=30)
    assert blocks(tmp_path / "l") == [(0, 4), (4, 2)]


@pytest.mark.parametrize(
    "changes", [{"mode": "x"}, {"block": 0}, {"block": 1.5}, {"delta": 1.0}, {"delta": -1e-9}]
)
def test_a_wrong_ledger_is_not_created(tmp_path: Path, changes: dict[str, object]) -> None:
    ((key, value),) = changes.items()
    with pytest.raises((ValueError, TypeError), match=f"{key} = {value!r:.5}"):
        Ledger(tmp_path / "l", **{"mode": "experiment", "delta": 1e-5, **changes})  # type: ignore[arg-type]
    assert not (tmp_path / "l").exists()


@pytest.mark.parametrize("changes", [{"mode": "release"}, {"delta": 0.0}, {"enforced": True}])
def test_a_ledger_is_continued_as_it_began(tmp_path: Path, changes: dict[str, object]) -> None:
    begun = {"mode": "experiment", "delta": 1e-5, "enforced": False}
    for _ in range(2):
        with Ledger(tmp_path / "l", **begun) as ledger:  # type: ignore[arg-type]
            ledger.pay(0, STEP)
    with pytest.raises(ValueError, match="the ledger was created with .*; start a new run folder"):
        Ledger(tmp_path / "l", **{**begun, **changes})  # type: ignore[arg-type]
    with Ledger(tmp_path / "l", **begun) as ledger:  # type: ignore[arg-type]  # and is not held
        with pytest.raises(ValueError, match="mechanisms: must name at least one"):
            ledger.pay(1)
        with pytest.raises(ValueError, match="step = -1"):
            ledger.pay(-1, STEP)
    assert blocks(tmp_path / "l") == [(0, 1)]
