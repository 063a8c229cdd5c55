"""Bounds of all pairs of Poisson patterns at once: never below the exact law, close to it, and no fault goes unseen."""

import math
from functools import cache
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import poisson

from opusim.accounting import numerics
from opusim.accounting.mechanisms.counts import known_counts_epsilon
from opusim.accounting.numerics import poisson_loss
from opusim.accounting.numerics.poisson_loss import RenyiBounds, tilted_bounds

DELTA = 1e-5
Regime = tuple[int, int, int, float, float]
REGIMES: list[Regime] = [
    *((8, 5, 40, 0.5, 3.0), (9, 6, 500, 0.03, 2.0), (10, 5, 300, 20.0, 600.0), (11, 4, 30, 0.02, 0.001)),
    *((12, 5, 60, 30.0, 5.0), (13, 4, 800, 1e-3, 1e-3), (14, 2, 64, 30.0, 1e4)),
]
"""Seed, labels, pixels, light, dark: few counts and many, close labels and far ones."""


def patterns(seed: int, labels: int, pixels: int, light: float, dark: float) -> np.ndarray:
    return dark + light * np.random.default_rng(seed).exponential(size=(labels, pixels))


@cache
def exact_bounds(regime: Regime) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of every ordered pair by the exact law."""
    rates = patterns(*regime)
    lower, upper = np.zeros((2, len(rates), len(rates)))
    for i, j in permutations(range(len(rates)), 2):
        found = numerics.poisson_bounds(rates[i], rates[j], DELTA)
        lower[i, j], upper[i, j] = found.lower, found.upper
    return lower, upper


@pytest.mark.parametrize("regime", REGIMES)
def test_bounds_of_all_pairs_are_above_the_exact_law_and_close(regime: Regime) -> None:
    rates, (lower, upper) = patterns(*regime), exact_bounds(regime)
    renyi = RenyiBounds.of(rates, DELTA)
    found = tilted_bounds(rates, DELTA, renyi)
    assert np.all(found <= renyi.bounds)
    assert np.all(found >= lower * (1 - 1e-9))
    others = ~np.eye(len(rates), dtype=bool)
    assert np.all(found[others] <= 1.25 * upper[others])
    assert numerics.renyi_upper(rates, DELTA) <= renyi.bounds.max()
    assert numerics.renyi_upper(rates, DELTA) >= lower.max()


def test_close_labels_are_bounded_within_one_per_cent_and_planted_faults_noticed() -> None:
    def bounds(rates: np.ndarray) -> np.ndarray:
        return tilted_bounds(rates, DELTA, RenyiBounds.of(rates, DELTA))

    rates, (lower, upper) = patterns(*REGIMES[1]), exact_bounds(REGIMES[1])
    others = ~np.eye(len(rates), dtype=bool)
    assert np.all(bounds(rates)[others] <= 1.01 * upper[others])
    assert np.any(bounds(np.delete(rates, np.s_[::10], axis=1)) < lower)
    assert np.any(exact_bounds(REGIMES[3])[0] > bounds(patterns(*REGIMES[3])).T)


@pytest.mark.parametrize(("tilt", "is_close"), [(0.3, True), (1.0, True), (4.0, False)])
def test_delta_of_the_transform_is_above_the_enumerated_one(tilt: float, is_close: bool) -> None:
    """At any tilt and epsilon, also far from the best ones; two pixels, both directions."""
    rates = np.array([[2.33, 6.34], [5.1, 3.2]])
    transform = poisson_loss._Transform.of(rates, tilt)
    counts = np.arange(80)
    p, q = (np.outer(*(poisson.pmf(counts, rate) for rate in row)) for row in rates)
    for epsilon in np.linspace(0.0, 9.0, 13):
        found = transform.delta(np.full((2, 2), epsilon))
        for (i, j), first, second in (((0, 1), p, q), ((1, 0), q, p)):
            exact = float(np.maximum(first - math.exp(epsilon) * second, 0).sum())
            assert found[i, j] >= exact
    near = transform.delta(np.full((2, 2), 2.0))[0, 1]
    assert (near <= 1.5 * float(np.maximum(p - math.exp(2.0) * q, 0).sum())) == is_close


@pytest.mark.parametrize("regime", REGIMES)
def test_the_worst_pair_is_that_of_the_finest_grid(regime: Regime) -> None:
    """Cheap bounds only choose pairs: the bound is that of the exact law of the worst one."""
    rates, (_, upper) = patterns(*regime), exact_bounds(regime)
    assert numerics.pattern_upper(rates, DELTA) == upper.max()
    assert numerics.pattern_bounds(rates, DELTA).upper == upper.max()
    assert upper[numerics.worst_patterns(rates, DELTA)] == upper.max()


@pytest.mark.parametrize("name", ["tilted_bounds", "RenyiBounds"])
def test_planted_fault_bounds_too_low_hide_the_worst_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = patterns(*REGIMES[1])
    worst = numerics.pattern_upper(rates, DELTA)
    too_low = 0.01 / (RenyiBounds.of(rates, DELTA).bounds + np.eye(len(rates)))
    renyi = SimpleNamespace(of=lambda *_: RenyiBounds(bounds=too_low, above=1.0))
    poisson_loss._worst_of.cache_clear()
    monkeypatch.setattr(poisson_loss, name, renyi if name == "RenyiBounds" else lambda *_: too_low)
    assert numerics.pattern_upper(rates, DELTA) < worst
    poisson_loss._worst_of.cache_clear()


def test_pixels_that_stay_dark_and_pixels_that_only_some_patterns_light() -> None:
    rates = patterns(*REGIMES[0])
    padded = np.hstack([rates, np.zeros((5, 3))])
    assert numerics.renyi_upper(padded, DELTA) == pytest.approx(numerics.renyi_upper(rates, DELTA))
    assert numerics.renyi_upper(np.zeros((3, 2)), DELTA) == 0.0
    some = np.hstack([rates, np.array([[1.0], [0.0], [1.0], [1.0], [1.0]])])
    assert math.isinf(numerics.renyi_upper(some, DELTA))
    assert numerics.pattern_upper(np.c_[rates, np.ones(5)], DELTA) == numerics.pattern_upper(rates, DELTA)


def test_rates_whose_sum_overflows_hide_no_pair_and_give_no_number_that_is_none() -> None:
    rates = np.column_stack([np.full(4, 1.5e308), [1.0, 1.0, 1.1, 9.0]])
    assert math.isinf(numerics.renyi_upper(rates, DELTA))
    pairs = permutations(range(len(rates)), 2)
    largest = max(numerics.poisson_bounds(rates[i], rates[j], DELTA).upper for i, j in pairs)
    assert numerics.pattern_upper(rates, DELTA) == largest
    assert math.isinf(known_counts_epsilon(rates, delta=1e-300))
