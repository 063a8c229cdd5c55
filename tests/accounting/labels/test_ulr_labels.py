"""Labels under fresh noise at a module's outputs: the leverage bound against the Gaussian that a step releases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.ulr_labels import fresh_noise_mu, jacobian_leverages

CLIP, NOISE, TAU = 0.6, 0.9, 0.4


def jacobians(seed: int, m: int = 7, outputs: int = 3, parameters: int = 11) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, outputs, parameters))


def exact_mu(all_of_them: np.ndarray, record: int, moved: np.ndarray, tau: float) -> float:
    """sqrt(d^T S^-1 d), d = J_i^T moved: the distance of two Gaussians with one covariance."""
    covariance = NOISE**2 * np.einsum("ioa,iob->ab", all_of_them, all_of_them) + tau**2 * np.eye(
        all_of_them.shape[2]
    )
    shift = all_of_them[record].T @ moved
    return float(np.sqrt(shift @ np.linalg.solve(covariance, shift)))


@pytest.mark.parametrize("tau", [0.0, TAU])
def test_no_label_exceeds_the_bound_and_the_worst_direction_attains_it(tau: float, seed: int) -> None:
    rows = jacobians(seed)
    mu = fresh_noise_mu(jacobian_leverages(rows, floor=(tau / NOISE) ** 2), clip_norm=CLIP, noise_std=NOISE)
    covariance = NOISE**2 * np.einsum("ioa,iob->ab", rows, rows) + tau**2 * np.eye(11)
    generator = np.random.default_rng(seed)
    for record in range(len(rows)):
        for _ in range(50):
            moved = generator.standard_normal(3)
            moved *= 2 * CLIP / np.linalg.norm(moved)
            assert exact_mu(rows, record, moved, tau) <= mu[record] * (1 + 1e-9)
        _, vectors = np.linalg.eigh(rows[record] @ np.linalg.solve(covariance, rows[record].T))
        assert exact_mu(rows, record, 2 * CLIP * vectors[:, -1], tau) == pytest.approx(mu[record], rel=1e-6)


def test_planted_fault_a_mean_leverage_is_exceeded(seed: int) -> None:
    rows = jacobians(seed)
    rows[0] *= 10  # a record of its own
    scores = jacobian_leverages(rows, floor=(TAU / NOISE) ** 2)
    mean = fresh_noise_mu(scores.mean(keepdims=True), clip_norm=CLIP, noise_std=NOISE)[0]
    exact = max(exact_mu(rows, 0, 2 * CLIP * unit, TAU) for unit in np.eye(3))
    assert exact > mean


def test_a_linear_module_is_the_leverage_of_its_inputs(seed: int) -> None:
    """J_i = I (x) (h_i, 1)^T."""
    h = np.random.default_rng(seed).standard_normal((6, 4))
    with_one = np.hstack([h, np.ones((6, 1))])
    rows = np.stack([np.kron(np.eye(3), row) for row in with_one])
    inverse = np.linalg.inv(with_one.T @ with_one + 0.3 * np.eye(5))
    known = np.einsum("id,de,ie->i", with_one, inverse, with_one)
    np.testing.assert_allclose(jacobian_leverages(rows, floor=0.3), known, rtol=1e-9)


def test_limits() -> None:
    private = np.zeros((2, 1, 2))
    private[0, 0, 0] = private[1, 0, 1] = 1.0  # an input that no other record has
    assert jacobian_leverages(private) == pytest.approx([1.0, 1.0])
    assert jacobian_leverages(private, floor=1e12) == pytest.approx([0.0, 0.0], abs=1e-9)
    with pytest.raises(ValueError, match="noise_std = 0.0"):
        fresh_noise_mu(np.ones(1), clip_norm=1.0, noise_std=0.0)
