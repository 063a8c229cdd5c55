"""Another accountant's epsilon stands next to ours, as a claim; one that cannot be used is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from opusim.accounting.explanation import Statement
from opusim.accounting.guarantee import Status
from tests.support.packages import install
from tests.support.private_loops import private_loop, run_epoch

PACKAGE = Path(__file__).parents[2] / "support" / "third_party_accountant"
GROUP = "opusim.accountants"


@pytest.mark.parametrize("relation", [pytest.param("zero_out", marks=pytest.mark.slow), "add_or_remove_one"])
def test_the_accountant_of_the_documentation_agrees(
    relation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.syspath_prepend(str(PACKAGE))
    options = {"relation": relation, "sample_rate": 0.2, "noise_multiplier": 1.3}
    with private_loop(tmp_path, accountant="lab_pld", **options) as loop:
        run_epoch(loop)
        ours, theirs = loop.statement().guarantees
        assert (ours.status, theirs.status) == (Status.PROVEN, Status.CLAIMED)
        assert theirs.epsilon == pytest.approx(ours.epsilon, rel=1e-3)
        assert theirs.source == "accountant lab_pld of package lab-pld"
        assert (theirs.delta, theirs.adjacency, theirs.unit) == (ours.delta, ours.adjacency, ours.unit)
        assert theirs.assumptions[0].holds is True
        assert loop.epsilon == ours.epsilon
        document = loop.statement().to_json()
        assert Statement.from_json(document) == loop.statement()
        assert document["guarantees"][1]["theorem"] is None


SOURCE = """
import math

class Halved:
    def epsilon(self, mechanisms, *, delta):
        (one,) = mechanisms
        assert one["kind"] == "record_central" and one["steps"] == 5 and delta == 1e-5
        return 1e-3

class Endless(Halved):
    def epsilon(self, mechanisms, *, delta):
        return math.inf

class Negative(Halved):
    def epsilon(self, mechanisms, *, delta):
        return -1.0

class Broken(Halved):
    def epsilon(self, mechanisms, *, delta):
        raise KeyError("no such kind")

class Unbuilt(Halved):
    def __init__(self):
        raise OSError("no licence")

class Empty:
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name.lower(): f"other_lab:{name}" for name in ("Halved", "Endless", "Negative", "Broken")}
    names |= {"unbuilt": "other_lab:Unbuilt", "empty": "other_lab:Empty"}
    install(monkeypatch, tmp_path / "packages", "other_lab", GROUP, names, SOURCE)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "epsilon", "holds"), [("halved", 1e-3, False), ("endless", float("inf"), True)]
)
def test_a_wrong_claim_stays_a_claim(tmp_path: Path, name: str, epsilon: float, holds: bool) -> None:
    """One that is below our lower bound says so; a budget counts neither."""
    with private_loop(tmp_path, accountant=name, target_epsilon=8.0) as loop:
        run_epoch(loop)
        ours, theirs = loop.statement().guarantees
        assert (theirs.epsilon, theirs.status) == (epsilon, Status.CLAIMED)
        assert theirs.assumptions[0].holds is holds
        assert loop.epsilon == ours.epsilon > 1e-3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", "accountant = 'negative' of package 'other_lab': epsilon = -1.0"),
        ("broken", "KeyError: 'no such kind'; repair that package, or leave accountant out"),
    ],
)
def test_an_accountant_that_fails_is_named(tmp_path: Path, name: str, message: str) -> None:
    with private_loop(tmp_path, accountant=name) as loop:
        run_epoch(loop, steps=1)
        with pytest.raises(ValueError, match=message):
            loop.statement()
        assert loop.epsilon > 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prv", "accountant = 'prv': must be one of broken, empty, .*; install the package that brings it"),
        ("empty", "is no class with a method epsilon"),
        ("unbuilt", "accountant = 'unbuilt' of package 'other_lab': OSError: no licence"),
    ],
)
def test_an_accountant_that_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        private_loop(tmp_path / "loop", accountant=name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "loop").exists()
