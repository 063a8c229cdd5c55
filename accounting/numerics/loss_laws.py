"""The privacy loss of one sampled Gaussian or Laplace step, and of many, with all numerical error stated.

**One step** adds noise N to a sum that a record moves by 1 with probability q. With the densities f of N and f_s of
N + s, and t(x) = log(f_1(x) / f(x)), the pairs (P, Q) and their losses log(P / Q) are

    remove:   (1 - q) f + q f_1  against  f                        log(1 + q (e^t(x) - 1))
    add:      f  against  (1 - q) f + q f_1                        the negative of it
    replace:  (1 - q) f + q f_1  against  (1 - q) f + q f_(-1)     their difference at x and -x

A law returns, for every bin of losses, the mass of P and the bin's own loss log(P(bin) / Q(bin)). Both keep their
relative precision (`rounding`) for every q and in every tail: a bin that is narrow in x is integrated by a quadrature
without visible error, the others are differences of tails of the same side, and a ratio R of masses enters as
log(1 + q (R - 1)).

**Many steps** take one discrete Fourier transform of the *tilted* law p e^(t l) / M(t), which is raised to the number
of steps T. With its T-fold law p_T

    delta(epsilon) = M(t)^T e^(-t epsilon) sum over l > epsilon of p_T(l) e^(-t (l - epsilon)) (1 - e^(epsilon - l)).

With a good t the law's weight lies near epsilon, so that errors of the transform are a small part of delta, whatever
delta is. These errors are counted, always on the safe side:

- losses beyond the window of the transform, which are folded into it: Chernoff bounds of the grid itself (`Plan.tail`);
- rounding of the transform (`_transformed`). The law's largest mass is taken out before, so this is in proportion to
  the rest;
- rounding of masses (relative) and of losses (absolute), at most `LossLaw.rounding` a step; and of products and sums;
- losses above the grid: their mass, at most 1e-6 of delta, counts as delta.

**Grids.** Every step has two laws of loss on a grid: the divergence curve of one is above the step's, the other below.

Both have their masses at some points a + j h: at all of them near 0, at ever fewer further out, since a loss l between
points l' < l < l'' adds (l - l') (l'' - l) to the variance, which matters only in proportion to l^2.

**Above** ("connect the dots", Doroshenko et al. 2022). Outcomes between two points are merged into one of masses A and
B under P and Q; it is split between the points such that both masses are kept, with the shares (1 - e^(l' - r)) /
(1 - e^(l' - l'')) and (e^(l'' - r) - 1) / (e^(l'' - l') - 1) of A, where r = log(A / B). Losses above the last point
are infinite, losses below the first are raised to it.

**Below**, its dual: the polygon with corners at the points between tangents of the curve, one for each pair of
neighbours (see `poisson_loss.polygon_below`). It needs the masses P_i, Q_i between two points of tangency and w_i =
e^(l_i) Q_i - P_i, the sum of P (e^(l_i - r) - 1) over their parts. A tangent touches at the middle, but at the upper
corner if it would be negative there, and at the lower corner if 1 - x would exceed it there.

If h is much longer than most losses, one point must be the loss of all short ones taken together, or the polygon would
reach 0 there: that is the offset a of the law below.

Everything is a sum of terms of relative precision. Where terms of the law below have both signs, their rounding is
taken off the mass; a corner of negative mass is removed by splitting that mass between its neighbours, which lowers the
polygon to its convex hull without touching any other mass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri
from typing_extensions import override

from opusim.accounting.guarantee import NoGuarantee

UNIT = 2.0**-53
"""Rounding of a double."""
LARGEST_LOSS = 600.0
"""e^loss stays a double."""
Direction = Literal["remove", "add", "replace"]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_FARTHEST = 36.5
"""Most standard deviations from a mean; beyond 37.6 a density is no normal double."""
_NARROW = 1.0
"""Largest w (1 + |x|) of a bin of half-width w about x, in standard deviations, that the quadrature integrates."""
_LARGEST_SIZE = 2**23
"""Most points of a transform; a plan asks for a quarter of it at most."""
_FINE = 128
"""Consecutive points on either side of 0; further out, neighbours are 1/128 of the loss apart."""
_ROUNDING = 2.0**-48
"""Rounding error of a mass of the law below, relative to the sum of its terms' sizes; it is taken off the mass."""


class LossLaw(ABC):
    """The law of a step's privacy loss."""

    @abstractmethod
    def rounding(self, tail: float) -> float:
        """Return the largest rounding error of the bins but for such a tail: relative of masses, else absolute."""

    @abstractmethod
    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mass under P of the losses between n ascending edges, and the bins' own losses, shape (n + 1,).

        The first is below all edges, the last above. The loss of a bin without mass is 0.
        """

    @abstractmethod
    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        """Return a loss below which P has at most the mass `low_tail`, and one above which it has `high_tail`."""


@dataclass(frozen=True, kw_only=True)
class GaussianLaw(LossLaw):
    """Gaussian noise of deviation z over the record's contribution, of sampled records, in one of three directions."""

    noise: float
    probability: float
    direction: Direction

    def rounding(self, tail: float) -> float:
        """Return the rounding error of masses and losses; see `LossLaw.rounding`.

        All points and nodes are within R = r + 2 / z standard deviations of each mean, r being the tail's quantile. An
        exponent y^2 / 2 has an error of 4.5 R^2 roundings: two of x, one each of x - m, the quotient and the square. A
        loss has those of two exponents without that of x, which moves it by 2 R / z <= R^2: 6 R^2; its bin's ends have
        3 R / z + 1 / z^2 <= 2 R^2. The peak errors of ndtr (Moshier, Cephes: 3.4e-14 up to 13, 5.7e-14 of erfc up to
        26.6) are at most 2 R^2, and at most doubled by the difference of tails of a bin that is not narrow.
        """
        return UNIT * (64 + 8 * (2 / self.noise - float(ndtri(tail))) ** 2)

    @override
    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z, q = self.noise, self.probability
        if self.direction == "add":
            masses, losses = _added(*self._pair(-edges[::-1]), q)
            return masses[::-1], losses[::-1]
        if self.direction == "remove":
            return _removed(*self._pair(edges), q)
        # asinh of (1 - q) sinh(l / 2) / (q e^(-1 / (2 z^2))), which overflows if q or z is small
        with np.errstate(divide="ignore"):
            sizes = np.log(np.sinh(np.abs(edges) / 2)) + 0.5 / z**2
            sizes += np.log1p(-q) - math.log(q)
        found = np.where(sizes > 300, sizes + math.log(2), np.arcsinh(np.exp(np.minimum(sizes, 300))))
        points = z**2 * (edges / 2 + np.sign(edges) * found)
        unmoved, up, down = self._moved(points, (0.0, 1.0, -1.0))
        masses, gained = _removed(unmoved, up, q)
        _, lost = _removed(unmoved, down, q)
        return masses, np.where(masses > 0, gained - lost, 0.0)

    def _pair(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        unmoved, moved = self._moved(_exponents(edges, self.probability) * self.noise**2 + 0.5, (0.0, 1.0))
        return unmoved, moved

    def _moved(self, edges: np.ndarray, shifts: Sequence[float]) -> list[np.ndarray]:
        x = np.concatenate([[-np.inf], np.maximum.accumulate(edges), [np.inf]])
        return [normal_masses(x, shift, self.noise) for shift in shifts]

    @override
    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        z = self.noise
        if 1 / z - float(ndtri(min(low_tail, high_tail / 2))) > _FARTHEST:
            return -math.inf, math.inf
        if self.direction == "add":
            return -self._loss(-z * float(ndtri(low_tail))), -self._loss(z * float(ndtri(high_tail)))
        moved = high_tail / (2 * self.probability)
        top = max(-z * float(ndtri(high_tail / 2)), 1 - z * float(ndtri(moved)) if moved < 1 else -math.inf)
        low = z * float(ndtri(low_tail))
        if self.direction == "remove":
            return self._loss(low), self._loss(top)
        return self._loss(low) - self._loss(-low), self._loss(top) - self._loss(-top)

    def _loss(self, x: float) -> float:
        return _log_mixed((x - 0.5) / self.noise**2, self.probability)


@dataclass(frozen=True, kw_only=True)
class LaplaceLaw(LossLaw):
    """Laplace noise; its loss is constant outside of [0, 1], so the least and the largest loss have mass.

    Attributes:
        scale: b, above 1 / 600, in units of the record's contribution.
        probability: q in (0, 1].
        direction: Which of the pairs; the law of replacement is not known.
    """

    scale: float
    probability: float
    direction: Literal["remove", "add"]

    def rounding(self, tail: float) -> float:
        """Return the rounding error of masses and losses: two exponents up to 1 / b, and the ends of bins."""
        return UNIT * (64 + 16 / self.scale)

    @override
    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.direction == "remove":
            return _removed(*self._moved(edges), self.probability)
        masses, losses = _added(*self._moved(-edges[::-1]), self.probability)
        return masses[::-1], losses[::-1]

    def _moved(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Masses of the noise and of the moved noise."""
        b, exponents = self.scale, _exponents(edges, self.probability)
        x = np.concatenate([[0.0], np.clip((exponents * b + 1) / 2, 0.0, 1.0), [1.0]])
        inner = -0.5 * np.expm1(-np.diff(x) / b)
        unmoved, moved = inner * np.exp(-x[:-1] / b), inner * np.exp(-(1 - x[1:]) / b)
        ends = np.searchsorted(exponents, [-1 / b, 1 / b])  # the bins of both masses
        np.add.at(unmoved, ends, [0.5, 0.5 * math.exp(-1 / b)])
        np.add.at(moved, ends, [0.5 * math.exp(-1 / b), 0.5])
        return unmoved, moved

    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        """Return the least and the largest loss, a little outside of their masses."""
        beyond = 1 + 128 * UNIT
        least, largest = (beyond * _log_mixed(t / self.scale, self.probability) for t in (-1.0, 1.0))
        return (least, largest) if self.direction == "remove" else (-largest, -least)


@dataclass(frozen=True, kw_only=True)
class MixedLaw(LossLaw):
    """A step that is one of several, at random, where the attacker learns which.

    Attributes:
        parts: Probability and law of each, at least one.
    """

    parts: tuple[tuple[float, LossLaw], ...]

    @override
    def rounding(self, tail: float) -> float:
        return max(law.rounding(tail) for _, law in self.parts) + 16 * UNIT

    @override
    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [(weight, *law.bins(edges)) for weight, law in self.parts]
        masses = np.array([weight * mass for weight, mass, _ in found])
        return pooled(masses, np.array([losses for _, _, losses in found]))

    @override
    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        spans = [law.span(low_tail, high_tail) for _, law in self.parts]
        return min(low for low, _ in spans), max(high for _, high in spans)


def pooled(masses: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mass and the loss of merged bins, shape (parts, bins): masses of both measures add."""
    total = masses.sum(axis=0)
    some = total > 0
    gained = np.divide((masses * np.expm1(-losses)).sum(axis=0), total, out=np.zeros_like(total), where=some)
    other = np.divide((masses * np.exp(-losses)).sum(axis=0), total, out=np.ones_like(total), where=some)
    with np.errstate(divide="ignore"):
        far = np.log(other)
    return total, -np.where(gained > -0.5, np.log1p(np.maximum(gained, -0.5)), far)


def normal_masses(x: np.ndarray, mean: float, z: float) -> np.ndarray:
    """Return the masses of N(mean, z^2) between ascending points, which may be infinite, to relative precision.

    Bins are integrated by the same nodes whatever the mean, so that ratios of masses do not suffer from the rounding of
    a bin's width.
    """
    low, high = x[:-1], x[1:]
    with np.errstate(invalid="ignore"):  # a bin between equal infinities is empty
        half = (high - low) / 2
        narrow = half / z * (1 + (np.maximum(np.abs(low), np.abs(high)) + 1.0) / z) <= _NARROW
    a, b = (low - mean) / z, (high - mean) / z
    found = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    low, half = low[narrow], half[narrow]
    nodes = ((low + half)[:, None] + half[:, None] * _NODES - mean) / z
    found[narrow] = half / (z * math.sqrt(2 * math.pi)) * (np.exp(-0.5 * np.square(nodes)) @ _WEIGHTS)
    return np.asarray(np.maximum(found, 0.0))


def _removed(unmoved: np.ndarray, moved: np.ndarray, q: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of (1 - q) f + q f_1 and losses against f."""
    return (1 - q) * unmoved + q * moved, _log_ratios(unmoved, moved, q)


def _added(unmoved: np.ndarray, moved: np.ndarray, q: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of f and losses against (1 - q) f + q f_1."""
    return unmoved, -_log_ratios(unmoved, moved, q)


def _log_ratios(unmoved: np.ndarray, moved: np.ndarray, q: float) -> np.ndarray:
    """log(1 + q (moved / unmoved - 1)); 0 for an empty bin, infinite if only the moved law has mass."""
    some = unmoved > 0
    ratios = np.divide(moved, unmoved, out=np.where(moved > 0, np.inf, 1.0), where=some)
    excess = q * (ratios - 1)
    near = np.log1p(np.maximum(excess, -0.5))
    with np.errstate(divide="ignore"):
        far = np.log((1 - q) + q * ratios)
    return np.where(excess > -0.5, near, far)


def _exponents(losses: np.ndarray, q: float) -> np.ndarray:
    """The t at which log(1 + q (e^t - 1)) takes each value; -infinity below its least value."""
    if q == 1:
        return losses
    with np.errstate(divide="ignore"):
        near = np.log1p(np.maximum(np.expm1(losses) / q, -1.0))
        far = np.log(np.maximum(np.exp(losses) - (1 - q), 0.0) / q)
    return np.where(losses > -0.5, near, far)


def _log_mixed(t: float, q: float) -> float:
    """log(1 + q (e^t - 1)), infinite if doubles overflow."""
    if q == 1:
        return t
    if t > 700:
        return math.inf
    excess = q * math.expm1(t)
    return math.log1p(excess) if excess > -0.5 else float(np.logaddexp(math.log1p(-q), math.log(q) + t))


@dataclass(frozen=True, kw_only=True, eq=False)
class LossGrid:
    """Masses of P, at least 0, at losses a + j h, j ascending, and at an infinite loss."""

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
    """Return a law whose divergence curve is nowhere below that of a step of this loss, on a grid of interval h.

    The mass below `low` is negligible, that above `high` may count as infinite.
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
    # one point is the loss of all outcomes up to h, or of all from -h on: the offset is that loss minus a multiple of h
    most_is_low = high > -low
    masses, own = law.bins(np.array([interval if most_is_low else -interval]))
    loss = float(own[0 if most_is_low else 1])
    known = masses.min() > 0 and math.isfinite(loss)
    offset = loss - interval * round(loss / interval) if known else 0.0
    numbers = _points(low, high, interval)
    losses = offset + numbers * interval
    # masses and losses of the bins below the first point, between points and middles, and above the last point
    edges = np.empty(2 * len(losses) - 1)
    edges[::2], edges[1::2] = losses, (losses[1:] + losses[:-1]) / 2
    masses, own = law.bins(edges)
    own = np.clip(own, np.concatenate([[-np.inf], edges]), np.concatenate([edges, [np.inf]]))
    # the number of the corner to which each bin belongs
    x, other = np.exp(losses), masses * np.exp(-own)
    negative = np.cumsum(masses[::-1])[::-1][2::2] < x[1:] * np.cumsum(other[::-1])[::-1][2::2]
    exceeded = np.cumsum(masses)[1:-1:2] > x[:-1] * np.cumsum(other)[1:-1:2]
    groups = np.arange(len(masses)) // 2
    groups[1:-1:2] += exceeded & (losses[:-1] < 0)
    groups[2::2] -= negative & (losses[1:] > 0)
    # masses of P at the corners
    q = np.bincount(groups, weights=other, minlength=len(losses))
    w = np.bincount(groups, weights=masses * np.expm1(losses[groups] - own), minlength=len(losses))
    gaps, kept = np.diff(losses), np.minimum(w[1:], 0) + np.maximum(w[:-1], 0)
    moved = np.maximum(w[:-1], 0) - np.minimum(w[1:], 0)  # rounding of w is that of losses
    found: np.ndarray = x * q
    terms: np.ndarray = found.copy()
    found[:-1] += kept / np.expm1(gaps)
    found[1:] += kept / np.expm1(-gaps)
    terms[:-1] += moved / np.expm1(gaps)
    terms[1:] -= moved / np.expm1(-gaps)
    _drop_concave(losses, found, terms)
    found = np.maximum(found - _ROUNDING * terms, 0.0)
    return LossGrid(offset=offset, interval=interval, numbers=numbers, masses=found, beyond=0.0)


def _points(low: float, high: float, interval: float) -> np.ndarray:
    """Numbers of the points from low to high: neighbours near 0, and ever farther apart beyond."""
    sides = []
    for count in (max(1, math.ceil(end / interval)) for end in (high, -low)):
        near, growth = np.arange(min(count, _FINE) + 1), np.log1p(1 / _FINE)
        doublings = int(np.log(max(count / _FINE, 1.0)) / growth)
        far = (_FINE * np.exp(growth * np.arange(1, doublings + 1))).astype(np.int64)
        sides.append(np.unique(np.concatenate([near, far, [count]])))
    return np.concatenate([-sides[1][:0:-1], sides[0]])


def _drop_concave(losses: np.ndarray, masses: np.ndarray, terms: np.ndarray) -> None:
    """Take corners of negative mass out of a polygon, which lowers it; in place.

    The mass is split between both neighbours as above, so that no other mass is touched or rounded, and those of the
    ends are kept. `terms`, the sizes to which rounding is proportional, are split in the same way.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one direction is composed; bounds are valid whatever the choices.

    Attributes:
        laws: Law of each part.
        steps: Number of steps of each part.
        roundings: Rounding error of the masses and losses of each part (`LossLaw.rounding`).
        low: Loss below which the mass is negligible.
        high: Loss above which it counts as infinite.
        interval: h.
        finest: The least h whose window fits.
        tilt: t.
        upper_tilt: Tilt of the Chernoff bound on losses above the window.
        lower_tilt: Tilt of the Chernoff bound on losses below the window.
        tail: Mass of the tilted law outside of the window, on either side.
        guess: Estimate of epsilon.
    """

    laws: tuple[LossLaw, ...]
    steps: tuple[int, ...]
    roundings: tuple[float, ...]
    low: float
    high: float
    interval: float
    finest: float
    tilt: float
    upper_tilt: float
    lower_tilt: float
    tail: float
    guess: float

    def above(self) -> list[LossGrid]:
        """Return a law above that of each part."""
        return [grid_above(law, self.low, self.high, self.interval) for law in self.laws]

    def below(self) -> list[LossGrid]:
        """Return a law below that of each part."""
        return [grid_below(law, self.low, self.high, self.interval) for law in self.laws]


@dataclass(frozen=True, kw_only=True, eq=False)
class TiltedLaw:
    """The composed law of one direction at the losses of a window.

    Attributes:
        losses: Ascending, the first at least 0; shape (n,).
        interval: h.
        tilt: t.
        guess: A reference loss.
        scale: log of M(t)^T e^(-t guess).
        powers: e^(-t (l - guess)) at each loss.
        sums: Sum of law times powers from each loss on.
        discounted: The same, each term times e^(guess - l).
        error: Error of the tilted law's sums.
        beyond: Mass of an infinite loss.
        shift: Largest error of losses, and largest relative error of masses.
    """

    losses: np.ndarray
    interval: float
    tilt: float
    guess: float
    scale: float
    powers: np.ndarray
    sums: np.ndarray
    discounted: np.ndarray
    error: float
    beyond: float
    shift: float

    def largest_epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon(delta), infinite if there is none."""
        wanted = (delta - self.beyond) * float(np.exp(-self.scale - self.shift))
        good = self._excess() + self.error * self.powers <= wanted
        if not good.any():
            return math.inf
        at = int(np.argmax(good))
        found = self._solved(at, self.sums[at] + self.error * self._power_before(at) - wanted)
        return float(np.clip(found, self._loss_before(at), self.losses[at])) + self.shift

    def estimate(self, delta: float) -> float:
        """Return epsilon(delta) without any margin for errors."""
        good = self._excess() <= delta * float(np.exp(-self.scale))
        return float(self.losses[int(np.argmax(good)) if good.any() else -1])

    def least_epsilon(self, delta: float) -> float:
        """Return a lower bound on epsilon(delta), 0 if there is none."""
        wanted = delta * float(np.exp(-self.scale + self.shift))
        good = np.flatnonzero(self._excess() - self.error * self.powers >= wanted)
        at = min(int(good[-1]) + 1, len(self.losses) - 1) if good.size else 0
        found = self._solved(at, self.sums[at] - self.error * self._power_before(at) - wanted)
        if not good.size and not found >= self._loss_before(at):  # the window begins above epsilon
            return 0.0
        return float(np.clip(found, self._loss_before(at), self.losses[at])) - self.shift

    def _loss_before(self, at: int) -> float:
        return max(float(self.losses[at]) - self.interval, 0.0)

    def _power_before(self, at: int) -> float:
        return float(self.powers[at]) * float(np.exp(self.tilt * self.interval))

    def _excess(self) -> np.ndarray:
        return self.sums - np.exp(self.losses - self.guess) * self.discounted

    def _solved(self, at: int, left: float) -> float:
        """The epsilon with e^(epsilon - guess) discounted = left."""
        if not (left > 0 and self.discounted[at] > 0):
            return -math.inf
        return self.guess + math.log(left / self.discounted[at])

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return upper bounds on delta, from 0 to 1."""
        found = (self._excess() + self.error * self.powers) * np.exp(self.scale + self.shift) + self.beyond
        # the curve falls, by at most 1 per epsilon
        at = np.searchsorted(self.losses, epsilons, side="right") - 1
        return np.clip(np.where(at < 0, 1.0, found[at] + self.shift), 0.0, 1.0)


def composed(plan: Plan, grids: Sequence[LossGrid]) -> TiltedLaw:
    """Return the law of all steps of a plan, each part having its grid's loss; raise NoGuarantee if too large."""
    tilt, interval = plan.tilt, plan.interval
    logs, up, down = (_logs(grids, plan.steps, t) for t in (tilt, plan.upper_tilt, plan.lower_tilt))
    rest = -math.log(plan.tail)
    top = (up - logs + rest) / (plan.upper_tilt - tilt)
    bottom = (logs - down - rest) / (tilt - plan.lower_tilt)
    if not (math.isfinite(top) and math.isfinite(bottom)):
        raise NoGuarantee("privacy loss: its moments exceed what doubles can follow; use fewer steps")
    offset = sum(count * grid.offset for count, grid in zip(plan.steps, grids, strict=True))
    first = math.floor((bottom - offset) / interval)
    size = int(next_fast_len(math.ceil((top - offset) / interval) - first + 2, real=True))
    if size > _LARGEST_SIZE:
        raise NoGuarantee(f"privacy loss: a transform of {size:,} points is too large; use fewer steps")
    law, rounding = _transformed(grids, plan.steps, tilt, first, size)
    start = max(0, math.ceil((max(0.0, plan.guess - 650 / (1 + tilt)) - offset) / interval) - first)
    start = min(start, size - 1)
    losses = offset + interval * (first + np.arange(start, size))
    powers = np.exp(-tilt * (losses - plan.guess))
    terms = law[start:] * powers
    sums = np.cumsum(terms[::-1])[::-1]
    discounted = np.cumsum((terms * np.exp(plan.guess - losses))[::-1])[::-1]
    longest = max(float(np.abs(grid.losses[[0, -1]]).max()) for grid in grids)
    own = UNIT * (32 + (1 + 2 * tilt) * longest)  # of a point's place, and of e^(t l) and their sum
    roundings = sum(count * (each + own) for count, each in zip(plan.steps, plan.roundings, strict=True))
    reach = max(abs(float(losses[0]) - plan.guess), abs(float(losses[-1]) - plan.guess))
    roundings += UNIT * (64 + 4 * (abs(logs) + tilt * (plan.guess + reach)))  # of `scale` and `powers`
    return TiltedLaw(
        losses=losses,
        interval=interval,
        tilt=tilt,
        guess=plan.guess,
        scale=logs - tilt * plan.guess,
        powers=powers,
        sums=sums,
        discounted=discounted,
        error=rounding
        + 2 * plan.tail * float(largest_weight(np.array(tilt)))
        + 2 * UNIT * (8 + reach + min(size, 1 / (tilt * interval))),
        beyond=sum(count * grid.beyond for count, grid in zip(plan.steps, grids, strict=True)),
        shift=roundings,
    )


def _logs(grids: Sequence[LossGrid], steps: Sequence[int], tilt: float) -> float:
    """Log of the mean of e^(t l) of the composed law."""
    total = 0.0
    for grid, count in zip(grids, steps, strict=True):
        terms = np.exp(tilt * grid.losses) * grid.masses
        if not 0 < float(terms.sum()) < 1e300:
            raise NoGuarantee("privacy loss: its moments exceed what doubles can follow; use fewer steps")
        total += count * math.log(math.fsum(terms.tolist()))
    return total


def _transformed(
    grids: Sequence[LossGrid], steps: Sequence[int], tilt: float, first: int, size: int
) -> tuple[np.ndarray, float]:
    """Return the composed tilted law at the numbers first, first + 1, ..., and the rounding error of its sums.

    A sum weighs masses by at most e^(-t u) (1 - e^(-u)), u being the distance from epsilon; its error is at most the
    largest error of a mass times the sum of these weights, and at most the product of both norms (Parseval).

    Each of the log2(n) stages changes each term of its sums by at most d = m + g (sqrt(2) + m) (Higham 2002, theorem
    24.2; g = 4 roundings, m the error of its factors e^(i a)). A transform is therefore off by log2(n) d sqrt(n) times
    its input's norm, and, since every output sums each input once, by log2(n) d times the sum of its input's sizes.
    pocketfft takes a factor from the product of two entries of a table, each off by at most 2.2 roundings, so that
    m <= 5 roundings (a product adds 5^(1/2) times a second order: Brent, Percival and Zimmermann 2007; up to 2.2
    were measured) and d <= 10.7. The stages of factors 3, 4 and 5 that it has instead cost 7.1, 4.6 and 5.7 for each
    doubling. The code takes 8, and multiplies the norm by 2^(1/2) and the largest error by 2.
    """
    roundings = UNIT * (8 * math.log2(size) + 16)
    sizes, phases, slopes = (np.zeros(size // 2 + 1) for _ in range(3))
    offset = 0
    for grid, count in zip(grids, steps, strict=True):
        tilted = grid.masses * np.exp(tilt * grid.losses)
        mode = int(np.argmax(tilted))
        others = tilted / math.fsum(tilted.tolist())
        others[mode] = 0.0
        outside = float(others.sum())
        folded = np.bincount((grid.numbers - grid.numbers[mode]) % size, weights=others, minlength=size)
        folded[0] -= outside
        less = rfft(folded)  # the transform of the law, less 1
        size_logs = _log_sizes(less)
        sizes += count * size_logs
        slopes += (count * outside) * np.exp(-size_logs)
        phases += count * np.arctan2(less.imag, 1 + less.real)
        offset += count * int(grid.numbers[mode])
    powers = np.exp(sizes)
    law = irfft(powers * np.exp(1j * phases), size)
    errors = (3 * roundings * slopes + roundings) * powers + 8 * UNIT * np.sqrt(powers)
    largest, norm = 2 * float(errors.mean()), math.sqrt(2 * float(np.square(errors).mean()))
    interval = grids[0].interval
    rounding = min(largest * weight_sum(tilt, interval), norm * weight_norm(tilt, interval))
    return np.maximum(np.roll(law, -((first - offset) % size)), 0.0), rounding


def _log_sizes(less: np.ndarray) -> np.ndarray:
    """Log of |1 + less|, to relative precision, at least -600; |1 + less|^2 is rounded away where it is small."""
    found = 0.5 * np.log1p(np.maximum(2 * less.real + np.square(np.abs(less)), -0.75))
    small = found < -0.5
    if small.any():
        found[small] = np.log(np.maximum(np.abs(1 + less[small]), 1e-260))
    return found


def weight_sum(tilt: float, interval: float) -> float:
    """The sum over k >= 0 of e^(-t k h) (1 - e^(-k h)), which would cancel if it were taken as two."""
    gaps = -math.expm1(-tilt * interval) * math.expm1(-(tilt + 1) * interval)
    return math.exp(-tilt * interval) * math.expm1(-interval) / gaps


def weight_norm(tilt: float, interval: float) -> float:
    """The root of the sum over k >= 0 of the squares of e^(-t k h) (1 - e^(-k h))."""
    once, twice, none = (1 / -math.expm1(-(2 * tilt + k) * interval) for k in (1, 2, 0))
    return math.sqrt(max(none - 2 * once + twice, 0.0) + 1e-12 * none)


def largest_weight(tilts: np.ndarray) -> np.ndarray:
    """The largest value of e^(-t u) (1 - e^(-u)) over u > 0."""
    return np.exp(tilts * -np.log1p(1 / tilts)) / (1 + tilts)
