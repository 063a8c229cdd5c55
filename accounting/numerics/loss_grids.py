"""Two laws of loss on a grid for every step: one whose divergence curve is above the step's, and one below it.

Both have their masses at a few points a + j h: all of them near 0, further out ever fewer, since a loss l that lies
between points l' < l < l'' adds (l - l') (l'' - l) to the variance, which counts only in proportion to l^2.

**Above** ("connect the dots", Doroshenko et al. 2022). The outcomes between two points are one outcome of masses A and
B under P and Q; it is split between the points such that both masses are kept, with the shares (1 - e^(l' - r)) /
(1 - e^(l' - l'')) and (e^(l'' - r) - 1) / (e^(l'' - l') - 1) of A, where r = log(A / B). Losses above the last point
are infinite, losses below the first are raised to it.

**Below**, its dual: the polygon with corners at the points between tangents of the curve, one for each pair of
neighbours (see `lower_polygon`). It needs the masses P_i, Q_i between two points of tangency and w_i = e^(l_i) Q_i -
P_i, the sum of P (e^(l_i - r) - 1) over their parts. A tangent touches at the middle; where it would be negative at the
upper corner it touches there, and where 1 - x would exceed it at the lower corner, at that one.

If h is much longer than most losses, one point must be the loss of all short ones taken together, or the polygon would
reach 0 there: that is the offset a of the law below.

Everything is a sum of terms of relative precision. Where those of the law below have both signs, their rounding is
taken off the mass; a corner whose mass is negative is taken out, by splitting that mass between its neighbours,
which lowers the polygon to its convex hull without touching any other mass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from accounting.numerics.loss_laws import LossLaw

_FINE = 128
"""Points next to 0 that are neighbours; further out their distance is this part of the loss."""

_ROUNDING = 2.0**-48
"""What rounding may add to a mass of the law below, in parts of the sum of its terms' sizes; it is taken off."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossGrid:
    """Masses at losses a + j h.

    Attributes:
        offset: a.
        interval: h, above 0.
        numbers: j of each point, ascending integers.
        masses: Of P at each point, at least 0.
        beyond: Mass of P at an infinite loss.
    """

    offset: float
    interval: float
    numbers: np.ndarray
    masses: np.ndarray
    beyond: float

    @property
    def losses(self) -> np.ndarray:
        """The loss of each point."""
        return np.asarray(self.offset + self.numbers * self.interval)


def grid_above(law: LossLaw, low: float, high: float, interval: float) -> LossGrid:
    """Return a law whose divergence curve is nowhere below that of a step.

    Args:
        law: Of the step's loss.
        low: Loss below which the mass is negligible.
        high: Loss above which the mass may count as infinite.
        interval: h, above 0.
    """
    numbers = _points(low, high, interval)
    losses = numbers * interval
    masses, own = law.bins(losses)
    inner, ratios = masses[1:-1], np.clip(own[1:-1], losses[:-1], losses[1:])
    gaps = np.diff(losses)
    found = np.zeros(len(losses))
    found[0] = masses[0]
    found[1:] += inner * np.expm1(losses[:-1] - ratios) / np.expm1(-gaps)
    found[:-1] += inner * np.expm1(losses[1:] - ratios) / np.expm1(gaps)
    return LossGrid(offset=0.0, interval=interval, numbers=numbers, masses=found, beyond=float(masses[-1]))


def grid_below(law: LossLaw, low: float, high: float, interval: float) -> LossGrid:
    """Return a law whose divergence curve is nowhere above that of a step; arguments as in `grid_above`."""
    numbers, offset = _points(low, high, interval), _offset(law, interval, most_is_low=high > -low)
    losses = offset + numbers * interval
    edges = np.empty(2 * len(losses) - 1)
    edges[::2], edges[1::2] = losses, (losses[1:] + losses[:-1]) / 2
    masses, own = law.bins(edges)
    inside = np.clip(own, np.concatenate([[-np.inf], edges]), np.concatenate([edges, [np.inf]]))
    masses = _below(masses, inside, losses)
    return LossGrid(offset=offset, interval=interval, numbers=numbers, masses=masses, beyond=0.0)


def _offset(law: LossLaw, interval: float, *, most_is_low: bool) -> float:
    """The loss of all outcomes up to h, or of all from -h on, less a multiple of h."""
    masses, own = law.bins(np.array([interval if most_is_low else -interval]))
    loss = float(own[0 if most_is_low else 1])
    return loss - interval * round(loss / interval) if masses.min() > 0 and math.isfinite(loss) else 0.0


def _points(low: float, high: float, interval: float) -> np.ndarray:
    up, down = (max(1, math.ceil(end / interval)) for end in (high, -low))
    return np.concatenate([-_side(down)[:0:-1], _side(up)])


def _side(count: int) -> np.ndarray:
    """Numbers from 0 to count."""
    if count <= _FINE:
        return np.arange(count + 1)
    growth = np.log1p(1 / _FINE)
    far = _FINE * np.exp(growth * np.arange(1, int(np.log(count / _FINE) / growth) + 1))
    return np.unique(np.concatenate([np.arange(_FINE + 1), far.astype(np.int64), [count]]))


def _below(masses: np.ndarray, own: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Masses of P at the points.

    Args:
        masses: Of the bins below the first point, between points and middles, and above the last point.
        own: Their losses.
        losses: The points.
    """
    groups = _between_tangents(masses, own, losses)
    count = len(losses)
    q = np.bincount(groups, weights=masses * np.exp(-own), minlength=count)
    w = np.bincount(groups, weights=masses * np.expm1(losses[groups] - own), minlength=count)
    gaps, kept = np.diff(losses), np.minimum(w[1:], 0) + np.maximum(w[:-1], 0)
    found = np.exp(losses) * q
    terms, moved = (
        found.copy(),
        np.maximum(w[:-1], 0) - np.minimum(w[1:], 0),
    )  # rounding of w is that of losses
    found[:-1] += kept / np.expm1(gaps)
    found[1:] += kept / np.expm1(-gaps)
    terms[:-1] += moved / np.expm1(gaps)
    terms[1:] -= moved / np.expm1(-gaps)
    _drop_concave(losses, found, terms)
    return np.maximum(found - _ROUNDING * terms, 0.0)


def _between_tangents(masses: np.ndarray, own: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """The number of the corner to which each bin belongs."""
    x, other = np.exp(losses), masses * np.exp(-own)
    negative = np.cumsum(masses[::-1])[::-1][2::2] < x[1:] * np.cumsum(other[::-1])[::-1][2::2]
    exceeded = np.cumsum(masses)[1:-1:2] > x[:-1] * np.cumsum(other)[1:-1:2]
    groups = np.arange(len(masses)) // 2
    groups[1:-1:2] += exceeded & (losses[:-1] < 0)
    groups[2::2] -= negative & (losses[1:] > 0)
    return groups


def _drop_concave(losses: np.ndarray, masses: np.ndarray, terms: np.ndarray) -> None:
    """Take corners of negative mass out of a polygon, which lowers it; in place.

    The mass is split between both neighbours as above, so that no other mass is touched or rounded.

    Args:
        losses: The points.
        masses: Of P at the points; those of the ends are kept.
        terms: The sizes that rounding is in proportion to, which are split alike.
    """
    last = len(losses) - 1
    before, after = list(range(-1, last)), list(range(1, last + 2))
    waiting = np.flatnonzero(masses < 0).tolist()
    while waiting:
        at = waiting.pop()
        if masses[at] >= 0 or at in (0, last):
            continue
        low, high = before[at], after[at]
        gap = losses[high] - losses[low]
        down = np.expm1(losses[high] - losses[at]) / np.expm1(gap)
        up = np.expm1(losses[low] - losses[at]) / np.expm1(-gap)
        for values in (masses, terms):
            values[low] += down * values[at]
            values[high] += up * values[at]
            values[at] = 0.0
        after[low], before[high] = high, low
        waiting += [near for near in (low, high) if masses[near] < 0]
