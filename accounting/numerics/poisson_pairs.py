"""Bounds on epsilon between all ordered pairs of known patterns of Poisson rates at once, by matrix products.

They choose the pairs that `opusim.accounting.numerics.poisson_loss` bounds by the exact law of the loss, and stand in
where doubles cannot follow that law.

**Tilted transform.** With the log moment generating function K(z) = sum a^(1+z) b^(-z) - a - z (a - b) of the loss and
any tilt s > 0,

    delta(epsilon) <= e^(-s epsilon) / Lambda  sum_n e^(K(z_n) - i u_n epsilon) / (z_n (z_n + 1)),

u_n = 2 pi n / Lambda, z_n = s + i u_n, n over all integers. By Poisson summation the right side is the sum over k of
e^(s k Lambda) delta(epsilon + k Lambda), whose terms are at least 0 and whose term k = 0 is delta(epsilon). A Gaussian
mechanism of sensitivity tau and deviation 1 is released besides, which only adds to delta: its
tau^2 z (z + 1) / 2 is added to K(z). Since |E e^(z L)| <= E e^(s L), what is left out beyond u_N = U is then at most
e^(K(s) - s epsilon - tau^2 U^2 / 2) / (pi U), which is added, as is the rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

_RENYI_ORDERS = np.logspace(-0.6, 0.6, 9)
"""Orders above 1 that are tried, in units of the order that is best for a Gaussian loss of the pairs' mean variance."""
_NEARBY_ORDERS = np.logspace(-0.15, 0.15, 7)
"""Orders above 1 that are tried next, in units of the best so far."""
_FREQUENCIES = 32
_PERIOD = 6.0
"""Lambda, in deviations of the loss."""
_LEFT_OUT = 7.0
"""tau^2 U^2 / 2: the Gaussian mechanism adds 2 _LEFT_OUT (_PERIOD / (2 pi _FREQUENCIES))^2 = 1.2 % of the variance."""
_HALVINGS = 11
_LOWEST = 0.8
"""Where the search for epsilon starts, as a share of the Renyi bound."""
_EPS = float(np.finfo(float).eps)


def pattern_divergences(rates: np.ndarray, order: float) -> np.ndarray:
    """Return the summed Renyi divergence of every ordered pair of known patterns, rounded up; 0 on the diagonal.

    With m the geometric mean of a pixel, x = log(a/m), y = log(b/m), E = expm1(alpha x), F = expm1((1 - alpha) y):
        a^alpha b^(1-alpha) - alpha a + (alpha - 1) b
            = m (E - alpha expm1(x)) + m (F + (alpha - 1) expm1(y)) + m E F,
    so that all pairs take one matrix product, and nothing of the size of m cancels. Its rounding, at most
    (pixels + 8 alpha (1 + max |x|)) units of the summed magnitudes, is added.

    Args:
        rates: Expected counts of each pattern at every pixel and frame, above 0, shape (patterns, pixels).
        order: alpha > 1.

    Returns:
        Shape (patterns, patterns), first law by second; infinite where doubles overflow.
    """
    middle = np.exp(np.mean(np.log(rates), axis=0))
    logs = np.log(rates / middle)
    units = (rates.shape[1] + 8 * order * (1 + np.abs(logs).max())) * np.finfo(float).eps
    with np.errstate(over="ignore", invalid="ignore"):
        up, down, once = np.expm1(order * logs), np.expm1((1 - order) * logs), np.expm1(logs)
        first, second = (up - order * once) @ middle, (down + (order - 1) * once) @ middle
        sizes = (abs(up) + order * abs(once)) @ middle, (abs(down) + (order - 1) * abs(once)) @ middle
        values = first[:, None] + second + (middle * up) @ down.T
        slack = units * (sizes[0][:, None] + sizes[1] + (middle * abs(up)) @ abs(down).T)
        values = (values + slack) / (order - 1)
    values = np.where(np.isfinite(values), np.maximum(values, 0.0), np.inf)
    np.fill_diagonal(values, 0.0)
    return np.asarray(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class RenyiBounds:
    """Epsilon of every ordered pair by Renyi divergences.

    Attributes:
        bounds: Shape (patterns, patterns), 0 on the diagonal; infinite if a rate is 0 for some patterns only
            or sums of rates overflow.
        above: The order of the largest bound, less 1; not a number if there is none.
    """

    bounds: np.ndarray
    above: float

    @classmethod
    def of(cls, rates: np.ndarray, delta: float, *, nearby: bool = False) -> Self:
        """Return the bounds at the best of some orders.

        epsilon = D + log((a - 1) / a) - (log delta + log a) / (a - 1) at order a (Canonne, Kamath and Steinke 2020,
        proposition 12).

        Args:
            rates: Expected counts, at least 0, shape (patterns, pixels).
            delta: In (0, 1).
            nearby: Whether to try more orders near the best.
        """
        lit = rates[:, np.any(rates > 0, axis=0)]
        if lit.size == 0:
            return cls(bounds=np.zeros((len(rates), len(rates))), above=math.nan)
        if lit.min() <= 0:
            return cls(bounds=_without_diagonal(np.full((len(rates), len(rates)), np.inf)), above=math.nan)
        logs = np.log(lit)
        with np.errstate(over="ignore", invalid="ignore"):
            spread = float(np.square(logs - logs.mean(axis=0)).mean(axis=0) @ lit.mean(axis=0))
        if not math.isfinite(spread):  # a sum of rates overflows
            return cls(bounds=_without_diagonal(np.full((len(rates), len(rates)), np.inf)), above=math.nan)
        best = math.sqrt(-math.log(delta) / max(spread, 1e-12))  # the loss's variance is twice the spread
        found = _best_of(lit, delta, best * _RENYI_ORDERS)
        if nearby and math.isfinite(found[1]):
            again = _best_of(lit, delta, found[1] * _NEARBY_ORDERS)
            found = np.minimum(found[0], again[0]), again[1]
        return cls(bounds=found[0], above=found[1])


def renyi_upper(rates: np.ndarray, delta: float) -> float:
    """Return the largest epsilon over ordered pairs by Renyi divergences; arguments as in `RenyiBounds.of`."""
    return float(RenyiBounds.of(np.asarray(rates, dtype=float), delta, nearby=True).bounds.max())


def _best_of(rates: np.ndarray, delta: float, orders_above: np.ndarray) -> tuple[np.ndarray, float]:
    """The least bounds over orders, and the order, less 1, at which the largest of them is least."""
    bounds, best, above_best = np.full((len(rates), len(rates)), np.inf), math.inf, math.nan
    for above in orders_above.tolist():
        order = 1 + above
        if order == 1:  # rates so far apart that the best order is 1 in doubles
            continue
        conversion = math.log(above / order) - (math.log(delta) + math.log(order)) / above
        found = _without_diagonal(pattern_divergences(rates, order) + conversion)
        if found.max() < best:
            best, above_best = float(found.max()), above
        bounds = np.minimum(bounds, found)
    return np.maximum(_without_diagonal(bounds), 0.0), above_best


def _without_diagonal(values: np.ndarray) -> np.ndarray:
    np.fill_diagonal(values, 0.0)
    return values


def tilted_bounds(rates: np.ndarray, delta: float, renyi: RenyiBounds) -> np.ndarray:
    """Return upper bounds on epsilon of every ordered pair by the tilted transform, where they are below `renyi`'s.

    Args:
        rates: Expected counts of each pattern at every pixel and frame, above 0, shape (patterns, pixels).
        delta: In (0, 1).
        renyi: Bounds of the same rates; their best order is the tilt.
    """
    if not (math.isfinite(renyi.above) and np.all(np.isfinite(renyi.bounds))):
        return renyi.bounds
    transform = _Transform.of(rates[:, np.any(rates > 0, axis=0)], renyi.above)
    if transform is None:
        return renyi.bounds
    high, low = renyi.bounds, _LOWEST * renyi.bounds
    for middle in [low, *[None] * _HALVINGS]:
        at = (low + high) / 2 if middle is None else middle
        holds = transform.delta(at) <= delta
        high, low = np.where(holds, at, high), np.where(holds, low, at)
    return np.asarray(high)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Transform:
    """The tilted transform of the losses of all ordered pairs.

    Attributes:
        tilt: s.
        step: 2 pi / Lambda.
        log_moment: K(s), with the Gaussian mechanism, shape (patterns, patterns).
        ratios: e^(K(z_n) - K(s)) / (z_n (z_n + 1)) for n >= 1, shape (frequencies, patterns, patterns).
        rounding: By how much K(z_n) - K(s) may be off.
    """

    tilt: float
    step: float
    log_moment: np.ndarray
    ratios: np.ndarray
    rounding: np.ndarray

    @classmethod
    def of(cls, rates: np.ndarray, tilt: float) -> Self | None:
        """Compute the transform, or return None if doubles overflow."""
        middle = np.exp(np.mean(np.log(rates), axis=0))
        x, sums = np.log(rates / middle), rates.sum(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            up, down = middle * np.exp((1 + tilt) * x), np.exp(-tilt * x)
            sizes = up @ down.T
            variances = (up * x**2) @ down.T - 2 * (up * x) @ (down * x).T + up @ (down * x**2).T
        variance = float(variances.max())
        if not (np.all(np.isfinite(sizes)) and 0 < variance < math.inf):
            return None
        step = 2 * math.pi / (_PERIOD * math.sqrt(variance))
        end = _FREQUENCIES * step
        added = _LEFT_OUT / end**2  # tau^2 / 2
        apart = sums[:, None] - sums
        turn = np.exp(1j * step * x)
        phase, ratios = np.ones_like(turn), []
        for n in range(1, _FREQUENCIES + 1):
            phase *= turn
            z = complex(tilt, n * step)
            moment = (up * phase) @ (down * phase).conj().T - sizes - (z - tilt) * apart
            gaussian = added * (z * (z + 1) - tilt * (tilt + 1))
            ratios.append(np.exp(moment + gaussian) / (z * (z + 1)))
        largest = abs(complex(tilt, end))
        units = _EPS * (rates.shape[1] + 8 * _FREQUENCIES + 8 * (1 + largest) * (1 + float(abs(x).max())))
        return cls(
            tilt=tilt,
            step=step,
            log_moment=sizes - sums[:, None] - tilt * apart + added * tilt * (tilt + 1),
            ratios=np.array(ratios),
            rounding=units * (2 * sizes + (2 + largest) * (sums[:, None] + sums)),
        )

    def delta(self, epsilon: np.ndarray) -> np.ndarray:
        """Return upper bounds of delta at an epsilon for each pair."""
        frequencies = self.step * np.arange(1, len(self.ratios) + 1)
        end, first = float(frequencies[-1]), 1 / (self.tilt * (self.tilt + 1))
        with np.errstate(over="ignore", invalid="ignore"):
            waves = np.exp(-1j * frequencies[:, None, None] * epsilon)
            summed = first + 2 * np.sum((self.ratios * waves).real, axis=0)
            total = first + 2 * np.sum(np.abs(self.ratios), axis=0)
            exponents = self.log_moment - self.tilt * epsilon
            slack = 4 * self.rounding + 8 * _EPS * (8 + (end + self.tilt) * epsilon + abs(self.log_moment))
            left_out = 2 * math.exp(-_LEFT_OUT) / (self.step * end)
            found = self.step / (2 * math.pi) * np.exp(exponents) * (summed + slack * total + left_out)
        return np.where(np.isfinite(found) & (slack < 0.1), found, np.inf)
