"""Device noise by its law, also under fluctuating light: exact divergences, boxes, certificates, refusals."""

import math
from itertools import permutations, product

import mpmath
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import norm, poisson

from opusim.accounting import numerics
from opusim.accounting.guarantee import NoGuarantee, Status
from opusim.accounting.mechanisms.counts import known_counts_guarantee
from opusim.accounting.mechanisms.readings import (
    ORDERS,
    DeviceReadings,
    box_rdp,
    box_variation,
    device_readings_guarantee,
    epsilon_of_divergence,
    least_epsilon,
    mu_of_readings,
    poisson_divergence,
)
from opusim.noise import FluctuatingCountNoise, GaussianNoise, NoiseModel, PhotonCountNoise
from tests.support.discrete_noise import DiscreteNoise

DELTA = 1e-5
GRID = DiscreteNoise(values=np.array([-1.0, 0.0, 1.0]), log_masses=np.log([0.25, 0.5, 0.25]))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.5), (5.0, 4.0), (20.0, 20.001), (0.0, 2.0), (7.0, 7.0)])
@pytest.mark.parametrize("order", [1.01, 2.0, 7.5])
def test_poisson_divergence_equals_the_sum_over_counts(a: float, b: float, order: float) -> None:
    with mpmath.workdps(40):
        low, high, alpha = mpmath.mpf(a), mpmath.mpf(b), mpmath.mpf(order)
        terms = (
            (mpmath.exp(-low) * low**k / mpmath.factorial(k)) ** alpha
            * (mpmath.exp(-high) * high**k / mpmath.factorial(k)) ** (1 - alpha)
            for k in range(200)
        )
        exact = float(mpmath.log(mpmath.fsum(terms)) / (alpha - 1))
    found = float(poisson_divergence(a, b, order))
    assert found == pytest.approx(exact, rel=1e-3, abs=1e-11)
    assert found >= exact * (1 - 1e-12) - 1e-30  # rounded up


def test_no_light_is_infinite_and_more_light_is_less_private() -> None:
    assert math.isinf(float(poisson_divergence(1e-9, 0.0, 2.0)))
    assert float(poisson_divergence(0.0, 0.0, 2.0)) == 0.0
    one, three = (float(poisson_divergence(2.0 * c, 1.5 * c, 3.0)) for c in (1.0, 2.7))
    assert three == pytest.approx(2.7 * one, rel=1e-9)


def test_the_corner_of_a_box_is_the_worst_pair(seed: int) -> None:
    generator = np.random.default_rng(seed)
    low = generator.uniform(0.2, 3, size=5)
    box = PhotonCountNoise(rate_low=low, rate_high=low + generator.uniform(0, 3, size=5))
    for order in (1.5, 4.0):
        for _ in range(300):
            rates = generator.uniform(box.rate_low, box.rate_high, size=(2, 5))
            assert numerics.pattern_divergences(rates, order).max() <= box_rdp(box, order) * (1 + 1e-9)
        corners = np.stack([box.rate_high, box.rate_low])
        assert numerics.pattern_divergences(corners, order).max() == pytest.approx(box_rdp(box, order))


def test_known_patterns_are_compared_pair_by_pair(seed: int) -> None:
    """The matrix product against the elementwise divergences, near and far."""
    generator = np.random.default_rng(seed)
    for spread in (1e-4, 0.3, 3.0):
        rates = 40 * np.exp(spread * generator.standard_normal((4, 300)))
        for order in (1.01, 2.7, 30.0):
            pairs = [poisson_divergence(a, b, order).sum() for a, b in permutations(rates, 2)]
            assert numerics.pattern_divergences(rates, order).max() == pytest.approx(max(pairs), rel=1e-4)
            assert numerics.pattern_divergences(rates, order).max() != pytest.approx(min(pairs), rel=1e-4)


def test_known_counts_are_sharper_than_the_boxes_around_them() -> None:
    rates = np.array([[50.0, 55.0], [55.0, 50.0], [50.0, 50.0]])
    box = PhotonCountNoise(rate_low=rates.min(0), rate_high=rates.max(0))
    loose = device_readings_guarantee(DeviceReadings(noise=box, readings=1), DELTA)
    sharp = known_counts_guarantee(rates[[0, 2]], delta=DELTA)
    known = known_counts_guarantee(rates, delta=DELTA)
    assert sharp.epsilon < known.epsilon < loose.epsilon
    assert known_counts_guarantee(rates, delta=DELTA, beta=5e-6).epsilon > known.epsilon
    assert sharp.status is Status.PROVEN_UNDER_DEVICE_MODEL
    with pytest.raises(NoGuarantee, match="must exceed beta"):
        known_counts_guarantee(rates, delta=DELTA, beta=1e-4)


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 30.0, 1e4])
def test_orders_that_cannot_matter_change_no_epsilon(scale: float) -> None:
    seen = []

    def divergence(order: float) -> float:
        seen.append(order)
        return scale * float(poisson_divergence(3.0, 2.0, order))

    found = epsilon_of_divergence(divergence, DELTA)
    curve = [scale * float(poisson_divergence(3.0, 2.0, order)) for order in ORDERS]
    assert found == numerics.renyi_to_epsilon(ORDERS, curve, DELTA)
    assert len(seen) < len(ORDERS)


def test_photon_epsilon_is_above_the_exact_hockey_stick_divergence() -> None:
    """One pixel, two rates: delta(epsilon) summed over counts is at most the delta asked for."""
    noise = PhotonCountNoise(rate_low=50.0, rate_high=55.0)
    guarantee = device_readings_guarantee(DeviceReadings(noise=noise, readings=1), DELTA)
    counts = np.arange(400)
    logs = [counts * np.log(r) - r - np.array([math.lgamma(k + 1) for k in counts]) for r in (55.0, 50.0)]
    for p, q in (logs, logs[::-1]):
        assert np.sum(np.maximum(np.exp(p) - np.exp(guarantee.epsilon + q), 0)) <= DELTA
    assert guarantee.status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert 2 < guarantee.epsilon < 5


def exact_variation(a: float, b: float) -> float:
    """Total variation of two Poisson laws, summed over counts."""
    counts = np.arange(int(max(a, b) + 20 * math.sqrt(max(a, b)) + 60))
    logs = [-r + counts * math.log(r) - np.array([math.lgamma(k + 1) for k in counts]) for r in (a, b)]
    return float(0.5 * np.sum(np.abs(np.exp(logs[0]) - np.exp(logs[1]))))


@pytest.mark.parametrize("a", [1e-7, 0.03, 2.7, 300.0])
@pytest.mark.parametrize("step", [1e-7, 1e-3, 0.5])
def test_the_limit_of_total_variation_holds_and_is_near(a: float, step: float) -> None:
    exact = exact_variation(a, a + step)
    box = PhotonCountNoise(rate_low=np.array([a]), rate_high=np.array([a + step]))
    assert exact * (1 - 1e-6) <= box_variation(box) <= 1.6 * exact
    assert box_variation(box, 3) >= box_variation(box)


def test_epsilon_is_zero_where_total_variation_proves_it() -> None:
    rates = np.array([[300.0, 40.0], [300.00032, 40.0]])
    assert exact_variation(300.0, 300.00032) < DELTA
    known = known_counts_guarantee(rates, delta=DELTA)
    assert known.epsilon == 0
    assert known.status is Status.PROVEN_UNDER_DEVICE_MODEL
    box = PhotonCountNoise(rate_low=rates.min(0), rate_high=rates.max(0))
    assert device_readings_guarantee(DeviceReadings(noise=box, readings=1), DELTA).epsilon == 0
    assert device_readings_guarantee(DeviceReadings(noise=box, readings=100), DELTA).epsilon > 0
    beta = DELTA - 1e-7  # what is left of delta is less than the distance
    assert known_counts_guarantee(rates, delta=DELTA, beta=beta).epsilon > 0
    gaussian = GaussianNoise(std=1.0, n_outputs=2)
    near = DeviceReadings(noise=gaussian, readings=1, distance=2.5e-5)  # erf(mu / sqrt 8) = 0.997e-5
    assert device_readings_guarantee(near, DELTA).epsilon == 0
    far = DeviceReadings(noise=gaussian, readings=1, distance=2.6e-5)
    assert device_readings_guarantee(far, DELTA).epsilon > 0
    dark = np.array([[0.0, 5.0], [1e-6, 5.0]])  # no Renyi divergence is finite
    assert known_counts_guarantee(dark, delta=DELTA).epsilon == 0
    assert math.isinf(known_counts_guarantee(dark * [[1], [100]], delta=DELTA).epsilon)


def test_zero_rates_are_infinite_and_laws_without_a_theorem_refused() -> None:
    noise = PhotonCountNoise(rate_low=np.array([1.0, 0.0]), rate_high=np.array([1.0, 0.1]))
    guarantee = device_readings_guarantee(DeviceReadings(noise=noise, readings=1), DELTA)
    assert (guarantee.epsilon, guarantee.reason) == (math.inf, "a rate may be 0 in its box")
    assert guarantee.status is Status.NONE
    with pytest.raises(NoGuarantee, match="noise law 'discrete': no theorem"):
        device_readings_guarantee(DeviceReadings(noise=GRID, readings=1), DELTA)
    law = GaussianNoise(std=1.0, n_outputs=1, beta=DELTA)
    readings = DeviceReadings(noise=law, readings=1, distance=1.0)
    with pytest.raises(NoGuarantee, match="must exceed beta"):
        device_readings_guarantee(readings, DELTA)


def test_gaussian_readings_compose_and_use_the_smallest_deviation() -> None:
    noise = GaussianNoise(std=np.array([4.0, 2.7]), n_outputs=2, beta=1e-6)
    guarantee = device_readings_guarantee(DeviceReadings(noise=noise, readings=9, distance=0.9), DELTA)
    assert guarantee.epsilon == pytest.approx(get_epsilon_gaussian(1.0, 9e-6))
    assert mu_of_readings(DeviceReadings(noise=noise, readings=9, distance=0.9)) == pytest.approx(1.0)
    silent = DeviceReadings(noise=GaussianNoise(std=0.0, n_outputs=2), readings=1, distance=1.0)
    assert math.isinf(device_readings_guarantee(silent, DELTA).epsilon)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("std", [1e-300, 1e-12, 1e7, 1e200])
def test_readings_of_extreme_noise_are_stated_without_a_warning(std: float) -> None:
    noise = GaussianNoise(std=std, n_outputs=4)
    guarantee = device_readings_guarantee(DeviceReadings(noise=noise, readings=1, distance=1.0), 1e-12)
    assert math.isinf(guarantee.epsilon) == (std < 1)
    assert guarantee.status is (Status.NONE if std < 1 else Status.PROVEN_UNDER_DEVICE_MODEL)


COUNTS = np.arange(60)
FACTORS = (0.3, 0.9, 1.0, 1.5, 3.0, 12.0)


def law(rates: np.ndarray) -> np.ndarray:
    """Masses of two independent counts, flat."""
    return np.outer(*(poisson.pmf(COUNTS, rate) for rate in rates)).ravel()


def divergence(p: np.ndarray, q: np.ndarray, factor: float) -> float:
    """H_k(P || Q), but for the masses beyond 60 counts."""
    return float(np.sum(np.maximum(p - factor * q, 0.0)))


class Instance:
    """Two inputs in two frames, dark light of its own in each, powers of any joint law on a grid.

    At the extreme the theorem is an equality: the brightest power is certain, and the dark light is the least.
    """

    def __init__(self, random: np.random.Generator, *, is_extreme: bool) -> None:
        self.light = random.uniform(0, 3, (2, 2))  # input, frame
        self.least_dark = random.uniform(0.2, 1.0)
        self.dark = self.least_dark + (0.0 if is_extreme else random.uniform(0, 1.0, 2))
        self.powers = [np.array(pair) for pair in product((0.0, 0.6, 1.3, 2.5), repeat=2)]
        self.chances = random.dirichlet(np.full(len(self.powers), 0.3))
        if is_extreme:
            self.chances = np.eye(len(self.powers))[-1]

    def released(self, factor: float, first: int) -> tuple[float, float]:
        """H_k of the counts, without and with the powers released."""
        laws = [[law(w * self.light[i] + self.dark) for w in self.powers] for i in (first, 1 - first)]
        mixed = [np.tensordot(self.chances, np.stack(each), axes=1) for each in laws]
        known = sum(c * divergence(p, q, factor) for c, p, q in zip(self.chances, *laws, strict=True))
        return divergence(*mixed, factor), float(known)

    def bound(self, brightest: float, factor: float, first: int, *, scaled_dark: bool = False) -> float:
        """H_k of steady counts at the brightest light; a fault: dark light scaled as well."""
        dark = self.least_dark * (brightest if scaled_dark else 1.0)
        return divergence(*(law(brightest * self.light[i] + dark) for i in (first, 1 - first)), factor)

    def beta(self, brightest: float) -> float:
        return float(sum(c for c, w in zip(self.chances, self.powers, strict=True) if w.max() > brightest))


def exceeds(random: np.random.Generator, *, scaled_dark: bool = False, beta_counts: bool = True) -> bool:
    """Whether any of 25 mixtures, every second at the extreme, exceeds the bound anywhere, in either direction."""
    for number in range(25):
        instance = Instance(random, is_extreme=bool(number % 2))
        for brightest, factor, first in product((1.3, 2.5), FACTORS, (0, 1)):
            most = instance.bound(brightest, factor, first, scaled_dark=scaled_dark)
            most += instance.beta(brightest) if beta_counts else 0.0
            if max(instance.released(factor, first)) > most + 1e-9:
                return True
    return False


@pytest.mark.slow
def test_no_mixture_exceeds_the_theorem(seed: int) -> None:
    assert not exceeds(np.random.default_rng(seed))


@pytest.mark.parametrize("fault", [{"beta_counts": False}, {"scaled_dark": True}])
def test_a_bound_without_beta_or_of_scaled_dark_light_is_exceeded(fault: dict[str, bool], seed: int) -> None:
    """Dark light that scales is what homogeneity of the divergence would take for granted."""
    assert exceeds(np.random.default_rng(seed), **fault)


def fluctuating(rms: float = 0.05, power_law: str = "log_normal", **changes: object) -> FluctuatingCountNoise:
    numbers = {"rate_low": np.full((4, 8), 3.0), "rate_high": np.full((4, 8), 3.4)} | changes
    return FluctuatingCountNoise(power_law=power_law, power_rms=rms, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("power_law", ["log_normal", "gaussian"])
def test_the_brightest_light_is_exceeded_as_often_as_beta_says(power_law: str) -> None:
    noise = fluctuating(0.1, power_law)
    for beta in (1e-12, 1e-6, 0.01):
        box = noise.at_most(40, beta)
        (power,) = set(((box.rate_high - noise.rate_low) / 0.4).round(12).ravel())
        s = math.sqrt(math.log(1.01))
        deviate = (power - 1) / 0.1 if power_law == "gaussian" else (math.log(power) + s * s / 2) / s
        assert norm.sf(deviate) == pytest.approx(beta / 40, rel=1e-4)
        assert box.beta == beta
        assert np.array_equal(box.rate_low, noise.rate_low)
    assert noise.at_most(1, 0.9).rate_high.max() == pytest.approx(3.4)  # never below the mean light
    with pytest.raises(ValueError, match="exceeds every power"):
        noise.at_most(1, 0.0)


def test_a_guarantee_takes_both_betas_off_delta_and_says_so() -> None:
    noise, delta = fluctuating(beta=2e-6), 1e-5
    best = least_epsilon(noise, 3, delta - 2e-6)
    found = device_readings_guarantee(DeviceReadings(noise=noise, readings=3), delta)
    assert found.epsilon == best.epsilon
    boxes = noise.at_most(12, best.beta)  # 3 readings of 4 frames
    steady = device_readings_guarantee(DeviceReadings(noise=boxes, readings=3), delta)
    assert boxes.beta == pytest.approx(2e-6 + best.beta)
    assert found.epsilon == pytest.approx(steady.epsilon, rel=1e-12)
    assert "fluctuating-light" in found.source
    text = " ".join(each.text for each in found.assumptions)
    assert f"beta of use = {best.beta:.3g}" in text
    assert "heated mirrors" in text
    with pytest.raises(NoGuarantee, match="must exceed beta"):
        device_readings_guarantee(DeviceReadings(noise=noise, readings=3), 2e-6)


def test_steady_light_is_the_limit_of_small_fluctuations() -> None:
    def epsilon(noise: NoiseModel) -> float:
        return device_readings_guarantee(DeviceReadings(noise=noise, readings=1), 1e-5).epsilon

    still = epsilon(PhotonCountNoise(rate_low=np.full((4, 8), 3.0), rate_high=np.full((4, 8), 3.4)))
    assert epsilon(fluctuating(0.0)) == still
    values = [epsilon(fluctuating(rms)) for rms in (1e-4, 0.01, 0.1, 0.3)]
    assert still < values[0] < values[1] < values[2] < values[3]
    assert values[0] == pytest.approx(still, rel=0.01)


def test_a_guarantee_holds_for_the_exact_mixture_of_a_continuous_law() -> None:
    """One pixel, log-normal power by quadrature, the power released: H at exp(epsilon) is at most delta."""
    delta, noise = 1e-3, fluctuating(0.05, rate_low=20.0, rate_high=26.0)
    epsilon = device_readings_guarantee(DeviceReadings(noise=noise, readings=1), delta).epsilon
    g = np.linspace(-8, 8, 801)
    chances, counts = norm.pdf(g) * (g[1] - g[0]), np.arange(200)
    p, q = (poisson.pmf(counts, 20 + 6 * power) for power in (noise.power.of_normal(g)[:, None], 0.0))

    def released(factor: float) -> float:
        sides = [np.maximum(a - factor * b, 0).sum(axis=1) for a, b in ((p, q), (q, p))]
        return float(chances @ np.maximum(*sides))

    assert released(math.exp(epsilon)) <= delta < released(math.exp(0.6 * epsilon))


def test_the_law_bounds_its_variance(seed: int) -> None:
    weight = np.ones((2, 3))
    noise = FluctuatingCountNoise(
        rate_low=np.full((2, 3), 2.0), rate_high=np.full((2, 3), 52.0), power_law="gaussian", power_rms=0.1,
        weight=weight,
    )  # fmt: skip
    random = np.random.default_rng(seed)
    low, high = noise.variance_bounds()
    power = noise.power.of_normal(random.standard_normal((100_000, 1, 1)))  # of both frames
    counts = random.poisson(2 + 47 * power, size=(100_000, 2, 3))
    variances = np.sum(weight * counts, axis=1).var(axis=0)
    assert np.all((low <= variances) & (variances <= high))
    assert np.all(variances > noise.at_most(1, 0.5).variance_bounds()[1])  # that of counts only
