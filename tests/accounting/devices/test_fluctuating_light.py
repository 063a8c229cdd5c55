"""Light that fluctuates: the theorem against exact mixtures, the law's boxes, and what a guarantee states."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm, poisson

from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.readings import DeviceReadings, device_readings_guarantee, least_epsilon
from opusim.noise import FluctuatingCountNoise, NoiseModel, PhotonCountNoise

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
def test_a_bound_without_beta_or_with_scaled_dark_light_is_exceeded(
    fault: dict[str, bool], seed: int
) -> None:
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
        rate_low=np.full((2, 3), 2.0),
        rate_high=np.full((2, 3), 52.0),
        power_law="gaussian",
        power_rms=0.1,
        weight=weight,
    )
    random = np.random.default_rng(seed)
    low, high = noise.variance_bounds()
    power = noise.power.of_normal(random.standard_normal((100_000, 1, 1)))  # of both frames
    counts = random.poisson(2 + 47 * power, size=(100_000, 2, 3))
    variances = np.sum(weight * counts, axis=1).var(axis=0)
    assert np.all((low <= variances) & (variances <= high))
    assert np.all(variances > noise.at_most(1, 0.5).variance_bounds()[1])  # that of counts only
