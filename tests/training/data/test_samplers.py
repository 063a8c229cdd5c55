"""Samplers: exact properties of every scheme, errors in a configuration, and the laws of the random ones.

Each law is tested together with a sampler that breaks it and must be caught. A statistic of many steps is compared
with its exact mean, in standard errors of its variance under the law. The limit is that of 5 standard errors for one
normal variable (probability 5.7e-7), and is moved outwards where the largest of a family is taken (Bonferroni).
"""

import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from opusim.training.data.samplers import (
    SCHEMES,
    DisjointCyclicSampler,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonMinBatchSampler,
    PoissonSampler,
    Sampler,
    ShuffledEpochsSampler,
    make_sampler,
)
from tests.support.forked import in_forked_process

OPTIONS: dict[str, dict[str, Any]] = {"poisson-min-batch": {"min_batch_size": 5}}


def _sampler(scheme: str, seed: int | None = 3) -> Sampler:
    """A sampler of 23 records in batches of 7."""
    return make_sampler(scheme, 23, None if scheme == "full-batch" else 7, seed, **OPTIONS.get(scheme, {}))


@pytest.mark.parametrize("scheme", SCHEMES)
class TestEveryScheme:
    """What holds for any sampler."""

    def test_gives_distinct_positions_in_range(self, scheme: str) -> None:
        sampler = _sampler(scheme)
        assert sampler.scheme == scheme
        for step in range(50):
            batch = sampler.indices(step)
            assert batch.dtype == torch.int64
            assert batch.ndim == 1
            assert len(batch.unique()) == len(batch)
            assert set(batch.tolist()) <= set(range(23))

    def test_a_batch_depends_on_seed_and_step_alone(self, scheme: str) -> None:
        in_order = [_sampler(scheme).indices(step) for step in range(12)]
        sampler = _sampler(scheme)
        for step in (11, 0, 5, 5, 7, 1):
            assert torch.equal(sampler.indices(step), in_order[step])

    def test_a_caller_may_change_a_batch(self, scheme: str) -> None:
        sampler = _sampler(scheme)
        before = sampler.indices(1).clone()
        sampler.indices(1).zero_()
        assert torch.equal(sampler.indices(1), before)

    def test_leaves_global_generators_alone(self, scheme: str) -> None:
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()[1].copy()
        _sampler(scheme).indices(4)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert np.array_equal(np.random.get_state()[1], numpy_state)

    def test_is_frozen_and_compares_by_its_plan(self, scheme: str) -> None:
        sampler, twin = _sampler(scheme), _sampler(scheme)
        sampler.indices(0)
        assert sampler == twin
        assert hash(sampler) == hash(twin)
        with pytest.raises(AttributeError):
            sampler.n_records = 7  # type: ignore[misc]

    @pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
    def test_refuses_what_is_no_step(self, scheme: str, step: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"step = .*: must be (at least 0|an integer)"):
            _sampler(scheme).indices(step)


@pytest.mark.parametrize("scheme", ["poisson", "poisson-min-batch", "fixed-size", "shuffled-epochs"])
def test_seeds_steps_and_entropy_give_different_batches(scheme: str) -> None:
    options = OPTIONS.get(scheme, {})
    first, second = (make_sampler(scheme, 2000, 900, seed, **options) for seed in (1, 2))
    assert not torch.equal(first.indices(0), second.indices(0))
    assert not torch.equal(first.indices(0), first.indices(1))
    unseeded = [make_sampler(scheme, 2000, 900, None, **options).indices(0) for _ in range(2)]
    assert not torch.equal(*unseeded)


@pytest.mark.parametrize("scheme", ["poisson", "poisson-min-batch", "fixed-size"])
def test_without_a_seed_a_step_is_drawn_afresh(scheme: str) -> None:
    sampler = make_sampler(scheme, 2000, 900, None, **OPTIONS.get(scheme, {}))
    assert not torch.equal(sampler.indices(0), sampler.indices(0))


def test_a_sampler_without_a_seed_draws_in_its_own_process() -> None:
    sampler = make_sampler("shuffled-epochs", 60, 12, None)
    assert "RuntimeError: a sampler without a seed belongs" in in_forked_process(lambda: sampler.indices(0))
    seeded = make_sampler("shuffled-epochs", 60, 12, 4)
    assert in_forked_process(lambda: seeded.indices(0).tolist()) == str(seeded.indices(0).tolist())


def test_without_a_seed_shuffled_epochs_still_cover_each_epoch() -> None:
    sampler = ShuffledEpochsSampler(2000, 300, seed=None)
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        assert torch.cat([sampler.indices(s) for s in steps]).sort().values.tolist() == list(range(2000))
    assert not torch.equal(sampler.indices(0), sampler.indices(7))


@given(data=st.data(), n=st.integers(1, 60), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_an_epoch_of_shuffled_batches_has_all(data: st.DataObject, n: int, seed: int, epoch: int) -> None:
    size = data.draw(st.integers(1, n))
    for drop_last in (False, True):
        sampler = ShuffledEpochsSampler(n, size, drop_last, seed=seed)
        first = epoch * sampler.steps_per_epoch
        batches = [sampler.indices(first + i) for i in range(sampler.steps_per_epoch)]
        seen = torch.cat(batches)
        assert len(seen.unique()) == len(seen) == (n - n % size if drop_last else n)
        assert all(len(batch) == size for batch in batches[:-1])
        assert sampler.expected_batch_size == pytest.approx(np.mean([len(batch) for batch in batches]))


@given(data=st.data(), n=st.integers(1, 60), cycle=st.integers(0, 10**6))
def test_cyclic_batches_are_disjoint_full_and_repeat(data: st.DataObject, n: int, cycle: int) -> None:
    size = data.draw(st.integers(1, n))
    sampler = DisjointCyclicSampler(n, size, seed=0)
    k = sampler.steps_per_epoch
    batches = [sampler.indices(i) for i in range(k)]
    assert torch.cat(batches).tolist() == list(range(k * size))
    assert n - k * size < size
    assert all(torch.equal(sampler.indices(cycle * k + i), batches[i]) for i in range(k))


def test_samplers_at_their_limits() -> None:
    assert FullBatchSampler(5, seed=None).indices(9).tolist() == [0, 1, 2, 3, 4]
    assert FixedSizeSampler(9, 9, seed=0).indices(0).sort().values.tolist() == list(range(9))
    empty = PoissonSampler(3, 1e-300, seed=0).indices(0)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64
    certain = PoissonSampler(300, 1.0, seed=0)
    assert all(len(certain.indices(step)) == 300 for step in range(100))


def test_rejection_with_minimum_zero_is_plain_poisson() -> None:
    plain, rejecting = PoissonSampler(40, 0.3, seed=5), PoissonMinBatchSampler(40, 0.3, 0, seed=5)
    assert rejecting.expected_batch_size == plain.expected_batch_size == pytest.approx(12)
    assert all(torch.equal(plain.indices(step), rejecting.indices(step)) for step in range(20))


@pytest.mark.parametrize(
    ("n", "q", "least"), [(50, 0.1, 5), (50, 0.1, 1), (23, 0.7, 20), (54_000, 1 / 300, 180)]
)
def test_rejection_states_the_mean_of_its_law(n: int, q: float, least: int) -> None:
    sizes = np.arange(least, n + 1)
    masses = binom.pmf(sizes, n, q)
    sampler = PoissonMinBatchSampler(n, q, least, seed=0)
    assert sampler.acceptance_probability == pytest.approx(masses.sum(), rel=1e-9)
    assert sampler.expected_batch_size == pytest.approx((sizes * masses).sum() / masses.sum(), rel=1e-9)


@pytest.mark.parametrize(("sampler", "mean", "steps", "probability"), [
    (PoissonSampler(54_000, 256 / 54_000, seed=0), 256, 211, 256 / 54_000),
    (PoissonSampler(10, 0.9, seed=0), 9, 1, 0.9),
    (FullBatchSampler(5, seed=None), 5, 1, 1.0),
    (FixedSizeSampler(54_000, 256, seed=0), 256, 211, None),
    (ShuffledEpochsSampler(54_000, 256, seed=0), 54_000 / 211, 211, None),
    (ShuffledEpochsSampler(54_000, 256, drop_last=True, seed=0), 256, 210, None),
    (DisjointCyclicSampler(54_000, 256, seed=0), 256, 210, None),
])  # fmt: skip
def test_what_a_sampler_states(sampler: Sampler, mean: float, steps: int, probability: float | None) -> None:
    assert sampler.expected_batch_size == pytest.approx(mean)
    assert sampler.steps_per_epoch == steps
    assert sampler.sampling_probability == probability


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    (("bernoulli", 10, 2, 0), {}, ValueError, "scheme = 'bernoulli': must be one of 'poisson', "),
    (("poisson", 10, 11, 0), {}, ValueError, r"batch_size = 11: must be an integer in \[1, 10\]"),
    (("fixed-size", 10, 0, 0), {}, ValueError, r"batch_size = 0: must be an integer in \[1, 10\]"),
    (("fixed-size", 10, 2.5, 0), {}, TypeError, "batch_size = 2.5: must be an integer, not float"),
    (("fixed-size", 10, None, 0), {}, TypeError, "batch_size = None: scheme 'fixed-size' needs a batch"),
    (("shuffled-epochs", 0, 1, 0), {}, ValueError, r"n_records = 0: must be at least 1"),
    (("shuffled-epochs", 10, 2, -1), {}, ValueError, r"seed = -1: must be an integer in \[0, "),
    (("full-batch", 10, 4, 0), {}, ValueError, "batch_size = 4: must be None or n_records = 10"),
    (("poisson", 10, 2, 0), {"drop_last": True}, TypeError, "'poisson' has no option 'drop_last'.*none"),
    (("shuffled-epochs", 10, 2, 0), {"drop": 1}, TypeError, "no option 'drop'; its options: drop_last"),
    (("poisson-min-batch", 10, 2, 0), {}, TypeError, "needs the option 'min_batch_size'"),
    (("poisson-min-batch", 10, 2, 0), {"min_batch_size": 9}, ValueError, "reached with probability"),
    (("poisson-min-batch", 10, 2, 0), {"min_batch_size": 11}, ValueError, "min_batch_size = 11"),
])  # fmt: skip
def test_make_sampler_names_what_is_wrong(arguments: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make_sampler(*arguments, **options)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.01, float("nan")])
def test_poisson_refuses_what_is_no_probability(probability: float) -> None:
    with pytest.raises(ValueError, match=r"sampling_probability = .*: must"):
        PoissonSampler(10, probability, seed=0)


def test_options_that_are_none_count_as_not_given() -> None:
    assert make_sampler("poisson", 10, 2, 0, min_batch_size=None) == PoissonSampler(10, 0.2, seed=0)


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


@cache
def _of(sampler: Sampler) -> np.ndarray:
    return _inclusions(lambda step: sampler.indices(step).numpy())


POISSON, FIXED_SIZE = PoissonSampler(N, Q, seed=SEED), FixedSizeSampler(N, B, seed=SEED)
SHUFFLED, REJECTING = ShuffledEpochsSampler(N, B, seed=SEED), PoissonMinBatchSampler(N, Q, LEAST, seed=SEED)


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
    error = variance * np.sqrt((kurtosis - 1) / len(found))
    of_variance = abs(((found - mean) ** 2).mean() - variance) / error
    return float(max(of_mean, of_variance) / _limit(2))


def _binomial(least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and masses of Binomial(N, Q), given at least `least`."""
    sizes = np.arange(least, N + 1)
    masses = binom.pmf(sizes, N, Q)
    return sizes, masses / masses.sum()


def _faulty(draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    return _inclusions(lambda _: draw(generator))


def test_poisson_follows_its_law() -> None:
    poisson = _of(POISSON)
    assert _inclusion_deviation(poisson, Q) < 1
    assert _pair_deviation(poisson, Q**2) < 1
    assert _step_deviation(poisson, Q) < 1
    assert _size_deviation(poisson, *_binomial()) < 1


def test_fixed_size_follows_its_law() -> None:
    fixed_size = _of(FIXED_SIZE)
    assert (fixed_size.sum(axis=1) == B).all()
    assert _inclusion_deviation(fixed_size, B / N) < 1
    assert _pair_deviation(fixed_size, B * (B - 1) / (N * (N - 1))) < 1
    assert _step_deviation(fixed_size, B / N) < 1


def test_the_first_batch_of_a_shuffled_epoch_is_a_uniform_set() -> None:
    for position in range(N // B):
        batches = _of(SHUFFLED)[position :: N // B]
        assert _inclusion_deviation(batches, B / N) < 1
        assert _pair_deviation(batches, B * (B - 1) / (N * (N - 1))) < 1


def test_rejection_follows_the_conditional_law() -> None:
    rejecting = _of(REJECTING)
    assert rejecting.sum(axis=1).min() == LEAST
    assert _size_deviation(rejecting, *_binomial(LEAST)) < 1
    assert _inclusion_deviation(rejecting, REJECTING.expected_batch_size / N) < 1


def test_epochs_and_fixed_sizes_sold_as_poisson_show() -> None:
    assert _size_deviation(_of(SHUFFLED), *_binomial()) > 2
    assert _size_deviation(_of(FIXED_SIZE), *_binomial()) > 2
    assert _step_deviation(_of(SHUFFLED), Q) > 2


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
    faulty = _inclusions(lambda step: POISSON.indices(step // 2).numpy())
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
