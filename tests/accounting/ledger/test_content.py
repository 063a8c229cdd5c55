"""What a ledger's lines may be, and which steps they cover."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opusim.accounting.guarantee import LedgerCorrupt
from opusim.accounting.ledger import Coverage, Payment, content_of, shortened
from opusim.accounting.mechanisms.labels import LabelBudget
from opusim.accounting.mechanisms.records import PoissonGaussian

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)
OPENING = {"mode": "release", "delta": 1e-5, "enforced": True}
BLOCK = {"first_step": 0, "steps": 4, "mechanisms": [STEP.to_json()]}


def block(first: int, steps: int) -> Payment:
    return Payment(first_step=first, steps=steps, mechanisms=(STEP,))


ONCE = Payment(first_step=None, steps=1, mechanisms=(LabelBudget(budget_mu=0.5),), name="labels")
PAID = {*range(3, 7), *range(12, 14), *range(14, 15)}


def test_every_step_is_found_in_its_block_which_ends_before_the_next_paid_one() -> None:
    coverage = Coverage([block(12, 2), ONCE, block(3, 4), block(14, 1)])
    for step in range(-1, 20):
        found = coverage.find(step)
        assert (found is not None) == (step in PAID)
        if found is not None:
            assert found.first_step is not None
            assert found.first_step <= step < found.first_step + found.steps
    for step in set(range(20)) - PAID:
        for wanted in (1, 2, 5, 30):
            free = next((n for n in range(wanted) if step + n in PAID), wanted)
            assert coverage.room(step, wanted) == free


@pytest.mark.parametrize(("blocks", "gap"), [
    ([], 0),
    ([(1, 5)], 0),
    ([(0, 5)], 5),
    ([(5, 2), (0, 5)], 7),
    ([(0, 5), (6, 2)], 5),
    ([(0, 9), (2, 3), (9, 1)], 10),  # paid twice in release mode: the shorter one ends within the longer
    ([(0, 3), (3, 3), (7, 1), (6, 1)], 8),
])  # fmt: skip
def test_the_first_gap_is_the_first_step_outside_blocks(blocks: list[tuple[int, int]], gap: int) -> None:
    assert Coverage([ONCE, *(block(*one) for one in blocks)]).first_gap() == gap


def test_a_shortened_block_takes_the_place_of_its_own_and_not_of_an_equal_one() -> None:
    first, second = block(0, 4), block(0, 4)
    coverage = Coverage([first, second])
    coverage.exchange(second, block(0, 2))
    assert coverage.first_gap() == 4  # the other one still pays for all four
    coverage.exchange(first, block(0, 3))
    assert coverage.first_gap() == 3


def test_the_part_of_a_payment_before_a_step() -> None:
    paid = block(3, 4)
    assert [paid.before(step) for step in (-1, 0, 3)] == [None, None, None]
    assert [paid.before(step) for step in (4, 6, 7, 8)] == [block(3, 1), block(3, 3), paid, paid]
    assert (ONCE.before(-1), ONCE.before(0), ONCE.before(9)) == (None, ONCE, ONCE)
    assert replace(paid, mechanisms=(STEP.repeated(2), STEP)).total == [STEP.repeated(8), STEP.repeated(4)]


def test_nothing_but_the_end_of_a_block_is_returned() -> None:
    assert shortened(block(3, 4), 4, 3) == block(3, 1)
    assert shortened(block(3, 4), 6, 1) == block(3, 3)
    other: Any = [
        (3, 4),
        (7, 0),
        (8, -1),
        (2, 5),
        (5, 1),
        (5, 3),
        (5.0, 2),
        (5, 2.0),
        (5.0, 2.0),
        ("5", 2),
        (None, 2),
    ]
    for paid, first, steps in (*((block(3, 4), *one) for one in other), (ONCE, 0, 1)):
        with pytest.raises(ValueError, match="are not the end of the block in the line before"):
            shortened(paid, first, steps)
    with pytest.raises(ValueError, match="returns True steps"):
        shortened(block(0, 2), 1, True)


def read(*entries: dict[str, Any]) -> Any:
    return content_of(Path("ledger.jsonl"), [OPENING, *entries])


def test_a_ledger_is_read_line_by_line() -> None:
    stop = {"stopped": {"step": 4, "checkpoint": "abc"}}
    once = {"name": "labels", "mechanisms": [LabelBudget(budget_mu=0.5).to_json()]}
    content = read(BLOCK, once, {**BLOCK, "first_step": 4, "steps": 1}, stop)
    assert content.payments == (block(0, 4), ONCE, block(4, 1))
    assert (content.mode, content.delta, content.enforced) == ("release", 1e-5, True)
    assert read(BLOCK, stop, {"resumed": {"checkpoint": None}}).payments == (block(0, 4),)
    found = read(BLOCK, {"returned": {"first_step": 1, "steps": 3}})
    assert sum(payment.steps for payment in found.payments) == 1
    assert {one.steps for one in content.mechanisms} == {5, 1}


BACK = {"returned": {"first_step": 1, "steps": 3}}
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: content_of(Path("ledger.jsonl"), []), "line 1: is missing"),
    "another mode": (lambda: content_of(Path("l"), [{**OPENING, "mode": "test"}]), "line 1: mode = 'test'"),
    "a delta of 1": (lambda: content_of(Path("l"), [{**OPENING, "delta": 1.0}]), "line 1: delta = 1"),
    "no truth value": (lambda: content_of(Path("l"), [{**OPENING, "enforced": 1}]), "line 1: enforced = 1"),
    "no delta": (lambda: content_of(Path("l"), [{"mode": "release", "enforced": True}]), "line 1: 'delta'"),
    "no mechanism": (lambda: read({**BLOCK, "mechanisms": []}), "line 2: mechanisms = .*: pays for nothing"),
    "a name of another type": (lambda: read({**BLOCK, "name": 3}), "line 2: name = 3"),
    "a step before the first": (lambda: read({**BLOCK, "first_step": -1}), "line 2: first_step = -1"),
    "no step": (lambda: read({**BLOCK, "steps": 0}), "steps = 0: pays for no block"),
    "a truth value for steps": (lambda: read({**BLOCK, "steps": True}), "steps = True: pays for no block"),
    "a truth value for the first": (lambda: read({**BLOCK, "first_step": False}), "first_step = False"),
    "a fraction for steps": (lambda: read({**BLOCK, "steps": 4.0}), "steps = 4.0: pays for no block"),
    "a fraction for the first": (lambda: read({**BLOCK, "first_step": 0.0}), "first_step = 0.0"),
    "a return behind no block": (lambda: read({"name": "x", "mechanisms": [STEP.to_json()]}, BACK), "line 3: returns"),
    "a return behind another line": (lambda: read(BLOCK, {"resumed": {"checkpoint": None}}, BACK), "line 4: returns"),
    "a second return": (
        lambda: read(BLOCK, {"returned": {"first_step": 3, "steps": 1}}, {"returned": {"first_step": 1, "steps": 2}}),
        "line 4: returns steps, but the line before reserves none",
    ),
    "a return in experiment mode": (
        lambda: content_of(Path("l"), [{**OPENING, "mode": "experiment"}, BLOCK, BACK]), "line 3: returns steps, but",
    ),
    "a delta of another type": (lambda: content_of(Path(), [{**OPENING, "delta": True}]), "line 1: delta = "),
    "a return without its steps": (lambda: read(BLOCK, {"returned": {"first_step": 1}}), "line 3: 'steps'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_line_that_is_none_is_refused_by_number(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(LedgerCorrupt, match=message):
        make()
