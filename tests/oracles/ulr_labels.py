"""Labels under fresh noise at a module's outputs: how far one step can tell two labels of a record apart.

Features and released weights are public, hence every Jacobian J_i. A step releases, with ||c_i|| <= C_v the only part
that depends on labels (a likelihood ratio estimate clipped at the outputs) and xi_i, eta fresh N(0, I),

    sum_i J_i^T (c_i + a xi_i) + tau eta,   covariance S = a^2 sum_i J_i^T J_i + tau^2 I, public.

A changed label moves c_i by at most 2 C_v, so the step is Gaussian with

    mu_i <= 2 C_v sqrt(lambda_max(J_i S^-1 J_i^T)) = (2 C_v / a) sqrt(lev_i),
    lev_i = lambda_max(J_i (sum_k J_k^T J_k + (tau/a)^2 I)^-1 J_i^T) in [0, 1],

and over the steps that use the record mu adds up in squares. For a linear module lev_i = h_i^T (H^T H + (tau/a)^2 I)^-1
h_i. The noise of the estimate itself earns nothing: its size is the loss, which is the secret. Batches must be public
(S tells who is in them): there is no amplification by sampling.
"""

from __future__ import annotations

import numpy as np

from opusim import checks


def jacobian_leverages(jacobians: np.ndarray, *, floor: float = 0.0) -> np.ndarray:
    """lev_i = lambda_max(J_i (sum_k J_k^T J_k + floor I)^-1 J_i^T), shape (m,), in [0, 1].

    The squared largest singular value of each record's rows of Q in QR = [J; sqrt(floor) I], in float64. Where rank is
    lost, the columns of Q span more than the range, which errs toward 1.

    Args:
        jacobians: J_i of every record of the batch, shape (m, outputs, parameters).
        floor: (tau / a)^2 >= 0.
    """
    checks.finite(jacobians=jacobians)
    checks.shape((None, None, None), jacobians=jacobians)
    checks.non_negative(floor=floor)
    rows = np.asarray(jacobians, dtype=np.float64)
    m, outputs, parameters = rows.shape
    flat = rows.reshape(m * outputs, parameters)
    stacked = np.vstack([flat, floor**0.5 * np.eye(parameters)]) if floor > 0 else flat
    q = np.linalg.qr(stacked, mode="reduced")[0][: m * outputs].reshape(m, outputs, -1)
    largest = np.linalg.norm(q, ord=2, axis=(1, 2))
    return np.minimum(np.square(largest), 1.0)


def fresh_noise_mu(leverages: np.ndarray, *, clip_norm: float, noise_std: float) -> np.ndarray:
    """mu_i = (2 C_v / a) sqrt(lev_i) of each record, shape (m,).

    Args:
        leverages: lev_i in [0, 1], shape (m,).
        clip_norm: C_v > 0, the bound on a record's signal at the outputs.
        noise_std: a > 0, of the fresh noise at the outputs.
    """
    checks.non_negative(leverages=leverages)
    checks.positive(clip_norm=clip_norm, noise_std=noise_std)
    return 2 * clip_norm / noise_std * np.sqrt(leverages)
