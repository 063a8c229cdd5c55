"""Labels projected once: a noisy reading of every record's one-hot label, kept and reused for the whole training.

r_i = B y_i + g_i, g ~ N(0, sigma_l^2) on the outputs of layer l. Between labels a and b the readings are Gaussians
of the same law, shifted: one record is mu-GDP with mu^2 = max_ab sum_l ||B^l_a - B^l_b||^2 / sigma_l^2 over all
distinct readings. Whatever happens to r_i later (scales, epochs, posterior targets) is post-processing; the output
layer takes its target from the same readings at no cost, for the least-squares numbers carry all that they tell.
Source: docs/privacy.md, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import log_softmax, softmax

from accounting.guarantee import Guarantee
from accounting.labels.gaussian import label_guarantee
from accounting.labels.mechanisms import LabelOnce
from accounting.statement import stated
from opusim import checks

_CHECKED = (
    "each label is read as often as stated, and every distinct reading of it is counted in mu",
    "the noise is drawn once for each reading, with the same law for all labels",
    "nothing but the readings looks at training labels",
)
_TRUSTED = (
    "features, initial weights and the projection are public or do not depend on labels",
    "neither the noise nor its seed is revealed, and nobody attacks the rounding of floating-point numbers",
)
_DEVICE_LAW = "the device's noise is Gaussian, the same for every label, and at least as strong as stated"


def label_once_mu(codes: Sequence[np.ndarray], sigmas: Sequence[float]) -> float:
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


def guarantees(mechanisms: Sequence[LabelOnce], *, delta: float, enforced: bool = False) -> list[Guarantee]:
    """mu-GDP for labels, mu^2 the sum over all readings.

    Args:
        mechanisms: At least one; each of its steps reads every label afresh.
        delta: In [0, 1).
        enforced: Whether the training code checked what code can check.
    """
    device = any(mechanism.device_law for mechanism in mechanisms)
    return [
        label_guarantee(
            mechanisms,
            delta=delta,
            source="docs/privacy.md, section 7: Gaussian mechanism on the stacked readings, then post-processing",
            assumptions=stated(_CHECKED, (*([_DEVICE_LAW] if device else []), *_TRUSTED), enforced=enforced),
            device_model=device,
        )
    ]


def reading_log_likelihood(
    readings: Sequence[np.ndarray], codes: Sequence[np.ndarray], sigmas: Sequence[float]
) -> np.ndarray:
    """Log p(r_i | label a) + const = -sum_l ||r_i^l - B^l_a||^2 / (2 sigma_l^2), shape (m, labels).

    Args:
        readings: Per reading, shape (m, n_l).
        codes: Per reading, B^l, shape (n_l, labels).
        sigmas: Per reading, above 0.
    """
    checks.positive(sigmas=sigmas)
    total = np.zeros((len(readings[0]), codes[0].shape[1]))
    for reading, code, sigma in zip(readings, codes, sigmas, strict=True):
        checks.shape((len(total), code.shape[0]), readings=reading)
        r, b = np.asarray(reading, float), np.asarray(code, float)
        total += (r @ b - np.sum(np.square(b), axis=0) / 2) / sigma**2  # ||r||^2 is common to all labels
    return total


def posterior_targets(logits: np.ndarray, log_likelihood: np.ndarray) -> np.ndarray:
    """softmax(log p_model + log-likelihood of the reading), row by row: soft labels, shape (m, labels).

    The model's own belief serves as prior, so it sharpens what the noisy reading says; post-processing of a
    guarantee that covers every update. Gains need some epochs of warm-up.

    Args:
        logits: The model's outputs, log-probabilities up to a constant of each row, shape (m, labels).
        log_likelihood: From `reading_log_likelihood` or `randomized_response.response_log_likelihood`.
    """
    checks.finite(logits=logits, log_likelihood=log_likelihood)
    checks.shape(np.shape(logits), log_likelihood=log_likelihood)
    return softmax(log_softmax(np.asarray(logits, float), axis=1) + log_likelihood, axis=1)
