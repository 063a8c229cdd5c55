"""Labels under amplification: the dominating pair against exact mixtures, the clip of the code that runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation, get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import norm

from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import Guarantee, Status, Unit
from opusim.accounting.mechanisms.labels import LabelAmplified
from opusim.training.networks.clipping import bounded_factors
from opusim.training.protections.amplified_labels import whitened_norms
from opusim.training.protections.released_model import Metric

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
LINE = np.linspace(-14, 14, 20_001)
STEP = LINE[1] - LINE[0]


def _only(mechanism: LabelAmplified, delta: float = 1e-5) -> Guarantee:
    (guarantee,) = guarantees([mechanism], delta=delta)
    return guarantee


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


def _delta_below(q: float, a: float, b: tuple[float, float], k: float) -> float:
    """H_k of (1-q) N(0) + q N((a, 0)) against (1-q) N(0) + q N(b) for k < 1, directly: only the last density counts
    against, so at each first coordinate the integrand is positive below a closed-form limit (b_2 > 0)."""
    gain = (1 - q) * (1 - k) * norm.pdf(LINE) + q * norm.pdf(LINE - a)
    loss = k * q * norm.pdf(LINE - b[0])
    if b[1] == 0:
        return float(np.sum(np.maximum(gain - loss, 0)) * STEP)
    log_loss = np.log(k * q) + norm.logpdf(LINE - b[0])
    limit = b[1] / 2 + (np.log(gain) - log_loss) / b[1]
    return float(np.sum(gain * norm.cdf(limit) - loss * norm.cdf(limit - b[1])) * STEP)


def _dominating(q: float, clip: float, multiplier: float = 1.0) -> pld.PrivacyLossDistribution:
    return pld.from_gaussian_mechanism(
        multiplier / clip,
        sampling_prob=q,
        value_discretization_interval=1e-3,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )


def _exceeds(loss: pld.PrivacyLossDistribution, q: float, a: tuple[float, float], b: float) -> bool:
    """Whether the exact pair has a larger delta anywhere; 1e-7 is above the error of the sums (checked below)."""
    bound = np.asarray(loss.get_delta_for_epsilon(EPSILONS))
    return any(_delta(q, a, b, e) > d + 1e-7 for e, d in zip(EPSILONS, bound, strict=True))


def test_the_sums_are_exact_enough() -> None:
    for shift in (0.3, 2.0):
        exact = norm.cdf(shift / 2 - 1 / shift) - np.e * norm.cdf(-shift / 2 - 1 / shift)
        assert _delta(1.0, (shift, 0.0), 0.0, 1.0) == pytest.approx(exact, abs=1e-7)
        assert _delta(1.0, (0.0, shift), 0.0, 1.0) == pytest.approx(exact, abs=1e-7)


@pytest.mark.slow
def test_no_pair_of_labels_beats_the_dominating_pair(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(200):
        q, clip = generator.uniform(0.02, 1.0), generator.uniform(0.2, 2.0)
        angle = np.pi * generator.choice([0.99, generator.uniform(0.01, 1)])
        radius, b = clip * np.array([1.0, generator.choice([1.0, generator.uniform()])])
        a = (radius * np.cos(angle), radius * np.sin(angle))
        for epsilon in EPSILONS:
            assert _delta(q, a, b, epsilon) <= _delta(q, (clip, 0.0), -clip, epsilon) + 1e-7


def test_no_pair_beats_it_below_one_either(seed: int) -> None:
    """k < 1, computed directly and not through the exchange of P and Q that the proof uses."""
    generator = np.random.default_rng(seed)
    for _ in range(60):
        q, clip = generator.uniform(0.02, 1.0), generator.uniform(0.2, 2.0)
        angle = np.pi * generator.choice([0.99, generator.uniform(0.01, 1)])
        a, radius = clip * np.array([generator.choice([1.0, generator.uniform()]), 1.0])
        b = (radius * np.cos(angle), radius * np.sin(angle))
        for k in (0.05, 0.3, 0.7, 0.95):
            assert _delta_below(q, a, b, k) <= _delta_below(q, clip, (-clip, 0.0), k) + 1e-7
    worst = _delta_below(0.3, 0.8, (-0.8, 0.0), 0.7)
    assert _delta_below(0.3, 0.84, (-0.84, 0.0), 0.7) > worst + 1e-4  # planted: a contribution 5 % too large


def test_dp_accountings_distribution_is_that_of_the_dominating_pair() -> None:
    for q, clip in ((0.05, 0.3), (0.3, 0.8), (1.0, 0.5)):
        found = _dominating(q, clip).get_delta_for_epsilon(EPSILONS)
        exact = [_delta(q, (clip, 0.0), -clip, epsilon) for epsilon in EPSILONS]
        np.testing.assert_allclose(found, exact, atol=2e-6)
        assert not _exceeds(_dominating(q, clip), q, (clip, 0.0), -clip)


def test_planted_errors_are_caught() -> None:
    """The worst pair against add_or_remove_one, against half the sensitivity, and against noise too large by 5 %."""
    q, clip = 0.3, 0.8
    worst = ((clip, 0.0), -clip)
    add_or_remove = pld.from_gaussian_mechanism(1 / clip, sampling_prob=q, value_discretization_interval=1e-3)
    assert not _exceeds(_dominating(q, clip), q, *worst)
    assert _exceeds(add_or_remove, q, *worst)
    assert _exceeds(_dominating(q, clip, 2.0), q, *worst)
    assert _exceeds(_dominating(q, clip, 1.05), q, *worst)


def test_kahanes_three_covariances_each_raise_the_divergence() -> None:
    """The step of the proof: E (1 - x L0 - y Lb)_+ grows with each of the three covariances."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(120)
    masses = masses / masses.sum()
    u, v = np.meshgrid(nodes, nodes, indexing="ij")
    weight = np.outer(masses, masses)

    def value(aa: float, bb: float, ab: float) -> float:
        first = np.sqrt(aa) * u
        second = ab / np.sqrt(aa) * u + np.sqrt(bb - ab**2 / aa) * v
        inside = 1 - 0.5 * np.exp(first - aa / 2) - 0.4 * np.exp(second - bb / 2)
        return float(np.sum(weight * np.maximum(inside, 0)))

    base = value(0.5, 0.9, 0.3)
    assert value(0.6, 0.9, 0.3) > base
    assert value(0.5, 1.1, 0.3) > base
    assert value(0.5, 0.9, 0.45) > base


def test_unsampled_single_step_is_a_gaussian_shifted_by_twice_the_clip() -> None:
    guarantee = _only(LabelAmplified(sampling_probability=1.0, steps=1, noise_multiplier=5))
    assert (guarantee.unit, guarantee.status) == (Unit.LABEL, Status.PROVEN)
    assert guarantee.epsilon == pytest.approx(get_epsilon_gaussian(1 / 0.4, 1e-5), rel=1e-8)


def test_published_values_of_replace_one() -> None:
    for multiplier, epsilon in ((5.0, 4.54), (15.0, 1.32)):
        mechanism = LabelAmplified(sampling_probability=1 / 60, steps=24_000, noise_multiplier=multiplier)
        assert _only(mechanism).epsilon == pytest.approx(epsilon, abs=7e-3)


def test_weighted_contributions_stay_within_the_clip(seed: int) -> None:
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


def test_the_leverages_of_public_rows_equal_those_by_the_inverse(seed: int) -> None:
    generator = np.random.default_rng(seed)
    h, base = generator.standard_normal((9, 5)), generator.standard_normal((20, 5))
    found = Metric.of_rows(torch.from_numpy(base), floor=0.2).leverages(torch.from_numpy(h)).numpy()
    matrix = base.T @ base / 20
    inverse = np.linalg.inv(matrix + 0.2 * np.trace(matrix) / 5 * np.eye(5))
    np.testing.assert_allclose(found, np.einsum("id,de,ie->i", h, inverse, h), rtol=1e-9)
