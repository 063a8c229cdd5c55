"""The last iterate of convex runs: theorem, closed forms, claims refuted, and the best attacks on its schedules."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.optimize import minimize
from scipy.stats import norm

from benchmarks.attacks.claims import FOUR_GATES_RATE, four_gates
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Adjacency, NoGuarantee, Release, Status
from opusim.accounting.mechanisms.convex import (
    ConvexLastIterate,
    claimed_mu,
    cyclic_descent_mu,
    learning_rates,
    least_regularisation,
    log_expansion,
    most_epochs,
    mu_of_schedule,
    priced_descents,
    proven_mu,
    residual_bound,
    smoothness,
    softmax_gap,
)

DELTA = 1e-5
SIZE = {"clip": 0.5, "learning_rate": 0.5, "batches": 60, "epochs": 40}
RUN = ConvexLastIterate(objective="squared", noise_multiplier=5.0, **SIZE)


def exact_mu(rates: np.ndarray, noises: np.ndarray, factors: np.ndarray, batches: int) -> float:
    """The largest mu over positions of x <- factor x + shift + noise, where shifts of 2 eta all point one way."""
    later = np.concatenate([np.cumprod(factors[::-1])[::-1][1:], [1.0]])
    deviation = math.sqrt(float(np.sum((later * noises) ** 2)))
    return max(abs(float(np.sum((2 * rates * later)[j::batches]))) / deviation for j in range(batches))


def noises_of(run: ConvexLastIterate) -> np.ndarray:
    noises = learning_rates(run) * run.noise_multiplier
    noises[-1] = math.hypot(noises[-1], run.final_noise * run.learning_rate * run.noise_multiplier)
    return noises


@pytest.mark.parametrize("final_noise", [0.0, 2.7])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("regularisation", [0.0, 2e-4, 0.02, 1.0])
@pytest.mark.parametrize("size", [(1, 7), (4, 1), (6, 10), (60, 40)])
def test_never_below_an_exact_linear_instance(
    size: tuple[int, int], regularisation: float, schedule: str, final_noise: float
) -> None:
    """Gradients that do not depend on the weights, so that a step contracts by 1 - eta lambda exactly."""
    run = replace(RUN, batches=size[0], epochs=size[1], regularisation=regularisation)
    run = replace(run, schedule=schedule, final_noise=final_noise)
    rates = learning_rates(run)
    exact = exact_mu(rates, noises_of(run), 1 - rates * regularisation, run.batches)
    assert proven_mu(run) >= exact * (1 - 1e-9)


def test_the_reference_instance_within_15_percent_and_a_planted_credit() -> None:
    run = replace(RUN, batches=60, epochs=400, regularisation=1e-4 / RUN.learning_rate)
    rates, mu0 = learning_rates(run), 2 / run.noise_multiplier
    found = exact_mu(rates, noises_of(run), 1 - rates * run.regularisation, 60)
    assert found / mu0 == pytest.approx(2.158, abs=1e-3)
    assert proven_mu(run) / mu0 == pytest.approx(2.366, abs=1e-3)
    assert found <= proven_mu(run) <= 1.15 * found
    # A record whose gradients agree until the last epoch: its last step is all there is, and a line is below it.
    straight = 2 * RUN.epochs * RUN.learning_rate / math.sqrt(float(np.sum(noises_of(RUN) ** 2)))
    last_step_alone = 2 / RUN.noise_multiplier
    assert straight < 0.85 * last_step_alone
    assert proven_mu(RUN) >= last_step_alone


@pytest.mark.parametrize("final_noise", [math.sqrt(59.0), 20.0])
def test_noise_at_the_end_is_credited_almost_exactly(final_noise: float) -> None:
    run = replace(RUN, final_noise=final_noise)
    rates = learning_rates(run)
    exact = exact_mu(rates, noises_of(run), np.ones_like(rates), run.batches)
    assert exact <= proven_mu(run) <= 1.03 * exact
    assert proven_mu(run) < 0.65 * proven_mu(replace(run, final_noise=0.0))


@pytest.mark.parametrize(("batches", "epochs"), [(1, 5), (60, 40), (480, 10)])
def test_one_more_epochs_noise_at_the_end_wastes_only_the_first(batches: int, epochs: int) -> None:
    run = replace(RUN, batches=batches, epochs=epochs, final_noise=math.sqrt(batches - 1))
    assert proven_mu(run) == pytest.approx(2 / run.noise_multiplier * math.sqrt(epochs / batches), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_schedule_against_an_optimiser(seed: int) -> None:
    """min sum (a / w)^2 under z >= 0, by sequential quadratic programming; c on both sides of 1."""
    generator = np.random.default_rng(seed)
    steps = int(generator.integers(2, 9))
    shifts = generator.uniform(0.1, 1.0, steps) * (generator.random(steps) < 0.6)
    shifts[int(generator.integers(steps))] = 0.7
    noises = generator.uniform(0.3, 2.0, steps)
    c = generator.uniform(0.6, 1.3, steps)

    def left(a: np.ndarray) -> np.ndarray:
        z, path = 0.0, []
        for t in range(steps):
            z = c[t] * z + shifts[t] - a[t]
            path.append(z)
        return np.array(path)

    found = minimize(
        lambda a: float(np.sum((a / noises) ** 2)), shifts, bounds=[(0, None)] * steps,
        constraints=[
            {"type": "ineq", "fun": lambda a: left(a)[:-1]}, {"type": "eq", "fun": lambda a: left(a)[-1]},
        ],
        options={"ftol": 1e-14, "maxiter": 2000},
    )  # fmt: skip
    assert found.success
    assert mu_of_schedule(shifts, noises, np.log(c)) == pytest.approx(math.sqrt(found.fun), rel=1e-5)


@pytest.mark.parametrize("c", [0.3, 0.9, 0.999, 1.0, 1.001, 1.05])
@pytest.mark.parametrize(("batches", "epochs"), [(2, 2), (5, 4), (10, 20), (60, 40)])
def test_closed_form_against_the_optimal_schedule(batches: int, epochs: int, c: float) -> None:
    shifts = np.zeros(batches * epochs)
    shifts[batches - 1 :: batches] = 1.0
    optimum = mu_of_schedule(shifts, np.ones_like(shifts), np.full_like(shifts, math.log(c)))
    closed = cyclic_descent_mu(1.0, batches, epochs, math.log(c))
    assert closed >= optimum * (1 - 1e-9)
    assert closed == pytest.approx(optimum, rel=2e-7 if c <= 1 else 0.02)


def printed_formula(batches: int, epochs: int, c: mpmath.mpf) -> float:
    """Theorem 2.8 as it is printed, at 60 digits."""
    share = c ** (2 * batches - 2) * (1 - c**2) / (1 - c**batches) ** 2
    power = c ** (batches * (epochs - 1))
    return float(mpmath.sqrt(1 + share * (1 - power) / (1 + power)))


@pytest.mark.parametrize("exponent", [*range(-18, 0)])
@pytest.mark.parametrize(("batches", "epochs"), [(1, 7), (60, 40), (60, 400), (600, 5)])
def test_closed_form_is_stable_near_one(batches: int, epochs: int, exponent: int) -> None:
    with mpmath.workdps(60):
        contraction = mpmath.mpf(10) ** exponent
        expected = printed_formula(batches, epochs, 1 - contraction)
    found = cyclic_descent_mu(1.0, batches, epochs, math.log1p(-(10.0**exponent)))
    assert found == pytest.approx(expected, rel=3e-7)


def test_closed_form_falls_with_contraction_from_0_to_1() -> None:
    contractions = np.concatenate([[0.0], np.logspace(-18, -0.001, 400)])
    mus = [cyclic_descent_mu(1.0, 60, 400, math.log1p(-x)) for x in contractions]
    assert np.all(np.diff(mus) <= 2e-7 * mus[0])
    assert mus[0] == pytest.approx(2.7659, abs=1e-4)
    assert cyclic_descent_mu(1.0, 60, 400, -math.inf) == 1.0
    assert cyclic_descent_mu(1.0, 60, 400, math.log1p(-1e-4)) < mus[0] < cyclic_descent_mu(1.0, 60, 400, 1e-6)


def test_the_claim_is_refuted_by_four_gates_whose_rate_is_refused() -> None:
    claimed, exact = four_gates()
    assert (claimed, exact) == (pytest.approx(1.574, abs=1e-3), pytest.approx(3.255, abs=1e-3))
    epsilons = [get_epsilon_gaussian(1 / (0.4 * ratio), DELTA) for ratio in (claimed, exact)]
    assert epsilons == [pytest.approx(2.58, abs=0.01), pytest.approx(5.96, abs=0.01)]
    # Scaled to features of norm 1: 4 gates of |x|^2 = 1/4, lambda / 4 and 4 eta give the same recursion.
    scaled = replace(RUN, learning_rate=4 * FOUR_GATES_RATE, regularisation=0.5 / 4, batches=2, epochs=50)
    with pytest.raises(NoGuarantee, match=r"learning_rate = 1.82222: must be below 2 / \(beta \+"):
        proven_mu(scaled)


def test_statements() -> None:
    proven, claimed = guarantees([replace(RUN, final_noise=7.0)], delta=DELTA, enforced=True)
    assert (proven.status, claimed.status) == (Status.PROVEN, Status.CLAIMED)
    for guarantee in (proven, claimed):
        assert guarantee.adjacency is Adjacency.REPLACE_ONE
        assert guarantee.release is Release.LAST_ITERATE
    assert math.isinf(claimed.epsilon)
    assert claimed.formula_value == pytest.approx(get_epsilon_gaussian(1 / claimed_mu(RUN), DELTA), rel=1e-6)
    assert [a.holds for a in claimed.assumptions] == [False, True, True]
    (one_gate,) = guarantees([replace(RUN, hyperplanes=1)], delta=DELTA)[1:]
    assert math.isfinite(one_gate.epsilon)
    refused, _ = guarantees([replace(RUN, learning_rate=2.0)], delta=DELTA)
    assert refused.status is Status.NONE
    assert "learning_rate = 2" in (refused.reason or "")
    (device, _) = guarantees([replace(RUN, device_noise=True)], delta=DELTA)
    assert device.status is Status.PROVEN_UNDER_DEVICE_MODEL


def test_runs_compose_and_two_classes_clip_without_harm() -> None:
    assert proven_mu(RUN.repeated(9)) == pytest.approx(3 * proven_mu(RUN))
    rates = np.array([1.0])
    assert log_expansion("softmax", 0.5, 2, rates, 0.1) == pytest.approx([math.log(0.9)])
    assert log_expansion("softmax", 0.5, 3, rates, 0.1) > math.log(0.9)


def test_bounds_and_smoothness() -> None:
    assert residual_bound("softmax", None, 10) == pytest.approx(math.sqrt(2))
    assert residual_bound("softmax", 5.0, 10) == pytest.approx(math.sqrt(2))
    assert residual_bound("one-against-rest", None, 9) == 3.0
    assert residual_bound("squared", 0.7, 10) == 0.7
    assert smoothness("softmax") == 0.5
    with pytest.raises(ValueError, match="clip is missing: nothing else bounds the residual of 'squared'"):
        residual_bound("squared", None, 10)


def test_clipped_softmax_and_its_gap() -> None:
    for n_classes, expected in {2: 0.0, 3: 0.00683, 5: 0.01046, 10: 0.01254}.items():
        assert softmax_gap(n_classes) == pytest.approx(expected, abs=1e-5)
    pi = np.random.default_rng(0).dirichlet(np.full(9, 0.4), size=200_000)  # 9 wrong classes
    s2, s3 = (np.sum(pi**m, axis=1) for m in (2, 3))
    found = float(np.max((s3 - s2**2) / (4 * (1 + s2) ** 1.5)))
    assert 0.9 * softmax_gap(10) < found <= softmax_gap(10)
    # k 60, E 400, lambda 0, noise 5: epsilon at eta 0.1, 0.5, 1, 2, and no contraction for comparison.
    run = replace(RUN, objective="softmax", clip=1.0, epochs=400)
    rates = (replace(run, learning_rate=eta) for eta in (0.1, 0.5, 1.0, 2.0))
    epsilons = [guarantees([one], delta=DELTA)[0].epsilon for one in rates]
    assert epsilons == pytest.approx([5.11, 6.05, 7.71, 13.64], abs=0.01)
    with pytest.raises(NoGuarantee, match="must be below 2"):
        log_expansion("softmax", 1.0, 10, np.array([4.0]), 0.0)


def test_plans_reach_their_target_with_less_noise_at_fewer_epochs() -> None:
    found = priced_descents(RUN, target_epsilon=3.0, delta=DELTA, epochs=(1, 10, 100))
    assert all(2.98 < plan.epsilon <= 3.0 for plan in found)
    multipliers = [plan.mechanism.noise_multiplier for plan in found]
    assert multipliers == sorted(multipliers)
    one = found[0]
    assert one.weight_noise == pytest.approx(0.5 * math.sqrt(60) * one.mechanism.noise_multiplier * 60)


@pytest.mark.parametrize(("epsilon", "contraction"), [(4.76, 3.76e-5), (1.33, 5.61e-5)])
def test_the_papers_contraction_for_its_epsilons(epsilon: float, contraction: float) -> None:
    """400 epochs of 60 batches at noise 5 and 15: eta lambda of the reference, solved from epsilon."""
    run = replace(RUN, epochs=400, noise_multiplier=5.0 if epsilon > 2 else 15.0)
    found = least_regularisation(run, target_epsilon=epsilon, delta=DELTA)
    assert run.learning_rate * found.regularisation == pytest.approx(contraction, rel=0.01)
    assert guarantees([found], delta=DELTA)[0].epsilon <= epsilon


def test_most_epochs_fit_their_target_and_targets_out_of_reach_are_refused() -> None:
    found = most_epochs(RUN, target_epsilon=3.0, delta=DELTA)
    assert guarantees([found], delta=DELTA)[0].epsilon <= 3.0
    assert guarantees([replace(found, epochs=found.epochs + 1)], delta=DELTA)[0].epsilon > 3.0
    with pytest.raises(NoGuarantee, match="no regularisation up to 1.5 reaches it with noise_multiplier = 5"):
        least_regularisation(RUN, target_epsilon=0.5, delta=DELTA)
    with pytest.raises(NoGuarantee, match="one epoch with noise_multiplier = 5 costs more"):
        most_epochs(RUN, target_epsilon=0.5, delta=DELTA)


BATCHES, EPOCHS, SHIFT = 3, 4, 1.0
STEPS = BATCHES * EPOCHS


def noises(final: float, std: float = 1.0) -> np.ndarray:
    """Every step's standard deviation; the last one's has `final` of them on top."""
    return np.array([std] * (STEPS - 1) + [std * math.hypot(1.0, final)])


def shifts(position: int) -> np.ndarray:
    """The steps at which a record of one batch takes part."""
    return np.where(np.arange(STEPS) % BATCHES == position, SHIFT, 0.0)


def bound(position: int, final: float, c: float, std: float = 1.0) -> float:
    return mu_of_schedule(shifts(position), noises(final, std), np.full(STEPS, math.log(c)))


def rotated(generator: np.random.Generator, c: float, size: int) -> np.ndarray:
    """A symmetric matrix with eigenvalues in [-c, c], some of them at the ends, in a random basis."""
    values = c * generator.choice([1.0, 1.0, -1.0, 0.0, generator.uniform(-1, 1)], size=size)
    basis, _ = np.linalg.qr(generator.normal(size=(size, size)))
    return basis * values @ basis.T


# Attacks: matrices that do not commute, with means and covariances in closed form, where the exact mu is a
# Mahalanobis distance; and nonlinear maps of one variable, whose densities are carried step by step on a grid.


def mu_of_maps(maps: np.ndarray, directions: np.ndarray, moved: np.ndarray, stds: np.ndarray) -> float:
    """mu of x <- A x + shift u + noise against x <- A x + noise."""
    size = maps.shape[1]
    mean, covariance = np.zeros(size), np.zeros((size, size))
    for a, u, s, w in zip(maps, directions, moved, stds, strict=True):
        mean, covariance = a @ mean + s * u, a @ covariance @ a.T + w**2 * np.eye(size)
    return math.sqrt(float(mean @ np.linalg.solve(covariance, mean)))


def worst_directions(maps: np.ndarray, position: int, stds: np.ndarray) -> np.ndarray:
    """Unit shifts of a locally largest exact mu: one after the other is turned where the distance grows fastest."""
    size = maps.shape[1]
    after = [np.eye(size)]
    for a in maps[:0:-1]:
        after.append(after[-1] @ a)
    after.reverse()  # after[t] carries step t to the end
    covariance = sum(w**2 * m @ m.T for m, w in zip(after, stds, strict=True))
    inverse = np.linalg.inv(covariance)
    mine = range(position, STEPS, BATCHES)
    directions = np.zeros((STEPS, size))
    directions[list(mine)] = np.eye(size)[0]
    for _ in range(30):
        for t in mine:
            mean = sum(after[s] @ directions[s] for s in mine if s != t)
            curvature = after[t].T @ inverse @ after[t]
            pull = after[t].T @ inverse @ mean + curvature @ directions[t]
            if np.linalg.norm(pull) > 1e-12:
                directions[t] = pull / np.linalg.norm(pull)
    return directions


@pytest.mark.parametrize("c", [0.6, 0.97, 1.0, 1.05])
@pytest.mark.parametrize("final", [0.0, math.sqrt(BATCHES - 1), 4.0])
def test_no_matrices_beat_the_theorem(c: float, final: float) -> None:
    generator, closest = np.random.default_rng(7), 0.0
    for trial in range(36):
        position, size = trial % BATCHES, 1 + trial % 4
        maps = np.array([rotated(generator, c, size) for _ in range(STEPS)])
        if trial < 2 * BATCHES:  # the plain scalar contraction among them
            maps = np.tile(c * np.eye(size), (STEPS, 1, 1))
        stds = noises(final)
        found = mu_of_maps(maps, worst_directions(maps, position, stds), shifts(position), stds)
        closest = max(closest, found / bound(position, final, c))
    assert 0.75 < closest <= 1 + 1e-9  # the attack comes near, so a bound that much lower would be caught


GRID = np.linspace(-16, 16, 801)
WIDTH = GRID[1] - GRID[0]


def wavy(generator: np.random.Generator, c: float) -> np.ndarray:
    """A c-Lipschitz function on the grid: slopes drawn from [-c, c] on stretches of random length."""
    edges = np.sort(generator.uniform(-6, 6, size=8))
    slopes = c * generator.choice([1.0, 1.0, 1.0, -1.0, 0.0], size=9)
    slope = slopes[np.searchsorted(edges, GRID)]
    values = np.cumsum(slope) * WIDTH
    return values - np.interp(0.0, GRID, values)


def carried(density: np.ndarray, images: np.ndarray, std: float) -> np.ndarray:
    """The density of phi(x) + N(0, std^2), normalised on the grid."""
    kernel = np.exp(-0.5 * ((GRID[:, None] - images[None, :]) / std) ** 2)
    out = kernel @ density
    return np.asarray(out / (out.sum() * WIDTH))


def neighbour(generator: np.random.Generator, images: np.ndarray, c: float) -> np.ndarray:
    """Another c-Lipschitz map at most SHIFT away, whose distance depends on x, as a saturating residual's does."""
    return np.asarray(np.clip(wavy(generator, c), images - SHIFT, images + SHIFT))


def last_densities(
    generator: np.random.Generator, c: float, position: int, stds: np.ndarray, *, plain: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Two runs from 0 whose maps differ at one batch's steps; `plain` for x <- c x against x <- c x + shift."""
    p = q = np.eye(len(GRID))[len(GRID) // 2] / WIDTH
    for s, std in zip(shifts(position), stds, strict=True):
        images = c * GRID if plain else wavy(generator, c)
        other = images + s if plain else neighbour(generator, images, c) if s else images
        p, q = carried(p, images, std), carried(q, other, std)
    return p, q


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0)) * WIDTH)


def gaussian_delta(mu: float, epsilon: float) -> float:
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def largest_share(p: np.ndarray, q: np.ndarray, mu: float) -> float:
    """The largest delta over that of two Gaussians mu apart, at several epsilons and in both directions."""
    return max(
        hockey_stick(first, second, epsilon) / gaussian_delta(mu, epsilon)
        for first, second in ((p, q), (q, p))
        for epsilon in (0.0, 0.5, 1.0, 2.0)
    )


@pytest.mark.parametrize("c", [pytest.param(0.9, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("final", [0.0, math.sqrt(BATCHES - 1)])
def test_no_nonlinear_maps_beat_the_theorem(final: float, c: float) -> None:
    generator = np.random.default_rng(11)
    for trial in range(10):
        position = trial % BATCHES
        p, q = last_densities(generator, c, position, noises(final), plain=trial < BATCHES)
        mu = bound(position, final, c)
        assert largest_share(p, q, mu) <= 1 + 1e-3  # the grid's own error is smaller
        if trial == BATCHES - 1:
            assert largest_share(p, q, 0.75 * mu) > 1  # a bound that much lower is caught
