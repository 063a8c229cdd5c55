"""Labels under photonic DFA: how far one step can tell two labels of a record apart, by leverage scores.

The credited noise comes after anything that was done to the signal s, and before or after the slope phi'. Row j of
layer l releases, with g_ij ~ N(0, sigma^2) and xi_j ~ N(0, I),

    before: U_j = sum_i (s_ij + g_ij) phi'_ij h_i + sqrt(lambda) sigma xi_j,  S_j = sum_i phi'_ij^2 h_i h_i^T,
    after:  U_j = sum_i (s_ij phi'_ij + g_ij) h_i + sqrt(lambda) sigma xi_j,  S = sum_i h_i h_i^T for every row.

Features are public and labels enter through s alone, so a changed label moves the mean and leaves the covariance
sigma^2 (S_j + lambda I) as it is: the step is exactly mu-GDP with

    before: mu_I^2 = sum_l sum_j (s_lIj(a) - s_lIj(b))^2 lev_lIj / sigma_l^2,
            lev_Ij = phi'_Ij^2 h_I^T (S_j + lambda I)^-1 h_I in [0, 1),
    after:  mu_I^2 = sum_l ||(s_lI(a) - s_lI(b)) * phi'_lI||^2 lev_lI / sigma_l^2,
            lev_I = h_I^T (S + lambda I)^-1 h_I in [0, 1): one Gram matrix a layer,

over layers whose readings are disjoint, hence independent. The output layer is a layer with phi' = 1 and s = e.
`LayerReadings` with slopes gives the first leverage, with slopes of None the second; the signals of the second form
have the slopes multiplied in. Source: docs/privacy.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import scipy.linalg

from opusim import checks

LABEL_CHECKED = (
    "each credited noise is drawn afresh, for one reading of one layer at one step, after the last nonlinearity of the "
    "signal",
    "every released layer is noised, the output layer too",
    "a record stands at most once in a batch",
    "no class weights, balanced batches or mixup, and no schedule or early stopping on training labels",
)
"""What a training code can check of any label protection."""

LABEL_TRUSTED = (
    "features, initial weights and the projection are public or do not depend on labels",
    "no loss or accuracy on training labels leaves",
    "neither the noise nor its seed is revealed, and nobody attacks the rounding of floating-point numbers",
)
"""What it cannot."""


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


def step_mu_bound(
    distances: Sequence[float | np.ndarray], scores: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """mu_I <= sqrt(sum_l Delta_l^2 max_j lev_lIj / sigma_l^2), shape (m,): where signals are not enumerated.

    Args:
        distances: Per layer, Delta_l, a number or one for each record, shape (m,): 2 tB for a signal scaled to a
            ball, `label_distance` or `ternary_distance` without one, sqrt(2) for e = p - y at the output. Times
            max_j |phi'_Ij| where the noise is added after the slope.
        scores: Per layer, the leverages, shape (m, n) or (m, 1).
        sigmas: Per layer, above 0.
    """
    checks.positive(sigmas=sigmas)
    for distance in distances:
        checks.non_negative(distances=distance)
    terms = [
        np.square(distance) * score.max(axis=1) / sigma**2
        for distance, score, sigma in zip(distances, scores, sigmas, strict=True)
    ]
    return np.sqrt(np.sum(terms, axis=0))


def label_distance(projection: np.ndarray) -> float:
    """Delta = max_ab ||B_a - B_b||: the error is p - y, so two labels differ by B_b - B_a.

    Args:
        projection: B, one column a label, shape (n, labels).
    """
    gaps = [np.linalg.norm(projection[:, a] - projection[:, b]) for a, b in _pairs(projection)]
    return float(max(gaps))


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
