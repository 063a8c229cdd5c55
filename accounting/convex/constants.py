"""How far one step of gradient descent on a convex objective pushes two models apart or together.

With features of norm at most 1 the gradient of one record is a residual r(z, y) of its logits z, spread over the
features. For the objectives of this package

| objective | residual | sensitivity L | smoothness beta |
| --- | --- | --- | --- |
| squared | clip_C(z - e_y) | 2 C | 1 |
| margin | clip_C(z - nearest point of the box z_y >= 1, z_c <= 0) | 2 C | 1 |
| one-against-rest | sigmoid(z_c) - [c = y], each entry clipped to C / sqrt(k) | 2 C | 1/4 |
| softmax | softmax(z) - e_y | 2 sqrt(2) | 1/2 |
| softmax, clipped | clip_C(softmax(z) - e_y) | 2 C | no gradient of a convex function for k >= 3 |

beta is the Hessian's bound: the Hessian of one record is (Hessian in the logits) kron x x^T, of rank one in the
features, so it is not block-diagonal over gates as Lemma 3.2 of the paper takes it to be. The first two residuals are
gradients of Huber functions of a distance to a convex set, hence 1-Lipschitz and monotone.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from accounting.errors import NoGuarantee
from opusim import checks

OBJECTIVES = ("squared", "margin", "one-against-rest", "softmax")
_SMOOTHNESS = {"squared": 1.0, "margin": 1.0, "one-against-rest": 0.25, "softmax": 0.5}


def check_objective(objective: str, clip: float | None) -> None:
    """Refuse an objective that is unknown, or whose residual nothing bounds.

    Args:
        objective: One of `OBJECTIVES`.
        clip: C > 0, or None if there is no clip (softmax and one-against-rest are bounded by themselves).

    Raises:
        ValueError: One of both.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective = {objective!r}: must be one of {', '.join(OBJECTIVES)}")
    if clip is not None:
        checks.positive(clip=clip)
    elif objective in ("squared", "margin"):
        raise ValueError(
            f"clip is missing: nothing else bounds the residual of {objective!r}; give one above 0"
        )


def residual_bound(objective: str, clip: float | None, n_classes: int) -> float:
    """Return C, the largest norm of one record's gradient without the regulariser; the sensitivity is L = 2 C."""
    check_objective(objective, clip)
    own = {"softmax": math.sqrt(2.0), "one-against-rest": math.sqrt(n_classes)}.get(objective, math.inf)
    return own if clip is None else min(own, clip)


def smoothness(objective: str) -> float:
    """Return beta, the Lipschitz constant of one record's gradient without the regulariser, at features of norm 1."""
    return _SMOOTHNESS[objective]


def log_expansion(
    objective: str, clip: float | None, n_classes: int, rate: np.ndarray, regularisation: float
) -> np.ndarray:
    """Return log c of each step: |step(a) - step(b)| <= c |a - b| for any two models and any batch.

    c = max(|1 - eta lambda|, |1 - eta (beta + lambda)|) for a gradient of a convex function; for clipped softmax of
    three classes and more c = q (1 - 8 kappa_k (eta / q) C / (4 - eta / q))^(-1/2), q = 1 - eta lambda.

    Args:
        objective: One of `OBJECTIVES`.
        clip: C, or None.
        n_classes: k.
        rate: eta of each step, at least 0.
        regularisation: lambda, at least 0.

    Raises:
        NoGuarantee: A rate is 2 / (beta + lambda) or more, so that steps push models apart.
    """
    beta = smoothness(objective)
    largest = float(np.max(rate))
    if not largest < 2 / (beta + regularisation):
        raise NoGuarantee(
            f"learning_rate = {largest:g}: must be below 2 / (beta + regularisation) = "
            f"{2 / (beta + regularisation):g}, beta being {beta:g} for {objective!r}; lower it"
        )
    shrink = _log_distance_from_one(rate * regularisation)
    if clips_a_softmax(objective, clip, n_classes):
        return _clipped_softmax(clip or math.inf, n_classes, rate, regularisation)
    return np.maximum(shrink, _log_distance_from_one(rate * (beta + regularisation)))


def _log_distance_from_one(x: np.ndarray) -> np.ndarray:
    """The logarithm of |1 - x|, x at least 0; exact for small x."""
    with np.errstate(divide="ignore"):
        return np.where(x < 0.5, np.log1p(-np.minimum(x, 0.5)), np.log(np.abs(1 - x)))


def clips_a_softmax(objective: str, clip: float | None, n_classes: int) -> bool:
    """Return whether clipped gradients are those of no convex function: softmax of three or more classes, clipped."""
    return objective == "softmax" and clip is not None and clip < math.sqrt(2.0) and n_classes > 2


def _clipped_softmax(clip: float, n_classes: int, rate: np.ndarray, regularisation: float) -> np.ndarray:
    shrink = _log_distance_from_one(rate * regularisation)
    step = rate / np.exp(shrink)
    if not float(np.max(rate * regularisation)) < 1 or not float(np.max(step)) < 4:
        raise NoGuarantee(
            f"learning_rate = {float(np.max(rate)):g}: must keep eta / (1 - eta lambda) below 4; lower it"
        )
    share = 8 * softmax_gap(n_classes) * step * clip / (4 - step)
    if not float(np.max(share)) < 1:
        raise NoGuarantee(
            f"learning_rate = {float(np.max(rate)):g} and clip = {clip:g}: no bound on how far a step of clipped "
            "softmax pushes two models apart; lower either"
        )
    return np.asarray(shrink - 0.5 * np.log1p(-share))


@lru_cache
def softmax_gap(n_classes: int) -> float:
    """Return kappa_k = max over distributions pi on the k - 1 wrong classes of (S3 - S2^2) / (4 (1 + S2)^(3/2)).

    S_m = sum of pi^m. At a maximum the positive entries take at most two values (Lagrange: they solve one quadratic),
    so a search over how often each occurs and over one number finds it; the answer is rounded up by 1e-4 of itself.
    """
    checks.integer(minimum=2, n_classes=n_classes)
    wrong, best = n_classes - 1, 0.0
    for many in range(1, wrong):  # entries of the first value, then of the second
        for few in {1, wrong - many} | set(range(1, min(4, wrong - many) + 1)):
            mass = np.linspace(0, 1, 20_001)
            first, second = mass / many, (1 - mass) / few
            s2, s3 = (many * first**m + few * second**m for m in (2, 3))
            best = max(best, float(np.max((s3 - s2**2) / (4 * (1 + s2) ** 1.5))))
    return best * (1 + 1e-4)
