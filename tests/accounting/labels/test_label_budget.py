"""Each record's budget: what it keeps within it, and what its guarantee is."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.composition import guarantees
from accounting.guarantee import Guarantee, Status, Unit
from accounting.mechanisms.labels import LabelBudget
from accounting.mechanisms.observations import PerRecordBudget


def _only(mechanism: LabelBudget, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 2), min_size=4, max_size=4), min_size=1, max_size=30), st.floats(0.1, 5)
)
def test_no_record_ever_exceeds_the_budget(steps: list[list[float]], budget: float) -> None:
    per_record = PerRecordBudget(budget_mu=budget, n_records=4)
    spent = np.zeros(4)
    for mu in steps:
        kept = per_record.charge(np.arange(4), np.array(mu))
        spent += kept * np.square(mu)
    assert np.all(spent <= budget**2)
    assert np.all(per_record.spent >= spent * (1 - 1e-15))


def test_a_refused_record_is_charged_nothing_and_may_come_back() -> None:
    per_record = PerRecordBudget(budget_mu=1.0, n_records=3)
    assert per_record.charge(np.array([0, 2]), np.array([0.8, 1.1])).tolist() == [True, False]
    assert per_record.charge(np.array([0, 2]), np.array([0.8, 0.9])).tolist() == [False, True]
    assert per_record.spent[1] == 0
    copy = PerRecordBudget(budget_mu=1.0, n_records=3)
    copy.restore(per_record.spent)
    assert np.array_equal(copy.spent, per_record.spent)


def test_the_guarantee_is_the_budget() -> None:
    guarantee = _only(LabelBudget(budget_mu=0.719))
    assert guarantee.epsilon == pytest.approx(3.0, abs=5e-3)
    assert guarantee.unit is Unit.LABEL
    assert guarantee.status is Status.PROVEN


def test_a_certificates_error_is_taken_from_delta() -> None:
    budget = LabelBudget(budget_mu=1.0, order="hardware", beta=4e-6)
    guarantee = _only(budget)
    assert guarantee.epsilon == pytest.approx(get_epsilon_gaussian(1.0, 6e-6))
    assert guarantee.status is Status.PROVEN_UNDER_DEVICE_MODEL
    useless = _only(LabelBudget(budget_mu=1.0, beta=1e-4))
    assert useless.status is Status.NONE
    assert "must exceed beta" in str(useless.reason)


def test_a_budget_that_is_spent_again_adds_up() -> None:
    """A run resumed in release mode: four times mu = 0.5 is mu = 1, and the certificate may fail each time."""
    again = _only(LabelBudget(budget_mu=0.5, beta=1e-6, steps=4))
    assert again.epsilon == pytest.approx(get_epsilon_gaussian(1.0, 6e-6))


def test_adaptive_spending_stays_within_the_gaussian_law(seed: int) -> None:
    """An adversary who spends by what it saw, topped up to B: the log-likelihood ratio is N(B^2/2, B^2) exactly."""
    generator = np.random.default_rng(seed)
    runs, budget = 100_000, 1.5
    total, left = np.zeros(runs), np.full(runs, budget**2)
    for _ in range(8):
        square = np.where(total > 0, 0.1, 0.6)  # spends more after losing
        square = np.where(square <= left, square, 0.0)
        total += square / 2 + np.sqrt(square) * generator.standard_normal(runs)
        left -= square
    total += left / 2 + np.sqrt(left) * generator.standard_normal(runs)
    assert abs(total.mean() - budget**2 / 2) < 5 * budget / runs**0.5
    assert abs(total.var() - budget**2) < 5 * budget**2 * (2 / runs) ** 0.5


@pytest.mark.parametrize(
    ("records", "mu", "message"),
    [
        ([0, 0], [0.1, 0.1], "one occurs twice"),
        ([0, 3], [0.1, 0.1], "outside"),
        ([0, 1], [0.1, -0.1], "at least 0"),
        ([0, 1], [0.1, float("nan")], "not NaN"),
    ],
)
def test_bad_input_is_named(records: list[int], mu: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerRecordBudget(budget_mu=1.0, n_records=3).charge(np.array(records), np.array(mu))
