"""The label theorems in numpy, slow and exact: leverages by QR, mu by enumeration of labels, posterior targets.

These twins know both orders of noise (before and after the slope) and every pair of labels; training code computes only
what it runs, in torch, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import scipy.linalg
from scipy.special import log_softmax, softmax

from opusim import checks


@dataclass(frozen=True, kw_only=True)
class LayerReadings:
    """What one layer's update takes from a batch of m records.

    Attributes:
        activations: h_i as rows, without the bias's constant, shape (m, fan_in).
        slopes: phi'_ij where the noise goes through them, shape (m, n); None where it does not: noise added after
            the slope, or a layer without one (the output layer).
        bias: Whether the layer has a bias, which is moved by the same readings: 1 is appended to h.
        floor: lambda >= 0, variance of the noise really added on every weight, in units of sigma^2; 0 for none.
    """

    activations: np.ndarray
    slopes: np.ndarray | None
    bias: bool = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        checks.finite(activations=self.activations)
        checks.shape((None, None), activations=self.activations)
        checks.non_negative(floor=self.floor)
        if self.slopes is not None:
            checks.finite(slopes=self.slopes)
            checks.shape((len(self.activations), None), slopes=self.slopes)

    def inputs(self) -> np.ndarray:
        """H in float64, with the constant 1 where there is a bias, shape (m, fan_in or fan_in + 1)."""
        h = np.asarray(self.activations, dtype=np.float64)
        return np.hstack([h, np.ones((len(h), 1))]) if self.bias else h


def leverages(layer: LayerReadings) -> np.ndarray:
    """lev_Ij = phi'_Ij^2 h_I^T (S_j + lambda I)^-1 h_I by a QR factorisation in float64, shape (m, n) or (m, 1).

    The squared row norms of Q's upper part in QR = [diag(phi'_j) H; sqrt(lambda) I]. Where rank is lost, the
    columns of Q span more than the range, which errs toward 1; a pseudo-inverse or a small ridge would not.
    Costs n factorisations of (m + fan_in, fan_in): meant for small layers and as an oracle for large ones.

    Args:
        layer: The readings. (m, 1) is returned for slopes of None: all rows of the update are alike.
    """
    h = layer.inputs()
    if layer.slopes is None:
        return _row_leverages(h, layer.floor)[:, None]
    slopes = np.asarray(layer.slopes, dtype=np.float64)
    columns = [_row_leverages(h * slopes[:, [j]], layer.floor) for j in range(slopes.shape[1])]
    return np.stack(columns, axis=1)


def public_leverages(layer: LayerReadings, reference: LayerReadings, scale: float) -> np.ndarray:
    """phi'_Ij^2 h_I^T (scale sum_r phi'_rj^2 h_r h_r^T + lambda I)^-1 h_I, shape (m, n) or (m, 1).

    S_j comes from public reference rows r, not from the batch, so a leverage may exceed 1. lambda is the
    reference's floor; it must be above 0, else a record outside the reference's span has no noise at all.

    Args:
        layer: The records.
        reference: The public rows, of the same layer at the same weights.
        scale: Above 0, such as the batch size over the number of reference rows.

    Raises:
        ValueError: The reference has no floor, or the two differ in slopes or widths.
    """
    checks.positive(scale=scale, floor_of_reference=reference.floor)
    h, base = layer.inputs(), reference.inputs()
    checks.shape((None, h.shape[1]), reference=base)
    if (layer.slopes is None) != (reference.slopes is None):
        raise ValueError("slopes: the records and the reference must both have them, or neither")
    if layer.slopes is None or reference.slopes is None:
        return _quadratic(h, base * scale**0.5, reference.floor)[:, None]
    slopes, others = np.asarray(layer.slopes, float), np.asarray(reference.slopes, float)
    checks.shape((None, slopes.shape[1]), reference_slopes=others)
    columns = [
        _quadratic(h * slopes[:, [j]], base * others[:, [j]] * scale**0.5, reference.floor)
        for j in range(slopes.shape[1])
    ]
    return np.stack(columns, axis=1)


def step_mu(
    signals: Sequence[np.ndarray], scores: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """mu_I = max over label pairs of sqrt(sum_l sum_j (s_lIj(a) - s_lIj(b))^2 lev_lIj / sigma_l^2), shape (m,).

    The maximum runs over the labels a record could have, never over the one it has: so mu_I is public.
    Where a device's own noise acts before a nonlinearity the signals cannot be enumerated: `step_mu_bound` with
    2 tB holds then (fix the readings; the divergence is jointly convex).

    Args:
        signals: Per layer, what each label would make of the noise-free signal (after any scale to the ball),
            shape (m, labels, n): s where the noise goes through the slope, s * phi' where it is added after it.
        scores: Per layer, the leverages, shape (m, n) or (m, 1).
        sigmas: Per layer, standard deviation of the credited noise, above 0.
    """
    _check_layers(signals, scores, sigmas)
    n_labels = signals[0].shape[1]
    worst = np.zeros(len(signals[0]))
    for a, b in combinations(range(n_labels), 2):
        pair = np.zeros_like(worst)
        for signal, score, sigma in zip(signals, scores, sigmas, strict=True):
            pair += np.sum(np.square(signal[:, a] - signal[:, b]) * score, axis=1) / sigma**2
        worst = np.maximum(worst, pair)
    return np.sqrt(worst)


def ternary_distance(projection: np.ndarray) -> float:
    """Delta = max_ab ||c_a B_a - c_b B_b|| over c in {1, 2}: the error is ternarized at a threshold below 1/2.

    t(p - y_a) - t(p - y_b) = -c_a e_a + c_b e_b, where c_a = t(p_a) - t(p_a - 1) is 2 for threshold <= p_a <=
    1 - threshold, else 1.

    Args:
        projection: B, shape (n, labels).
    """
    gaps = [
        np.linalg.norm(first * projection[:, a] - second * projection[:, b])
        for (a, b), first, second in product(_pairs(projection), (1, 2), (1, 2))
    ]
    return float(max(gaps))


def _pairs(projection: np.ndarray) -> list[tuple[int, int]]:
    checks.finite(projection=projection)
    checks.shape((None, None), projection=projection)
    if projection.shape[1] < 2:
        raise ValueError(f"projection has {projection.shape[1]} column: at least two labels are needed")
    return list(combinations(range(projection.shape[1]), 2))


def _row_leverages(rows: np.ndarray, floor: float) -> np.ndarray:
    """Squared row norms of Q's first len(rows) rows, shape (m,), at most 1."""
    stacked = np.vstack([rows, floor**0.5 * np.eye(rows.shape[1])]) if floor > 0 else rows
    q = np.linalg.qr(stacked, mode="reduced")[0]
    return np.minimum(np.sum(np.square(q[: len(rows)]), axis=1), 1.0)


def _quadratic(rows: np.ndarray, base: np.ndarray, floor: float) -> np.ndarray:
    """r^T (base^T base + floor I)^-1 r for each row r, through R of a QR factorisation, shape (m,)."""
    stacked = np.vstack([base, floor**0.5 * np.eye(base.shape[1])])
    r = np.linalg.qr(stacked, mode="r")
    whitened = scipy.linalg.solve_triangular(r, rows.T, trans="T")
    return np.sum(np.square(whitened), axis=0)


def _check_layers(
    signals: Sequence[np.ndarray], scores: Sequence[np.ndarray], sigmas: Sequence[float]
) -> None:
    if not len(signals) == len(scores) == len(sigmas) >= 1:
        raise ValueError(
            f"signals, scores, sigmas have lengths {len(signals)}, {len(scores)}, {len(sigmas)}: one each a layer"
        )
    checks.positive(sigmas=sigmas)
    m, n_labels = np.shape(signals[0])[:2]
    for signal, score in zip(signals, scores, strict=True):
        checks.shape((m, n_labels, None), signals=signal)
        checks.finite(signals=signal)
        checks.non_negative(scores=score)
        if score.shape not in ((m, signal.shape[2]), (m, 1)):
            raise ValueError(f"scores has shape {score.shape}: must be ({m}, {signal.shape[2]}) or ({m}, 1)")


def label_readout_mu(codes: Sequence[np.ndarray], sigmas: Sequence[float]) -> float:
    """max_ab sqrt(sum_l ||B^l_a - B^l_b||^2 / sigma_l^2) over all distinct readings.

    Args:
        codes: Per reading, B^l with one column a label, shape (n_l, labels); a one-hot target that is noised by
            itself is the identity.
        sigmas: Per reading, the standard deviation of its noise, above 0.

    Raises:
        ValueError: Lengths differ, or the readings disagree about the number of labels.
    """
    if not len(codes) == len(sigmas) >= 1:
        raise ValueError(f"codes, sigmas have lengths {len(codes)}, {len(sigmas)}: must be equal, at least 1")
    checks.positive(sigmas=sigmas)
    n_labels = codes[0].shape[1]
    squares = np.zeros((n_labels, n_labels))
    for code, sigma in zip(codes, sigmas, strict=True):
        checks.shape((None, n_labels), codes=code)
        checks.finite(codes=code)
        gaps = np.asarray(code, float)[:, :, None] - np.asarray(code, float)[:, None, :]
        squares += np.sum(np.square(gaps), axis=0) / sigma**2
    return float(np.sqrt(squares.max()))


def posterior_targets(logits: np.ndarray, log_likelihood: np.ndarray) -> np.ndarray:
    """softmax(log p_model + log-likelihood of the reading), row by row: soft labels, shape (m, labels).

    The model's own belief serves as prior, so it sharpens what the noisy reading says; post-processing of a
    guarantee that covers every update. Gains need some epochs of warm-up.

    Args:
        logits: The model's outputs, log-probabilities up to a constant of each row, shape (m, labels).
        log_likelihood: From `reading_log_likelihood` or `response_log_likelihood`.
    """
    checks.finite(logits=logits, log_likelihood=log_likelihood)
    checks.shape(np.shape(logits), log_likelihood=log_likelihood)
    return softmax(log_softmax(np.asarray(logits, float), axis=1) + log_likelihood, axis=1)
