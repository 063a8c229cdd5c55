"""What a finding of an audit says in a few words."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opusim.accounting.anytime import AnytimePlan
from opusim.accounting.audit import AuditPlan, audit, estimated
from opusim.accounting.guarantee import Adjacency, Guarantee, Release, Status, Unit
from opusim.accounting.one_run import Law, Method, OneRunPlan, audit_one_run
from opusim.training.attacks.findings import (
    SYSTEM_NOISE,
    Audit,
    Finding,
    Played,
    Role,
    headline,
    paragraphs,
    power_text,
    verdict,
)
from opusim.training.attacks.replay import coins
from opusim.training.attacks.run_audit import forecast, read_as_games

DELTA = 1e-5
PLAN = AuditPlan(threat_model="sees the update", pair="in or out", delta=DELTA)
SEES_ALL = OneRunPlan(adversary="sees all", canaries=60, delta=DELTA, claimed=1.0, law=Law.GAUSSIAN)
CLAIM = Guarantee(
    epsilon=1.0, delta=DELTA, unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, release=Release.EVERY_UPDATE,
    status=Status.PROVEN, mechanism="test", source="test",
)  # fmt: skip


def audit_of(*findings: Finding, claim: Guarantee = CLAIM, **facts: Any) -> Audit:
    settings = {"trials": 60, "seed": 1, "steps": 3, "played": Played.STEP, **facts}
    return Audit(findings=findings, guarantees=(claim,), **settings)


def of_run(scores: np.ndarray, inside: np.ndarray, result: Any, **facts: Any) -> Finding:
    """A finding on a run from scores, and whether each is of a record that was inside."""
    return Finding.of(Role.RUN, "difference", (scores[inside], scores[~inside]), result, **facts)


@pytest.mark.parametrize(
    ("scores", "gap", "says"),
    [
        (20, 9.0, "too few trials to exceed 1"),  # a perfect attack, whose bound ends below the claim
        (200, 9.0, "found, as required"),
        (200, 0.0, "not found by this attack"),
    ],
)
def test_a_broken_control_says_why_it_was_not_found(scores: int, gap: float, says: str) -> None:
    outside = np.random.default_rng(1).random(scores)
    halves = outside[::-1] + gap, outside
    assert Finding.of(Role.BROKEN, "difference", halves, audit(*halves, PLAN), claim=CLAIM).says == says


@pytest.mark.parametrize(
    ("epsilon", "power", "says"),
    [
        (1.0, 0.004, "would find half of the noise missing with probability 0.00"),
        (1.0, 0.9, None),
        (1.0, None, None),
        (9.0, 0.0, "cannot show more than"),
        (math.inf, None, "No theorem gives a finite epsilon"),
    ],
)
def test_a_page_says_when_its_audit_is_weak(epsilon: float, power: float | None, says: str | None) -> None:
    halves = np.random.default_rng(1).random((2, 200))
    claim = replace(CLAIM, epsilon=epsilon, reason="no theorem" if math.isinf(epsilon) else None)
    finding = Finding.of(Role.RUN, "difference", (halves[0], halves[1]), audit(*halves, PLAN), claim=claim)
    found = audit_of(replace(finding, power=power), claim=claim, trials=400, control_trials=0, steps=1)
    assert finding.result.ceiling < 9
    assert ("is weak" in verdict(found)) is (says is not None and "half" in says)
    assert says is None or says in verdict(found)
    assert "none infinite" not in verdict(found)
    assert power is None or "in as many trials, by errors alone" in power_text(found)
    weak = power is not None and power < 0.5
    assert ("This audit is weak" in "\n".join(paragraphs(found))) is weak


@pytest.mark.parametrize("canaries", [False, True])
def test_an_estimate_above_the_claim_is_told_unless_a_bound_refutes_the_claim(canaries: bool) -> None:
    scores, inside = np.random.default_rng(1).standard_normal(60), np.arange(60) % 2 == 0
    scores[inside] += 2
    halves = scores[inside], scores[~inside]
    result: Any = audit(*halves, PLAN)
    shown: Any = {"estimate": estimated(*halves, result)}
    if canaries:
        result, shown = audit_one_run(scores, inside, replace(SEES_ALL, claimed=None)), {}
    (estimate,) = of_run(scores, inside, result, **shown).estimates
    low = result.epsilon_lower
    for epsilon, told in ((0.9 * low, False), ((low + estimate) / 2, True), (estimate + 1, False)):
        if canaries:
            result = audit_one_run(scores, inside, replace(SEES_ALL, claimed=epsilon))
        claim, played = replace(CLAIM, epsilon=epsilon), Played.TRAINING if canaries else Played.STEP
        found = audit_of(of_run(scores, inside, result, claim=claim, **shown), claim=claim, played=played)
        assert found.refuted is (epsilon < low)
        assert ("Estimates above the claim: " in "\n".join(paragraphs(found))) is told


@pytest.mark.parametrize("trials", [60, 100])
def test_forecast_ceiling_and_power_of_a_step_agree(trials: int) -> None:
    """By errors alone all say the same number, and the forecast's ratio is at most 2 if half of the noise is found."""
    generator = np.random.default_rng(trials)
    tossed = coins(3, trials)[:, 0]
    claim = replace(CLAIM, epsilon=2.2)
    games = AnytimePlan(delta=DELTA, claimed=claim.epsilon, law=Law.GAUSSIAN, confidence=0.95)
    text = forecast(games, tossed)
    scores = generator.standard_normal(trials) + 99.0 * tossed
    result, read = audit(scores[tossed], scores[~tossed], PLAN), read_as_games(scores, tossed, games, 0.0)
    finding = of_run(scores, tossed, result, claim=claim, **read)
    found = audit_of(finding, claim=claim, trials=trials, steps=1)
    ceiling = f"{finding.result.ceiling:.2f}"
    assert f"by errors alone a perfect attack shows epsilon {ceiling}" in text
    assert f"By errors alone, a perfect attack would have shown {ceiling}" in "\n".join(paragraphs(found))
    ratio = re.search(r"noise ([\d.]+) times too small\) with probability 0.9 by the e-value", text)
    assert ratio is not None
    assert (float(ratio[1]) <= 2) is (found.power >= 0.9)
    assert "by the e-value or by errors alone" in power_text(found)


def test_results_of_the_older_schemas_are_read() -> None:
    """Version 1 kept trials and scores of canaries in two schemas, without what was played."""
    generator = np.random.default_rng(1)
    scores, inside = generator.standard_normal(60), np.arange(60) % 2 == 0
    result = audit_one_run(scores, inside, replace(SEES_ALL, weaker_mu=2.0))
    canaries = of_run(scores, inside, result, scope="run", claim=CLAIM)
    canaries = replace(canaries, attack="all updates", members="", others="")
    facts = {"played": Played.TRAINING, "crafted": "gradients", "game": "a mechanism", "cpu_s": 1.0}
    found = audit_of(canaries, **facts)
    most = max(bound.ceiling for bound in result.bounds if bound.method.is_bound)
    assert f"ideal scores would typically show {most:.2f} by " in verdict(found)
    assert "by normal scores if they pass the test of normality then." in power_text(found)
    content = found.to_json()
    (one,) = content["findings"]
    old = {
        **{"schema_version": 1, "guarantees": content["guarantees"], "accounted": "a mechanism", "canaries": 60},
        **{"crafted": "gradients", "steps": 3, "seed": 1, "cpu_s": 1.0, "trainings": 1, "looks": 1},
        "readings": [{"adversary": "all updates", "result": one["result"], "curve": one["curve"]}],
        **{"null": [], "broken": []},
    }  # fmt: skip
    assert Audit.from_json(old) == found
    assert Audit.from_json({**old, "trainings": 60}).played is Played.FINAL_MODELS
    with pytest.raises(ValueError, match="not an audit"):
        Audit.from_json({**old, "readings": [1]})
    trials = of_run(scores, inside, audit(scores[inside], scores[~inside], PLAN))
    found = audit_of(trials, control_trials=40)
    content = found.to_json()
    old = {key: value for key, value in content.items() if key not in ("played", "steps", "looks", "cpu_s")}
    old |= {"schema_version": 1, "step": 3, "release": "the weights after every step"}
    assert Audit.from_json(old) == found
    assert Audit.from_json({**old, "game": "a game"}).played is Played.PROTECTION


def missed_control(*, refused: bool) -> Audit:
    """An audit of 200 canaries whose scores tell nothing of the coins, normal or with the tails of few draws."""
    generator = np.random.default_rng(1)
    inside = np.arange(200) % 2 == 0
    scores = generator.standard_normal(200) if not refused else generator.standard_normal(200) ** 5
    plan = replace(SEES_ALL, canaries=200, claimed=3.0, weaker_mu=1.3)
    if refused:
        rights = tuple((method, 0.83) for method in plan.methods if method.guesses)
        plan = replace(plan, draws=1.98, weaker_normality=1e-19, weaker_right=rights)
    claim = replace(CLAIM, epsilon=3.0)
    own = of_run(scores, inside, audit_one_run(scores, inside, plan), claim=claim)
    return audit_of(own, replace(own, role=Role.BROKEN), claim=claim, trials=200, played=Played.TRAINING)


@pytest.mark.parametrize("refused", [False, True])
def test_a_broken_control_that_is_not_found_fails_for_its_true_reason(refused: bool) -> None:
    found = missed_control(refused=refused)
    (broken,) = found.of(Role.BROKEN)
    assert found.failed_controls == [broken]
    assert found.to_json()["controls_hold"] is False
    assert broken.by_chance is (broken.says == "left to chance: power 0.02") is refused
    assert ("normal scores stay below the claim" in broken.says) is not refused
    said, texts = headline(found), "\n".join(paragraphs(found))
    assert said.startswith("DO NOT RELY ON THIS AUDIT: the broken control")
    assert (broken.says in said) is not refused
    assert "All controls behaved as required" not in texts
    assert ("Repeat it with more canaries" in said) is not refused
    assert ("drawn q T = 1.98 times" in said and "opusim audit RUN" in said) is refused
    assert found.power is not None
    assert (found.power < 0.05) is refused
    rows = {row["read as"]: row for row in found.of(Role.RUN)[0].rows()}
    for method in (Method.NORMAL_BOUND, Method.NORMAL_ESTIMATE):
        assert rows[method]["evidence"].startswith("normality p ")
        assert (rows[method]["finding"] == "scores are not normal: does not count") is refused


@pytest.mark.parametrize(
    ("power", "holds"), [(None, True), (0.95, True), (0.55, True), (0.45, False), (0.1, False)]
)
@pytest.mark.parametrize("refuted", [False, True])
def test_a_control_found_by_chance_fails(power: float | None, holds: bool, refuted: bool) -> None:
    """Unless the run is refuted."""
    missed, scores = missed_control(refused=False), np.random.default_rng(2).standard_normal(200)
    inside = np.arange(200) % 2 == 0
    scores[inside] += 2.0
    own, broken = missed.findings
    shown = replace(broken, result=audit_one_run(scores, inside, own.result.plan), power=power)
    assert shown.refutes
    run = replace(own, result=shown.result) if refuted else own
    found = replace(missed, findings=(run, shown))
    assert found.refuted is refuted
    assert found.controls_hold is (holds or refuted)
    assert (shown.says == "found, as required") is holds
    told = power is not None and f"with probability {power:.2f}" in headline(found)
    assert told is not found.controls_hold


def test_more_canaries_are_no_remedy_for_scores_that_are_not_normal() -> None:
    """Six draws pass the forecast's test of normality, and the scores do not."""
    missed = missed_control(refused=True)
    result = missed.findings[0].result
    result = replace(result, plan=replace(result.plan, draws=6.0, weaker_normality=0.5))
    findings = [replace(one, result=result, power=0.95) for one in missed.findings]
    found = replace(missed, findings=tuple(findings))
    said = headline(found)
    assert "half of the noise was not found by this attack: scores are not normal" in said.lower()
    assert "drawn q T = 6 times" in said
    assert "private-loop" in said
    assert "Repeat it with more canaries" not in said


@pytest.mark.parametrize("release", [False, True])
def test_each_attack_has_its_adversary_and_a_release_run_repeats_only_coins(release: bool) -> None:
    tossed = coins(3, 100)[:, 0]
    scores = np.random.default_rng(1).standard_normal(100)
    games = AnytimePlan(delta=DELTA, claimed=1.0, law=Law.GAUSSIAN)
    knows = {"row space": "features", "difference": "all records"}
    read, findings = read_as_games(scores, tossed, games, 0.0), []
    for name, what in knows.items():
        result = audit(scores[tossed], scores[~tossed], replace(PLAN, threat_model=f"knows {what}"))
        findings.append(replace(of_run(scores, tossed, result, claim=CLAIM, **read), attack=name))
    texts = paragraphs(audit_of(*findings, trials=100, note=SYSTEM_NOISE if release else ""))
    told = [text for text in texts if text.startswith("Adversary")]
    assert told == [f"Adversary {name!r} knows {what}." for name, what in knows.items()]
    assert ("continue the same games" in "\n".join(texts)) is not release
    assert ("with another seed only" in "\n".join(texts)) is release
    assert (SYSTEM_NOISE in texts) is release
