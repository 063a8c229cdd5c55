"""The privacy loss of one sampled Gaussian or Laplace step, as masses between given losses.

A step adds noise N to a sum that a record moves by 1 with probability q. With the densities f of N and f_s of N + s,
and t(x) = log(f_1(x) / f(x)), the pairs (P, Q) and their losses log(P / Q) are

    remove:   (1 - q) f + q f_1  against  f                        log(1 + q (e^t(x) - 1))
    add:      f  against  (1 - q) f + q f_1                        the negative of it
    replace:  (1 - q) f + q f_1  against  (1 - q) f + q f_(-1)     their difference at x and -x

A law returns, for every bin of losses, the mass of P and the bin's own loss log(P(bin) / Q(bin)). Both keep their
relative precision (`rounding`) for every q and in every tail: a bin that is narrow in x is integrated by a quadrature
without visible error, the others are differences of tails of the same side, and a ratio R of masses enters as
log(1 + q (R - 1)).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr, ndtri

_UNIT = 2.0**-53
LARGEST_LOSS = 600.0
"""e^loss stays a double."""
Direction = Literal["remove", "add", "replace"]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_FARTHEST = 36.5
"""Most standard deviations from a mean; beyond 37.6 a density is no normal double."""
_NARROW = 1.0
"""Largest w (1 + |x|) of a bin of half-width w about x, in standard deviations, that the quadrature integrates."""


class LossLaw(ABC):
    """The law of a step's privacy loss."""

    @abstractmethod
    def rounding(self, tail: float) -> float:
        """Return what rounding may change the masses of bins by, relatively, and their losses, absolutely.

        Args:
            tail: Mass on either side that it need not hold for, above 0.
        """

    @abstractmethod
    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mass under P of the losses between edges, and the bins' own losses.

        Args:
            edges: Losses in ascending order, shape (n,).

        Returns:
            Masses and losses, shape (n + 1,): below the first edge, between edges, above the last. The loss of a bin
            without mass is 0.
        """

    @abstractmethod
    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        """Return a loss below which P has at most the mass `low_tail`, and one above which it has `high_tail`."""


@dataclass(frozen=True, kw_only=True)
class GaussianLaw(LossLaw):
    """Gaussian noise.

    Attributes:
        noise: z, above 0: standard deviation in units of the record's contribution.
        probability: q in (0, 1].
        direction: Which of the three pairs.
    """

    noise: float
    probability: float
    direction: Direction

    def rounding(self, tail: float) -> float:
        """Return what rounding does to masses and losses; see `LossLaw.rounding`.

        All points and nodes are within R = r + 2 / z standard deviations of each mean, r being the tail's quantile. An
        exponent y^2 / 2 has an error of 4.5 R^2 roundings: two of x, one each of x - m, the quotient and the square. A
        loss has those of two exponents without that of x, which moves it by 2 R / z <= R^2: 6 R^2; its bin's ends have
        3 R / z + 1 / z^2 <= 2 R^2. The peak errors of ndtr (Moshier, Cephes: 3.4e-14 up to 13, 5.7e-14 of erfc up to
        26.6) are at most 2 R^2, and at most doubled by the difference of tails of a bin that is not narrow.
        """
        return _UNIT * (64 + 8 * (2 / self.noise - float(ndtri(tail))) ** 2)

    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return masses and losses; see `LossLaw.bins`."""
        z, q = self.noise, self.probability
        if self.direction == "add":
            masses, losses = _added(*self._pair(-edges[::-1]), q)
            return masses[::-1], losses[::-1]
        if self.direction == "remove":
            return _removed(*self._pair(edges), q)
        unmoved, up, down = self._moved(z**2 * (edges / 2 + self._inverse_sinh(edges)), (0.0, 1.0, -1.0))
        masses, gained = _removed(unmoved, up, q)
        _, lost = _removed(unmoved, down, q)
        return masses, np.where(masses > 0, gained - lost, 0.0)

    def _pair(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        unmoved, moved = self._moved(_exponents(edges, self.probability) * self.noise**2 + 0.5, (0.0, 1.0))
        return unmoved, moved

    def _moved(self, edges: np.ndarray, shifts: Sequence[float]) -> list[np.ndarray]:
        x = np.concatenate([[-np.inf], np.maximum.accumulate(edges), [np.inf]])
        return [normal_masses(x, shift, self.noise) for shift in shifts]

    def _inverse_sinh(self, losses: np.ndarray) -> np.ndarray:
        """Asinh of (1 - q) sinh(l / 2) / (q e^(-1 / (2 z^2))), which overflows if q or z is small."""
        with np.errstate(divide="ignore"):
            sizes = np.log(np.sinh(np.abs(losses) / 2)) + 0.5 / self.noise**2
            sizes += np.log1p(-self.probability) - math.log(self.probability)
        found = np.where(sizes > 300, sizes + math.log(2), np.arcsinh(np.exp(np.minimum(sizes, 300))))
        return np.sign(losses) * found

    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        """Return the ends of the losses; see `LossLaw.span`."""
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
        direction: Which of the pairs; that of replacement is not known.
    """

    scale: float
    probability: float
    direction: Literal["remove", "add"]

    def rounding(self, tail: float) -> float:
        """Return what rounding does to masses and losses: two exponents up to 1 / b, and the ends of bins."""
        return _UNIT * (64 + 16 / self.scale)

    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return masses and losses; see `LossLaw.bins`."""
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
        beyond = 1 + 128 * _UNIT
        least, largest = (beyond * _log_mixed(t / self.scale, self.probability) for t in (-1.0, 1.0))
        return (least, largest) if self.direction == "remove" else (-largest, -least)


@dataclass(frozen=True, kw_only=True)
class MixedLaw(LossLaw):
    """A step that is one of several, at random, where the attacker learns which.

    Attributes:
        parts: Probability and law of each, at least one.
    """

    parts: tuple[tuple[float, LossLaw], ...]

    def rounding(self, tail: float) -> float:
        """Return what rounding does to masses and losses; see `LossLaw.rounding`."""
        return max(law.rounding(tail) for _, law in self.parts) + 16 * _UNIT

    def bins(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return masses and losses; see `LossLaw.bins`."""
        found = [(weight, *law.bins(edges)) for weight, law in self.parts]
        masses = np.array([weight * mass for weight, mass, _ in found])
        return pooled(masses, np.array([losses for _, _, losses in found]))

    def span(self, low_tail: float, high_tail: float) -> tuple[float, float]:
        """Return the ends of the losses; see `LossLaw.span`."""
        spans = [law.span(low_tail, high_tail) for _, law in self.parts]
        return min(low for low, _ in spans), max(high for _, high in spans)


def pooled(masses: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mass and the loss of bins that are made one: masses of both measures add.

    Args:
        masses: Of P, shape (parts, bins).
        losses: Same shape.
    """
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
    """log(1 + q (e^t - 1)), infinite if doubles cannot follow."""
    if q == 1:
        return t
    if t > 700:
        return math.inf
    excess = q * math.expm1(t)
    return math.log1p(excess) if excess > -0.5 else float(np.logaddexp(math.log1p(-q), math.log(q) + t))
