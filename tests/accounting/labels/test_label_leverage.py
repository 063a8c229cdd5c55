"""The label theorem by simulation, its accountant's inputs, and planted errors that must be caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from accounting.mechanisms.observations import label_distance, step_mu_bound
from tests.oracles import label_simulation as simulation
from tests.oracles.label_leverage import (
    LayerReadings,
    leverages,
    public_leverages,
    step_mu,
    ternary_distance,
)
from training.protections.metric import Metric, batch_leverages

LIMIT = 5.0
FAMILY_LIMIT = float(norm.isf(norm.sf(LIMIT) / 144))  # 12 cases, 6 label pairs, mean and variance
TRIALS = 4000
AFTER = pytest.mark.parametrize("after", [False, True], ids=["noise before the slope", "noise after it"])


def _batch_scores(h: np.ndarray, floor: float) -> np.ndarray:
    """The leverages that training computes, in torch, for an absolute floor lambda; shape (m,)."""
    share = floor * h.shape[1] / np.square(h).sum()
    scores, ridge = batch_leverages(torch.from_numpy(h), floor=share)
    assert ridge == pytest.approx(floor, rel=1e-12)
    return scores.numpy()


def _scores(layers: list[simulation.Layer], *, bias: bool = True) -> list[np.ndarray]:
    """Of each layer: the code that trains for noise after the slope, the oracle for noise before it."""
    scores = []
    for layer in layers:
        h = layer.h if bias else layer.h[:, :-1]
        if layer.after:
            scores.append(_batch_scores(h, layer.floor)[:, None])
        else:
            readings = LayerReadings(
                activations=layer.h[:, :-1], slopes=layer.slopes, bias=bias, floor=layer.floor
            )
            scores.append(leverages(readings))
    return scores


def _signals(layers: list[simulation.Layer]) -> list[np.ndarray]:
    """What `step_mu` takes: with the slopes in it where the noise comes after them."""
    return [layer.signals * layer.slopes[:, None] if layer.after else layer.signals for layer in layers]


def _accounted(layers: list[simulation.Layer], *, bias: bool = True) -> np.ndarray:
    return step_mu(_signals(layers), _scores(layers, bias=bias), [layer.sigma for layer in layers])


def _measured(
    layers: list[simulation.Layer],
    record: int,
    labels: np.ndarray,
    other: int,
    generator: np.random.Generator,
) -> np.ndarray:
    return sum(
        simulation.log_ratio(
            layer, simulation.update(layer, labels, generator, TRIALS), record, labels, other
        )
        for layer in layers
    )


@AFTER
@pytest.mark.parametrize("case", range(6))
def test_log_likelihood_ratio_is_that_of_a_shifted_gaussian_with_the_accountants_mu(
    case: int, after: bool, seed: int
) -> None:
    """Random layers and batches, m below and above the fan-in; mu is attained at the worst pair, a bound elsewhere."""
    generator = np.random.default_rng([seed, case])
    m, n_labels = int(generator.integers(3, 14)), 3
    layers = simulation.random_layers(
        generator, m=m, labels=n_labels, floor=float(generator.choice([0.01, 1.0])), after=after
    )
    labels = generator.integers(0, n_labels, size=m)
    record = int(generator.integers(m))
    bound = _accounted(layers)[record]
    exact = []
    for own in range(n_labels):
        for other in set(range(n_labels)) - {own}:
            labels[record] = own
            two = [signal[:, [own, other]] for signal in _signals(layers)]  # the pair alone, for its exact mu
            mu = step_mu(two, _scores(layers), [layer.sigma for layer in layers])[record]
            exact.append(mu)
            ratios = _measured(layers, record, labels, other, generator)
            assert simulation.moments_deviation(ratios, mu) < FAMILY_LIMIT
    assert max(exact) == pytest.approx(bound, rel=1e-12)


def test_leverages_equal_the_inverse_and_lie_in_the_unit_interval(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for floor in (0.0, 0.3):
        layer = simulation.random_layers(generator, m=11, labels=3, floor=floor)[0]
        score = _scores([layer])[0]
        for j in range(layer.slopes.shape[1]):
            rows = layer.slopes[:, [j]] * layer.h
            inverse = np.linalg.inv(rows.T @ rows + floor * np.eye(rows.shape[1]))
            np.testing.assert_allclose(score[:, j], np.einsum("id,de,ie->i", rows, inverse, rows), rtol=1e-9)
        assert score.min() >= 0
        assert score.max() <= 1
        assert score.sum(axis=0).max() <= layer.h.shape[1] + 1e-9  # fan-in + 1


@pytest.mark.parametrize("m", [3, 7, 30])
def test_the_leverages_that_train_are_those_of_the_oracle(m: int, seed: int) -> None:
    """Below and above the fan-in; rounding may raise a leverage, never lower it by more than 1e-9."""
    generator = np.random.default_rng([seed, m])
    h = generator.standard_normal((m, 7)) * generator.exponential(size=(m, 1))
    for floor in (1e-4, 0.3, 10.0):
        exact = leverages(LayerReadings(activations=h, slopes=None, bias=False, floor=floor))[:, 0]
        np.testing.assert_allclose(_batch_scores(h, floor), exact, rtol=1e-8, atol=1e-9)


def test_the_public_metric_that_trains_is_that_of_the_oracle(seed: int) -> None:
    generator = np.random.default_rng(seed)
    h, base = generator.standard_normal((9, 5)), generator.standard_normal((20, 5))
    metric = Metric.of_rows(torch.from_numpy(base), floor=0.2)
    floor = 0.2 * np.square(base).sum() / 20 / 5
    exact = public_leverages(
        LayerReadings(activations=h, slopes=None, bias=False),
        LayerReadings(activations=base, slopes=None, bias=False, floor=floor),
        1 / 20,
    )[:, 0]
    np.testing.assert_allclose(metric.leverages(torch.from_numpy(h)).numpy(), exact, rtol=1e-9)


def test_no_floor_and_too_few_records_give_leverage_one() -> None:
    h = np.random.default_rng(0).standard_normal((3, 7))
    np.testing.assert_allclose(leverages(LayerReadings(activations=h, slopes=None)), 1.0)
    zero = LayerReadings(activations=np.zeros((3, 2)), slopes=None, bias=False)
    assert leverages(zero).shape == (3, 1)  # rank lost: errs toward 1, never below the truth
    assert not leverages(
        LayerReadings(activations=np.zeros((3, 2)), slopes=None, bias=False, floor=1.0)
    ).any()


def test_public_leverages_equal_those_of_the_batch_when_the_batch_is_the_reference(seed: int) -> None:
    layer = simulation.random_layers(np.random.default_rng(seed), m=9, labels=3, floor=0.2)[0]
    readings = LayerReadings(activations=layer.h[:, :-1], slopes=layer.slopes, floor=0.2)
    np.testing.assert_allclose(public_leverages(readings, readings, 1.0), leverages(readings), rtol=1e-9)
    with pytest.raises(ValueError, match="floor_of_reference"):
        public_leverages(readings, LayerReadings(activations=layer.h[:, :-1], slopes=layer.slopes), 1.0)


def test_the_bound_by_the_ball_is_never_below_the_enumeration(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(20):
        layers = simulation.random_layers(generator, m=8, labels=4, floor=0.1)
        bound = step_mu_bound((2.0, 2.0, 2**0.5), _scores(layers), [layer.sigma for layer in layers])
        assert np.all(_accounted(layers) <= bound * (1 + 1e-12))
        later = [replace(layer, after=True) for layer in layers]
        steepest = [np.abs(layer.slopes).max(axis=1) for layer in layers]
        distances = [d * slope for d, slope in zip((2.0, 2.0, 2**0.5), steepest, strict=True)]
        bound = step_mu_bound(distances, _scores(later), [layer.sigma for layer in layers])
        assert np.all(_accounted(later) <= bound * (1 + 1e-12))


def test_ternary_distance_is_attained_and_the_plain_one_is_too_small(seed: int) -> None:
    generator = np.random.default_rng(seed)
    b = generator.standard_normal((5, 3))
    largest = 0.0
    for p in np.vstack(
        [generator.dirichlet(np.ones(3), size=3000), [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]]
    ):
        codes = [np.where(p - y >= 0.15, 1, np.where(p - y <= -0.15, -1, 0)) for y in np.eye(3)]
        largest = max(largest, *(np.linalg.norm(b @ (x - y)) for x in codes for y in codes))
    assert largest <= ternary_distance(b) * (1 + 1e-12)
    one_hot = np.eye(2)
    assert label_distance(one_hot) == pytest.approx(2**0.5)
    assert ternary_distance(one_hot) == pytest.approx(8**0.5)
    assert largest > label_distance(b)  # the planted error: the plain distance for a ternarized error


# Planted errors. Each claims the mu that the faulty code or accountant believes in.


@AFTER
def test_planted_unnoised_output_layer_is_caught(after: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    layers = simulation.random_layers(generator, m=6, labels=3, floor=0.1, after=after)
    layers = [replace(layer, sigma=8 * layer.sigma) for layer in layers]  # mu < 0.6 by the hidden layers
    claimed = _accounted(layers[:2])[0]  # believes that the output layer leaks nothing
    labels = np.zeros(6, dtype=int)
    coins = generator.integers(0, 2, size=400)
    guesses = []
    for coin in coins:
        labels[0] = coin
        exact = simulation.update(layers[2], labels, generator, 1, noise=0.0)[0]
        distances = []
        for guess in (0, 1):
            labels[0] = guess
            distances.append(
                np.linalg.norm(exact - simulation.update(layers[2], labels, generator, 1, noise=0.0)[0])
            )
        guesses.append(np.argmin(distances))
    assert simulation.accuracy_excess(np.array(guesses) == coins, claimed) > LIMIT


@AFTER
def test_planted_noise_reused_between_epochs_is_caught(after: bool, seed: int) -> None:
    """Two epochs, the second with half the signal; fresh noise obeys sqrt(mu_1^2 + mu_2^2), reused noise cancels."""
    generator = np.random.default_rng(seed)
    first = simulation.random_layers(generator, m=20, labels=2, floor=1.0, after=after)[0]
    first = replace(first, sigma=2.0)
    second = replace(first, signals=first.signals / 2)
    claimed = (_accounted([first])[0] ** 2 + _accounted([second])[0] ** 2) ** 0.5
    labels = generator.integers(0, 2, size=20)
    coins = generator.integers(0, 2, size=600)
    means = []
    for label in (0, 1):
        labels[0] = label
        means.append(
            simulation.update(first, labels, generator, 1, noise=0.0)[0]
            - simulation.update(second, labels, generator, 1, noise=0.0)[0]
        )
    for reused, caught in ((False, False), (True, True)):
        right = []
        for trial, coin in enumerate(coins):
            labels[0] = coin
            one = simulation.update(first, labels, np.random.default_rng([seed, trial]), 1)[0]
            key = trial if reused else trial + len(coins)
            two = simulation.update(second, labels, np.random.default_rng([seed, key]), 1)[0]
            gaps = [np.linalg.norm(one - two - mean) for mean in means]
            right.append(np.argmin(gaps) == coin)
        assert (simulation.accuracy_excess(np.array(right), claimed) > LIMIT) is caught


def test_planted_scale_after_the_reading_is_caught(seed: int) -> None:
    """h = 1, no slope: others' readings of norm 100 tB shrink their noise; the claim takes it for whole."""
    generator = np.random.default_rng(seed)
    m, n, sigma = 100, 4, 0.5
    claimed = step_mu_bound([2.0], [_batch_scores(np.ones((m, 1)), 1e-9)[:, None]], [sigma])[0]
    assert claimed == pytest.approx(0.4)
    coins = generator.integers(0, 2, size=2000)
    for after, caught in ((False, False), (True, True)):
        signal = np.zeros((len(coins), m, n))
        signal[:, 1:, 0] = 100.0  # the others
        signal[:, 0, 1] = 2.0 * coins - 1
        noise = sigma * generator.standard_normal(signal.shape)
        signal = signal + noise if after else signal
        released = (_to_ball(signal) + (0 if after else noise)).sum(axis=1)
        right = (released[:, 1] > 0) == (coins == 1)
        assert (simulation.accuracy_excess(right, claimed) > LIMIT) is caught


@AFTER
def test_planted_bias_left_out_of_the_leverage_is_caught(after: bool) -> None:
    """One record with a small activation among equal large ones: only the constant sees it."""
    generator = np.random.default_rng(3)
    h = np.vstack([[[0.1]], np.full((30, 1), 3.0)])
    signals = np.tile(np.array([[[1.0], [-1.0]]]), (31, 1, 1))
    layer = simulation.Layer(np.hstack([h, np.ones((31, 1))]), np.ones((31, 1)), signals, 1.0, 1e-3, after)
    labels = np.zeros(31, dtype=int)
    ratios = _measured([layer], 0, labels, 1, generator)
    assert simulation.moments_deviation(ratios, _accounted([layer])[0]) < LIMIT
    without = _accounted([layer], bias=False)[0]
    assert without < 0.1 * _accounted([layer])[0]
    assert simulation.moments_deviation(ratios, without) > 10


def test_planted_pseudo_inverse_and_ridge_understate_a_faint_pixel() -> None:
    """A pixel lit (1e-4) by one record alone: its leverage is 1, and 0.1 by pinv or with a ridge that is not added."""
    generator = np.random.default_rng(5)
    h = generator.standard_normal((100, 10))
    h = np.hstack([h, np.zeros((100, 1))])
    h[0, 10] = 1e-4
    exact = leverages(LayerReadings(activations=h, slopes=None, bias=False))[0, 0]
    gram = h.T @ h
    ridge = h[0] @ np.linalg.solve(gram + 1e-6 * np.eye(11), h[0])
    pinv = h[0] @ np.linalg.pinv(gram, rcond=1e-6) @ h[0]
    assert exact == pytest.approx(1.0, abs=1e-9)
    assert max(ridge, pinv) < 0.3
    # the same number is right once the noise is really there, as training has it
    assert _batch_scores(h, 1e-6)[0] == pytest.approx(ridge, rel=1e-6)


def test_planted_unweighted_leverage_understates_slopes_near_zero() -> None:
    h = np.ones((200, 1))
    slopes = np.full((200, 1), 1e-3)
    slopes[0] = 1.0
    weighted = leverages(LayerReadings(activations=h, slopes=slopes, bias=False))[0, 0]
    unweighted = leverages(LayerReadings(activations=h, slopes=None, bias=False))[0, 0]
    assert weighted > 0.99
    assert unweighted < 0.01


def test_planted_leverage_of_the_other_form_is_caught(seed: int) -> None:
    """The one Gram matrix of noise after the slope, claimed for noise before it: others' slopes shrink their noise."""
    generator = np.random.default_rng(seed)
    layers = simulation.random_layers(generator, m=8, labels=2, floor=0.01)[:1]
    layers[0].slopes[1:] *= 0.05
    labels = np.zeros(8, dtype=int)
    ratios = _measured(layers, 0, labels, 1, generator)
    assert simulation.moments_deviation(ratios, _accounted(layers)[0]) < LIMIT
    claimed = _accounted([replace(layer, after=True) for layer in layers])[0]
    assert claimed < 0.9 * _accounted(layers)[0]
    assert simulation.moments_deviation(ratios, claimed) > 10


def test_planted_sum_over_layers_that_share_readings_is_caught(seed: int) -> None:
    """One slope-free reading drives two layers: record 0 hides in each, and stands alone in the stacked vector."""
    first = np.random.default_rng(seed).standard_normal((60, 1))
    first[0] = 0.3
    second = first.copy()
    second[0] = -first[0]
    alone = [_batch_scores(h, 1e-9)[0] for h in (first, second)]
    assert sum(alone) < 0.02
    assert _batch_scores(np.hstack([first, second]), 1e-9)[0] == pytest.approx(1.0)


def _to_ball(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1.0)
