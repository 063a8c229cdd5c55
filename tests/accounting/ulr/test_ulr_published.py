"""Eq. 11 of the DP-ULR paper: the printed numbers, its conditions by name, and what its proof leaves out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Status
from opusim.accounting.mechanisms.ulr import PublishedUlr, admissible, published_rdp, published_value

DELTA = 1e-5
PAPER = PublishedUlr(
    target_std=4.0, sampling_probability=1 / 120, n_records=60_000, min_batch_size=500, modules=4,
    largest_module=128 * 785, sampled=True, steps=3000,
)  # fmt: skip


@pytest.mark.parametrize(("target", "value"), [(0.5, 11.3), (1, 5.68), (2, 3.18), (4, 2.01), (8, 1.44)])
def test_the_formula_at_the_papers_settings(target: float, value: float) -> None:
    found = published_value([replace(PAPER, target_std=target)], DELTA, checked=False)
    assert found == pytest.approx(value, abs=0.06 if value > 10 else 0.006)


def test_the_term_of_rejection_is_not_negligible_at_the_boundary() -> None:
    """N_B = q N: 2.01 with it, 1.12 without; far below the boundary it vanishes."""
    assert published_value([replace(PAPER, min_batch_size=350)], DELTA, checked=False) == pytest.approx(
        1.12, abs=0.01
    )
    q = PAPER.sampling_probability
    small = replace(PAPER, n_records=10_000, sampling_probability=0.01, min_batch_size=50, steps=1)
    assert published_rdp(small, 2.0) - 4 * 0.01**2 / 16 < 1e-9
    assert published_rdp(replace(PAPER, steps=1), 2.0) - 4 * q**2 / 16 > 1e-4


def test_conditions_on_alpha_are_kept_to() -> None:
    """The formula's best order breaks them: 2.10 inside, 2.01 outside."""
    _, claimed = guarantees([PAPER], delta=DELTA)
    assert claimed.status is Status.CLAIMED
    assert claimed.epsilon == pytest.approx(2.10, abs=0.006)
    assert claimed.formula_value == pytest.approx(2.01, abs=0.006)
    assert admissible(PAPER, 2.0)
    assert not admissible(PAPER, 256.0)


@pytest.mark.parametrize(("changes", "name"), [
    ({"target_std": 2.0}, "sigma_0 >= 4"),
    ({"sampling_probability": 0.3, "n_records": 6000}, "q <= 1/5"),
    ({"min_batch_size": 501}, "N_B <= q N"),
    ({"sampled": False}, "sampled independently"),
])  # fmt: skip
def test_each_condition_that_fails_is_named(changes: dict[str, object], name: str) -> None:
    _, claimed = guarantees([replace(PAPER, **changes)], delta=DELTA)
    assert claimed.epsilon == math.inf
    assert claimed.reason is not None
    assert name in claimed.reason
    assert claimed.formula_value is not None
    assert math.isfinite(claimed.formula_value)


def test_gaps_are_listed_with_their_size() -> None:
    none, claimed = guarantees([PAPER], delta=DELTA)
    assert (none.status, none.epsilon) == (Status.NONE, math.inf)
    failed = [item.text for item in claimed.failed_assumptions]
    assert len(failed) == 5
    assert any("0.0705 C in the largest module" in text for text in failed)
    assert any("moves them by 2 C together" in text for text in failed)
    single = replace(PAPER, modules=1, largest_module=5)
    assert len(guarantees([single], delta=DELTA)[1].failed_assumptions) == 3


@settings(max_examples=10)
@given(st.floats(0.3, 20), st.floats(1.01, 4), st.integers(1, 5000))
def test_more_noise_never_raises_and_more_steps_never_lower(target: float, factor: float, steps: int) -> None:
    run = replace(PAPER, target_std=target, steps=steps)
    value = published_value([run], DELTA, checked=False)
    assert published_value([replace(run, target_std=target * factor)], DELTA, checked=False) <= value
    assert published_value([replace(run, steps=steps + 1)], DELTA, checked=False) >= value


def test_runs_compose() -> None:
    halves = [replace(PAPER, steps=1000), replace(PAPER, steps=2000)]
    assert published_value(halves, DELTA, checked=True) == pytest.approx(
        published_value([PAPER], DELTA, checked=True)
    )
    assert published_value([PAPER], 0.0, checked=False) == math.inf
