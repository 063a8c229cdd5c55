"""Test the laws of the random samplers, each together with a sampler that breaks it and must be caught.

A statistic of many steps is compared with its exact mean, in standard errors of its variance under the law.
The limit is that of 5 standard errors for one normal variable (probability 5.7e-7), and is moved outwards
where the largest of a family is taken (Bonferroni).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, norm

from opusim.training.data.samplers import (
    FixedSizeSampler,
    PoissonMinBatchSampler,
    PoissonSampler,
    Sampler,
    ShuffledEpochsSampler,
)

N, B, STEPS = 24, 6, 6000
Q = B / N
LEAST = 5
SEED = 0


def _limit(family: int) -> float:
    """Number of standard errors that the largest of a family stays within."""
    return float(norm.isf(norm.sf(5.0) / family))


def _inclusions(draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """Whether each record is in each step's batch, shape (STEPS, N)."""
    included = np.zeros((STEPS, N), dtype=bool)
    for step in range(STEPS):
        included[step, draw(step)] = True
    return included


def _of(sampler: Sampler) -> np.ndarray:
    return _inclusions(lambda step: sampler.indices(step).numpy())


def _inclusion_deviation(included: np.ndarray, probability: float) -> float:
    """Largest deviation of a record's frequency, in standard errors, over the limit of its family."""
    error = np.sqrt(probability * (1 - probability) / len(included))
    return float(np.abs(included.mean(axis=0) - probability).max() / error / _limit(N))


def _pair_deviation(included: np.ndarray, probability: float) -> float:
    """The same for the frequency with which two records meet in a batch."""
    both = (included.T.astype(float) @ included)[np.triu_indices(N, k=1)] / len(included)
    error = np.sqrt(probability * (1 - probability) / len(included))
    return float(np.abs(both - probability).max() / error / _limit(len(both)))


def _step_deviation(included: np.ndarray, probability: float) -> float:
    """The same for a record's covariance between one step and the next, summed over records.

    Steps being independent, products of centred inclusions have mean 0, and those of different steps or of
    independent records are uncorrelated; records of a fixed-size batch correlate by -1 / (N - 1) at both
    steps, which multiplies the variance of the sum over records by 1 + 1 / (N - 1).
    """
    centred = included - probability
    products = (centred[1:] * centred[:-1]).sum(axis=1)
    error = probability * (1 - probability) * np.sqrt(N * (1 + 1 / (N - 1)) / len(products))
    return float(abs(products.mean()) / error / _limit(1))


def _size_deviation(included: np.ndarray, sizes: np.ndarray, masses: np.ndarray) -> float:
    """The same for mean and variance of the batch size, whose law has the given masses."""
    mean = float(sizes @ masses)
    variance = float((sizes - mean) ** 2 @ masses)
    kurtosis = float((sizes - mean) ** 4 @ masses) / variance**2
    found = included.sum(axis=1)
    of_mean = abs(found.mean() - mean) / np.sqrt(variance / len(found))
    of_variance = abs(((found - mean) ** 2).mean() - variance) / (
        variance * np.sqrt((kurtosis - 1) / len(found))
    )
    return float(max(of_mean, of_variance) / _limit(2))


def _binomial(least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and masses of Binomial(N, Q), given at least `least`."""
    sizes = np.arange(least, N + 1)
    masses = binom.pmf(sizes, N, Q)
    return sizes, masses / masses.sum()


@pytest.fixture(scope="module")
def poisson() -> np.ndarray:
    return _of(PoissonSampler(N, Q, seed=SEED))


@pytest.fixture(scope="module")
def fixed_size() -> np.ndarray:
    return _of(FixedSizeSampler(N, B, seed=SEED))


@pytest.fixture(scope="module")
def shuffled() -> np.ndarray:
    return _of(ShuffledEpochsSampler(N, B, seed=SEED))


@pytest.fixture(scope="module")
def rejecting() -> np.ndarray:
    return _of(PoissonMinBatchSampler(N, Q, LEAST, seed=SEED))


def _faulty(draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    return _inclusions(lambda _: draw(generator))


def test_poisson_follows_its_law(poisson: np.ndarray) -> None:
    assert _inclusion_deviation(poisson, Q) < 1
    assert _pair_deviation(poisson, Q**2) < 1
    assert _step_deviation(poisson, Q) < 1
    assert _size_deviation(poisson, *_binomial()) < 1


def test_fixed_size_follows_its_law(fixed_size: np.ndarray) -> None:
    assert (fixed_size.sum(axis=1) == B).all()
    assert _inclusion_deviation(fixed_size, B / N) < 1
    assert _pair_deviation(fixed_size, B * (B - 1) / (N * (N - 1))) < 1
    assert _step_deviation(fixed_size, B / N) < 1


def test_the_first_batch_of_a_shuffled_epoch_is_a_uniform_set(shuffled: np.ndarray) -> None:
    for position in range(N // B):
        batches = shuffled[position :: N // B]
        assert _inclusion_deviation(batches, B / N) < 1
        assert _pair_deviation(batches, B * (B - 1) / (N * (N - 1))) < 1


def test_rejection_follows_the_conditional_law(rejecting: np.ndarray) -> None:
    sampler = PoissonMinBatchSampler(N, Q, LEAST, seed=SEED)
    assert rejecting.sum(axis=1).min() == LEAST
    assert _size_deviation(rejecting, *_binomial(LEAST)) < 1
    assert _inclusion_deviation(rejecting, sampler.expected_batch_size / N) < 1


def test_shuffled_epochs_and_fixed_sizes_sold_as_poisson_are_caught(
    shuffled: np.ndarray, fixed_size: np.ndarray
) -> None:
    assert _size_deviation(shuffled, *_binomial()) > 2
    assert _size_deviation(fixed_size, *_binomial()) > 2
    assert _step_deviation(shuffled, Q) > 2


def test_a_forgotten_last_record_is_caught() -> None:
    faulty = _faulty(lambda generator: np.flatnonzero(generator.random(N - 1) < Q))
    assert _inclusion_deviation(faulty, Q) > 2


def test_records_that_come_in_pairs_are_caught() -> None:
    faulty = _faulty(lambda generator: np.flatnonzero(np.repeat(generator.random(N // 2) < Q, 2)))
    assert _inclusion_deviation(faulty, Q) < 1  # each single record looks right
    assert _pair_deviation(faulty, Q**2) > 2


def test_a_window_sold_as_a_random_set_is_caught() -> None:
    faulty = _faulty(lambda generator: (generator.integers(N) + np.arange(B)) % N)
    assert _inclusion_deviation(faulty, B / N) < 1
    assert _pair_deviation(faulty, B * (B - 1) / (N * (N - 1))) > 2


def test_a_generator_that_repeats_its_step_is_caught() -> None:
    sampler = PoissonSampler(N, Q, seed=SEED)
    faulty = _inclusions(lambda step: sampler.indices(step // 2).numpy())
    assert _step_deviation(faulty, Q) > 2


def test_topping_up_sold_as_rejection_is_caught() -> None:
    def top_up(generator: np.random.Generator) -> np.ndarray:
        order = generator.permutation(N)
        return order[: max(LEAST, generator.binomial(N, Q))]

    assert _size_deviation(_faulty(top_up), *_binomial(LEAST)) > 2


def test_poisson_without_a_seed_has_its_law(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inclusions over 400 batches of 1,000 records, five standard errors; a rate 5 % off is caught.

    What the system would draw comes from the test's seed: an upper tail of squares is heavier than a normal one.
    """
    system = random.Random(seed).randbytes
    monkeypatch.setattr(os, "urandom", system)
    monkeypatch.setattr(random, "_urandom", system)  # behind the module secrets
    q = 0.137
    sampler = PoissonSampler(1000, q, seed=None)
    counts = np.zeros(1000)
    for step in range(400):
        counts[sampler.indices(step).numpy()] += 1
    standard_error = (q * (1 - q) / 400_000) ** 0.5
    assert abs(counts.mean() / 400 - q) < 5 * standard_error
    assert abs(counts.mean() / 400 - 1.05 * q) > 5 * standard_error
    spread = np.square(counts - 400 * q).mean() / (400 * q * (1 - q))
    assert abs(spread - 1) < 5 * (2 / 1000) ** 0.5
    assert not np.array_equal(sampler.indices(0).numpy(), sampler.indices(0).numpy())
