"""The sampled Gaussian mechanism with rejection: the bound against quadrature in both directions, and known values."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.stats import binom, norm

from opusim.accounting import numerics
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, Status
from opusim.accounting.mechanisms.records import Gaussian
from opusim.accounting.mechanisms.ulr import PublishedUlr, RejectionGaussian, admissible, published_rdp

CASES = ((24, 0.2, 4, 4.0), (100, 0.2, 20, 4.0), (100, 0.2, 20, 1.0), (50, 0.05, 5, 0.7), (40, 0.5, 1, 2.0))
"""N, q, N_B, z."""
PARAMETERS = [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])]
ALL_VALUES, ORDERS = (-1.0, 0.0, 1.0), (2.0, 4.0, 8.0)


def run_of(n: int, q: float, least: int, z: float, steps: int = 1) -> RejectionGaussian:
    return RejectionGaussian(
        noise_multiplier=z, sampling_probability=q, n_records=n, min_batch_size=least, steps=steps
    )


def paper_of(case: tuple[int, float, int, float]) -> PublishedUlr:
    n, q, least, z = case
    return PublishedUlr(
        target_std=z, sampling_probability=q, n_records=n, min_batch_size=least, modules=1, largest_module=1,
        sampled=True,
    )  # fmt: skip


def densities(n: int, q: float, least: int, z: float, others: float, new: float) -> tuple[np.ndarray, ...]:
    """Grid spacing, output densities without and with the new record, the others all alike, by their definition."""
    reach = n * abs(others) + 2 + 14 * z
    grid = np.linspace(-reach, reach, 60_001)
    without, with_new = np.zeros_like(grid), np.zeros_like(grid)
    for k in range(n + 1):
        mass = binom.pmf(k, n, q)
        if k >= least:
            without += mass * norm.pdf(grid, k * others, z)
            with_new += (1 - q) * mass * norm.pdf(grid, k * others, z)
        if k + 1 >= least:
            with_new += q * mass * norm.pdf(grid, k * others + new, z)
    step = grid[1] - grid[0]
    return np.array(step), without / (without.sum() * step), with_new / (with_new.sum() * step)


def renyi(order: float, step: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    keep = (p > 1e-300) & (q > 1e-300)
    logs = order * np.log(p[keep]) - (order - 1) * np.log(q[keep])
    return float(np.log(np.exp(logs).sum() * step) / (order - 1))


@pytest.mark.parametrize("case", PARAMETERS, ids=str)
def test_no_neighbours_exceed_the_bound_in_either_direction(case: tuple[int, float, int, float]) -> None:
    exceeded = False
    for others, new in product(ALL_VALUES, (-1.0, 1.0)):
        step, without, with_new = densities(*case, others, new)
        bounds, plain = (
            numerics.mixture_renyi_curve(run_of(case[0], case[1], least, case[3]).as_mixture(), ORDERS)
            for least in (case[2], 1)  # planted: rejection ignored
        )
        for order, bound, unrejected in zip(ORDERS, bounds, plain, strict=True):
            exact = max(renyi(order, step, without, with_new), renyi(order, step, with_new, without))
            assert exact <= bound * (1 + 1e-6)
            exceeded |= exact > unrejected * (1 + 1e-6)
    assert exceeded or case[2] == 1


@pytest.mark.parametrize("case", PARAMETERS, ids=str)
def test_hockey_sticks_stay_below_the_mixture_that_is_composed(case: tuple[int, float, int, float]) -> None:
    mixture, z = run_of(case[0], case[1], case[2], 1.0).as_mixture(), case[3]
    for others, new in product(ALL_VALUES, (-1.0, 1.0)):
        step, without, with_new = densities(*case, others, new)
        remove, add = AdjacencyType.REMOVE, AdjacencyType.ADD
        for direction, p, q in ((remove, with_new, without), (add, without, with_new)):
            for epsilon in (0.0, 0.05, 0.3, 1.0):
                exact = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step)
                bound = sum(
                    share
                    * GaussianPrivacyLoss(
                        noise, sampling_prob=mixture.probability, adjacency_type=direction
                    ).get_delta_for_epsilon(epsilon)
                    for share, noise in ((1 - mixture.share, z), (mixture.share, z / 2))
                )
                assert exact <= bound + 1e-7  # the quadrature's own error


@pytest.mark.slow
def test_the_reference_cases() -> None:
    """Order 4, N = 100, q = 0.2, N_B = 20, z = 4: exact 1.59e-2, eq. 10 5.63e-2, the bound 2.28e-2."""
    case = (100, 0.2, 20, 4.0)
    found = []
    for others, new in product(ALL_VALUES, (-1.0, 1.0)):
        step, without, with_new = densities(*case, others, new)
        found += [renyi(4.0, step, without, with_new), renyi(4.0, step, with_new, without)]
    assert max(found) == pytest.approx(1.59e-2, rel=5e-3)
    curve = numerics.mixture_renyi_curve(run_of(*case).as_mixture(), (4.0,))
    assert curve[0] == pytest.approx(2.28e-2, rel=5e-3)
    assert published_rdp(paper_of(case), 4.0) == pytest.approx(5.63e-2, rel=5e-3)


@pytest.mark.parametrize(
    ("z", "holds"), [(0.5, False), (1.0, False), (2.0, False), (4.0, True), (8.0, True)], ids=str
)
def test_equation_10_at_the_noises_of_the_papers_table(z: float, holds: bool) -> None:
    """Batch 64, the others' contributions zero, N_B half the mean; eq. 10 wants sigma_0 >= 4, and limits alpha."""
    case = (60_000, 64 / 60_000, 32, z)
    rate = run_of(*case).as_mixture().probability
    grid = np.linspace(-20 * z, 1 + 80 * z, 200_001)
    without = norm.pdf(grid, 0, z)
    with_new = (1 - rate) * without + rate * norm.pdf(grid, 1, z)
    paper = paper_of(case)
    found = [
        (renyi(order, grid[1] - grid[0], with_new, without), published_rdp(paper, order), order)
        for order in (2.0, 4.0, 16.0, 64.0)
        if order <= 16 * z**2  # larger divergences overflow
    ]
    if holds:
        assert all(exact <= formula for exact, formula, order in found if admissible(paper, order))
        assert any(admissible(paper, order) for *_, order in found)
    else:
        assert any(exact > 10 * formula for exact, formula, _ in found)


@pytest.mark.parametrize(("z", "renyi_value"), [(1, 17.8), (2, 2.50), (4, 0.873), (8, 0.397)])
def test_composed_epsilon_is_at_most_the_references(z: float, renyi_value: float) -> None:
    """N = 60,000, batches of at least 500 = q N, 25 epochs, by Renyi divergences there; sharper here."""
    (guarantee,) = guarantees([run_of(60_000, 1 / 120, 500, z, steps=3000)], delta=1e-5)
    assert 0.85 * renyi_value < guarantee.epsilon <= renyi_value * 1.004
    assert (guarantee.status, guarantee.adjacency) == (Status.PROVEN, Adjacency.ADD_OR_REMOVE_ONE)


def test_no_rejection_rare_batches_and_failing_orders(caplog: pytest.LogCaptureFixture) -> None:
    mixture = run_of(1000, 0.1, 1, 1.0).as_mixture()
    assert mixture.probability == pytest.approx(0.1, rel=1e-9)
    assert mixture.share < 1e-9
    assert run_of(50, 1.0, 20, 1.0).as_mixture().share == 0
    # P(X >= N_B) is below 1e-308: no sampling, and 2 C apart, so a Gaussian of half the noise.
    (guarantee,) = guarantees([run_of(1000, 1e-100, 10, 8.0)], delta=1e-5)
    (plain,) = guarantees([Gaussian(noise_multiplier=4.0)], delta=1e-5)
    assert plain.epsilon <= guarantee.epsilon <= 1.01 * plain.epsilon
    guarantees([run_of(1000, 0.5, 10, 1e5)], delta=1e-5)
    assert not caplog.records


@pytest.mark.parametrize(("q", "least"), [(0.01, 10), (0.05, 50), (0.2, 150), (0.5, 480)])
def test_both_parameters_fall_as_the_data_set_grows(q: float, least: int) -> None:
    """What lets N be a lower limit."""
    found = [run_of(n, q, least, 1.0).as_mixture() for n in range(1000, 3000, 50)]
    for earlier, later in pairwise(found):
        assert later.probability <= earlier.probability * (1 + 1e-9)
        assert later.share <= earlier.share + 1e-9


def test_parameters_against_sums_over_batch_sizes() -> None:
    n, q, least = 30, 0.3, 8
    mass = binom.pmf(np.arange(n + 1), n, q)
    above, near = mass[least:].sum(), mass[least - 1 :].sum()
    mean = (np.arange(least, n + 1) * mass[least:]).sum() / above
    mean_near = (np.arange(least - 1, n + 1) * mass[least - 1 :]).sum() / near
    mixture = run_of(n, q, least, 1.0).as_mixture()
    assert mixture.probability == pytest.approx(q * near / (q * near + (1 - q) * above), rel=1e-9)
    assert mixture.share == pytest.approx(mean - mean_near, rel=1e-9)
