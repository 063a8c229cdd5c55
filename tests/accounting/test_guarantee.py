"""Statements that contradict themselves are refused, and a statement survives its JSON to the last bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from opusim.accounting.guarantee import (
    Adjacency,
    Assumption,
    EpsilonBounds,
    Guarantee,
    NoGuarantee,
    Release,
    Status,
    Unit,
    from_json,
    to_json,
)

SOUND = Guarantee(
    epsilon=1.0,
    delta=1e-5,
    unit=Unit.RECORD,
    adjacency=Adjacency.ZERO_OUT,
    release=Release.EVERY_UPDATE,
    status=Status.PROVEN,
    mechanism="noise",
    source="theorem record-clipping by hand",
    assumptions=(Assumption(text="checked", holds=True), Assumption(text="on trust")),
    epsilon_lower=0.9,
)
FAILED = Assumption(text="no", holds=False)


@pytest.mark.parametrize(
    ("lower", "upper"), [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, math.inf), (math.inf, math.inf)]
)
def test_bounds_enclose(lower: float, upper: float) -> None:
    assert EpsilonBounds(lower=lower, upper=upper, method="").upper == upper


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-1e-300, 1.0), (1.0, math.nextafter(1.0, 0.0)), (math.nan, 1.0), (0.0, math.nan), (-1.0, -1.0)],
)
def test_bounds_that_contradict_each_other_are_refused(lower: float, upper: float) -> None:
    with pytest.raises(NoGuarantee, match="is no interval .quadrature.; report this"):
        EpsilonBounds(lower=lower, upper=upper, method="quadrature")


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 0.0, "epsilon_lower": None},
        {"epsilon": 0.0, "epsilon_lower": 0.0},
        {"epsilon_lower": 1.0},
        {"delta": 0.0},
        {"epsilon": math.inf, "reason": "too little noise"},
        {"epsilon": math.inf, "reason": "none", "status": Status.NONE, "assumptions": (FAILED,)},
        {"status": Status.CLAIMED, "assumptions": (FAILED,)},
        {"status": Status.PROVEN_UNDER_DEVICE_MODEL},
    ],
)
def test_statements_that_may_be_made(changes: dict[str, Any]) -> None:
    made = replace(SOUND, **changes)
    assert Guarantee.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": -1e-9, "epsilon_lower": None}, "epsilon = -1e-09: must be at least 0 or infinite"),
        ({"epsilon": math.nan, "epsilon_lower": None}, "epsilon = nan: must be at least 0"),
        ({"delta": 1.0}, "delta = 1"),
        ({"delta": -1e-9}, "delta = -1e-09"),
        ({"epsilon_lower": math.nextafter(1.0, 2.0)}, "exceeds epsilon = 1.0"),
        ({"epsilon_lower": math.nan}, "epsilon_lower = nan"),
        ({"epsilon": math.inf}, "reason = None: an infinite epsilon needs one"),
        ({"reason": "why not"}, "reason = 'why not': .*a finite epsilon has none"),
        ({"status": Status.NONE}, "status = 'none': has no finite epsilon, got 1.0"),
        ({"assumptions": (FAILED,)}, "status = 'proven': the assumption 'no' does not hold"),
        (
            {"status": Status.PROVEN_UNDER_DEVICE_MODEL, "assumptions": (*SOUND.assumptions, FAILED)},
            "the assumption 'no' does not hold",
        ),
    ],
)
def test_statements_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SOUND, **changes)


def test_a_budget_counts_what_a_theorem_supports() -> None:
    proven = {Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL}
    for status in Status:
        numbers = {"epsilon": math.inf, "reason": "none"} if status is Status.NONE else {}
        assert replace(SOUND, status=status, **numbers).is_proven == (status in proven)
    mixed = replace(SOUND, status=Status.CLAIMED, assumptions=(*SOUND.assumptions, FAILED))
    assert mixed.failed_assumptions == (FAILED,)
    assert SOUND.failed_assumptions == ()


@pytest.mark.parametrize(
    ("source", "theorem"),
    [
        ("theorem record-clipping by hand", "record-clipping"),
        ("theorem record-clipping", "record-clipping"),
        ("equation 3", None),
        ("a theorem", None),
    ],
)
def test_the_theorem_is_the_second_word(source: str, theorem: str | None) -> None:
    assert replace(SOUND, source=source).theorem == theorem


@dataclass(frozen=True)
class Kept:
    """A record with a number that may be infinite, one that may be absent, and texts."""

    number: float
    text: str
    count: int = 3
    maybe: float | None = None


def test_only_numbers_are_infinite() -> None:
    record = Kept(number=math.inf, text="inf", maybe=math.inf)
    assert to_json(record) == {"number": "inf", "text": "inf", "count": 3, "maybe": "inf"}
    assert from_json(Kept, to_json(record)) == record
    assert from_json(Kept, {"number": 0.1 + 0.2, "text": "x", "other": 1}) == Kept(0.1 + 0.2, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text": "x"}, "number: Field required"),
        ({"number": 1.0, "text": "x", "count": True}, "count = True: "),
        ({"number": 1.0, "text": "x", "count": "5"}, "count = '5': "),
        ({"number": 1.0, "text": "x", "count": "inf"}, "count = 'inf': "),
        ({"number": 1.0, "text": 3}, "text = 3: "),
        ({"number": [1.0], "text": "x"}, "^number: "),
    ],
)
def test_values_keep_their_types(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Kept, content)
