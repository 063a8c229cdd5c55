"""Epsilon at small sampling probabilities: both bounds against exact single steps and a second accountant."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions

from opusim.accounting.composition import calibrate_noise, guarantees
from opusim.accounting.guarantee import Adjacency, EpsilonBounds
from opusim.accounting.mechanisms.records import PoissonGaussian
from opusim.accounting.numerics import loss_laws
from opusim.accounting.numerics.loss_laws import Direction, GaussianLaw, LaplaceLaw, LossLaw
from opusim.accounting.numerics.sampled_noise import NoisySum, noise_bounds

ADDED, REPLACED = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE
CLOSE, SMALL = 1.01, 1e-3  # ratio of upper and lower bound, and their distance where epsilon is small

Curve = Callable[[mpmath.mpf], mpmath.mpf]


def bounds(
    q: float,
    z: float,
    steps: int,
    delta: float,
    adjacency: Adjacency = ADDED,
    law: Literal["gaussian", "laplace"] = "gaussian",
) -> EpsilonBounds:
    return noise_bounds([NoisySum(law=law, scale=z, probability=q, steps=steps)], adjacency, delta)


def upper_tail(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def gaussian_curve(q: float, z: float, direction: str) -> Curve:
    """delta(epsilon) of one step, from the point at which the densities' ratio is e^epsilon."""
    q, z = mpmath.mpf(q), mpmath.mpf(z)

    def crossing(value: mpmath.mpf) -> mpmath.mpf:
        return z**2 * mpmath.log(value) + mpmath.mpf(1) / 2

    def removed(epsilon: mpmath.mpf) -> mpmath.mpf:
        inner = mpmath.expm1(epsilon) / q + 1
        if inner <= 0:
            return -mpmath.expm1(epsilon)
        x = crossing(inner)
        without, moved = upper_tail(x / z), upper_tail((x - 1) / z)
        return (1 - q) * without + q * moved - mpmath.exp(epsilon) * without

    def added(epsilon: mpmath.mpf) -> mpmath.mpf:
        inner = mpmath.expm1(-epsilon) / q + 1
        if inner <= 0:
            return mpmath.mpf(0)
        x = crossing(inner)
        without, moved = upper_tail(-x / z), upper_tail(-(x - 1) / z)
        return without - mpmath.exp(epsilon) * ((1 - q) * without + q * moved)

    return removed if direction == "remove" else added


def exact_epsilon(curves: list[Curve], delta: float) -> float:
    def one(curve: Curve) -> mpmath.mpf:
        low, high = mpmath.mpf(0), mpmath.mpf(60)
        if curve(low) <= delta:
            return low
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if curve(middle) > delta else (low, middle)
        return high

    with mpmath.workdps(40):
        return float(max(one(curve) for curve in curves))


@pytest.mark.parametrize(("q", "z", "delta"), [
    *((1e-7, 0.6, 1e-10), (1e-5, 0.5, 1e-9), (1e-3, 0.6, 1e-6), (3e-3, 1.0, 1e-8), (0.01, 3.0, 1e-3)),
    (0.5, 1.0, 1e-5),
])  # fmt: skip
def test_a_single_step_is_enclosed(q: float, z: float, delta: float) -> None:
    found = bounds(q, z, 1, delta)
    exact = exact_epsilon([gaussian_curve(q, z, direction) for direction in ("remove", "add")], delta)
    assert found.lower <= exact <= found.upper
    assert found.upper <= exact * CLOSE + 1e-5


def grid_curve(grid: loss_laws.LossGrid, epsilon: float) -> float:
    later = grid.losses > epsilon
    return grid.beyond + float(grid.masses[later] @ -np.expm1(epsilon - grid.losses[later]))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("q", "z", "interval"), [(1e-3, 0.6, 1e-4), (1e-7, 0.6, 1e-5), (1e-7, 0.6, 1e-9), (3e-3, 3.0, 1e-5)]
)
def test_grids_lie_on_both_sides_of_curves(q: float, z: float, interval: float, direction: Direction) -> None:
    """Relative to delta, in 40 digits, whether the interval is longer or shorter than most losses."""
    law, curve = GaussianLaw(noise=z, probability=q, direction=direction), gaussian_curve(q, z, direction)
    ends = law.span(1e-12, 1e-16)
    above, below = (find(law, *ends, interval) for find in (loss_laws.grid_above, loss_laws.grid_below))
    for epsilon in above.losses[:: max(1, len(above.losses) // 40)] + 0.3 * interval:
        with mpmath.workdps(40):
            exact = float(curve(mpmath.mpf(float(epsilon))))
        assert grid_curve(above, epsilon) >= exact * (1 - 1e-11) - 1e-17
        assert grid_curve(below, epsilon) <= exact * (1 + 1e-11) + 1e-17


def test_a_law_rounded_down_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the law below in the place of that above."""
    monkeypatch.setattr(loss_laws, "grid_above", loss_laws.grid_below)
    found = bounds(1e-3, 0.6, 1, 1e-6)
    assert found.upper < exact_epsilon([gaussian_curve(1e-3, 0.6, "remove")], 1e-6)


PRICED = [
    (1e-3, 0.6, 1000, 1e-6, 1e-3, ADDED),
    pytest.param(1e-5, 0.6, 100_000, 1e-8, 1e-3, REPLACED, marks=pytest.mark.slow),
    (1e-7, 0.6, 10_000, 1e-12, 1e-3, ADDED),
]


@pytest.mark.parametrize(("q", "z", "steps", "delta", "interval", "adjacency"), PRICED)
def test_dp_accounting_lies_around_both_bounds(
    q: float, z: float, steps: int, delta: float, interval: float, adjacency: Adjacency
) -> None:
    found = bounds(q, z, steps, delta, adjacency)
    optimistic, pessimistic = (
        second_opinion(q, z, steps, delta, interval, adjacency, pess) for pess in (False, True)
    )
    assert optimistic <= found.upper
    assert found.lower <= pessimistic
    assert found.upper <= max(CLOSE * pessimistic, pessimistic + SMALL)


def second_opinion(
    q: float, z: float, steps: int, delta: float, interval: float, adjacency: Adjacency, pessimistic: bool
) -> float:
    relation = distributions.NeighborRel.ADD_OR_REMOVE_ONE
    if adjacency is REPLACED:
        relation = distributions.NeighborRel.REPLACE_ONE
    step = distributions.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=interval, pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic, neighboring_relation=relation,
    )  # fmt: skip
    return float(step.self_compose(steps).get_epsilon_for_delta(delta))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(3e-3, 3.0, 1000, 1e-6), (1e-3, 3.0, 1000, 1e-6), (1e-3, 0.6, 10_000, 1e-8)],
)
def test_a_fine_second_accountant_agrees(q: float, z: float, steps: int, delta: float) -> None:
    """At z = 3 the default interval of dp_accounting, 1e-4, is long against a step's loss: its epsilon is too large."""
    found = bounds(q, z, steps, delta)
    fine = [second_opinion(q, z, steps, delta, 1e-5, ADDED, pess) for pess in (False, True)]
    assert fine[0] <= found.upper <= max(CLOSE * fine[1], fine[1] + SMALL)
    assert found.lower <= fine[1]


QS, ZS, STEPS = (1e-6, 3e-3), (0.6, 1.0), (1000, 3000)
MANY_QS = (1e-7, 1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 5e-2)
MANY_ZS, MANY_STEPS = (0.6, 0.7, 0.8, 1.0, 3.0), (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 100_000)


def require_close_and_monotone(
    qs: tuple[float, ...], zs: tuple[float, ...], counts: tuple[int, ...], delta: float
) -> None:
    """Close bounds, and epsilon that grows with q and the steps and falls with z."""
    uppers = np.empty((len(qs), len(zs), len(counts)))
    for place in itertools.product(*(range(size) for size in uppers.shape)):
        i, j, k = place
        found = bounds(qs[i], zs[j], counts[k], delta)
        assert found.upper <= max(CLOSE * found.lower, found.lower + SMALL), (qs[i], zs[j], counts[k], found)
        assert found.method.startswith("privacy loss distribution")
        uppers[place] = found.upper
    assert (np.diff(uppers, axis=0) >= 0).all()
    assert (np.diff(uppers, axis=1) <= 0).all()
    assert (np.diff(uppers, axis=2) >= 0).all()


def test_bounds_are_close_and_monotone() -> None:
    require_close_and_monotone(QS, ZS, STEPS, 1e-6)


@pytest.mark.slow
def test_bounds_are_close_and_monotone_at_500_settings() -> None:
    require_close_and_monotone(MANY_QS, MANY_ZS, MANY_STEPS, 1e-8)


@pytest.mark.parametrize("delta", [1e-6, 1e-12])
def test_many_steps_and_small_deltas_have_a_tight_epsilon(delta: float) -> None:
    """A transform's rounding of 1e-16 a step would be larger than delta."""
    found = bounds(1e-3, 1.0, 10**6, delta)
    assert found.upper <= CLOSE * found.lower


@pytest.mark.parametrize(("q", "b", "steps"), [(0.01, 1.0, 1000), (1e-4, 0.5, 10_000)])
def test_laplace_noise_is_tight_too(q: float, b: float, steps: int) -> None:
    found = bounds(q, b, steps, 1e-6, law="laplace")
    assert found.upper <= max(CLOSE * found.lower, found.lower + SMALL)
    step = distributions.from_laplace_mechanism(b, sampling_prob=q, value_discretization_interval=1e-3)
    assert found.lower <= step.self_compose(steps).get_epsilon_for_delta(1e-6)


def test_laws_have_mass_one_and_lose_nothing_under_the_other_measure() -> None:
    laws: list[LossLaw] = [
        GaussianLaw(noise=0.6, probability=1e-5, direction="replace"),
        LaplaceLaw(scale=0.3, probability=1e-3, direction="remove"),
        LaplaceLaw(scale=0.3, probability=1e-3, direction="add"),
    ]
    for law in laws:
        low, high = law.span(1e-14, 1e-14)
        masses, losses = law.bins(np.linspace(low, high, 2001))
        assert masses.sum() == pytest.approx(1, abs=1e-13)
        assert masses @ np.exp(-losses) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
def test_noise_is_calibrated_by_the_tight_epsilon() -> None:
    """With a hundredth less noise the lower bound exceeds the target, so that no accountant could take less."""
    start = PoissonGaussian(noise_multiplier=1.0, sampling_probability=1e-3, steps=1000)
    found, stated = calibrate_noise(start, target_epsilon=1.0, delta=1e-7)
    less = replace(found, noise_multiplier=found.noise_multiplier / 1.01)
    (guarantee,) = guarantees([less], delta=1e-7)
    assert stated.epsilon <= 1.0
    assert guarantee.epsilon_lower is not None
    assert guarantee.epsilon_lower > 1.0


def test_noise_of_several_kinds_together_is_enclosed() -> None:
    sums = [NoisySum(law="gaussian", scale=0.8, probability=1e-3, steps=500) for _ in range(2)]
    together, once = noise_bounds(sums, ADDED, 1e-7), bounds(1e-3, 0.8, 1000, 1e-7)
    assert together.lower <= once.upper
    assert once.lower <= together.upper <= CLOSE * once.upper
