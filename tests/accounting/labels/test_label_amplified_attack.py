"""The strongest attack on labels under amplification: secret batches, weights, a public covariance, several steps.

The attacker knows everything but record 0's coins and label (the others' coins and labels too), so its
log-likelihood ratio L is exact, and delta(epsilon) = E (1 - e^(epsilon - L))_+ is estimated without bias.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld

from opusim.training.networks.clipping import bounded_factors
from opusim.training.protections.amplified_labels import whitened_norms
from opusim.training.protections.released_model import Metric
from tests.oracles import label_simulation as simulation

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
    assert (
        _excess(ratios, _claimed(NeighboringRelation.ADD_OR_REMOVE_ONE)) > 10
    )  # planted: the wrong relation
    unclipped = sum(_step_ratio(layers, metrics, np.ones(8), generator) for _ in range(STEPS))
    assert _excess(unclipped, _claimed()) > 10  # planted: weights left out
