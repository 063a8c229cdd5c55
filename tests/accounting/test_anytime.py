"""Bets against a claim: few false alarms wherever they are read, half of the noise found early, bounds that hold."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from opusim.accounting.anytime import (
    AnytimeAudit,
    AnytimePlan,
    audit_anytime,
    games_needed,
    in_coin_order,
    power_within,
    smallest_ratio,
    strength_of,
)
from opusim.accounting.audit import epsilon_of
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.one_run import Law, Method, OneRunPlan, audit_one_run

GAUSSIAN = AnytimePlan(delta=1e-5, claimed=3.0, law=Law.GAUSSIAN)
MU = strength_of(Law.GAUSSIAN, 3.0, 1e-5)
PURE = AnytimePlan(delta=0.0, claimed=1.0)


def games(mu: float, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ideal scores of a Gaussian mechanism, and the coins."""
    coins = generator.random(count) < 0.5
    return np.where(coins, mu / 2, -mu / 2) + generator.standard_normal(count), coins


@pytest.mark.parametrize("plan", [GAUSSIAN, PURE, AnytimePlan(delta=1e-3, claimed=0.5)])
def test_a_true_claim_is_rarely_refuted_at_any_time(plan: AnytimePlan) -> None:
    """At the limit of the claim, where a bound on a fixed number of games that is read each time errs often."""
    error = 5 * math.sqrt(0.05 * 0.95 / 400)
    assert power_within(plan, 1.0, 400) <= 0.05 + error
    right = np.random.default_rng(1).random((400, 400)) < 1 / (1 + math.exp(-1.0))
    played = np.arange(1, 401)
    p_values = binom.sf(np.cumsum(right, axis=1) - 1, played, 1 / (1 + math.exp(-1.0)))
    alarms = (p_values[:, 9:] <= 0.05).any(axis=1).mean()  # planted: peeking at a fixed bound
    assert alarms > 0.05 + error
    assert (p_values[:, -1] <= 0.05).mean() <= 0.05 + error


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [1.0, 3.0])
def test_no_more_than_one_null_run_in_twenty_alarms(claimed: float, seed: int) -> None:
    plan = AnytimePlan(delta=1e-5, claimed=claimed, law=Law.GAUSSIAN)
    generator, alarms = np.random.default_rng(seed), 0
    for _ in range(300):
        game = AnytimeAudit(plan, bounds=False)
        game.add(*games(strength_of(Law.GAUSSIAN, claimed, 1e-5), 400, generator))
        alarms += game.result.refuted_at is not None
    assert alarms <= 15 + 5 * math.sqrt(300 * 0.05 * 0.95)


def test_half_of_the_noise_is_found_early_and_the_bound_stays_below_the_truth(seed: int) -> None:
    generator, found = np.random.default_rng(seed), []
    for _ in range(20):
        game = AnytimeAudit(GAUSSIAN, bounds=False)
        game.add(*games(2 * MU, 150, generator))
        found.append(game.result.refuted_at or math.inf)
    assert np.median(found) <= 110  # 65 in the benchmark; the median of 20 errs by a quarter
    scores, coins = games(2 * MU, 300, generator)
    read = audit_anytime(scores, coins, GAUSSIAN)
    truth = epsilon_of(2 * MU, 1e-5)
    assert 3.0 < read.epsilon_lower <= truth
    assert read.e_value is not None
    assert read.e_value > 20
    bounds = [bound for _, bound in read.sequence]
    assert bounds == sorted(bounds)
    assert read.sequence[-1] == (300, read.epsilon_lower)
    assert audit_anytime(scores, np.roll(coins, 1), GAUSSIAN).epsilon_lower < 1.0  # none follow these coins


def test_games_may_be_added_in_any_pieces_and_continue_under_the_same_coins(seed: int) -> None:
    scores, coins = games(1.0, 200, np.random.default_rng(seed))
    whole, pieces = AnytimeAudit(GAUSSIAN), AnytimeAudit(GAUSSIAN)
    whole.add(scores, coins)
    for start, stop in ((0, 1), (1, 40), (40, 41), (41, 200)):
        pieces.add(scores[start:stop], coins[start:stop])
        assert pieces.result.games == stop
    assert pieces.result == whole.result
    first, second = scores[coins], scores[~coins]
    few, many = in_coin_order(first[:30], second[:30], seed=1), in_coin_order(first, second, seed=1)
    for some, all_of_them in zip(few, many, strict=True):
        assert 30 <= len(some) <= 60
        np.testing.assert_array_equal(some, all_of_them[: len(some)])


def test_what_an_audit_can_find_is_known_beforehand() -> None:
    needed = games_needed(GAUSSIAN, 2.0, most=1000)
    assert 60 < needed < 300
    assert power_within(GAUSSIAN, 2.0, needed) >= 0.9
    assert power_within(GAUSSIAN, 2.0, needed // 3) < 0.6
    ratio = smallest_ratio(GAUSSIAN, 40)
    assert ratio is not None
    assert power_within(GAUSSIAN, ratio, 40) >= 0.9 > power_within(GAUSSIAN, ratio - 0.2, 40)
    assert smallest_ratio(GAUSSIAN, 2) is None


def test_e_values_of_one_run_stand_for_its_guesses() -> None:
    """With m independent coins and guesses that are right by chance, p is the tail of a binomial law at delta 0."""
    scores, inside = np.arange(100.0), np.arange(100) >= 50
    plan = OneRunPlan(adversary="all", canaries=100, delta=0.0, claimed=1.0)
    result = audit_one_run(scores, inside, plan)
    bound = result.bound(Method.ANY_MECHANISM)
    p_value = binom.sf(bound.correct - 1, bound.guesses, 1 / (1 + math.exp(-1.0)))
    assert result.e_value == pytest.approx(0.5 / math.sqrt(p_value))


def test_bad_input_is_named() -> None:
    with pytest.raises(NoGuarantee, match="law = 'gaussian'"):
        AnytimePlan(delta=0.0, claimed=1.0, law=Law.GAUSSIAN)
    with pytest.raises(ValueError, match="claimed"):
        AnytimePlan(delta=0.0, claimed=-1.0)
    with pytest.raises(ValueError, match="bounds"):
        AnytimeAudit(AnytimePlan(delta=0.0), bounds=False)
    with pytest.raises(ValueError, match="scores"):
        AnytimeAudit(PURE).add(np.zeros(3), np.ones(2, dtype=bool))
