"""Slow, obvious twins of the camera's kernels; no code is shared with them."""

import numpy as np
from scipy.special import ndtr
from scipy.stats import poisson


def count(rate: float, w: float) -> int:
    """The quantile of the Poisson law at Phi(w)."""
    return int(poisson.ppf(ndtr(w), rate)) if rate > 0 else 0


def digital_number(rate: float, w: float, z: float, sensor: dict[str, float]) -> float:
    """One pixel through well, offset, read noise, gain and converter."""
    electrons = min(count(rate, w), sensor["well"]) + sensor["offset"] + sensor["read"] * z
    return float(np.clip(np.rint(sensor["black"] + sensor["gain"] * electrons), 0, sensor["top"]))
