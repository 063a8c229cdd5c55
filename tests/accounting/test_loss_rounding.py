"""Rounded losses: the grid of the accountants, and what statements say."""

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.fft import rfft

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency
from opusim.accounting.mechanism import Mechanism, mechanism_from_json
from opusim.accounting.mechanisms.labels import LabelAmplified, LabelReadout, LabelRelease
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced
from opusim.accounting.mechanisms.selection import PrivateSelection
from opusim.accounting.mechanisms.zeroth_order import ZoGaussian, ZoLaplace
from opusim.accounting.numerics import loss_laws
from opusim.accounting.numerics.loss_laws import (
    Direction,
    GaussianLaw,
    LaplaceLaw,
    grid_above,
    grid_below,
    normal_masses,
    pooled,
)
from opusim.accounting.numerics.sampled_noise import (
    NoisyStep,
    NoisySum,
    compose_bounds,
    noise_bounds,
    plan_of,
)

UNIT = loss_laws.UNIT
ADDED = Adjacency.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_law_below_has_no_more_mass_than_one(direction: Direction) -> None:
    """It had 1 + 2e-12 where the polygon bridged corners; at 1e8 steps the lower bound then passed the upper one."""
    law = LaplaceLaw(scale=2.424012167720748, probability=4.79259838878059e-07, direction=direction)
    below = grid_below(law, *law.span(1e-17, 1e-22), 1.17e-8)
    assert 1 - 1e-13 <= math.fsum(below.masses) <= 1
    assert 1 - 1e-13 <= math.fsum(below.masses * np.exp(-below.losses)) <= 1 + 1e-15


def test_coarse_grids_of_a_wide_law_stay_on_their_sides() -> None:
    """Beyond the loss of 2 the law below kept 1e-41 of rounding where 1e-70 is true."""
    law = GaussianLaw(noise=0.9591933057841097, probability=6.490418126760989e-08, direction="replace")
    ends = law.span(7e-25, 5e-137)
    above, below = grid_above(law, *ends, 2.1342516615790226), grid_below(law, *ends, 2.1342516615790226)
    for epsilon in (0.5, 1.0, 2.0, 2.08):
        high, low = (float(grid.masses[grid.losses > epsilon].sum()) + grid.beyond for grid in (above, below))
        assert low <= high
    assert below.masses[-1] <= 1e-60


@pytest.mark.parametrize(("z", "tail"), [(0.3, 1e-30), (1.0, 1e-20), (1.0, 1e-150), (4.0, 1e-250)])
def test_masses_keep_the_precision_that_is_counted(z: float, tail: float) -> None:
    law = GaussianLaw(noise=z, probability=0.01, direction="remove")
    reach = math.sqrt(-2 * math.log(tail)) - 1.5
    x = z * np.linspace(-reach, reach, 8)
    points = np.sort(np.concatenate([x, x + 1e-3 * z, x + 1e-9 * z]))
    found = normal_masses(points, 1.0, z)[1:-1]
    with mpmath.workdps(300):
        for i in range(1, len(points) - 2):
            low, high = ((mpmath.mpf(float(end)) - 1) / mpmath.mpf(z) for end in points[i : i + 2])
            sign = 1 if low > 0 else -1
            first, second = (mpmath.erfc(sign * end / mpmath.sqrt(2)) / 2 for end in (low, high))
            exact = abs(first - second)
            if exact > mpmath.mpf(10) ** -290:
                assert abs(found[i - 1] / exact - 1) <= law.rounding(tail)


def test_large_losses_and_spectra_near_zero_keep_their_size() -> None:
    """log(1 - (1 - e^-l)) has lost e^-l from l = 30 on."""
    masses, losses = pooled(np.array([[1e-20], [1e-20]]), np.array([[40.0], [41.0]]))
    assert masses[0] == pytest.approx(2e-20, rel=1e-15)
    assert losses[0] == pytest.approx(40 - math.log((1 + math.exp(-1)) / 2), abs=1e-14)
    found = loss_laws._log_sizes(np.array([0.0, 1e-17, -1 + 1e-9, -1 - 1e-9j, -0.25, -1.0], dtype=complex))
    assert found[:2].tolist() == [0.0, 1e-17]
    assert found[2:5] == pytest.approx([math.log(1e-9), math.log(1e-9), math.log(0.75)], rel=1e-7)
    assert -math.inf < found[5] < -500
    tilt, interval = 3e14, 1e-15
    with mpmath.workdps(50):
        a, b = (mpmath.exp(-(mpmath.mpf(tilt) + k) * mpmath.mpf(interval)) for k in (0, 1))
        exact = float(1 / (1 - a) - 1 / (1 - b))
    assert loss_laws.weight_sum(tilt, interval) == pytest.approx(exact, rel=1e-12)


def test_no_lower_bound_comes_from_where_the_window_begins() -> None:
    """If the error hides the whole window, nothing is known below it."""
    law = GaussianLaw(noise=1.0, probability=1.0, direction="remove")
    plan = plan_of([law], [400], 1e-20)
    composed = loss_laws.composed(plan, plan.below())
    assert composed.losses[0] > 1
    assert composed.least_epsilon(1e-20) > 250
    assert replace(composed, error=1e9).least_epsilon(1e-20) == 0.0


@pytest.mark.parametrize("size", [2**14, 3**9, 5**6, 2 * 3**7])
def test_a_transform_has_the_error_that_is_counted(size: int) -> None:
    """Its factors e^(i a), against long doubles; and all of it, against the transform in long doubles."""
    unit = np.zeros(size)
    unit[1] = 1.0
    turn = 2 * np.arccos(np.longdouble(-1)) / size
    angles = -turn * np.arange(size // 2 + 1)
    found = rfft(unit)
    factors = np.hypot(found.real - np.cos(angles), found.imag - np.sin(angles))
    assert float(factors.max()) <= 5 * UNIT
    values = np.random.default_rng(5).standard_normal(size)
    error = np.abs(rfft(values) - rfft(values.astype(np.longdouble)))
    assert float(error.max()) <= UNIT * (8 * math.log2(size) + 16) * float(np.abs(values).sum())


@pytest.mark.parametrize(("law", "scale", "q", "steps", "delta"), [
    ("laplace", 7667.1, 3.6e-5, 7, 8.9e-27),
    pytest.param("gaussian", 1.0, 0.01, 10**8, 1e-6, marks=pytest.mark.slow),
])  # fmt: skip
def test_beyond_doubles_is_no_failure(law: str, scale: float, q: float, steps: int, delta: float) -> None:
    one = NoisySum(law="laplace" if law == "laplace" else "gaussian", scale=scale, probability=q, steps=steps)
    found = noise_bounds([one], ADDED, delta)
    assert 0 <= found.lower <= found.upper


@pytest.mark.parametrize(("scale", "q"), [(1.7684303340442777, 0.999999), (64.81303461389548, 3.656558e-06)])
def test_rounding_of_a_closed_form_is_counted(scale: float, q: float) -> None:
    """At a tiny delta the exact epsilon is that of delta = 0, and exceeded the double of it."""
    found = noise_bounds([NoisySum(law="laplace", scale=scale, probability=q)], ADDED, 1e-80)
    with mpmath.workdps(120):
        exact = mpmath.log1p(mpmath.mpf(q) * mpmath.expm1(1 / mpmath.mpf(scale)))
        assert found.lower <= exact * (1 - mpmath.mpf(10) ** -60)
        assert exact <= found.upper <= exact * (1 + 1e-12)


@pytest.mark.parametrize(("mu", "delta"), [(1 / 1.5880073652667304, 1.744834350314965e-13), (0.5, 1e-220)])
def test_the_gaussian_closed_form_encloses_its_root(mu: float, delta: float) -> None:
    found = noise_bounds([NoisySum(law="gaussian", scale=1 / mu)], ADDED, delta)

    def spent(epsilon: mpmath.mpf) -> mpmath.mpf:
        z = mpmath.mpf(1 / mu)
        first, second = (mpmath.erfc((epsilon * z + sign / (2 * z)) / mpmath.sqrt(2)) / 2 for sign in (-1, 1))
        return first - mpmath.exp(epsilon) * second

    with mpmath.workdps(300):
        assert spent(mpmath.mpf(found.lower)) >= delta >= spent(mpmath.mpf(found.upper))


def test_a_single_step_among_many_costs_little_rounding() -> None:
    def step(z: float, q: float, steps: int) -> NoisyStep:
        return tuple(GaussianLaw(noise=z, probability=q, direction=d) for d in ("remove", "add")), steps

    with np.errstate(all="ignore"):
        found = compose_bounds([step(0.9, 1e-3, 1), step(0.9, 1e-3, 9999)], 1e-9)
        once = compose_bounds([step(0.9, 1e-3, 10_000)], 1e-9)
    assert found.lower <= once.upper
    assert once.lower <= found.upper <= 1.01 * found.lower


_ZO: dict[str, Any] = {"sampling_probability": 0.1, "clip_norm": 0.05, "divisor": 10}
_SUM: dict[str, Any] = {"noise_multiplier": 2.0, "exactly_rounded": True}
EXACT: tuple[Mechanism, ...] = (
    *(ZoGaussian(noise_multiplier=2.0, **_ZO), ZoLaplace(scale=2.0, **_ZO), LabelRelease(mu=0.7)),
    *(LabelReadout(mu=0.7), RecordCentral(**_ZO, **_SUM), RecordReplaced(**_ZO, **_SUM)),
    LabelAmplified(sampling_probability=0.1, **_SUM),
    PrivateSelection(mean=3.0, mu=0.4, rests_on="convex-last-iterate"),
)
OF_DEVICES: tuple[Mechanism, ...] = (
    ZoGaussian(noise_multiplier=2.0, device_noise=True, **_ZO),
    LabelRelease(mu=0.7, device_noise=True),
    LabelReadout(mu=0.7, device_law=True),
    RecordCentral(device_noise=True, **_ZO, **_SUM),
    RecordReplaced(device_noise=True, **_ZO, **_SUM),
    LabelAmplified(sampling_probability=0.1, device_noise=True, **_SUM),
)
TRUSTED = "the rounding of floating-point numbers is not attacked"
ALIKE = "alike"


def rounding(*mechanisms: Mechanism, enforced: bool = True) -> list[tuple[bool | None, str]]:
    """The assumptions about rounding, each with whether code checked it."""
    (stated,) = guarantees(list(mechanisms), delta=1e-5, enforced=enforced)
    return [
        (each.holds, each.text)
        for each in stated.assumptions
        if each.text == TRUSTED or "exactly rounded number" in each.text
    ]


@pytest.mark.parametrize("mechanism", EXACT, ids=lambda one: type(one).__name__)
def test_exact_rounding_is_checked_and_older_ledgers_keep_it_on_trust(mechanism: Mechanism) -> None:
    ((holds, text),) = rounding(mechanism)
    assert holds is True
    assert text != TRUSTED
    assert rounding(mechanism, enforced=False) == [(None, text)]
    content = mechanism.to_json()
    del content["exactly_rounded"]
    old = mechanism_from_json(content)
    assert rounding(old) == [(None, TRUSTED)]
    assert rounding(mechanism, old) == rounding(old, mechanism) == [(None, TRUSTED)]


@pytest.mark.parametrize("mechanism", OF_DEVICES, ids=lambda one: type(one).__name__)
def test_noise_of_a_device_has_digits_of_its_own(mechanism: Mechanism) -> None:
    exact = next(one for one in EXACT if type(one) is type(mechanism))
    assert rounding(mechanism) == rounding(exact, mechanism) == [(None, TRUSTED)]


def test_searches_and_correlated_noise_state_their_rounding() -> None:
    """A trial's float32 noise stays on the trust of its own theorem, which the statement names."""
    ((_, text),) = rounding(EXACT[-1])
    assert text.startswith("every score is released")
    (stated,) = guarantees([EXACT[-1]], delta=1e-5, enforced=True)
    assert any("of theorem convex-last-iterate" in a.text and a.holds is None for a in stated.assumptions)
    banded = RecordCentral(correlation=(0.8, 0.6), **_ZO, **_SUM)
    assert rounding(banded) == [(None, TRUSTED)]


def test_a_number_of_rows_that_a_record_changes_is_on_trust() -> None:
    """A matrix product may round other records' rows differently if a batch has one row more."""

    def trusted(mechanism: Mechanism) -> bool:
        (stated,) = guarantees([mechanism], delta=1e-5, enforced=True)
        return any(ALIKE in each.text and each.holds is None for each in stated.assumptions)

    search = EXACT[-1]
    assert isinstance(search, PrivateSelection)
    assert not trusted(search)  # the number is public
    assert trusted(replace(search, adjacency=Adjacency.ADD_OR_REMOVE_ONE))
    assert trusted(EXACT[0])
    assert trusted(EXACT[1])
    assert not trusted(EXACT[2])  # features, and so the rows, are public
    record = RecordCentral(noise_multiplier=1.0, **_ZO)
    assert not trusted(record)
    assert rounding(record) == [(None, TRUSTED)]  # unless the code that ran says that it rounds


@pytest.mark.parametrize(
    "mechanism", [one for one in EXACT if getattr(one, "clip", None) or hasattr(one, "bands")]
)
def test_the_rounding_of_sums_themselves_is_counted_or_on_trust(mechanism: Mechanism) -> None:
    def about_sums(*mechanisms: Mechanism, enforced: bool = True) -> list[tuple[str, bool | None]]:
        (stated,) = guarantees(list(mechanisms), delta=1e-5, enforced=enforced)
        words = {"for every batch": "counted", "is not counted": "uncounted"}
        words["contributions of other"] = "others"
        found = [
            (name, each.holds)
            for each in stated.assumptions
            for word, name in words.items()
            if word in each.text
        ]
        return sorted(found)

    not_counted = [("others", None), ("uncounted", None)]
    assert about_sums(mechanism) == not_counted
    counting = replace(mechanism, counts_sums=True)
    assert about_sums(counting) == [("counted", True), ("others", None)]
    assert about_sums(counting, enforced=False) == [("counted", None), ("others", None)]
    assert about_sums(counting, mechanism) == not_counted
    content = counting.to_json()
    assert mechanism_from_json(content) == counting
    del content["counts_sums"]  # as in former ledgers
    assert mechanism_from_json(content) == mechanism
    assert about_sums(replace(counting, exactly_rounded=False)) == []  # the wider trust covers it
