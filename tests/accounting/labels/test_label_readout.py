"""Label readings and randomized response: laws, stacked distances, posteriors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, Status, Unit
from opusim.accounting.mechanisms.labels import (
    LabelReadout,
    keep_probability,
    label_distance,
    reading_log_likelihood,
    respond,
    response_log_likelihood,
)
from opusim.training.protections.noisy_labels import NoisyLabels
from tests.oracles.label_readings import label_readout_mu


def _only(mechanism: LabelReadout, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


def test_log_likelihood_ratio_has_the_law_of_mu(seed: int) -> None:
    """Mean and variance under the worst pair; a planted second, uncounted reading is caught."""
    generator = np.random.default_rng(seed)
    codes, sigmas = [generator.standard_normal((4, 2)), generator.standard_normal((6, 2))], [2.0, 3.0]
    mu, n = label_readout_mu(codes, sigmas), 40_000
    assert label_distance(codes[0]) == pytest.approx(label_readout_mu(codes[:1], [1.0]))
    readings = [
        code[:, 0] + sigma * generator.standard_normal((n, len(code)))
        for code, sigma in zip(codes, sigmas, strict=True)
    ]
    likelihood = reading_log_likelihood(readings, codes, sigmas)
    ratio = likelihood[:, 0] - likelihood[:, 1]

    def deviation(claimed: float) -> float:
        of_mean = abs(ratio.mean() - claimed**2 / 2) / (claimed / n**0.5)
        return max(of_mean, abs(ratio.var() - claimed**2) / (claimed**2 * (2 / n) ** 0.5))

    assert deviation(mu) < 5
    assert deviation(label_readout_mu(codes[:1], sigmas[:1])) > 10


def test_the_guarantee_of_a_mu() -> None:
    guarantee = _only(LabelReadout(mu=0.719))
    assert guarantee.epsilon == pytest.approx(3.0, abs=5e-3)
    assert (guarantee.unit, guarantee.status) == (Unit.LABEL, Status.PROVEN)


def test_posterior_is_bayes_rule_by_hand() -> None:
    """Prior (0.7, 0.3), likelihoods 1 : 4, posterior 7 : 12, by the code that trains; flat at first."""
    labels = NoisyLabels(log_likelihood=torch.tensor([[0.1, 0.4]]).log(), flat_steps=1)
    logits = torch.tensor([[0.7, 0.3]]).log() + 5.0  # a constant added to a row changes nothing
    flat, informed = (labels.targets(logits, torch.tensor([0]), step) for step in (0, 1))
    np.testing.assert_allclose(flat, [[1 / 5, 4 / 5]], rtol=1e-6)
    np.testing.assert_allclose(informed, [[7 / 19, 12 / 19]], rtol=1e-6)


def test_reading_likelihood_equals_the_gaussian_density(seed: int) -> None:
    generator = np.random.default_rng(seed)
    code, reading = generator.standard_normal((5, 3)), generator.standard_normal((4, 5))
    likelihood = reading_log_likelihood([reading], [code], [1.7])
    density = np.array([[-np.sum((r - b) ** 2) / (2 * 1.7**2) for b in code.T] for r in reading])
    difference = likelihood - density
    np.testing.assert_allclose(difference, np.repeat(difference[:, :1], 3, axis=1), atol=1e-12)


def test_response_law_attains_epsilon_and_its_likelihood_sums_to_one() -> None:
    likelihood = np.exp(response_log_likelihood(np.arange(10), epsilon=1.3, n_labels=10))
    np.testing.assert_allclose(likelihood.sum(axis=0), 1.0)
    assert np.log(likelihood.max() / likelihood.min()) == pytest.approx(1.3)
    assert keep_probability(0.0, 4) == 0.25


def test_responses_follow_the_law(seed: int) -> None:
    """Frequencies of all pairs, five standard errors over the family; epsilon off by 10 % is caught."""
    generator = np.random.default_rng(seed)
    n, k, epsilon = 200_000, 4, 1.0
    frequencies = np.stack(
        [
            np.bincount(respond(np.full(n, a), epsilon=epsilon, n_labels=k, generator=generator), minlength=k)
            / n
            for a in range(k)
        ]
    )

    def deviation(claimed: float) -> float:
        law = np.exp(response_log_likelihood(np.arange(k), epsilon=claimed, n_labels=k)).T
        return float(np.max(np.abs(frequencies - law) / np.sqrt(law * (1 - law) / n)))

    assert deviation(epsilon) < 5.5
    assert deviation(1.1 * epsilon) > 10


@pytest.mark.parametrize("labels", [np.array([0, 4]), np.array([-1]), np.array([0.5])])
def test_labels_out_of_range_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"labels: must be integers in \[0, 4\)"):
        respond(labels, epsilon=1.0, n_labels=4, generator=np.random.default_rng(0))
