"""Noise that is correlated over steps: its price against dense matrices, an independent accountant, and exact laws."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.special import ndtr

from opusim.accounting import Budget, RecordCentral, guarantees
from opusim.accounting.guarantee import BudgetExceeded, Guarantee
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanism import mechanism_from_json
from opusim.accounting.mechanisms.records import RecordReplaced

RUN = RecordCentral(
    noise_multiplier=2.0, sampling_probability=0.05, clip_norm=0.7, divisor=100, steps=42,
    correlation=(0.8, 0.5, 0.3),
)  # fmt: skip
STEPS, NOISE, Q = 4, 1.3, 0.35
COEFFICIENTS = (0.8, 0.6)
"""Of the exact examples, over four steps of two subsets."""


def only(*mechanisms: RecordCentral | RecordReplaced, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees(mechanisms, delta=delta)
    return guarantee


def dense(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    return sum(np.eye(steps, k=-back) * c for back, c in enumerate(coefficients))


@pytest.mark.parametrize(("correlation", "steps"), [
    *(((0.8, 0.5, 0.3), 2), ((0.8, 0.5, 0.3), 43), ((1.0, 0.9, 0.8, 0.7), 13)),
    pytest.param((2.0, 0.0, -1.5), 42, marks=pytest.mark.slow),
])  # fmt: skip
def test_epsilon_is_another_accountants_at_the_dense_sensitivity(correlation: tuple, steps: int) -> None:
    found = only(replace(RUN, correlation=correlation, steps=steps))
    bands = len(correlation)
    sensitivity = float(np.linalg.norm(dense(correlation, steps), axis=0).max())
    event = dp_accounting.PoissonSampledDpEvent(
        bands * RUN.sampling_probability, dp_accounting.GaussianDpEvent(RUN.noise_multiplier / sensitivity)
    )
    accountant = PLDAccountant()
    accountant.compose(event, math.ceil(steps / bands))
    expected = accountant.get_epsilon(1e-5)
    lower = found.epsilon if found.epsilon_lower is None else found.epsilon_lower
    assert lower - 1e-3 <= expected <= found.epsilon * 1.002 + 1e-6


def test_independent_noise_and_replacement_cost_what_they_did() -> None:
    plain = replace(RUN, correlation=(1.0,))
    kept = plain.to_json()
    del kept["correlation"]
    assert mechanism_from_json(kept) == plain
    assert mechanism_from_json(RUN.to_json()) == RUN
    flat = replace(plain, sampling_probability=0.15, steps=14, noise_multiplier=2 / math.hypot(0.8, 0.5, 0.3))
    assert only(RUN).epsilon == pytest.approx(only(flat).epsilon, rel=1e-6)
    assert only(plain).source.startswith("theorem clipped-records ")
    assert only(RUN).source.startswith("theorem banded-records ")
    assert "correlated over 3 steps" in RUN.describe()
    assert "correlated" not in plain.describe()
    values: dict[str, Any] = {"noise_multiplier": 2.0, "clip_norm": 1.0, "divisor": 1}
    banded = RecordReplaced(**values, sampling_probability=0.05, steps=11, correlation=(0.8, 0.6))
    flat = RecordReplaced(**values, sampling_probability=0.1, steps=6)
    assert only(banded).epsilon == pytest.approx(only(flat).epsilon, rel=1e-6)
    known = replace(RUN, steps=1).known_batch()
    assert known.as_noise().probability == 1.0
    assert known.as_noise().scale == pytest.approx(2.0 / 0.8)  # one step: only c_0 of its column has run
    # Two runs of 4 steps with 3 bands are 2 + 2 releases, and 8 steps of one run are 3.
    four = replace(RUN, steps=4)
    assert only(four, four).epsilon == pytest.approx(only(replace(RUN, steps=12)).epsilon, rel=1e-6)
    assert only(four, four).epsilon > only(replace(RUN, steps=8)).epsilon


def test_a_ledger_adds_the_steps_of_its_run(tmp_path: Path) -> None:
    step = RUN.repeated(1)
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=1e-5, block=4) as ledger:
        for number in range(10):
            ledger.pay(number, step, until=10)
        assert ledger.guarantees()[0].epsilon == pytest.approx(only(replace(RUN, steps=10)).epsilon, rel=1e-6)
        ledger.pay_once("correlated noise begun anew", step.repeated(2))
        for number in range(8, 10):  # a part with new noise: 4 + 1 releases
            ledger.pay(number, step, until=10)
    found = read_ledger(tmp_path / "ledger.jsonl").guarantees()[0]
    assert found.epsilon >= only(replace(RUN, steps=10), replace(RUN, steps=2)).epsilon * (1 - 1e-6)
    budget = Budget(epsilon=only(replace(RUN, steps=9)).epsilon, delta=1e-5)
    with Ledger(tmp_path / "budget.jsonl", mode="experiment", delta=1e-5, budget=budget) as ledger:
        for number in range(9):
            ledger.pay(number, step)
        with pytest.raises(BudgetExceeded):
            ledger.pay(9, step)


# Exact laws: one record, coins enumerated, noise N(0, NOISE^2 I) after multiplication by C


Law = list[tuple[float, np.ndarray]]
"""Probabilities and the shifts that they give rows of C G."""


def drawn(coefficients: tuple[float, ...], coins: list[tuple[float, tuple[int, ...]]]) -> Law:
    """The law of C G for a record of contribution 1: probabilities of the steps in which it is drawn."""
    matrix = dense(coefficients, STEPS)
    return [(p, matrix[:, list(steps)].sum(axis=1)) for p, steps in coins]


def batches(steps: tuple[int, ...], probability: float) -> list[tuple[float, tuple[int, ...]]]:
    """Which of some steps draw the record, each independently."""
    found = []
    for coins in product((0, 1), repeat=len(steps)):
        weight = math.prod(probability if coin else 1 - probability for coin in coins)
        found.append((weight, tuple(step for step, coin in zip(steps, coins, strict=True) if coin)))
    return found


def cyclic(coefficients: tuple[float, ...]) -> Law:
    """The record's subset by a fair coin, then Poisson batches of its subset."""
    return [
        (p / 2, shift)
        for subset in (0, 1)
        for p, shift in drawn(coefficients, batches((subset, subset + 2), 2 * Q))
    ]


def largest_gap(law: Law, epsilon: float, n: int = 60_000) -> tuple[float, float]:
    """The larger hockey-stick divergence of both orders with its standard error, by sampling from each side."""
    generator = np.random.default_rng(20260101)
    weights = np.array([p for p, _ in law])
    shifts = np.stack([shift for _, shift in law])
    noise = NOISE * generator.normal(size=(n, STEPS))
    mean = shifts[generator.choice(len(law), n, p=weights / weights.sum())]

    def log_ratio(y: np.ndarray) -> np.ndarray:  # record against none
        exponent = (y @ shifts.T - 0.5 * np.square(shifts).sum(axis=1)) / NOISE**2
        return np.log(np.exp(exponent) @ weights)

    gains = (
        np.maximum(1 - np.exp(epsilon - log_ratio(mean + noise)), 0),
        np.maximum(1 - np.exp(epsilon + log_ratio(noise)), 0),
    )
    return max((float(gain.mean()), float(gain.std() / n**0.5)) for gain in gains)


def stated(coefficients: tuple[float, ...], delta: float) -> float:
    run = replace(RUN, noise_multiplier=NOISE, sampling_probability=Q, steps=STEPS, correlation=coefficients)
    return only(run, delta=delta).epsilon


@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_the_exact_law_stays_below_the_stated_epsilon(delta: float) -> None:
    gap, error = largest_gap(cyclic(COEFFICIENTS), stated(COEFFICIENTS, delta))
    assert gap <= delta + 5 * error


def test_the_bound_is_tight_for_the_worst_subset_and_planted_faults_exceed_it() -> None:
    """Two whole blocks of the first subset are the accounted mechanism itself, so its gap is delta."""
    worst = drawn(COEFFICIENTS, batches((0, 2), 2 * Q))
    gap, error = largest_gap(worst, stated(COEFFICIENTS, 0.05), n=200_000)
    assert abs(gap - 0.05) <= 5 * error + 1e-4  # the stated epsilon is discretised from above
    # All subsets at every step; columns of norm above 1; both cost more than is stated.
    delta = 0.05
    epsilon = stated(COEFFICIENTS, delta)
    everywhere = drawn(COEFFICIENTS, batches(tuple(range(STEPS)), 2 * Q))
    wide = cyclic((0.8, 1.4))
    for fault in (everywhere, wide):
        gap, error = largest_gap(fault, epsilon)
        assert gap > delta + 5 * error
    assert stated((0.8, 1.4), delta) > epsilon  # the accountant knows the coefficients that run


def test_planted_partition_of_fixed_sizes_breaks_adding_a_record() -> None:
    """Records fall into subsets by their place: one more at the front moves every other one to another subset.

    Three records with contributions along different axes, drawn whenever their subset comes (b q = 1). The release is
    Gaussian with the same noise, so its exact mu is the distance of the two noiseless releases.
    """
    rows = np.eye(3)
    matrix = dense(COEFFICIENTS, STEPS)

    def released(records: list[int], subset_of: dict[int, int]) -> np.ndarray:
        sums = np.zeros((STEPS, 3))
        for record in records:
            sums[subset_of[record] :: 2] += rows[record]
        return matrix @ sums

    by_place = released([0, 1, 2], {0: 0, 1: 1, 2: 0}) - released([1, 2], {1: 0, 2: 1})
    by_coin = released([0, 1, 2], {0: 0, 1: 1, 2: 0}) - released([1, 2], {1: 1, 2: 0})
    accounted = math.sqrt(STEPS / 2)  # blocks of norm 1
    assert np.linalg.norm(by_coin) == pytest.approx(accounted)
    assert np.linalg.norm(by_place) > 1.3 * accounted

    def delta_of(mu: float, epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))

    run = replace(
        RUN, noise_multiplier=NOISE, sampling_probability=0.5, steps=STEPS, correlation=COEFFICIENTS
    )
    epsilon = only(run, delta=0.01).epsilon
    assert delta_of(float(np.linalg.norm(by_coin)) / NOISE, epsilon) <= 0.01 * (1 + 1e-6)
    assert delta_of(float(np.linalg.norm(by_place)) / NOISE, epsilon) > 0.02
