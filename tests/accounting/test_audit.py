"""Audit estimators: coverage on a known mechanism, a null and a broken control, ceilings, verdicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import binom, norm

from opusim.accounting.audit import (
    AuditPlan,
    Estimator,
    Verdict,
    audit,
    audit_drawn_noise,
    clopper_pearson_upper,
    detection_probability,
    epsilon_of,
    estimated,
    lower_bound,
)
from opusim.accounting.guarantee import Adjacency, Guarantee, NoGuarantee, Release, Status, Unit

DELTA = 1e-5
PLAN = AuditPlan(threat_model="sees the reading", pair="0 against 1", delta=DELTA)
GAUSSIAN = replace(PLAN, estimator=Estimator.GAUSSIAN, mechanism_law="gaussian")
REPEATS, N = 200, 1000


def _claim(epsilon: float, delta: float = DELTA) -> Guarantee:
    return Guarantee(
        epsilon=epsilon, delta=delta, unit=Unit.RECORD, adjacency=Adjacency.REPLACE_ONE,
        release=Release.EVERY_UPDATE, status=Status.CLAIMED, mechanism="test", source="test",
    )  # fmt: skip


def _bounds(shift: float, plan: AuditPlan, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.array(
        [
            audit(generator.standard_normal(N) + shift, generator.standard_normal(N), plan).epsilon_lower
            for _ in range(REPEATS)
        ]
    )


@pytest.mark.parametrize("plan", [PLAN, GAUSSIAN])
def test_null_control_finds_nothing(plan: AuditPlan, seed: int) -> None:
    share = np.mean(_bounds(0.0, plan, seed) <= 0)
    assert share >= 0.95


@pytest.mark.parametrize("plan", [PLAN, GAUSSIAN])
def test_bound_stays_below_the_true_epsilon_and_broken_noise_is_flagged(plan: AuditPlan, seed: int) -> None:
    """mu = 1 at its true epsilon; the broken control (noise divided by 4) exceeds the claim by either estimator."""
    true = get_epsilon_gaussian(1.0, DELTA)
    found = _bounds(1.0, plan, seed)
    assert np.mean(found <= true) >= 0.95 - 5 * (0.05 * 0.95 / REPEATS) ** 0.5
    assert found.max() > 0.1
    generator = np.random.default_rng(seed)
    broken = audit(4 + generator.standard_normal(4 * N), generator.standard_normal(4 * N), plan)
    assert broken.verdict(_claim(true)) is Verdict.REFUTED
    assert "refuted" in broken.describe(_claim(true))


def test_the_gaussian_estimator_is_refused_where_the_law_is_not_declared(seed: int) -> None:
    """And why: on Laplace noise it exceeds the truth, which the other estimator never does here."""
    with pytest.raises(NoGuarantee, match="needs mechanism_law = 'gaussian'"):
        replace(PLAN, estimator=Estimator.GAUSSIAN, mechanism_law="laplace")
    generator = np.random.default_rng(seed)
    scores = [generator.laplace(size=20_000) + shift for shift in (1.0, 0.0)]
    assert audit(*scores, PLAN).epsilon_lower <= 1.0
    assert audit(*scores, GAUSSIAN).epsilon_lower > 1.5


@pytest.mark.parametrize(("n", "ceiling"), [(100, 3.28), (500, 4.91), (1000, 5.60), (10_000, 7.90)])
def test_ceilings_of_a_perfect_attack(n: int, ceiling: float) -> None:
    assert lower_bound(0, 0, n, n, PLAN) == pytest.approx(ceiling, abs=6e-3)


def test_clopper_pearson_inverts_the_binomial() -> None:
    for events, trials in ((0, 10), (3, 17), (16, 17)):
        assert binom.cdf(events, trials, clopper_pearson_upper(events, trials, 0.025)) == pytest.approx(0.025)
    assert clopper_pearson_upper(5, 5, 0.025) == 1.0


def test_a_bound_far_below_the_claim_proves_nothing() -> None:
    generator = np.random.default_rng(1)
    result = audit(generator.standard_normal(100), generator.standard_normal(100), PLAN)
    assert result.verdict(_claim(8.0)) is Verdict.PROVES_NOTHING
    assert "this proves nothing" in result.describe(_claim(8.0))
    assert result.verdict(_claim(0.0)) is Verdict.CONSISTENT
    infinite = replace(_claim(1.0), epsilon=math.inf, reason="none")
    assert result.verdict(infinite) is Verdict.PROVES_NOTHING
    with pytest.raises(ValueError, match="the audit was made at 1e-05"):
        result.verdict(_claim(8.0, delta=1e-6))


@pytest.mark.parametrize("scores", [np.ones(3), np.array([0.0, 1.0, np.nan, 2.0]), np.ones((4, 1))])
def test_bad_scores_are_named(scores: np.ndarray) -> None:
    with pytest.raises(ValueError, match="scores_in"):
        audit(scores, np.ones(10), PLAN)


def test_worlds_far_apart_reach_the_ceiling_whatever_the_split() -> None:
    """A threshold at a member's score would lose a fresh member just below it; one midway loses none."""
    generator = np.random.default_rng(3)
    for split in range(50):
        result = audit(10 + generator.random(60), generator.random(60), replace(PLAN, seed=split))
        assert result.epsilon_lower == result.ceiling


@pytest.mark.parametrize("plan", [PLAN, GAUSSIAN])
def test_estimates_lie_between_their_ends_and_cover_the_truth(plan: AuditPlan, seed: int) -> None:
    """N(0, 1) against N(1, 1): mu = 1 under the Gaussian law; otherwise what the threshold's true rates show."""
    generator, covered, repeats = np.random.default_rng(seed), 0, 60
    for _ in range(repeats):
        first, second = generator.normal(1.0, 1.0, N), generator.normal(0.0, 1.0, N)
        result = audit(first, second, plan)
        found = estimated(first, second, result)
        high = math.inf if found.high is None else found.high
        assert found.low <= found.epsilon <= high
        miss, alarm = norm.cdf(result.threshold - 1.0), norm.sf(result.threshold)
        truth = epsilon_of(1.0, DELTA)
        if plan is PLAN:
            truth = max(np.log((1 - miss - DELTA) / alarm), np.log((1 - alarm - DELTA) / miss))
        covered += found.low <= truth <= high
    assert covered / repeats >= 0.95 - 5 * np.sqrt(0.95 * 0.05 / repeats)


@pytest.mark.parametrize(("plan", "claimed"), [(PLAN, 2.6), (GAUSSIAN, epsilon_of(1.75, DELTA))])
def test_the_detection_probability_is_the_best_attacks(plan: AuditPlan, claimed: float, seed: int) -> None:
    """The Gaussian mechanism of mu = 2 against a claim that allows less: audits of its scores refute it as often."""
    statements = [(d, epsilon_of(2.0, d)) for d in (DELTA, 1e-4, 1e-3, 1e-2, 0.1, 0.3)]
    expected = detection_probability(statements, claimed, N // 2, N // 2, plan)
    generator, repeats = np.random.default_rng(seed), 60
    found = np.mean(
        [
            audit(generator.normal(2.0, 1.0, N), generator.normal(0.0, 1.0, N), plan).epsilon_lower > claimed
            for _ in range(repeats)
        ]
    )
    assert 0.2 < expected < 0.98
    error = 5 * np.sqrt(expected * (1 - expected) / repeats)
    assert found - error <= expected <= found + error + 0.2  # audits choose their threshold on other scores
    assert detection_probability(statements, 20.0, N // 2, N // 2, plan) == 0


DRAWN = replace(GAUSSIAN, estimator=Estimator.DRAWN_NOISE)


@pytest.mark.parametrize("mu", [pytest.param(0.2, marks=pytest.mark.slow), 1.0])
def test_drawn_noise_bounds_epsilon_closely_and_exceeds_it_as_rarely_as_stated(mu: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    true, above = epsilon_of(mu, DELTA), 0
    for _ in range(REPEATS):
        first, second = mu / 2 + generator.normal(size=N), -mu / 2 + generator.normal(size=N)
        found = audit_drawn_noise(first, second, (mu / 2, -mu / 2), DRAWN)
        above += found.epsilon_lower > true
        assert 0.85 * true < found.epsilon_lower
    share = above / REPEATS
    assert abs(share - 0.05) < 5 * math.sqrt(0.05 * 0.95 / REPEATS)


@pytest.mark.slow
def test_drawn_noise_that_is_smaller_than_stated_is_found_with_the_calculated_probability(seed: int) -> None:
    generator, mu, stated = np.random.default_rng(seed), 1.0, 0.96
    claimed = epsilon_of(stated, DELTA)
    found = 0
    for _ in range(REPEATS):
        first, second = mu / 2 + generator.normal(size=N), -mu / 2 + generator.normal(size=N)
        found += audit_drawn_noise(first, second, (mu / 2, -mu / 2), DRAWN).epsilon_lower > claimed
    power = detection_probability([(DELTA, epsilon_of(mu, DELTA))], claimed, N, N, DRAWN)
    assert 0.5 < power < 0.95
    assert abs(found / REPEATS - power) < 5 * math.sqrt(power * (1 - power) / REPEATS)


def test_scores_without_any_noise_tell_the_worlds_apart() -> None:
    ones = np.ones(8)
    found = audit_drawn_noise(ones, -ones, (1.0, -1.0), DRAWN)
    assert found.epsilon_lower == found.ceiling > 1e5
    assert (found.false_negatives, found.false_positives) == (0, 0)
    assert audit_drawn_noise(ones, ones, (1.0, 1.0), DRAWN).epsilon_lower == 0.0
    with pytest.raises(NoGuarantee, match="needs mechanism_law = 'gaussian'"):
        replace(PLAN, estimator=Estimator.DRAWN_NOISE)
