"""Labels that are read once, in numpy: the mu of stacked readings, posterior targets."""

from collections.abc import Sequence

import numpy as np
from scipy.special import log_softmax, softmax

from opusim import checks


def label_readout_mu(codes: Sequence[np.ndarray], sigmas: Sequence[float]) -> float:
    """max_ab sqrt(sum_l ||B^l_a - B^l_b||^2 / sigma_l^2) over all distinct readings.

    Each reading has B^l with one column a label, shape (n_l, labels); a one-hot target that is noised by itself is the
    identity. Its noise has the standard deviation sigma_l, above 0. Lengths must agree, and the readings about the
    number of labels.
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
    guarantee that covers every update. Gains need some epochs of warm-up. The likelihood comes from
    `reading_log_likelihood` or `response_log_likelihood`.
    """
    checks.finite(logits=logits, log_likelihood=log_likelihood)
    checks.shape(np.shape(logits), log_likelihood=log_likelihood)
    return softmax(log_softmax(np.asarray(logits, float), axis=1) + log_likelihood, axis=1)
