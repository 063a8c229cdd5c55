"""The kernel that optical random features approximate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opusim import checks


def opu_kernel(X: Any, Y: Any = None, *, degree: int = 2, bias: float = 0.0, gain: float = 1.0) -> np.ndarray:
    """Return the expected product of two intensities, the OPU kernel, exact for real vectors.

    For rows r of a complex medium with independent standard complex normal entries, E|r_i|^2 = 1, and s = degree / 2,

        k(x, y) = E[|r x|^degree |r y|^degree] = (s!)^2 sum_i C(s, i)^2 (x.y)^(2i) (|x|^2 |y|^2)^(s - i),

    which is |x|^2 |y|^2 + (x.y)^2 at degree 2. Features are `device.intensities(x) ** s / sqrt(n_outputs)`: their dot
    products have this mean. Sources: Saade et al., "Random projections through multiple optical scattering", 2016,
    for degree 2; Ohana et al., "Kernel computations from large-scale random features obtained by optical processing
    units", 2020, for even degrees. scikit-learn takes the function as a kernel, as in KernelRidge(kernel=opu_kernel).

    Args:
        X: Vectors, shape (n, d) or (d,).
        Y: Vectors, shape (m, d) or (d,); None takes X.
        degree: An even number of at least 2.
        bias: b^2, added to every dot product: a vector with one more entry b, or b^2 mirrors that are always on.
        gain: Factor on the intensities.

    Returns:
        float64, shape (n, m); a number for two vectors.

    Raises:
        ValueError: Another degree or shape.
    """
    checks.integer(degree=degree, minimum=2)
    checks.non_negative(bias=bias)
    checks.positive(gain=gain)
    if degree % 2:
        raise ValueError(f"degree = {degree}: must be even; an intensity has degree 2")
    checks.complete(X=X, Y=Y)
    x = np.asarray(X, dtype=np.float64)
    y = x if Y is None else np.asarray(Y, dtype=np.float64)
    if x.shape[-1:] != y.shape[-1:] or not 1 <= x.ndim <= 2 or not 1 <= y.ndim <= 2:
        raise ValueError(f"X has shape {x.shape} and Y {y.shape}: must be (n, d) and (m, d) with the same d")
    dots = x @ y.T + bias
    sizes = np.multiply.outer(np.sum(x * x, axis=-1) + bias, np.sum(y * y, axis=-1) + bias)
    s = degree // 2
    total = sum(math.comb(s, i) ** 2 * dots ** (2 * i) * sizes ** (s - i) for i in range(s + 1))
    return np.asarray(math.factorial(s) ** 2 * gain**degree * total)
