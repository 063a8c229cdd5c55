"""Photon counts as the mechanism: the exact loss against enumeration, draws and limits; the argmax as a channel."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import norm, poisson

from benchmarks.devices.count_attack import certified_confusion
from opusim.accounting import numerics
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import NoGuarantee, Status
from opusim.accounting.mechanism import CertifiedMechanism, mechanism_from_json
from opusim.accounting.mechanisms.counts import (
    LabelArgmax,
    LabelCounts,
    argmax_epsilon,
    at_brightest,
    confusion_matrix,
    known_counts_guarantee,
)
from opusim.accounting.mechanisms.readings import epsilon_of_divergence
from opusim.accounting.numerics import poisson_loss
from opusim.accounting.numerics.poisson_loss import polygon_below

DELTA = 1e-5
PAIRS = [
    *(((2.33, 6.34), (6.34, 2.33)), ((50.0, 55.0), (60.0, 50.0)), ((3.0, 5.0), (3.0, 4.0))),
    *(((0.5, 0.02), (0.3, 1.0)), ((300.0, 310.0), (290.0, 310.0)), ((1.0, 0.0), (2.0, 0.7))),
    ((1.0, 1e-6), (1.4, 0.0)),
]


def enumerated_epsilon(a: tuple[float, ...], b: tuple[float, ...], delta: float) -> float:
    """The hockey-stick divergence of two pixels, summed over all pairs of counts, and its root."""
    counts = [np.arange(int(max(pair) + 15 * math.sqrt(max(pair)) + 40)) for pair in zip(a, b, strict=True)]
    p, q = (np.outer(*(poisson.pmf(n, r) for n, r in zip(counts, rates, strict=True))) for rates in (a, b))
    low, high = 0.0, 60.0
    if np.maximum(p - q, 0).sum() <= delta:
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(p - np.exp(middle) * q, 0).sum() > delta else (low, middle)
    return high


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("delta", [DELTA, 1e-2])
def test_the_bounds_enclose_two_enumerated(a: tuple[float, ...], b: tuple[float, ...], delta: float) -> None:
    exact, found = enumerated_epsilon(a, b, delta), numerics.poisson_bounds(np.array(a), np.array(b), delta)
    assert found.lower - 1e-9 <= exact <= found.upper + 1e-9
    assert found.upper <= exact * 1.01 + 1e-9
    assert found.lower >= exact * 0.9 - 1e-9


def test_planted_fault_a_merged_pixel_is_below_the_exact_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding every jump toward 0 forgets losses; the enumeration finds it."""

    def rounded(pair: poisson_loss._Pair, jumps: np.ndarray, interval: float) -> poisson_loss._OnGrid:
        return poisson_loss._merged(np.trunc(0.98 * jumps / interval).astype(np.int64), pair.a, interval)

    a, b = PAIRS[1]
    monkeypatch.setattr(poisson_loss, "_split", rounded)
    assert numerics.poisson_bounds(np.array(a), np.array(b), DELTA).upper < enumerated_epsilon(a, b, DELTA)


def test_a_bound_on_any_grid_is_a_bound() -> None:
    """Of bright patterns: a coarse grid splits a pixel into parts of which one is 1e-17 of it and holds all of b."""
    a, b = np.array([1e7, 3.0]), np.array([1e7 * math.exp(9), 2.0])
    lower = numerics.poisson_bounds(a, b, 1e-3).lower
    assert lower > 8e10
    pair = poisson_loss._Pair.of(a, b)
    uppers = [poisson_loss._upper(pair, 1e-3, window)[0] for window in poisson_loss._WINDOWS]
    assert min(uppers) >= lower
    assert uppers == sorted(uppers, reverse=True)


def realised(a: np.ndarray, b: np.ndarray, epsilon: float, seed: int) -> tuple[float, float]:
    """E max(0, 1 - e^(epsilon - loss)) over drawn counts, and its standard error."""
    drawn = np.random.default_rng(seed).poisson(a, (40_000, len(a)))
    losses = drawn @ np.log(a / b) - (a - b).sum()
    excess = np.maximum(0.0, -np.expm1(epsilon - losses))
    return float(excess.mean()), float(excess.std() / math.sqrt(len(excess)))


def speckle(seed: int, *, labels: int, pixels: int, light: float, dark: float) -> np.ndarray:
    """Rates of labels that light every pixel by an exponential amount, as a medium does."""
    return dark + light * np.random.default_rng(seed).exponential(size=(labels, pixels))


@pytest.mark.parametrize(("light", "dark", "pixels"), [(0.4, 2.7, 60), (2.0, 6.0, 20), (0.05, 0.1, 90)])
def test_delta_of_drawn_counts_is_the_stated_one(light: float, dark: float, pixels: int, seed: int) -> None:
    a, b = speckle(3, labels=2, pixels=pixels, light=light, dark=dark)
    delta = 0.02
    bounds = numerics.poisson_bounds(a, b, delta)
    mean, error = realised(a, b, bounds.upper, seed)
    assert mean <= delta + 5 * error
    assert realised(a, b, bounds.lower, seed)[0] >= delta - 5 * error
    mean, error = realised(a, b, 0.85 * bounds.upper, seed)  # planted fault: an epsilon that is too small
    assert mean > delta + 5 * error


def test_many_counts_have_the_gaussian_limit() -> None:
    """Rates r +- d with d / r small: the loss is N(mu^2 / 2, mu^2) with mu^2 = sum (a - b)^2 / r."""
    rate, pixels = 3e4, 12
    shift = np.sqrt(rate) * np.linspace(0.1, 0.5, pixels)
    a, b = rate + shift / 2, rate - shift / 2
    mu = math.sqrt(float(np.sum(shift**2) / rate))
    bounds = numerics.poisson_bounds(a, b, DELTA)
    assert numerics.poisson_upper(a, b, DELTA) == bounds.upper
    assert bounds.upper == pytest.approx(get_epsilon_gaussian(1 / mu, DELTA), rel=3e-3)
    assert bounds.lower == pytest.approx(bounds.upper, rel=5e-3)


def test_renyi_conversion_costs_some_per_cent_of_mu() -> None:
    """The exact loss is never above the Renyi bound, and near epsilon 3 to 8 it allows 4 to 9 % more mu."""
    rates = speckle(5, labels=4, pixels=128, light=0.13, dark=6.0)
    for light in (0.5, 1.0, 3.0):
        at = 6.0 + light * (rates - 6.0)
        exact = numerics.pattern_bounds(at, DELTA).upper
        renyi = epsilon_of_divergence(lambda a, at=at: numerics.pattern_divergences(at, a).max(), DELTA)
        mus = [calibrated_mu(epsilon) for epsilon in (exact, renyi)]
        assert exact < renyi
        assert 1.04 < mus[1] / mus[0] < 1.09


def calibrated_mu(epsilon: float) -> float:
    """The mu whose Gaussian mechanism has this epsilon."""
    return float(numerics.find_root(lambda mu: get_epsilon_gaussian(1 / mu, DELTA) - epsilon, 1e-3, 30.0))


RATES = speckle(2, labels=3, pixels=10, light=0.5, dark=0.0)
COUNTS = LabelCounts.of(RATES, np.full(10, 4.0))


def test_repeated_and_different_readings_add_their_counts() -> None:
    (twice,) = guarantees([COUNTS, COUNTS], delta=DELTA)
    stacked = known_counts_guarantee(np.hstack([COUNTS.rates, COUNTS.rates]), delta=DELTA)
    assert twice.epsilon == pytest.approx(stacked.epsilon, rel=1e-4)
    other = LabelCounts.of(2 * RATES, np.full(10, 5.0))
    (both,) = guarantees([COUNTS, other], delta=DELTA)
    stacked = known_counts_guarantee(np.hstack([COUNTS.rates, other.rates]), delta=DELTA)
    assert both.epsilon == pytest.approx(stacked.epsilon, rel=1e-4)
    with pytest.raises(NoGuarantee, match="different numbers of labels"):
        guarantees([COUNTS, LabelCounts.of(RATES[:2], np.full(10, 4.0))], delta=DELTA)


def test_the_statement_of_counts_is_proven_under_a_device_model() -> None:
    (found,) = guarantees([replace(COUNTS, beta=4e-6)], delta=DELTA)
    assert found.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert found.theorem == "poisson-loss"
    less, all_of_it = (guarantees([COUNTS], delta=delta)[0].epsilon for delta in (6e-6, DELTA))
    assert found.epsilon == less > all_of_it
    assert found.epsilon_lower is not None
    assert found.epsilon_lower <= found.epsilon
    assert "must exceed beta" in str(guarantees([replace(COUNTS, beta=DELTA)], delta=DELTA)[0].reason)
    none = LabelCounts.of(RATES * (RATES > 0.3), np.zeros(10))
    assert "a rate may be 0" in str(guarantees([none], delta=DELTA)[0].reason)


@pytest.mark.parametrize("power", [(0.0, 1.3), (0.9, 1.0, 1.1), (0.4, 0.4, 1.3)])
def test_light_that_varies_is_covered_by_its_brightest_frame(power: tuple[float, ...]) -> None:
    """The exact mixture over powers of two pixels' counts, more dark light included, against w_max and d_min."""
    light, dark = np.array([[1.2, 0.2], [0.3, 0.8]]), 1.7

    def epsilon_at(brightest: float) -> float:
        rates = at_brightest(light + dark, brightest=brightest, dark_low=dark)
        return known_counts_guarantee(rates, delta=DELTA).epsilon

    counts = np.arange(60)
    laws = [
        np.mean(
            [
                np.outer(*(poisson.pmf(counts, w * rate + dark + extra) for rate in row))
                for w, extra in zip(power, (0.0, 0.4, 0.1), strict=False)
            ],
            axis=0,
        )
        for row in light
    ]

    def spent(epsilon: float) -> float:
        return max(np.maximum(p - math.exp(epsilon) * q, 0).sum() for p, q in (laws, laws[::-1]))

    assert spent(epsilon_at(max(power))) <= DELTA
    assert spent(epsilon_at(0.2)) > DELTA  # planted: less light than the brightest


def group_laws(rates: np.ndarray) -> np.ndarray:
    """Masses of Poisson counts, shape (labels, groups, counts)."""
    return poisson.pmf(np.arange(int(rates.max() + 15 * math.sqrt(rates.max()) + 40)), rates[:, :, None])


def one_hot(unlit: float, lit: float, k: int = 10) -> np.ndarray:
    return unlit + (lit - unlit) * np.eye(k)


@pytest.mark.parametrize(("unlit", "lit", "epsilon"), [(2.33, 6.34, 3.0), (13.4, 36.4, 8.0)])
def test_one_hot_groups_need_few_electrons(unlit: float, lit: float, epsilon: float) -> None:
    """Rates of an unlit and of the lit group, dark charge included, ties broken at random."""
    laws = group_laws(one_hot(unlit, lit))
    low, high = confusion_matrix(laws, laws)
    np.testing.assert_allclose(low, high, rtol=1e-12)
    np.testing.assert_allclose(low.sum(axis=1), 1.0, rtol=1e-12)
    assert argmax_epsilon(low, high, symmetrised=True) == pytest.approx(epsilon, abs=0.01)
    assert argmax_epsilon(low, high, symmetrised=False) == pytest.approx(epsilon, abs=0.01)  # it is symmetric


def drawn_answers(rates: np.ndarray, own: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Argmax of drawn counts, ties broken at random."""
    counts = generator.poisson(rates[own])
    return np.argmax(counts + generator.random(counts.shape), axis=1)


def worst_entry(found: np.ndarray, law: np.ndarray, n: int) -> float:
    """Largest deviation of measured probabilities, in standard errors."""
    return float(np.max(np.abs(found / n - law) / np.sqrt(law * (1 - law) / n)))


def test_the_confusion_matrix_is_that_of_drawn_counts(seed: int) -> None:
    k, n = 4, 50_000
    rates = speckle(4, labels=k, pixels=k, light=3.0, dark=1.0) + 4 * np.eye(k)
    law = confusion_matrix(group_laws(rates), group_laws(rates))[0]
    generator, found = np.random.default_rng(seed), np.zeros((k, k))
    own = np.repeat(np.arange(k), n)
    np.add.at(found, (own, drawn_answers(rates, own, generator)), 1)
    limit = norm.isf(norm.sf(5.0) / k**2)
    assert worst_entry(found, law, n) < limit
    brighter = confusion_matrix(group_laws(1.2 * rates), group_laws(1.2 * rates))[0]
    assert worst_entry(found, brighter, n) > limit  # planted: 20 % more light


def test_secret_permutations_make_randomized_response(seed: int) -> None:
    """Exactly, over all permutations; and by draws, with the permutation not released."""
    k, n = 4, 200_000
    rates = speckle(6, labels=k, pixels=k, light=3.0, dark=1.0) + 3 * np.eye(k)
    law = confusion_matrix(group_laws(rates), group_laws(rates))[0]
    p = np.trace(law) / k
    averaged = np.mean([law[np.ix_(s, s)] for s in permutations(range(k))], axis=0)
    expected = np.full((k, k), (1 - p) / (k - 1)) + (p - (1 - p) / (k - 1)) * np.eye(k)
    np.testing.assert_allclose(averaged, expected, rtol=1e-12)
    symmetric = argmax_epsilon(law, law, symmetrised=True)
    assert symmetric == pytest.approx(math.log((k - 1) * p / (1 - p)), rel=1e-6)
    assert symmetric == pytest.approx(float(np.log(averaged.max() / averaged.min())), rel=1e-6)
    assert symmetric < argmax_epsilon(law, law, symmetrised=False)
    generator, found = np.random.default_rng(seed), np.zeros((k, k))
    own = np.tile(np.arange(k), n // k)
    moved = np.argsort(generator.random((n, k)), axis=1)
    answers = drawn_answers(rates, moved[np.arange(n), own], generator)
    np.add.at(found, (own, np.argmax(moved == answers[:, None], axis=1)), 1)
    limit = norm.isf(norm.sf(5.0) / k**2)
    assert worst_entry(found, expected, n // k) < limit
    assert worst_entry(found, law, n // k) > limit  # planted: without permutations


def test_limits_over_boxes_hold_everywhere_in_them(seed: int) -> None:
    generator = np.random.default_rng(seed)
    low = speckle(7, labels=3, pixels=3, light=2.0, dark=1.0)
    high = low * 1.3
    size = group_laws(high).shape[2]
    laws = [poisson.pmf(np.arange(size), rates[:, :, None]) for rates in (low, high)]
    least, most = confusion_matrix(*laws)
    for _ in range(50):
        inside = poisson.pmf(np.arange(size), generator.uniform(low, high)[:, :, None])
        found = confusion_matrix(inside, inside)[0]
        assert np.all(least <= found * (1 + 1e-12))
        assert np.all(found <= most * (1 + 1e-12))
    at_high = confusion_matrix(laws[1], laws[1])[0]
    assert argmax_epsilon(least, most, symmetrised=True) > argmax_epsilon(at_high, at_high, symmetrised=True)


def test_a_certified_matrix_holds_as_often_as_it_says(seed: int) -> None:
    """Coverage of all entries together at beta = 0.2, and of the epsilon; Clopper-Pearson is conservative."""
    n, beta, trials = 300, 0.2, 400
    law = np.array([[0.9, 0.07, 0.03], [0.1, 0.8, 0.1], [0.02, 0.08, 0.9]])
    epsilon, generator = argmax_epsilon(law, law, symmetrised=False), np.random.default_rng(seed)
    missed = below = 0
    for _ in range(trials):
        low, high = certified_confusion(np.stack([generator.multinomial(n, row) for row in law]), beta=beta)
        missed += not (np.all(low <= law) and np.all(law <= high))
        below += argmax_epsilon(low, high, symmetrised=False) < epsilon
    allowed = beta + 5 * math.sqrt(beta * (1 - beta) / trials)
    assert missed / trials < allowed
    assert below <= missed
    sure = certified_confusion(np.array([[5, 0], [0, 5]]), beta=beta)
    assert (sure[0][0, 1], sure[1][0, 0]) == (0.0, 1.0)
    assert math.isinf(argmax_epsilon(*sure, symmetrised=False))
    exact = np.round(n * law).astype(int)
    narrow, wide = (
        certified_confusion(exact, beta=b) for b in (0.999999, 1e-6)
    )  # planted: no margin of limits
    assert argmax_epsilon(*narrow, symmetrised=False) < argmax_epsilon(*wide, symmetrised=False)


def test_the_argmax_is_pure_but_for_beta() -> None:
    one = LabelArgmax(step_epsilon=1.3, n_classes=10)
    (found,) = guarantees([one], delta=0.0)
    assert (found.epsilon, found.status) == (1.3, Status.PROVEN_UNDER_DEVICE_MODEL)
    assert any("an attacker who sees them is not covered" in each.text for each in found.assumptions)
    assert any("permutation" in assumption.text for assumption in found.assumptions)
    plain = guarantees([replace(one, symmetrised=False)], delta=0.0)[0]
    assert not any("permutation" in assumption.text for assumption in plain.assumptions)
    (twice,) = guarantees([one.repeated(2)], delta=0.0)
    assert twice.epsilon == pytest.approx(2.6)
    certified = replace(one, beta=1e-6)
    assert guarantees([certified], delta=DELTA)[0].epsilon <= 1.3
    assert math.isinf(guarantees([certified], delta=1e-7)[0].epsilon)


def test_contradictory_limits_and_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="nowhere above highest"):
        argmax_epsilon(np.eye(2), 0.5 * np.eye(2), symmetrised=False)
    with pytest.raises(ValueError, match="must be square"):
        argmax_epsilon(np.full((2, 3), 0.1), np.full((2, 3), 0.2), symmetrised=False)
    with pytest.raises(ValueError, match="dark_low: exceeds a rate"):
        at_brightest(COUNTS.rates, dark_low=5.0)


@pytest.mark.parametrize("gap", [1e-15, 1e-13, 1e-9])
def test_rates_that_doubles_barely_tell_apart_cost_nothing(gap: float) -> None:
    rates = np.array([[5.0, 5.0], [5.0 * (1 + gap), 5.0]])
    found = known_counts_guarantee(rates, delta=DELTA)
    assert (found.epsilon, found.epsilon_lower) == (0.0, 0.0)


@pytest.mark.parametrize("one", [COUNTS, LabelArgmax(step_epsilon=1.0, n_classes=4)])
def test_one_certificate_costs_its_beta_once(one: CertifiedMechanism) -> None:
    named = replace(one, beta=4e-6, certificate="a" * 32)
    together = [named, named.repeated(2)]
    assert math.isfinite(guarantees(together, delta=DELTA)[0].epsilon)
    unnamed = [replace(each, certificate="") for each in together]  # each look may have its own calibration
    assert math.isinf(guarantees(unnamed, delta=DELTA)[0].epsilon)
    assert named.taken_upfront
    old = {key: value for key, value in one.to_json().items() if key != "certificate"}
    assert mechanism_from_json(old) == one


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_ratio_on_the_grid_survives_the_last_digit_of_its_point(ulps: int) -> None:
    """One ratio, 1, at a point that is 1 up to rounding: its polygon is the two measures' own curve."""
    ends = np.array([1.0, 0.0])
    found = polygon_below(np.array([0.97, 1 + ulps * np.spacing(1.0), 1.03]), ends, ends)
    assert found is not None
    first, masses = found
    assert dict(enumerate(masses, start=first))[1] == pytest.approx(1.0)
    assert masses.sum() == pytest.approx(1.0)
