"""Labels under amplification by a secret batch: noise whose covariance is public, at equal leverages.

A step releases, with a secret Poisson(q) batch, U_j = sum_{i in batch} w_i s_ij phi'_ij h_i + N(0, sigma^2 S_j) for
every row j of every layer. S_j depends on neither batch nor labels, for instance
S_j = (m/N') sum over fixed public rows of phi'_rj^2 h_r h_r^T + lambda I. The whitened contribution of record i under
label a has norm c_i(a) = sqrt(sum_l sum_j s_lj(a)^2 lev_lij / sigma_l^2), and w_i = min(1, C / c_i), where c_i is
c_i(a) of the record's own (even noisy) signal, or a maximum over labels: only the norm of what is summed counts.

Theorem. The step is dominated by the pair P* = (1-q) N(0,1) + q N(C,1), Q* = (1-q) N(0,1) + q N(-C,1): the
Poisson-subsampled Gaussian under replace_one with noise multiplier 1/C.

Proof: docs/privacy.md, section 6 (for k >= 1 the hockey-stick divergence is E (1 - x L_0 - y L_b)_+ of two jointly
log-normal likelihood ratios, and Kahane's convexity inequality makes it grow with each of their covariances, which
the worst pair attains at once; k < 1 is its mirror image). Steps compose adaptively since dominating pairs do.

Noise that depends on the batch cannot be amplified: it shows who is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accounting.guarantee import Adjacency, Guarantee
from accounting.labels.leverage import LABEL_CHECKED, LABEL_TRUSTED
from accounting.labels.mechanisms import LabelAmplified
from accounting.mechanisms import PoissonGaussian
from accounting.standard import noise_bounds
from accounting.statement import proven_guarantee, stated
from opusim import checks

_CHECKED = (
    "every whitened contribution is scaled to norm C at most, whatever the label",
    "the noise's covariance depends on neither batch nor labels, and no noise comes from the batch's own readings",
    "the batch is Poisson sampled afresh at each step",
)
_SECRET = "batches stay secret: sizes, frames, joules, times and the sampler's state are not released"
_DEVICE_LAW = (
    "the device's noise is Gaussian, independent of labels and batch, and at least as strong as stated"
)


def whitened_norms(
    signals: Sequence[np.ndarray], scores: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """c_i = max over labels a of sqrt(sum_l sum_j s_lij(a)^2 lev_lij / sigma_l^2), shape (m,).

    Args:
        signals: Per layer, the signal as it is summed, shape (m, 1, n), or what each label would make of it, shape
            (m, labels, n). Readings of a noisy device come in as they are: the bound holds for each of them.
        scores: Per layer, leverages in the public S_j (`label_leverage.public_leverages`), shape (m, n) or (m, 1).
        sigmas: Per layer, sigma_l > 0.
    """
    checks.positive(sigmas=sigmas)
    squares = [
        np.sum(np.square(signal) * score[:, None, :], axis=2) / sigma**2
        for signal, score, sigma in zip(signals, scores, sigmas, strict=True)
    ]
    return np.sqrt(np.max(np.sum(squares, axis=0), axis=1))


def record_weights(norms: np.ndarray, clip: float) -> np.ndarray:
    """w_i = min(1, C / c_i), shape (m,), after which every whitened contribution has norm C at most.

    Args:
        norms: c_i >= 0, shape (m,).
        clip: C > 0.
    """
    checks.non_negative(norms=norms)
    checks.positive(clip=clip)
    return np.minimum(1.0, clip / np.maximum(norms, np.finfo(float).tiny))


def equalised_weights(h: np.ndarray, *, rounds: int = 60, ridge: float = 1e-9) -> np.ndarray:
    """Kiefer-Wolfowitz weights w of the D-optimal design: max_i h_i^T (sum_k w_k h_k h_k^T)^-1 h_i -> fan_in.

    Each round multiplies w_i by lev_i / sum_k w_k lev_k. In S_j = m sum_k w_k h_k h_k^T every record has about the
    leverage fan_in / m, which is the least that the largest can be. The weights see public features only.

    Args:
        h: Public features as rows, the bias's constant included, shape (n_records, fan_in).
        rounds: Number of rounds, at least 0.
        ridge: Added to the diagonal, relative to its mean, above 0; for the factorisation only, so any value is safe.

    Returns:
        Weights of sum 1, shape (n_records,).
    """
    checks.shape((None, None), h=h)
    checks.finite(h=h)
    checks.integer(minimum=0, rounds=rounds)
    checks.positive(ridge=ridge)
    rows = np.asarray(h, dtype=np.float64)
    weights = np.full(len(rows), 1 / len(rows))
    for _ in range(rounds):
        gram = rows.T @ (rows * weights[:, None])
        gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
        whitened = np.linalg.solve(np.linalg.cholesky(gram), rows.T)  # (fan_in, n_records)
        weights = weights * np.sum(np.square(whitened), axis=0)
        weights /= weights.sum()
    return weights


def guarantees(
    mechanisms: Sequence[LabelAmplified], *, delta: float, enforced: bool = False
) -> list[Guarantee]:
    """Epsilon of all steps together by the dominating pair, replace_one.

    Args:
        mechanisms: At least one.
        delta: In [0, 1).
        enforced: Whether the training code checked what code can check.
    """
    steps = [
        PoissonGaussian(
            noise_multiplier=mechanism.noise_multiplier,
            sampling_probability=mechanism.sampling_probability,
            steps=mechanism.steps,
            adjacency=Adjacency.REPLACE_ONE,
        )
        for mechanism in mechanisms
    ]
    device = any(mechanism.device_noise for mechanism in mechanisms)
    trusted = (_SECRET, *LABEL_TRUSTED, *([_DEVICE_LAW] if device else []))
    return [
        proven_guarantee(
            mechanisms,
            bounds=noise_bounds(steps, Adjacency.REPLACE_ONE, delta),
            delta=delta,
            adjacency=Adjacency.REPLACE_ONE,
            source="docs/privacy.md, section 6: Poisson-subsampled Gaussian, replace_one",
            assumptions=stated((*_CHECKED, *LABEL_CHECKED), trusted, enforced=enforced),
            device_model=device,
        )
    ]
