"""Selection among a Poisson number of trials: known values, an exact instance, high precision, the paper's numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad, trapezoid
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr
from scipy.stats import norm

from benchmarks.attacks.claims import search_epsilon
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, NoGuarantee, Release, Status, Unit
from opusim.accounting.mechanisms.records import Gaussian, PoissonGaussian
from opusim.accounting.mechanisms.selection import (
    NoisyTrial,
    PrivateSelection,
    _lines,
    gaussian_delta,
    models_bounds,
    priced_search,
    refined_delta,
    refined_epsilon,
    renyi_epsilon,
    selection_bounds,
    theorem_epsilon,
)
from opusim.accounting.numerics import noise_bounds

DELTA = 1e-5
MUS = {1.33: 0.3473, 4.76: 1.0749}
"""mu of the paper's two base epsilons at delta 1e-5."""


@pytest.mark.parametrize(
    ("base", "mean", "theorem", "refined", "renyi"),
    [(1.33, 20, 4.32, 3.72, 3.78), (4.76, 20, 13.64, 12.51, 12.77), (1.33, 10, 2.89, None, None),
     (4.76, 10, 9.40, None, None), (1.33, 5, None, 2.01, None), (4.76, 5, None, 6.93, None)],
)  # fmt: skip
def test_known_values(base: float, mean: float, theorem: float, refined: float, renyi: float) -> None:
    values = ((theorem_epsilon, theorem), (refined_epsilon, refined), (renyi_epsilon, renyi))
    for bound, expected in values:
        if expected is not None:
            assert bound(MUS[base], mean, DELTA) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize(("base", "claimed"), [(1.33, 2.88), (4.76, 8.91)])
def test_the_papers_numbers_are_not_what_its_theorem_gives_at_20_trials(base: float, claimed: float) -> None:
    assert theorem_epsilon(MUS[base], 20, DELTA) > 1.45 * claimed
    fitting = brentq(lambda m: theorem_epsilon(MUS[base], m, DELTA) - claimed, 1, 20)
    assert 8.5 < fitting < 10.5


@pytest.mark.parametrize(("mu", "mean"), [(0.3, 20.0), (1.0, 5.0), (4.0, 1.0)])
def test_the_envelope_of_lines_is_the_largest_of_them(mu: float, mean: float) -> None:
    slopes, levels, turns = _lines(mu, mean)
    assert (np.diff(turns) > 0).all()
    u = np.geomspace(max(turns[0], 1e-9) / 2, 2 * turns[-1], 500)
    best = np.searchsorted(turns, u)
    np.testing.assert_allclose(
        slopes[best] * (u - levels[best]), (slopes * (u[:, None] - levels)).max(axis=1), rtol=1e-9, atol=1e-15
    )


def exact_delta(mu: float, mean: float, epsilon: float) -> float:
    """The score is the output itself, N(0, 1) against N(mu, 1), both directions: densities in closed form."""

    def density(y: float, shift: float) -> float:
        return mean * math.exp(-mean * ndtr(shift - y)) * norm.pdf(y - shift)

    def excess(y: float, first: float, second: float) -> float:
        return max(density(y, first) - math.exp(epsilon) * density(y, second), 0.0)

    return max(quad(excess, -9, 9 + mu, args=pair, limit=400, epsabs=1e-12)[0] for pair in ((0, mu), (mu, 0)))


@pytest.mark.parametrize("mean", [0.5, pytest.param(5.0, marks=pytest.mark.slow), 20.0])
@pytest.mark.parametrize("mu", [0.3473, 1.0749])
def test_no_bound_is_below_an_exact_instance(mu: float, mean: float) -> None:
    for epsilon in (0.5, 2.0, 5.0):
        assert refined_delta(mu, mean, epsilon) >= exact_delta(mu, mean, epsilon)
    bounds = selection_bounds(mu, mean, DELTA)
    assert exact_delta(mu, mean, bounds.upper) <= DELTA


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("mean", [0.5, 20.0])
@pytest.mark.parametrize("mu", [5.0, 8.0, 24.0])
def test_weakly_private_trials_do_not_lose_the_upper_tail(mu: float, mean: float, delta: float) -> None:
    """The exact instance again, on a grid: its delta lies where 1 - Phi is below the rounding of doubles."""
    y = np.linspace(mu - 9, mu + 9, 100_001)

    def log_density(shift: float) -> np.ndarray:
        return math.log(mean) - mean * ndtr(shift - y) + norm.logpdf(y - shift)

    epsilon = selection_bounds(mu, mean, delta).upper
    excess = np.exp(log_density(mu)) - np.exp(log_density(0.0) + epsilon)
    assert trapezoid(np.maximum(excess, 0), y) <= delta


@pytest.mark.slow
def test_the_exact_instance_of_20_trials() -> None:
    for base, expected in ((1.33, 2.72), (4.76, 8.24)):
        found = brentq(lambda e, mu=MUS[base]: exact_delta(mu, 20, e) - DELTA, 0.8 * expected, 1.2 * expected)
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "claimed", "expected"), [(1.33, 2.88, 3.63), (4.76, 8.91, 12.37)])
def test_the_papers_numbers_are_refuted_by_an_instance(base: float, claimed: float, expected: float) -> None:
    """A score that prefers outputs which the other world makes likelier comes close to the refined bound."""
    found = search_epsilon(MUS[base], 20, DELTA)
    assert found == pytest.approx(expected, abs=0.02)
    assert claimed < found <= selection_bounds(MUS[base], 20, DELTA).upper


def test_planted_fault_the_base_epsilon_alone_is_refuted() -> None:
    """What a search that forgot its trials would print."""
    for base, mu in MUS.items():
        assert exact_delta(mu, 20, base) > 2 * DELTA


@pytest.mark.parametrize(
    "mu",
    [0.05, pytest.param(0.3473, marks=pytest.mark.slow), 1.0749, pytest.param(3.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mean", [1.0, 8.0])
def test_the_refined_bound_against_direct_integration(mu: float, mean: float) -> None:
    """The integrand at a fine grid of a, without cells or envelopes, is at most the bound and close to it."""
    a = np.concatenate([[0.0], np.logspace(-12, 0, 4000)])
    gain = ndtr(mu + norm.ppf(a)) - a

    def integrand(x: float, epsilon: float) -> float:
        ratio = math.exp(mu * x - mu**2 / 2)
        best = np.max(np.exp(-mean * a) * (ratio - np.exp(epsilon - mean * gain)))
        return max(float(best), 0.0) * norm.pdf(x)

    epsilon = refined_epsilon(mu, mean, 1e-3)
    x = np.linspace(-8, 8 + mu, 3000)
    direct = mean * float(trapezoid([integrand(v, epsilon) for v in x], x))
    assert 0.9 * direct <= 1e-3 * 1.001
    assert refined_delta(mu, mean, epsilon) >= direct * 0.999


def test_more_trials_and_less_noise_cost_more_by_the_gaussian_profile() -> None:
    by_mean = [selection_bounds(0.5, m, DELTA).upper for m in (0.5, 1, 2, 5, 10, 20, 50)]
    by_mu = [selection_bounds(mu, 5, DELTA).upper for mu in (0.01, 0.1, 0.3, 1.0, 3.0)]
    assert by_mean == sorted(by_mean)
    assert by_mu == sorted(by_mu)
    assert gaussian_delta(0.3473, 0.0) == pytest.approx(0.1379, abs=1e-4)
    assert gaussian_delta(1.0749, 4.76) == pytest.approx(DELTA, rel=0.02)


def test_statement_and_several_searches() -> None:
    one = PrivateSelection(mean=5, mu=0.3473)
    (guarantee,) = guarantees([one], delta=DELTA, enforced=True)
    assert guarantee.status is Status.PROVEN
    assert (guarantee.adjacency, guarantee.release) == (Adjacency.REPLACE_ONE, Release.LAST_ITERATE)
    assert guarantee.epsilon == pytest.approx(2.01, abs=0.01)
    (two,) = guarantees([one.repeated(2)], delta=DELTA)
    assert two.epsilon == pytest.approx(2 * selection_bounds(0.3473, 5, DELTA / 2).upper)
    with pytest.raises(ValueError, match=r"mean = 0: must be finite and above 0"):
        PrivateSelection(mean=0, mu=1.0)


SAMPLED = NoisyTrial(law="gaussian", scale=1.0, probability=0.3, steps=1)
OTHER = NoisyTrial(law="gaussian", scale=0.8, probability=0.1, steps=1)
BROAD = 1e-3
"""A delta that quadrature resolves."""


def exact_sampled_delta(trials: tuple[NoisyTrial, ...], mean: float, epsilon: float) -> float:
    """One sampled step whose settings are drawn uniformly and shown, and whose output is its score; both directions.

    A record is added: the sum moves by 1 with probability q. The density of the best is m e^(-m a(y)) p Q(y), a(y) the
    probability that a trial of any settings scores above y.
    """
    y = np.linspace(-9, 10, 20_001)

    def worlds(added: bool) -> np.ndarray:
        shares = [one.probability if added else 0.0 for one in trials]
        laws, tails = (
            [(1 - q) * of(y, 0, one.scale) + q * of(y, 1, one.scale) for one, q in zip(trials, shares, strict=True)]
            for of in (norm.pdf, norm.sf)
        )  # fmt: skip
        above = np.mean(tails, axis=0)
        return mean * np.exp(-mean * above) * np.array(laws) / len(trials)

    found = []
    for first, second in ((True, False), (False, True)):
        excess = np.maximum(worlds(first) - math.exp(epsilon) * worlds(second), 0.0)
        found.append(float(trapezoid(excess, y, axis=1).sum()))
    return max(found)


@pytest.mark.parametrize("mean", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("trials", [(SAMPLED,), (SAMPLED, OTHER)], ids=["one setting", "two settings"])
def test_sampled_trials_against_an_exact_instance(trials: tuple[NoisyTrial, ...], mean: float) -> None:
    bound = models_bounds(trials, Adjacency.ADD_OR_REMOVE_ONE, mean, BROAD).upper
    assert exact_sampled_delta(trials, mean, bound) <= BROAD
    exact = brentq(lambda e: exact_sampled_delta(trials, mean, e) - BROAD, 0.01, bound, xtol=1e-3)
    assert exact > 0.3 * bound  # the bound is not empty


def test_planted_fault_charging_the_best_trial_only_is_refuted() -> None:
    """What a search that forgot its trials would print for sampled noise."""
    base = noise_bounds([SAMPLED.as_noise()], Adjacency.ADD_OR_REMOVE_ONE, BROAD).upper
    assert exact_sampled_delta((SAMPLED,), 12.0, base) > 2 * BROAD


@pytest.mark.parametrize("mean", [1.0, 5.0, 10.0])
@pytest.mark.parametrize(("adjacency", "relation"), [
    (Adjacency.ADD_OR_REMOVE_ONE, NeighboringRelation.ADD_OR_REMOVE_ONE),
    (Adjacency.ZERO_OUT, NeighboringRelation.REPLACE_SPECIAL),
])  # fmt: skip
def test_trials_of_dp_accounting(mean: float, adjacency: Adjacency, relation: NeighboringRelation) -> None:
    """Its accountant prices the same search from Renyi divergences only, with another law for their delta."""
    one = NoisyTrial(law="gaussian", scale=1.5, probability=0.05, steps=200)
    step = PoissonSampledDpEvent(one.probability, GaussianDpEvent(one.scale))
    accountant = RdpAccountant(neighboring_relation=relation)
    accountant.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(step, one.steps), mean, math.inf))
    theirs, ours = accountant.get_epsilon(DELTA), models_bounds((one,), adjacency, mean, DELTA).upper
    assert 0.8 * theirs < ours <= theirs
    assert ours > noise_bounds([one.as_noise()], adjacency, DELTA).upper


def test_trials_without_sampling_cost_what_their_mu_costs() -> None:
    one = NoisyTrial(law="gaussian", scale=8.0, probability=1.0, steps=4)
    for adjacency, mu in ((Adjacency.REPLACE_ONE, 0.5), (Adjacency.ZERO_OUT, 0.25)):
        assert models_bounds((one,), adjacency, 3.0, DELTA) == selection_bounds(mu, 3.0, DELTA)


def test_the_larger_of_scores_and_models_counts() -> None:
    trials = (NoisyTrial(law="gaussian", scale=4.0, probability=0.1, steps=50),)
    kind = {"adjacency": Adjacency.ZERO_OUT, "release": Release.EVERY_UPDATE}
    search = PrivateSelection(mean=3.0, mu=0.05, trials=trials, **kind)
    (models,) = guarantees([search], delta=DELTA, enforced=True)
    assert models.epsilon == models_bounds(search.trials, Adjacency.ZERO_OUT, 3.0, DELTA).upper
    assert (models.adjacency, models.release) == (Adjacency.ZERO_OUT, Release.EVERY_UPDATE)
    (scores,) = guarantees([replace(search, mu=2.0)], delta=DELTA)
    assert scores.epsilon == selection_bounds(2.0, 3.0, DELTA).upper > models.epsilon
    (two,) = guarantees([search.repeated(2)], delta=DELTA)
    each = models_bounds(trials, Adjacency.ZERO_OUT, 3.0, DELTA / 2).upper
    assert two.epsilon == pytest.approx(2 * each)


@pytest.mark.slow
def test_a_search_is_priced_for_its_dearest_settings() -> None:
    noise = {"noise_multiplier": 1.0, "sampling_probability": 0.1}
    short = PoissonGaussian(**noise, steps=20, adjacency=Adjacency.ZERO_OUT)
    long = short.repeated(60)
    priced = priced_search([short, long, short], mean=2.0, epsilon=3.0, delta=DELTA)
    assert priced.trials[0] == priced.trials[2]
    assert priced.trials[1].noise > 1.3 * priced.trials[0].noise
    assert [trial.steps for trial in priced.selection.trials] == [20, 60]
    (stated,) = guarantees([priced.selection], delta=DELTA)
    assert 2.95 < stated.epsilon <= 3.0
    for trial in priced.trials:
        (own,) = guarantees([trial], delta=DELTA)
        assert own.epsilon < 0.9 * stated.epsilon


def test_bounds_end_where_the_numbers_do() -> None:
    for mu, mean, delta in ((0.5, 3.0, 0.0), (math.nextafter(25.0, 26.0), 3.0, DELTA), (1e3, 0.1, 0.5)):
        assert selection_bounds(mu, mean, delta).upper == math.inf
    assert selection_bounds(25.0, 3.0, DELTA).upper < math.inf
    assert models_bounds((SAMPLED,), Adjacency.ADD_OR_REMOVE_ONE, 3.0, 0.0).upper == math.inf


@pytest.mark.parametrize("mu", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("mean", [0.3, pytest.param(1.0, marks=pytest.mark.slow), 6.0])
def test_the_least_of_three_bounds_counts(mu: float, mean: float) -> None:
    three = [bound(mu, mean, DELTA) for bound in (theorem_epsilon, refined_epsilon, renyi_epsilon)]
    assert selection_bounds(mu, mean, DELTA).upper == min(three)
    assert selection_bounds(mu, mean, DELTA).lower == 0
    assert refined_delta(mu, mean, three[1]) <= DELTA or three[1] == math.inf
    if three[1] < math.inf:
        assert refined_delta(mu, mean, three[1] * (1 - 3e-4)) > DELTA


@pytest.mark.parametrize("mu", [0.3473, 1.0749])
@pytest.mark.parametrize("mean", [0.25, 1.0, 8.0])
def test_the_renyi_bound_against_its_formula(mu: float, mean: float) -> None:
    """The best order is searched without a grid; the logarithm of a mean below 1 is not credited."""

    def epsilon(log_order: float) -> float:
        over = math.exp(log_order)  # lambda - 1
        spent = (1 + over) * mu**2 / 2 + mean * gaussian_delta(mu, math.log1p(1 / over))
        spent += math.log(max(mean, 1.0)) / over
        return spent + math.log1p(-1 / (1 + over)) - math.log(DELTA * (1 + over)) / over

    best = minimize_scalar(epsilon, bounds=(-3.0, 5.0), method="bounded", options={"xatol": 1e-9}).fun
    assert best * (1 - 1e-9) <= renyi_epsilon(mu, mean, DELTA) <= 1.001 * best


def test_theorem_5_1_in_its_two_cases() -> None:
    mu, mean = 1.0749, 5.0
    most = mean * gaussian_delta(mu, 0.0)
    for delta in (DELTA, 0.999 * most):
        inner = brentq(lambda e, delta=delta: mean * gaussian_delta(mu, e) - delta, 0.0, 60.0, xtol=1e-12)
        assert theorem_epsilon(mu, mean, delta) == pytest.approx(inner + most, rel=1e-6)
    small = 0.1  # so few trials that nothing is left of delta at epsilon 0
    for delta in (1.001 * small * gaussian_delta(mu, 0.0), 0.5):
        assert theorem_epsilon(mu, small, delta) == small * gaussian_delta(mu, 0.0)


@pytest.mark.parametrize(("text", "message"), [
    *(("gaussian,4,0.1", "must be LAW,SCALE,Q,STEPS"), ("uniform,4,0.1,4", "must be LAW,SCALE,Q,STEPS")),
    *(("gaussian,0,0.1,4", "scale = 0"), ("gaussian,inf,0.1,4", "scale = inf"), ("gaussian,4,0,4", "probability = 0")),
    *(("gaussian,4,2,400", "probability = 2"), ("gaussian,4,1.1,4", "probability = 1.1")),
    ("gaussian,4,0.1,0", "steps = 0"),
])  # fmt: skip
def test_a_trial_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyTrial.from_text(text)
    with pytest.raises(TypeError, match="steps = 2.5"):
        replace(SAMPLED, steps=2.5)  # type: ignore[arg-type]
    assert NoisyTrial.from_text("gaussian,4,1,400").steps == 400


def test_more_noise_scales_every_setting_and_leaves_the_score() -> None:
    search = PrivateSelection(mean=3.0, mu=0.4, trials=(replace(SAMPLED, what="x"), OTHER))
    assert (search.noise, search.repeated(1).noise) == (SAMPLED.scale, SAMPLED.scale)
    found = search.with_noise(2.5)
    assert [one.scale for one in found.trials] == [2.5, pytest.approx(2.5 * OTHER.scale / SAMPLED.scale)]
    assert (found.mu, found.noise, found.trials[0].what) == (0.4, 2.5, "")
    plain = PrivateSelection(mean=3.0, mu=0.4)
    assert plain.noise == pytest.approx(2.5)
    assert plain.with_noise(4.0) == replace(plain, mu=0.25)


def test_searches_add_up_at_equal_shares_and_only_alike_ones() -> None:
    one, other = PrivateSelection(mean=5.0, mu=0.3), PrivateSelection(mean=2.0, mu=0.5, steps=2)
    (both,) = guarantees([one, other], delta=DELTA)
    parts = [selection_bounds(found.mu, found.mean, DELTA / 3).upper * found.steps for found in (one, other)]
    assert both.epsilon == pytest.approx(math.fsum(parts), rel=1e-12)
    assert both.theorem == "private-selection"
    mixed = replace(other, trials=(SAMPLED,), adjacency=Adjacency.ZERO_OUT)
    assert guarantees([mixed], delta=DELTA)[0].theorem == "selection-of-noisy-sums"
    others = {
        "adjacency": Adjacency.ZERO_OUT, "release": Release.EVERY_UPDATE, "unit": Unit.LABEL, "rests_on": "x",
    }  # fmt: skip
    for name, value in others.items():
        with pytest.raises(NoGuarantee, match=f"searches: {name} differs"):
            guarantees([one, replace(other, **{name: value})], delta=DELTA)
    (device,) = guarantees([one, replace(one, mean=3.0, device_noise=True)], delta=DELTA)
    assert device.status is Status.PROVEN_UNDER_DEVICE_MODEL


@pytest.mark.parametrize("adjacency", [Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT])
def test_settings_without_sampling_are_priced_by_their_mu(adjacency: Adjacency) -> None:
    whole = Gaussian(noise_multiplier=3.0, steps=4, adjacency=adjacency)
    priced = priced_search([whole, whole.repeated(16)], mean=3.0, epsilon=2.0, delta=DELTA)
    assert not priced.selection.trials
    (stated,) = guarantees([priced.selection], delta=DELTA)
    assert 1.999 < stated.epsilon <= 2.0
    moved = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    for trial in priced.trials:
        mu = moved * math.sqrt(trial.steps) / trial.noise
        assert mu == pytest.approx(priced.selection.mu, rel=1e-6)
        assert mu < priced.selection.mu
    both = [whole, replace(whole, adjacency=Adjacency.ADD_OR_REMOVE_ONE)]
    with pytest.raises(NoGuarantee, match="the trials differ in what they protect"):
        priced_search(both, mean=3.0, epsilon=2.0, delta=DELTA)
