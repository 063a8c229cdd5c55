"""Zeroth-order training: published noise levels, closed forms, several directions on one batch."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from opusim.accounting import Adjacency, Status, Unit, ZoGaussian, ZoLaplace, guarantees
from opusim.accounting.guarantee import Guarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import PoissonGaussian, PoissonLaplace
from opusim.accounting.mechanisms.zeroth_order import composed_pure_epsilon, cut_delta, sampled_pure_epsilon
from tests.oracles.dp_events import event

DELTA = 1e-5
GAUSSIAN = ZoGaussian(
    noise_multiplier=16.4, sampling_probability=16 / 1000, clip_norm=0.05, divisor=16, steps=75_000
)
LAPLACE = ZoLaplace(scale=10.5, sampling_probability=20 / 1000, clip_norm=0.05, divisor=20, steps=2000)


def _only(mechanism: Mechanism, delta: float) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def test_published_rows_of_both_laws() -> None:
    """Table 16 of the paper: sigma 16.4 for epsilon 1."""
    found = _only(GAUSSIAN, DELTA)
    assert round(found.epsilon, 2) == 1.0
    wanted = (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Status.PROVEN)
    assert (found.unit, found.adjacency, found.status) == wanted
    device = _only(replace(GAUSSIAN, device_noise=True), DELTA)
    assert (device.status, device.epsilon) == (Status.PROVEN_UNDER_DEVICE_MODEL, found.epsilon)
    # Table 13: b = 16.3 over 75,000 steps gives 1, where the closed form gives 76.
    ran = ZoLaplace(scale=16.3, sampling_probability=16 / 1000, clip_norm=0.05, divisor=16, steps=75_000)
    assert round(_only(ran, DELTA).epsilon, 2) == 0.99
    assert _only(ran, 0.0).epsilon > 70


@pytest.mark.parametrize(("directions", "steps"), [(1, 2000), (3, 7)])
def test_a_pure_statement_names_what_cut_tails_cost(directions: int, steps: int) -> None:
    """Each released number is off with probability 2^-63: N of them in total variation N 2^-63."""
    mechanism = replace(LAPLACE, directions=directions, steps=steps)
    assert not [a for a in _only(mechanism, 0.0).assumptions if "tail" in a.text]
    mechanism = replace(mechanism, exactly_rounded=False)  # of opusim 0.2
    found = _only(mechanism, 0.0)
    expected = (1 + math.exp(found.epsilon)) * directions * steps * 2.0**-63
    assert cut_delta([mechanism], found.epsilon) == pytest.approx(expected, rel=1e-12)
    (tails,) = [a for a in found.assumptions if "tail" in a.text]
    assert tails.holds is None
    assert f"adds {expected:.1g} to delta = 0" in tails.text
    assert cut_delta([mechanism, mechanism], found.epsilon) == pytest.approx(2 * expected, rel=1e-12)
    assert cut_delta([mechanism], math.inf) == 1.0
    assert not [a for a in _only(GAUSSIAN, DELTA).assumptions if "tail" in a.text]


def test_directions_of_one_batch_cost_more_than_steps_of_their_own() -> None:
    """The planted fault would count n directions as n separately sampled steps."""
    together = _only(replace(GAUSSIAN, directions=4, steps=1000), DELTA).epsilon
    fault = _only(replace(GAUSSIAN, steps=4000), DELTA).epsilon
    alike = PoissonGaussian(noise_multiplier=8.2, sampling_probability=0.016, steps=1000)
    assert together == _only(alike, DELTA).epsilon
    assert together > fault
    pure = _only(replace(LAPLACE, directions=4), 0.0).epsilon
    assert pure == pytest.approx(2000 * math.log(1 + 0.02 * (math.exp(4 / 10.5) - 1)), rel=1e-12)
    assert pure > _only(replace(LAPLACE, steps=8000), 0.0).epsilon


def test_directions_clipped_jointly_are_one_gaussian_of_the_clip() -> None:
    """Delta of one step of three directions on a grid, for a record along one axis or along all, against the statement;
    a record whose differences are clipped one by one, the planted fault, spends more."""
    joint = replace(GAUSSIAN, directions=4, joint_clip=True, steps=1000)
    assert _only(joint, DELTA).epsilon == _only(replace(GAUSSIAN, steps=1000), DELTA).epsilon
    assert _only(joint, DELTA).epsilon < _only(replace(joint, joint_clip=False), DELTA).epsilon
    z, q, delta = 1.3, 0.3, 0.02
    sizes = {"noise_multiplier": z, "sampling_probability": q, "directions": 3, "steps": 1}
    epsilon = _only(replace(joint, **sizes), delta).epsilon
    grid = np.linspace(-8, 8, 101)
    points = z * np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1)
    here = np.exp(-0.5 * (points / z) ** 2).prod(axis=-1)

    def spent(along: np.ndarray) -> float:
        there = (1 - q) * here + q * np.exp(-0.5 * ((points - along) / z) ** 2).prod(axis=-1)
        pairs = ((there, here), (here, there))
        return max(float(np.maximum(p - math.exp(epsilon) * r, 0).sum() / here.sum()) for p, r in pairs)

    assert spent(np.array([1.0, 0.0, 0.0])) == pytest.approx(delta, rel=0.02)
    assert spent(np.ones(3) / 3**0.5) == pytest.approx(delta, rel=0.02)
    assert spent(np.ones(3)) > 1.5 * delta


def test_one_direction_is_the_standard_mechanism() -> None:
    """Also at delta = 0, at which Gaussian noise has no finite epsilon."""
    for mechanism, alike in (
        (GAUSSIAN, PoissonGaussian(noise_multiplier=16.4, sampling_probability=0.016, steps=75_000)),
        (LAPLACE, PoissonLaplace(scale=10.5, sampling_probability=0.02, steps=2000)),
    ):
        for delta in (0.0, DELTA):
            assert _only(mechanism, delta).epsilon == _only(alike, delta).epsilon
    assert _only(GAUSSIAN, 0.0).reason


def test_pure_steps_against_the_binomial_law() -> None:
    """The oracle: n responses have the loss (2 k - n) epsilon with k binomial, and delta is a finite sum."""
    step, n = 0.3, 7
    keep = 1 / (1 + math.exp(-step))
    epsilon = composed_pure_epsilon(step, n, 0.01)
    masses = [math.comb(n, k) * keep**k * (1 - keep) ** (n - k) for k in range(n + 1)]
    losses = [(2 * k - n) * step for k in range(n + 1)]
    spent = sum(m * max(0.0, 1 - math.exp(epsilon - loss)) for m, loss in zip(masses, losses, strict=True))
    assert spent == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "n", "delta"),
    [(0.3, 50, 1e-16), (0.01, 1000, 1e-16), (1e-4, 10**6, 1e-5), (1e-4, 10**6, 1e-10), (1e-4, 10**7, 1e-5)],
)
def test_many_pure_steps_hold_in_high_precision(step: float, n: int, delta: float) -> None:
    """The same sum in 40 digits: what a Fourier transform of 10^6 steps rounds away is above a small delta."""
    epsilon = composed_pure_epsilon(step, n, delta)
    with mpmath.workdps(40):
        odds = mpmath.exp(mpmath.mpf(step))
        k = math.floor((epsilon / step + n) / 2) + 1
        mass = mpmath.exp(
            mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
            + k * mpmath.log(odds / (1 + odds)) - (n - k) * mpmath.log(1 + odds)
        )  # fmt: skip
        spent = mpmath.mpf(0)
        while k <= n and mass > delta * mpmath.mpf(10) ** -12:
            spent += mass * (1 - mpmath.exp(epsilon - (2 * k - n) * mpmath.mpf(step)))
            mass *= mpmath.mpf(n - k) / (k + 1) * odds
            k += 1
    assert 0.999 * delta < spent <= delta


def test_two_laplace_directions_against_enumeration() -> None:
    """The true delta of one step at the stated epsilon, integrated on a grid, stays below the stated one."""
    b, q, delta = 2.0, 0.3, 0.02
    ran = ZoLaplace(scale=b, sampling_probability=q, clip_norm=1.0, divisor=1.0, directions=2)
    epsilon = _only(ran, delta).epsilon
    step = 0.02
    grid = np.arange(-40, 41, step) + step / 2
    with_record, without = (np.exp(-np.abs(grid - shift) / b) / (2 * b) * step for shift in (1.0, 0.0))
    here = np.outer(without, without)
    there = (1 - q) * here + q * np.outer(with_record, with_record)
    for first, second in ((there, here), (here, there)):
        assert np.maximum(first - math.exp(epsilon) * second, 0).sum() <= delta
    assert epsilon < sampled_pure_epsilon(2 / b, q)


def test_events_compose_directions_within_the_sample() -> None:
    from dp_accounting.pld import PLDAccountant

    ran = replace(GAUSSIAN, directions=4, steps=100)
    theirs = PLDAccountant().compose(event(ran)).get_epsilon(DELTA)
    assert _only(ran, DELTA).epsilon == pytest.approx(theirs, rel=5e-3)
    assert not PLDAccountant().supports(event(replace(LAPLACE, directions=2)))
    assert PLDAccountant().supports(event(replace(LAPLACE, directions=1)))
