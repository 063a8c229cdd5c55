"""Statements and their theorems, calibration to a target, and who is warned of a large delta."""

import json
import math
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest

from opusim.accounting import Adjacency, Assumption, Guarantee, NoGuarantee, Release, Status, Theorem, Unit
from opusim.accounting.cli import explain_command
from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.explanation import (
    LARGE_DELTA,
    WARNINGS,
    LedgerFacts,
    RunFacts,
    Statement,
    explain_theorem,
    large_delta,
)
from opusim.accounting.guarantee import EpsilonBounds, from_json, to_json
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout
from opusim.accounting.mechanisms.records import Gaussian, PoissonGaussian, RecordCentral
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian
from opusim.accounting.theorems import known_theorems, theorem
from tests.support.imports import ROOT, imports_of

SOUND = Guarantee(
    epsilon=1.0, delta=1e-5, unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, release=Release.EVERY_UPDATE,
    status=Status.PROVEN, mechanism="noise", source="theorem record-clipping by hand",
    assumptions=(Assumption(text="checked", holds=True), Assumption(text="on trust")), epsilon_lower=0.9,
)  # fmt: skip
FAILED = Assumption(text="no", holds=False)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    for lower, upper in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, math.inf), (math.inf, math.inf)):
        assert EpsilonBounds(lower=lower, upper=upper, method="").upper == upper
    less = math.nextafter(1.0, 0.0)
    for lower, upper in ((-1e-300, 1.0), (1.0, less), (math.nan, 1.0), (0.0, math.nan), (-1.0, -1.0)):
        with pytest.raises(NoGuarantee, match="is no interval .quadrature.; report this"):
            EpsilonBounds(lower=lower, upper=upper, method="quadrature")


@pytest.mark.parametrize("changes", [
    *({"epsilon": 0.0, "epsilon_lower": None}, {"epsilon": 0.0, "epsilon_lower": 0.0}),
    *({"epsilon_lower": 1.0}, {"delta": 0.0}, {"epsilon": math.inf, "reason": "too little noise"}),
    {"epsilon": math.inf, "reason": "none", "status": Status.NONE, "assumptions": (FAILED,)},
    *({"status": Status.CLAIMED, "assumptions": (FAILED,)}, {"status": Status.PROVEN_UNDER_DEVICE_MODEL}),
])  # fmt: skip
def test_statements_that_may_be_made(changes: dict[str, Any]) -> None:
    made = replace(SOUND, **changes)
    assert Guarantee.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(("changes", "message"), [
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
])  # fmt: skip
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


def test_the_theorem_is_the_second_word() -> None:
    assert SOUND.theorem == replace(SOUND, source="theorem record-clipping").theorem == "record-clipping"
    assert replace(SOUND, source="equation 3").theorem is replace(SOUND, source="a theorem").theorem is None


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


@pytest.mark.parametrize(("content", "message"), [
    ({"text": "x"}, "number: Field required"),
    ({"number": 1.0, "text": "x", "count": True}, "count = True: "),
    ({"number": 1.0, "text": "x", "count": "5"}, "count = '5': "),
    ({"number": 1.0, "text": "x", "count": "inf"}, "count = 'inf': "),
    ({"number": 1.0, "text": 3}, "text = 3: "),
    ({"number": [1.0], "text": "x"}, "^number: "),
])  # fmt: skip
def test_values_keep_their_types(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Kept, content)


THEOREMS = known_theorems()


def _stands(page: str) -> bool:
    """Whether a page of the documentation has the sections that are named."""
    name, _, place = page.partition(", ")
    text = (ROOT / "docs" / name).read_text()
    numbers = re.findall(r"\d+", place)
    if not numbers:
        return f"## {place}" in text
    return all(re.search(rf"^## {number}\. ", text, re.MULTILINE) for number in numbers)


@pytest.mark.parametrize("found", THEOREMS, ids=lambda found: found.name)
def test_every_theorem_is_complete_and_its_code_exists(found: Theorem) -> None:
    assert found.statement
    assert found.proof
    assert _stands(found.page)
    module, _, name = found.code.rpartition(".")
    assert hasattr(import_module(module), name)
    text = explain_theorem(found)
    for part in (*found.checked_by_code, *found.trusted):
        assert part in text


def test_planted_sections_are_missed() -> None:
    assert not _stands("privacy-records.md, section 99")
    assert not _stands("forward-only.md, What is not guaranteed")


def test_the_source_of_a_guarantee_leads_to_its_theorem(capsys: pytest.CaptureFixture[str]) -> None:
    step = RecordCentral(noise_multiplier=2.0, sampling_probability=0.1, clip_norm=1.0, divisor=100)
    (guarantee,) = guarantees([step], delta=1e-5)
    name = guarantee.source.split()[1]
    assert guarantee.source.startswith(theorem(name).citation)
    assert "docs/" not in guarantee.source
    explain_command(name)
    assert "Poisson-sampled Gaussian mechanism with multiplier z" in " ".join(capsys.readouterr().out.split())


def test_all_names_are_listed_and_unknown_or_taken_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    explain_command()
    out = capsys.readouterr().out
    assert all(found.name in out for found in THEOREMS)
    with pytest.raises(ValueError, match="theorem 'nothing': is not known; choose one of adaptive-clipped"):
        theorem("nothing")
    taken = vars(THEOREMS[0]) | {"title": "another"}
    with pytest.raises(ValueError, match="the name is taken"):
        Theorem(**taken)


def test_only_numerics_imports_scipy_and_dp_accounting() -> None:
    for path in (ROOT / "accounting").rglob("*.py"):
        modules = {each.target.split(".")[0] for each in imports_of(path.read_text(), package="opusim")}
        assert not modules & {"scipy", "dp_accounting"} or path.parent.name == "numerics", path


N = 1294
RECORDS = RecordCentral(
    noise_multiplier=1.1, sampling_probability=64 / N, clip_norm=1.0, divisor=64, relation=Adjacency.ZERO_OUT
)


def statement(mechanism: Mechanism, delta: float, records: int | None = None) -> Statement:
    return Statement(
        mode="release",
        guarantees=tuple(guarantees([mechanism], delta=delta)),
        mechanisms=(mechanism,),
        ledger=LedgerFacts(
            lines=2, digest="0" * 64, delta=delta, enforced=True, payments=1, steps_paid=1, releases_paid=(),
            checked_against=("checkpoint",),
        ),
        run=RunFacts(finished=True, step=1, versions={}, records=records),
        versions={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("delta", "warned"), [(0.1, True), (1 / N, True), (0.101 / N, True), (0.1 / N, False), (1e-5, False)]
)
def test_the_rule_begins_above_a_tenth_of_one_over_n(delta: float, warned: bool) -> None:
    line = large_delta(delta, [RECORDS])
    assert (line is not None) is warned
    if line is not None:
        told = f"delta = {delta:g} with 1,294 records (0.1 / records is 7.7e-05): {LARGE_DELTA}"
        assert (line.startswith(told), "\n" in line) == (True, False)
    assert ("large-delta" in statement(RECORDS, delta).warnings) is warned


def test_n_is_what_public_constants_tell() -> None:
    added = RecordCentral(noise_multiplier=1.1, sampling_probability=0.01, clip_norm=1.0, divisor=20)
    zo = ZoGaussian(noise_multiplier=1.1, sampling_probability=0.01, clip_norm=1.0, divisor=20, directions=3)
    for mechanism in (added, zo):
        assert mechanism.public_records == pytest.approx(2000)
        assert large_delta(0.1 / 2001, [mechanism]) is None
        assert large_delta(0.1 / 1999, [mechanism]) is not None
    smaller = RecordCentral(noise_multiplier=1.1, sampling_probability=0.1, clip_norm=1.0, divisor=20)
    assert large_delta(0.1 / 1000, [added, smaller]) is None  # the least n of several: 200
    assert large_delta(0.1 / 199, [added, smaller]) is not None


def test_without_a_public_number_there_is_no_warning_but_with_one() -> None:
    for mechanism in (PoissonGaussian(noise_multiplier=1.0, sampling_probability=0.1), LabelReadout(mu=1.0)):
        assert large_delta(0.1, [mechanism]) is None
        assert large_delta(0.01, [mechanism], records=10) is None
        assert large_delta(0.01, [mechanism], records=11) is not None
    labels = LabelReadout(mu=1.0)
    assert "large-delta" not in statement(labels, 0.01).warnings
    assert "large-delta" in statement(labels, 0.01, records=100).warnings


def test_the_statement_says_so_in_text_and_json_and_reads_it_back() -> None:
    stated = statement(RECORDS, 0.1)
    assert " ".join(WARNINGS["large-delta"].split()) in " ".join(stated.text().split())
    document = json.loads(json.dumps(stated.to_json()))
    assert {"code": "large-delta", "text": WARNINGS["large-delta"]} in document["warnings"]
    document["warnings"] = []
    assert "large-delta" in Statement.from_json(document).warnings
    del document["run"]["records"]  # of a document of the version before
    assert Statement.from_json(document).run is not None


@pytest.mark.parametrize(("noise", "warned"), [(0.3, True), (5.0, False)])
def test_an_epsilon_above_ten_is_warned_about(noise: float, warned: bool) -> None:
    weak = RecordCentral(noise_multiplier=noise, sampling_probability=1.0, clip_norm=1.0, divisor=N, steps=4)
    stated = statement(weak, 1e-6)
    assert (stated.guarantees[0].epsilon > 10) is warned
    assert ("large-epsilon" in stated.warnings) is warned


RUN = PoissonGaussian(noise_multiplier=1.0, sampling_probability=0.1, steps=30)
DELTA = 1e-5


def epsilon(mechanism: Gaussian | PoissonGaussian, delta: float = DELTA) -> float:
    return min(one.epsilon for one in guarantees([mechanism], delta=delta) if one.is_proven)


@pytest.mark.parametrize("target", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("start", [1e-5, 0.02, 0.7, 5.0, 900.0, 1e7])
def test_the_answer_is_within_its_tolerance_wherever_the_search_begins(start: float, target: float) -> None:
    begun = Gaussian(noise_multiplier=start, steps=3)
    found, stated = calibrate_noise(begun, target_epsilon=target, delta=DELTA)
    assert stated.epsilon == epsilon(found) <= target
    assert epsilon(replace(found, noise_multiplier=found.noise_multiplier * (1 - 3e-4))) > target
    assert found == replace(begun, noise_multiplier=found.noise_multiplier)


def test_the_target_is_met_by_sampled_noise_and_by_an_inverse_field() -> None:
    found, stated = calibrate_noise(RUN, target_epsilon=1.0, delta=DELTA)
    assert stated.epsilon == epsilon(found) <= 1.0
    assert epsilon(replace(found, noise_multiplier=found.noise_multiplier * (1 - 3e-4))) > 1.0
    found, stated = calibrate_noise(LabelReadout(mu=3.0), target_epsilon=1.0, delta=DELTA)
    assert stated.epsilon <= 1.0 < guarantees([replace(found, mu=found.mu * 1.0003)], delta=DELTA)[0].epsilon


@pytest.mark.parametrize("start", [1e-3, 0.01, 0.03, 50.0])
def test_the_least_noise_is_a_hundredth(start: float) -> None:
    found, stated = calibrate_noise(Gaussian(noise_multiplier=start), target_epsilon=1e8, delta=DELTA)
    assert found.noise_multiplier == pytest.approx(0.01, rel=1e-12)
    assert stated.epsilon <= 1e8


def test_targets_out_of_reach_are_refused() -> None:
    found, stated = calibrate_noise(Gaussian(noise_multiplier=1.0), target_epsilon=1e-9, delta=0.5)
    assert found.noise_multiplier < 10
    assert stated.epsilon <= 1e-9
    hard = Gaussian(noise_multiplier=1.0, steps=10**12)
    assert epsilon(replace(hard, noise_multiplier=1e6)) > 0.1
    with pytest.raises(NoGuarantee, match=r"target_epsilon = 0.1: gaussian with noise up to 1e\+06"):
        calibrate_noise(hard, target_epsilon=0.1, delta=DELTA)
    with pytest.raises(NoGuarantee, match="at delta = 0; its epsilon is infinite at delta = 0 whatever"):
        calibrate_noise(RUN, target_epsilon=3.0, delta=0.0)
    for target in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="target_epsilon = "):
            calibrate_noise(RUN, target_epsilon=target, delta=DELTA)
