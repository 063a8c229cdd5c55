"""One-run bounds: coverage over 10,000 synthetic experiments on exact mechanisms, a planted fault, ceilings."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, norm

from opusim.accounting.audit import gaussian_mu, normal_limits
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.records import RecordCentral
from opusim.accounting.one_run import (
    FEWEST_CANARIES,
    Law,
    Method,
    OneRunPlan,
    _p_value,
    _refutes_mu,
    audit_one_run,
    ceiling,
    correct_guesses,
    guesses_bound,
)

DELTA, REPEATS, LEVEL = 1e-5, 10_000, 0.05
TOLERANCE = 5 * math.sqrt(LEVEL * (1 - LEVEL) / REPEATS)
GUESSING = (Method.ANY_MECHANISM, Method.GAUSSIAN_TRADE_OFF)


def plan(canaries: int, claimed: float, *, law: Law = Law.GAUSSIAN, delta: float = DELTA) -> OneRunPlan:
    return OneRunPlan(adversary="sees the scores", canaries=canaries, delta=delta, claimed=claimed, law=law)


def gaussian_scores(
    mu: float, canaries: int, repeats: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The exact Gaussian mechanism on each canary: N(mu, 1) if it is in, N(0, 1) if not."""
    coins = generator.random((repeats, canaries)) < 0.5
    return generator.standard_normal((repeats, canaries)) + mu * coins, coins


def refuted_by_guesses(scores: np.ndarray, coins: np.ndarray, claim: OneRunPlan, method: Method) -> float:
    """Share of experiments whose bound exceeds the claim."""
    guesses = claim.guesses(method)
    counts = correct_guesses(scores, coins, guesses)
    bounds = {
        count: guesses_bound(method, claim.canaries, guesses, count, delta=claim.delta)
        for count in np.unique(counts).tolist()
    }
    return float(np.mean([bounds[count] > claim.claimed for count in counts.tolist()]))


def refuted_by_normality(scores: np.ndarray, coins: np.ndarray, mu: float) -> float:
    found = [normal_limits(row[coin], row[~coin])[1] > mu for row, coin in zip(scores, coins, strict=True)]
    return float(np.mean(found))


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
@pytest.mark.parametrize("method", GUESSING)
def test_guesses_refute_a_true_claim_as_seldom_as_stated(method: Method, epsilon: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    claim = plan(400, epsilon)
    scores, coins = gaussian_scores(gaussian_mu(epsilon, DELTA), 400, REPEATS, generator)
    assert refuted_by_guesses(scores, coins, claim, method) <= LEVEL + TOLERANCE


@pytest.mark.parametrize("epsilon", [pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_the_normal_bound_covers_the_true_mu_as_often_as_stated_not_more(epsilon: float, seed: int) -> None:
    """Two-sided: a bound that is too cautious by half a standard error would fail as well."""
    mu = gaussian_mu(epsilon, DELTA)
    scores, coins = gaussian_scores(mu, 400, REPEATS, np.random.default_rng(seed))
    assert abs(refuted_by_normality(scores, coins, mu) - LEVEL) <= TOLERANCE


def test_the_bound_for_any_mechanism_is_tight_on_randomized_response(seed: int) -> None:
    """Each coin is kept with probability e^epsilon / (1 + e^epsilon): no bound of level 0.05 refutes more often.

    The number of correct guesses is a whole number, so the exact share is the largest binomial tail below the level.
    """
    generator, epsilon = np.random.default_rng(seed), 1.5
    claim = plan(400, epsilon, law=Law.ANY, delta=0.0)
    coins = generator.random((REPEATS, 400)) < 0.5
    kept = generator.random(coins.shape) < expit(epsilon)
    scores = np.where(kept, coins, ~coins) + 0.5 * generator.random(coins.shape)
    found = refuted_by_guesses(scores, coins, claim, Method.ANY_MECHANISM)
    k = claim.guesses(Method.ANY_MECHANISM)
    tails = [_p_value(400, k, v, epsilon, 0.0) for v in range(k + 1)]
    exact = max(tail for tail in tails if tail <= LEVEL)
    assert abs(found - exact) <= 5 * math.sqrt(exact * (1 - exact) / REPEATS)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_one_guess_on_the_gaussian_mechanism_is_refuted_exactly_above_its_best_accuracy(mu: float) -> None:
    """The best guess of one coin is right with probability Phi(mu / 2), which no test can know to be too seldom."""
    best = float(norm.cdf(mu / 2))
    assert not _refutes_mu(mu, 1, 1, 1, best * (1 - 1e-9))
    assert _refutes_mu(mu, 1, 1, 1, best * (1 + 1e-9))


@pytest.mark.parametrize("canaries", [2, 5, 40])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_independent_gaussian_coins_never_exceed_either_bound(mu: float, canaries: int) -> None:
    """Exact: all coins are guessed at the best threshold, so that V ~ Binomial(m, Phi(mu / 2)).

    A level below P(V >= v) must not refute mu at v, and P(V >= v) must not exceed the p-value of its (epsilon, delta).
    """
    epsilon = math.log(0.9 / (1 - 0.9))
    delta = float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))
    for correct in range(1, canaries + 1):
        tail = float(binom.sf(correct - 1, canaries, norm.cdf(mu / 2)))
        assert not _refutes_mu(mu, canaries, canaries, correct, tail * (1 - 1e-9))
        assert tail <= _p_value(canaries, canaries, correct, epsilon, delta) * (1 + 1e-9)
    all_right = 0.5**canaries  # without any leak: exact in both directions
    assert not _refutes_mu(0.0, canaries, canaries, canaries, all_right * (1 - 1e-6))
    assert _refutes_mu(0.0, canaries, canaries, canaries, all_right * (1 + 1e-6))


def test_delta_is_spent_as_the_worst_mechanism_spends_it(seed: int) -> None:
    """With probability m delta / 10 the release gives ten coins away: (0, delta)-DP for each canary on average."""
    generator, canaries, given = np.random.default_rng(seed), 100, 10
    delta = 0.01
    coins = generator.random((REPEATS, canaries)) < 0.5
    leaks = generator.random(REPEATS) < canaries * delta / given
    scores = generator.random(coins.shape)
    signs = np.where(coins[:, :given], 2.0, -2.0)
    scores[:, :given] = np.where(leaks[:, None], signs, scores[:, :given])
    counts = correct_guesses(scores, coins, given)
    for count in range(given + 1):
        share = float(np.mean(counts >= count))
        allowed = _p_value(canaries, given, count, 0.0, delta)
        assert share <= allowed + 5 * math.sqrt(max(allowed * (1 - allowed), 1 / REPEATS) / REPEATS)
    without = _p_value(canaries, given, given, 0.0, 0.0)
    error = math.sqrt(without * (1 - without) / REPEATS)
    assert np.mean(counts == given) > without + 5 * error  # delta = 0 is refuted


@pytest.mark.parametrize("method", [Method.GAUSSIAN_TRADE_OFF, Method.NORMAL_BOUND])
def test_half_of_the_noise_is_found(method: Method, seed: int) -> None:
    """The planted fault: 2,000 canaries at a claim of 4 whose noise is half; at least 95 of 100 runs are refuted."""
    generator, mu = np.random.default_rng(seed), gaussian_mu(4.0, DELTA)
    scores, coins = gaussian_scores(2 * mu, 2000, 100, generator)
    if method is Method.NORMAL_BOUND:
        found = refuted_by_normality(scores, coins, mu)
    else:
        found = refuted_by_guesses(scores, coins, plan(2000, 4.0), method)
    assert found >= 0.95


@pytest.mark.slow
def test_without_canaries_in_the_data_nothing_is_found(seed: int) -> None:
    """Null: scores that no coin moved exceed 0 as often as stated."""
    scores, coins = gaussian_scores(0.0, 400, REPEATS, np.random.default_rng(seed))
    for method in GUESSING:
        guesses = plan(400, 4.0).guesses(method)
        counts = correct_guesses(scores, coins, guesses)
        bounds = {c: guesses_bound(method, 400, guesses, c, delta=DELTA) for c in np.unique(counts).tolist()}
        assert np.mean([bounds[c] > 0 for c in counts.tolist()]) <= LEVEL + TOLERANCE
    assert refuted_by_normality(scores, coins, 0.0) <= LEVEL + TOLERANCE


def test_ceilings_at_epsilon_4() -> None:
    thousand, five = plan(1000, 4.0), plan(5000, 4.0)
    expected = {
        Method.ANY_MECHANISM: (1.6, 2.0),
        Method.GAUSSIAN_TRADE_OFF: (2.2, 2.6),
        Method.NORMAL_BOUND: (3.5, 3.8),
        Method.NORMAL_ESTIMATE: (4.0, 4.0),
    }
    for method, values in expected.items():
        found = thousand.ceiling(method), five.ceiling(method)
        assert found == pytest.approx(values, abs=0.15)


@pytest.mark.slow
def test_ceilings_are_what_ideal_scores_give(seed: int) -> None:
    """Median over 100 ideal experiments, within five standard errors of a median."""
    claim, repeats = plan(1000, 4.0), 100
    scores, coins = gaussian_scores(gaussian_mu(4.0, DELTA), 1000, repeats, np.random.default_rng(seed))
    results = [audit_one_run(row, coin, claim) for row, coin in zip(scores, coins, strict=True)]
    for method in Method:
        found = np.array([result.bound(method).epsilon for result in results])
        error = 1.2533 * found.std() / math.sqrt(repeats)
        step = 0.04 if method in GUESSING else 0.0  # counts are whole numbers
        assert abs(float(np.median(found)) - claim.ceiling(method)) <= 5 * error + step


def test_scores_that_are_not_normal_are_named(seed: int) -> None:
    generator = np.random.default_rng(seed)
    coins = generator.random(1000) < 0.5
    claim = plan(1000, 4.0)
    assert audit_one_run(generator.standard_normal(1000) + coins, coins, claim).normality > 1e-4
    assert audit_one_run(generator.laplace(size=1000) + coins, coins, claim).normality < 1e-6
    assert audit_one_run(generator.standard_normal(1000) * (1 + coins), coins, claim).normality < 1e-6


def test_perfect_scores_reach_the_largest_bound() -> None:
    coins = np.arange(100) % 2 == 0
    found = audit_one_run(coins.astype(float), coins, plan(100, 4.0, law=Law.ANY, delta=0.0))
    assert found.auc == 1.0
    bound = found.bound(Method.ANY_MECHANISM)
    assert bound.correct == bound.guesses
    assert bound.epsilon == pytest.approx(math.log(1 / (0.05 ** (-1 / bound.guesses) - 1)), rel=1e-4)
    assert found.bounds[0].method in Method
    assert found.plan.methods == (Method.ANY_MECHANISM,)


@pytest.mark.parametrize(("call", "error", "named"), [
    (lambda: guesses_bound(Method.ANY_MECHANISM, 100, 40, 41, delta=DELTA), ValueError, "correct"),
    (lambda: guesses_bound(Method.ANY_MECHANISM, 100, 102, 50, delta=DELTA), ValueError, "correct"),
    (lambda: guesses_bound(Method.ANY_MECHANISM, 100, 40, -1, delta=DELTA), ValueError, "correct"),
    (lambda: plan(100, 4.0, delta=0.0), NoGuarantee, "delta"),
    (lambda: plan(FEWEST_CANARIES - 1, 4.0), ValueError, "canaries"),
    (lambda: audit_one_run(np.zeros(100), np.ones(100, dtype=bool), plan(100, 4.0)), ValueError, "inside"),
    (lambda: replace(plan(100, 4.0, law=Law.ANY), readings=(Method.NORMAL_BOUND,)), ValueError, "readings"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], object], error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        call()


def test_the_ceiling_of_all_guesses() -> None:
    assert ceiling(Method.ANY_MECHANISM, 1000, 4.0, 0.0, guesses=1000) == pytest.approx(3.5, abs=0.6)


def test_scores_are_read_only_as_the_plan_says() -> None:
    """A bound that is left out beforehand needs no share of the error, which raises the ceilings of the others."""
    coins = np.arange(100) % 2 == 0
    only = replace(plan(100, 4.0), readings=(Method.GAUSSIAN_TRADE_OFF,))
    found = audit_one_run(coins.astype(float), coins, only)
    assert [bound.method for bound in found.bounds] == [Method.GAUSSIAN_TRADE_OFF]
    numbers = {"canaries": 2000, "epsilon": 4.0, "delta": DELTA}
    seven, nine = (ceiling(Method.NORMAL_BOUND, **numbers, confidence=1 - LEVEL / n) for n in (7, 9))
    assert seven > nine


def sampled_scores(
    q: float,
    z: float,
    canaries: int,
    repeats: int,
    generator: np.random.Generator,
    *,
    drawn: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood ratios of 40 Poisson-sampled steps at q and z, drawn with another probability if one is given."""
    coins = generator.random((repeats, canaries)) < 0.5
    found = np.zeros(coins.shape)
    for _ in range(40):
        inside = coins & (generator.random(coins.shape) < (q if drawn is None else drawn))
        y = z * generator.standard_normal(coins.shape) + inside
        found += np.logaddexp(math.log1p(-q), math.log(q) + (2 * y - 1) / (2 * z * z))
    return found, coins


def test_normal_scores_are_held_against_the_strictest_statement(seed: int) -> None:
    """Sound steps are refuted as seldom as stated; a rate a quarter too high more often than at the claim's delta."""
    q, z, generator, repeats = 0.3, 2.3, np.random.default_rng(seed), 200
    step = RecordCentral(noise_multiplier=z, sampling_probability=q, clip_norm=1.0, divisor=1.0, steps=40)
    deltas = (DELTA, 0.01, 0.1, 0.3)
    stated = {d: RecordCentral.guarantees([step], delta=d, enforced=True)[0].epsilon for d in deltas}
    claim = replace(plan(1000, stated.pop(DELTA)), elsewhere=tuple(stated.items()))
    assert claim.strictest == (0.3, stated[0.3])
    own = gaussian_mu(claim.claimed or 0.0, DELTA)
    assert claim.allowed_mu < own
    played = {d: sampled_scores(q, z, 1000, repeats, generator, drawn=d) for d in (q, 1.25 * q)}
    shares = {
        (drawn, mu): refuted_by_normality(*scores, mu)
        for drawn, scores in played.items()
        for mu in (own, claim.allowed_mu)
    }
    assert shares[q, claim.allowed_mu] <= LEVEL + 5 * math.sqrt(LEVEL * (1 - LEVEL) / repeats)
    error = 5 * math.sqrt(0.5 / repeats)
    assert shares[1.25 * q, claim.allowed_mu] > shares[1.25 * q, own] + error
    (scores,), (coins,) = sampled_scores(q, z, 1000, 1, generator, drawn=2 * q)
    result = audit_one_run(scores, coins, claim)
    bound = result.bound(Method.NORMAL_BOUND)
    assert result.exceeds(bound)
    delta, claimed, found = result.at_strictest(bound) or (0.0, 0.0, 0.0)
    assert (delta, claimed) == claim.strictest
    assert found > claimed


def test_the_power_is_the_share_of_refutations_of_ideal_scores(seed: int) -> None:
    generator, repeats = np.random.default_rng(seed), 400
    claim = replace(plan(400, 4.0), weaker_mu=1.3)
    scores, coins = gaussian_scores(1.3, 400, repeats, generator)
    guessed = refuted_by_guesses(scores, coins, claim, Method.GAUSSIAN_TRADE_OFF)
    normal = refuted_by_normality(scores, coins, claim.allowed_mu)
    for method, share in ((Method.GAUSSIAN_TRADE_OFF, guessed), (Method.NORMAL_BOUND, normal)):
        power = claim.power(method)
        assert power is not None
        assert share == pytest.approx(power, abs=5 * math.sqrt(power * (1 - power) / repeats) + 0.05)
    assert claim.power(Method.NORMAL_ESTIMATE) is None
    assert plan(400, 4.0).power(Method.NORMAL_BOUND) is None
