"""Labels under amplification: the statement against exact mixtures, and the strongest attack on the code that runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation, get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import norm

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, Status, Unit
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelAmplified
from opusim.accounting.mechanisms.records import PoissonGaussian
from opusim.training.networks.clipping import bounded_factors
from opusim.training.protections.amplified_labels import whitened_norms
from opusim.training.protections.released_model import Metric
from tests.oracles import label_simulation as simulation

LINE = np.linspace(-14, 14, 20_001)
STEP = LINE[1] - LINE[0]


def _only(mechanism: Mechanism, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def _step(q: float, multiplier: float) -> LabelAmplified:
    return LabelAmplified(sampling_probability=q, steps=1, noise_multiplier=multiplier)


def _delta(q: float, a: tuple[float, float], b: float, epsilon: float) -> float:
    """H of (1-q) N(0) + q N(a) against (1-q) N(0) + q N((b, 0)) in the plane, k = e^epsilon.

    For each first coordinate t the integrand is positive where the second exceeds a closed-form limit (a_2 > 0);
    on a line (a_2 = 0) it is a sum over a fine grid.
    """
    k = np.exp(epsilon)
    rest = (1 - q) * (k - 1) * norm.pdf(LINE) + k * q * norm.pdf(LINE - b)
    if a[1] == 0:
        return float(np.sum(np.maximum(q * norm.pdf(LINE - a[0]) - rest, 0)) * STEP)
    limit = a[1] / 2 + (np.log(rest) - np.log(q) - norm.logpdf(LINE - a[0])) / a[1]
    inside = q * norm.pdf(LINE - a[0]) * norm.sf(limit - a[1]) - rest * norm.sf(limit)
    return float(np.sum(inside) * STEP)


@pytest.mark.parametrize(("q", "clip"), [(0.05, 0.3), (0.3, 0.8), (1.0, 0.5)])
@pytest.mark.parametrize("delta", [1e-2, 1e-4])
def test_a_step_costs_what_its_worst_pair_tells(q: float, clip: float, delta: float, seed: int) -> None:
    """Exactly delta for opposite contributions of norm C, and no other pair tells more; 1e-7 is the sums' error."""
    epsilon, generator = _only(_step(q, 1 / clip), delta).epsilon, np.random.default_rng(seed)
    worst = _delta(q, (clip, 0.0), -clip, epsilon)
    assert worst == pytest.approx(delta, rel=2e-3)
    for _ in range(30):
        angle = np.pi * generator.choice([0.99, generator.uniform(0.01, 1)])
        radius, b = clip * np.array([1.0, generator.choice([1.0, generator.uniform()])])
        assert _delta(q, (radius * np.cos(angle), radius * np.sin(angle)), b, epsilon) <= worst + 1e-7
    added = PoissonGaussian(noise_multiplier=1 / clip, sampling_probability=q)
    for fault in (added, _step(q, 2 / clip), _step(q, 1.05 / clip)):  # another relation, half, less noise
        assert _delta(q, (clip, 0.0), -clip, _only(fault, delta).epsilon) > 1.05 * delta


def test_one_whole_step_and_published_values() -> None:
    guarantee = _only(LabelAmplified(sampling_probability=1.0, steps=1, noise_multiplier=5))
    assert (guarantee.unit, guarantee.status) == (Unit.LABEL, Status.PROVEN)
    assert guarantee.epsilon == pytest.approx(get_epsilon_gaussian(1 / 0.4, 1e-5), rel=1e-8)
    for multiplier, epsilon in ((5.0, 4.54), (15.0, 1.32)):
        mechanism = LabelAmplified(sampling_probability=1 / 60, steps=24_000, noise_multiplier=multiplier)
        assert _only(mechanism).epsilon == pytest.approx(epsilon, abs=7e-3)


def test_weighted_contributions_stay_within_the_clip_by_true_leverages(seed: int) -> None:
    """The torch code that training runs: factors bring every whitened contribution, label by label, within the clip."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = [torch.randn(50, d, generator=generator).exp() for d in (7, 5)]
    white = [Metric.of_rows(row[:9], floor=0.01).whiten(row) for row in rows]
    for _ in range(4):
        deltas = [torch.randn(50, n, generator=generator) for n in (6, 4)]
        factors = bounded_factors(whitened_norms(deltas, white), 1.7)
        scaled = [delta.double() * factors[:, None] for delta in deltas]
        assert whitened_norms(scaled, white).max() <= 1.7 * (1 + 1e-9)
        assert ((factors > 0) & (factors <= 1)).all()
    generator = np.random.default_rng(seed)
    h, base = generator.standard_normal((9, 5)), generator.standard_normal((20, 5))
    found = Metric.of_rows(torch.from_numpy(base), floor=0.2).leverages(torch.from_numpy(h)).numpy()
    matrix = base.T @ base / 20
    inverse = np.linalg.inv(matrix + 0.2 * np.trace(matrix) / 5 * np.eye(5))
    np.testing.assert_allclose(found, np.einsum("id,de,ie->i", h, inverse, h), rtol=1e-9)


Q, CLIP, STEPS, TRIALS = 0.4, 0.6, 3, 20_000
EPSILONS = np.array([0.25, 0.5, 1.0, 1.5])


def _layers(generator: np.random.Generator) -> list[simulation.Layer]:
    """Record 0's two labels send opposite signals, slopes included, large enough to be clipped."""
    layers = simulation.random_layers(generator, m=8, labels=2, floor=0.5)
    for layer in layers:
        layer.slopes[:] = 1.0
        layer.signals[0] = 10 * layer.signals[0] / np.linalg.norm(layer.signals[0], axis=1, keepdims=True)
        layer.signals[0, 1] = -layer.signals[0, 0]
    return [replace(layer, sigma=2 * layer.sigma) for layer in layers]


def _metrics(layers: list[simulation.Layer]) -> list[Metric]:
    """The covariance that training draws noise with, of the first four records' features, which are public."""
    return [Metric.of_rows(torch.from_numpy(layer.h[:4]), floor=layer.floor) for layer in layers]


def _factors(layers: list[simulation.Layer], metrics: list[Metric]) -> tuple[np.ndarray, np.ndarray]:
    """Norms and factors of every record by the code that trains; record 0's two labels have equal norms."""
    deltas = [torch.from_numpy(layer.signals[:, 0] / layer.sigma) for layer in layers]
    white = [metric.whiten(torch.from_numpy(layer.h)) for layer, metric in zip(layers, metrics, strict=True)]
    norms = whitened_norms(deltas, white)
    return norms.numpy(), bounded_factors(norms, CLIP).numpy()


def _step_ratio(
    layers: list[simulation.Layer], metrics: list[Metric], weights: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The attacker's log-likelihood ratio of label 0 against label 1 of record 0, when it is 0, shape (TRIALS,)."""
    joins = (generator.random(TRIALS) < Q)[:, None]
    exponents = np.zeros((3, TRIALS))  # record 0 absent, present with label 0, present with label 1
    for layer, metric in zip(layers, metrics, strict=True):
        public = layer.h[:4].T @ layer.h[:4] / 4
        ridge = layer.floor * np.trace(public) / len(public)
        covariance = layer.sigma**2 * (public + ridge * np.eye(len(public)))
        for j in range(layer.slopes.shape[1]):
            first, second = (weights[0] * layer.signals[0, label, j] * layer.h[0] for label in (0, 1))
            white = torch.from_numpy(generator.standard_normal((TRIALS, len(first))))
            noise = layer.sigma * metric.colour(white).numpy()
            released = noise + joins * first
            for k, mean in enumerate((np.zeros_like(first), first, second)):
                away = released - mean
                exponents[k] -= np.einsum("td,td->t", away, np.linalg.solve(covariance, away.T).T) / 2
    absent = np.log(1 - Q) + exponents[0]
    one, other = (np.logaddexp(absent, np.log(Q) + exponents[k]) for k in (1, 2))
    return one - other


def _excess(ratios: np.ndarray, loss: pld.PrivacyLossDistribution) -> float:
    """The largest violation of delta(epsilon), in standard errors of the estimate."""
    allowed = np.asarray(loss.self_compose(STEPS).get_delta_for_epsilon(EPSILONS))
    spent = np.maximum(1 - np.exp(EPSILONS[:, None] - ratios[None]), 0)  # (epsilons, trials)
    errors = spent.std(axis=1) / len(ratios) ** 0.5
    return float(np.max((spent.mean(axis=1) - allowed) / np.maximum(errors, 1e-12)))


def _claimed(relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE) -> pld.PrivacyLossDistribution:
    return pld.from_gaussian_mechanism(
        1 / CLIP, sampling_prob=Q, value_discretization_interval=1e-3, neighboring_relation=relation
    )


@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in (1, 2))])
def test_the_strongest_attack_stays_within_the_account_and_reaches_it(case: int, seed: int) -> None:
    generator = np.random.default_rng([seed, case])
    layers = _layers(generator)
    metrics = _metrics(layers)
    norms, weights = _factors(layers, metrics)
    assert norms[0] > CLIP  # so record 0 sits at the bound, with opposite contributions: the worst pair
    ratios = sum(_step_ratio(layers, metrics, weights, generator) for _ in range(STEPS))
    assert _excess(ratios, _claimed()) < 5
    assert _excess(ratios, _claimed(NeighboringRelation.ADD_OR_REMOVE_ONE)) > 10  # planted: another relation
    unclipped = sum(_step_ratio(layers, metrics, np.ones(8), generator) for _ in range(STEPS))
    assert _excess(unclipped, _claimed()) > 10  # planted: weights left out
