"""How long the medium keeps its speckle: from frames of one pattern at two times."""

from __future__ import annotations

import numpy as np

from opusim import checks
from opusim.calibration.jackknife import Estimate, jackknife


def sparse_patterns(n_inputs: int, rows: int, seed: int = 1) -> np.ndarray:
    """Random binary patterns with one mirror in ten on, at least one: uint8, shape (rows, n_inputs).

    With few mirrors on, a field hardly depends on the anchor's, by whose intensity the pixels were chosen; so it is
    a circular Gaussian to within the share of mirrors that is on.
    """
    random = np.random.default_rng(seed)
    patterns = np.zeros((rows, n_inputs), dtype=np.uint8)
    for row in patterns:
        row[random.choice(n_inputs, size=max(1, n_inputs // 10), replace=False)] = 1
    return patterns


def decorrelation_time(
    first: np.ndarray,
    again: np.ndarray,
    later: np.ndarray,
    *,
    elapsed_s: float,
    confidence: float,
    groups: int = 40,
) -> Estimate:
    """The time tau after which the field's correlation has fallen to 1/e, from intensities.

    cov(I(0), I(t)) / cov(I(0), I'(0)) = |rho(t)|^2 = exp(-2 t / tau) over pixels, for circular Gaussian fields
    (Siegert); I and I' are two frames at time 0, whose noises are independent, so that noise falls out.

    Args:
        first: frames at time 0, shape (patterns, pixels), DN, at least two patterns with equally many mirrors on.
        again: the same patterns, at time 0 once more.
        later: the same patterns, after the time elapsed.
        elapsed_s: seconds, above 0; best about a third of the time sought.
        confidence: of the interval, in (0, 1).
        groups: of pixels.

    Raises:
        ValueError: shapes differ, or the frames show no correlation.
    """
    checks.positive(elapsed_s=elapsed_s)
    checks.shape(first.shape, again=again, later=later)
    checks.integer(patterns=len(first), minimum=2)
    a, b, c = (
        frames - frames.mean(axis=0, dtype=np.float64) for frames in (first, again, later)
    )  # no fixed pattern
    columns = np.stack([np.ones_like(a), a, b, c, a * b, a * c])  # (6, patterns, pixels)
    sums = np.stack([columns[:, :, g::groups].sum(axis=2) for g in range(groups)])

    def log_ratio(total: np.ndarray) -> dict[str, float]:
        mean_a, mean_b, mean_c, ab, ac = (
            total[1:] / total[0]
        )  # each (patterns,): patterns differ in their means
        same, apart = float(np.mean(ab - mean_a * mean_b)), float(np.mean(ac - mean_a * mean_c))
        if same <= 0 or apart <= 0:
            raise ValueError(
                f"elapsed_s = {elapsed_s:g}: the frames do not correlate; take the later ones sooner"
            )
        return {"rate": float(-np.log(apart / same)) / (2 * elapsed_s)}

    rate = jackknife(sums, log_ratio, confidence=confidence)["rate"]
    return Estimate(
        value=1 / rate.value if rate.value > 0 else np.inf,
        low=1 / rate.high if rate.high > 0 else np.inf,
        high=1 / rate.low if rate.low > 0 else np.inf,
    )
