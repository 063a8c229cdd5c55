"""Polygons below the divergence curve of two measures: what lower bounds on epsilon are computed from."""

from __future__ import annotations

import numpy as np
from scipy.optimize import isotonic_regression

LARGEST_LOSS = 600.0
"""e^loss stays a double."""
_ROUNDING = 1e-15
"""What rounding may make of two equal values, relative to 1 or to the larger one."""


def polygon_below(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Masses at the points x whose divergence curve is nowhere above that of a pair of measures of mass 1.

    The curve delta(x) = P(ratio > x) - x Q(ratio > x) is convex and has at a middle m the tangent A - x B. A polygon
    with corners at the points x_i lies below the curve if its value at x_i is at most that of both neighbouring
    tangents, which differ there by w_i = x_i Q_i - P_i (Q_i, P_i the masses between two middles). Its slopes are
    -B_i + (max(0, w_i) + min(0, w_{i+1})) / (x_{i+1} - x_i), and the mass of Q at x_i is the change of slope.

    Args:
        x: Increasing points, above 0, that enclose all ratios.
        a: Mass of P beyond a middle of each interval, one less than points.
        b: Mass of Q there.

    Returns:
        The first point that is used and the masses of P from there on, or None if the points are too far apart.
    """
    ends = _ends(x, a, b)
    if ends is None:
        return None
    first, last = ends
    x, a, b = x[first : last + 1], a[first:last], b[first:last]
    w = np.diff(a, prepend=1.0, append=0.0) - x * np.diff(b, prepend=1.0, append=0.0)
    slopes = (np.maximum(w[:-1], 0) + np.minimum(w[1:], 0)) / np.diff(x) - b
    convex = isotonic_regression(
        slopes, weights=np.diff(x)
    ).x  # the polygon's convex hull, if it is not convex
    masses = x * np.diff(convex, prepend=-1.0, append=0.0)
    if not np.isfinite(masses).all() or masses.min() < -1e-9:
        return None
    return first, np.maximum(masses, 0.0)


def _ends(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[int, int] | None:
    """Grid points between which the polygon leaves 1 - x and reaches 0 without crossing a tangent.

    It may leave at x_i if 1 - x is at most the tangents behind it at their grid points, and end at x_i if the tangents
    before it are not negative there. (Both fail only near a loss that the mechanism cannot fall below or exceed.)
    Neither counts what rounding may make of values that are equal.
    """
    below = np.flatnonzero(x[:-1] * (1 - b) < (1 - a) - _ROUNDING)
    negative = np.flatnonzero(a < (1 - _ROUNDING) * x[1:] * b)
    first = int(below[-1]) + 1 if below.size else 0
    last = int(negative[0]) if negative.size else len(x) - 1
    return (first, last) if last > first else None
