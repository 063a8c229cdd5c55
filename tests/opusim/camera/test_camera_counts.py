"""Counts and digital numbers of single pixels: laws, limits, and the naive twin of the kernels."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import poisson

from opusim.camera.stages import fill_counts, fill_numbers
from tests.oracles import naive_camera


def counts_at(rate: float, w: np.ndarray) -> np.ndarray:
    counts = np.empty(w.size)
    fill_counts(counts, np.full(w.size, rate), w.astype(np.float32))
    return counts


def total_variation(rate: float) -> float:
    """Of the kernel's law from Poisson's, from the w at which its counts step up: no sampling."""
    n = np.arange(max(0, int(rate - 9 * rate**0.5 - 5)), int(rate + 9 * rate**0.5 + 25))
    low, high = np.full(n.size, -9.5), np.full(n.size, 9.5)
    for _ in range(60):
        middle = (low + high) / 2
        reached = counts_at(rate, middle) >= n
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    masses = np.diff(ndtr(high))
    return float(0.5 * np.sum(np.abs(masses - poisson.pmf(n[:-1], rate))))


@pytest.mark.parametrize("rate", [0.05, 1.0, 6.0, 11.99, 12.0, 20.0, 64.0, 100.0, 699.0, 701.0, 2544.0])
def test_the_counts_law_is_within_the_stated_distance(rate: float) -> None:
    assert total_variation(rate) < 1e-6


def test_counts_equal_the_naive_twins(seed: int) -> None:
    random = np.random.default_rng(seed)
    w = random.standard_normal(4000).astype(np.float32)
    rates = random.exponential(80.0, 4000)
    counts = np.empty(4000)
    fill_counts(counts, rates, w)
    wrong = counts != [
        naive_camera.count(rate, value) for rate, value in zip(rates, w.astype(float), strict=True)
    ]
    assert not np.any(wrong)


def test_counts_grow_with_the_rate_and_with_w() -> None:
    w = np.linspace(-5, 5, 1001)
    for rate in (0.3, 12.0, 80.0):
        assert np.all(np.diff(counts_at(rate, w)) >= 0)
    low, high = counts_at(11.9999, w), counts_at(12.0001, w)
    assert np.mean(low != high) < 0.01  # no seam where the method changes
    assert np.all(counts_at(0.0, w) == 0)


def test_numbers_go_through_the_stages_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 300
    rates, offset = random.exponential(30.0, size), random.normal(0, 2, size)
    w, z = random.standard_normal((2, size)).astype(np.float32)
    got = np.empty(size)
    fill_numbers(got, rates, offset, w, z, (1.0, 55.0, 2.7, 3.3, 20.0, 180.0))
    fixed = {"well": 55.0, "read": 2.7, "black": 20.0, "gain": 3.3, "top": 180.0}
    parts = zip(rates, w.astype(float), z.astype(float), offset, strict=True)
    expected = [naive_camera.digital_number(r, a, b, fixed | {"offset": o}) for r, a, b, o in parts]
    np.testing.assert_array_equal(got, expected)


def test_each_stage_switches_off_alone() -> None:
    rates, none = np.array([0.4, 70.0, 5000.0]), np.zeros(3)
    quiet, empty = np.empty(3), np.empty(0, np.float32)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, np.inf, 0.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * rates, rtol=1e-15)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, 60.0, 0.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * np.minimum(rates, 60), rtol=1e-15)
    fill_numbers(quiet, rates, none, empty, empty, (0.0, np.inf, 0.0, 2.7, 10.0, 4095.0))
    np.testing.assert_array_equal(quiet, [11, 199, 4095])
    z = np.array([-1.5, 0.0, 2.0], np.float32)
    fill_numbers(quiet, rates, none, z, z, (0.0, np.inf, 3.0, 2.7, 10.0, -1.0))
    np.testing.assert_allclose(quiet, 10 + 2.7 * (rates + 3.0 * z), rtol=1e-15)
    fill_numbers(quiet, rates, none, z, z, (1.0, np.inf, 0.0, 1.0, 0.0, -1.0))
    np.testing.assert_array_equal(quiet, poisson.ppf(ndtr(z.astype(float)), rates))


def test_tails_reach_nine_standard_deviations() -> None:
    assert counts_at(20.0, np.array([ndtri(1e-12)]))[0] == poisson.ppf(
        ndtr(float(np.float32(ndtri(1e-12)))), 20
    )
    assert counts_at(20.0, np.array([9.4]))[0] < 400
