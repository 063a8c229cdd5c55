"""Proposition 3 as published: where it fails, what it says, and the direction that it leaves out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Status
from opusim.accounting.mechanisms.pdfa import (
    PdfaWithoutFormula,
    PublishedLayer,
    PublishedPdfa,
    column_bound_published,
    published_guarantee,
    published_rdp,
    published_value,
)
from tests.oracles.pdfa_column import column_bound_two_sided, column_divergence

DELTA = 1e-5


def _paper(gamma_min: float = 0.0, sigma: float = 0.2) -> PublishedPdfa:
    """784-512-512-10, tau_f = tau_h^max = 1, batches of 256, 15 epochs of 210 steps (section 4)."""
    sizes = ((784, 512, True, True), (512, 512, False, True), (512, 10, False, False))
    layers = tuple(
        PublishedLayer(
            fan_in=fan_in, width=width, gamma_min=gamma_min, gamma_max=1.0, inputs_bounded_below=positive,
            noised=noised,
        )
        for fan_in, width, positive, noised in sizes
    )  # fmt: skip
    return PublishedPdfa(
        layers=layers, batch_size=256, steps=15 * 210, sigma=sigma, tau_b=1.0, tau_h_min=1.0, tau_h_max=1.0
    )


def _one_hidden(**changes: float) -> PublishedPdfa:
    hidden = PublishedLayer(fan_in=65, width=32, gamma_min=0.8, gamma_max=1.0, inputs_bounded_below=True)
    run = PublishedPdfa(
        layers=(hidden,), batch_size=256, steps=10, sigma=5.0, tau_b=1.0, tau_h_min=0.8, tau_h_max=1.0
    )
    return replace(run, **changes)


def test_tanh_relu_and_a_second_hidden_layer_have_no_finite_epsilon() -> None:
    guarantee = published_guarantee([_paper(gamma_min=0.0)], DELTA)
    assert math.isinf(guarantee.epsilon)
    assert guarantee.status is Status.CLAIMED
    assert guarantee.reason is not None
    for name in ("layer 1: gamma_min > 0", "layer 2: entrywise lower bound", "positive definiteness"):
        assert name in guarantee.reason
    guarantee = published_guarantee([_paper(gamma_min=1.0)], DELTA)
    assert math.isinf(guarantee.epsilon)
    assert guarantee.reason == (
        "Proposition 3 does not apply: layer 2: entrywise lower bound: every |h_ik| >= tau_h_min / sqrt(n) > 0"
    )


def test_the_formula_exceeds_a_million_and_whole_records_have_no_guarantee() -> None:
    run = _paper()
    assert published_rdp(run, 2.0) / 2 == pytest.approx(1.11e6, rel=3e-3)
    assert published_rdp(run, 2.0, noised_only=True) / 2 == pytest.approx(0.80e6, rel=5e-3)
    guarantee = published_guarantee([run], DELTA)
    assert guarantee.formula_value is not None
    assert guarantee.formula_value > 1e6
    assert published_value([run], DELTA, noised_only=True) < 1e6  # the two layers that carry noise
    none, claimed = guarantees([_one_hidden()], delta=DELTA)
    assert (none.status, none.epsilon) == (Status.NONE, math.inf)
    assert claimed.status is Status.CLAIMED
    lacking = PdfaWithoutFormula(missing="a clip of the projected error", steps=10)
    (none,) = guarantees([lacking], delta=DELTA)
    assert (none.status, none.epsilon) == (Status.NONE, math.inf)
    assert len(guarantees([_one_hidden(), lacking], delta=DELTA)) == 1  # nothing is claimed of a part


def test_one_hidden_layer_with_bounded_slope_and_positive_inputs_is_finite_and_its_gaps_are_listed() -> None:
    guarantee = published_guarantee([_one_hidden()], DELTA)
    assert math.isfinite(guarantee.epsilon)
    assert len(guarantee.failed_assumptions) == 2  # reverse direction, shared noise
    assert guarantee.formula_value is not None
    assert guarantee.formula_value <= guarantee.epsilon


def test_an_order_beyond_positive_definiteness_is_infinite_and_a_negative_logarithm_named() -> None:
    limit = 1 + 256 * 0.4096 / (1 - 0.4096)
    assert math.isfinite(published_guarantee([_one_hidden(order=0.99 * limit)], DELTA).epsilon)
    beyond = published_guarantee([_one_hidden(order=1.01 * limit)], DELTA)
    assert beyond.reason is not None
    assert "positive definiteness" in beyond.reason
    guarantee = published_guarantee([_one_hidden(batch_size=1)], DELTA)
    assert guarantee.reason is not None
    assert "positive log denominator" in guarantee.reason
    assert guarantee.formula_value == math.inf


def test_the_reverse_direction_violates_eq_17_inside_its_hypotheses() -> None:
    n, m, alpha, sigma = 512, 10, 9.9, 1000.0
    lo, hi = 1.0, 2.0
    arguments = {"batch_size": m, "width": n, "lo": lo, "hi": hi, "signal": 1 / sigma}
    without, with_large = np.full(n, m * lo), np.full(n, (m - 1) * lo + hi)
    shift = np.zeros(n)
    forward = column_divergence(alpha, shift=shift, variance_p=without, variance_q=with_large)
    reverse = column_divergence(alpha, shift=shift, variance_p=with_large, variance_q=without)
    published = column_bound_published(alpha, **arguments)
    assert m * lo > (alpha - 1) * (hi - lo)
    assert published == pytest.approx(30.0, abs=0.05)
    assert reverse == pytest.approx(39.1, abs=0.05)
    assert forward <= published < reverse <= column_bound_two_sided(alpha, **arguments)


def test_two_sided_bound_is_never_below_the_exact_divergence(seed: int) -> None:
    """Random neighbours within the box; and the published bound, tried as a planted fault, is caught."""
    generator = np.random.default_rng(seed)
    caught = 0
    for _ in range(2000):
        n, m = int(generator.integers(1, 6)), int(generator.integers(2, 8))
        lo, hi = 1.0, 1 + generator.exponential()
        alpha = 1 + generator.uniform(0, 1) * m * lo / (hi - lo)
        signal = generator.exponential()
        corners = generator.integers(0, 2, size=(m + 1, n)) * (hi - lo) + lo
        common, first, second = corners[:-2].sum(axis=0), corners[-1], corners[-2]
        direction = generator.standard_normal(n)
        shift = 2 * signal * np.sqrt(hi) * direction / np.linalg.norm(direction)
        exact = column_divergence(alpha, shift=shift, variance_p=common + first, variance_q=common + second)
        arguments = {"batch_size": m, "width": n, "lo": lo, "hi": hi, "signal": signal}
        assert exact <= column_bound_two_sided(alpha, **arguments) * (1 + 1e-9)
        caught += exact > column_bound_published(alpha, **arguments) * (1 + 1e-9)
    assert caught > 0


def test_runs_compose_at_a_common_order() -> None:
    twice = published_value([_one_hidden(), _one_hidden()], DELTA)
    assert twice == pytest.approx(published_value([_one_hidden(steps=20)], DELTA))
    (_, claimed) = guarantees([_one_hidden(order=2.0), _one_hidden(order=3.0)], delta=DELTA)
    assert claimed.epsilon == math.inf
