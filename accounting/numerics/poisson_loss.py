"""Bounds on epsilon between products of Poisson laws: the exact privacy loss of photon counts, without Renyi orders.

With rates a and b of independent counts N_i the loss is sum N_i c_i - sum (a_i - b_i), c_i = log(a_i / b_i): under the
first law a compound Poisson number, whose jumps c have the intensity a_i at c_i. The second law has b_i there.

**Upper bound.** Counts of two pixels can be added, so a pixel (a, b) is post-processing of two pixels (a', b') and
(a'', b'') with a' + a'' = a and b' + b'' = b. Each pixel is split so that its parts have ratios at neighbouring grid
points e^(j h). The pair on the grid therefore dominates, and its loss is h times a compound Poisson integer plus a
constant: one Fourier transform gives its law. This is "connect the dots" (Doroshenko et al. 2022) for intensities; it
adds at most h^2 / 4 for each expected count to the loss's variance.

**Lower bound.** A count may be sent to a random grid point, which is post-processing. The polygon below the
intensities' divergence curve, with corners on the grid (`polygon_below`), is reached that way (Blackwell 1953).

Losses beyond the window of the transform (Chernoff bounds) and the transform's rounding are taken off delta, or added
to it, on the safe side. A count that only the first law can give is an infinite loss.

**All ordered pairs** of known patterns have bounds by matrix products: Renyi divergences and the transform below. They
choose the pairs that are bounded by the exact law, and stand in where doubles cannot follow that law.

**Tilted transform.** With the log moment generating function K(z) = sum a^(1+z) b^(-z) - a - z (a - b) of the loss and
any tilt s > 0,

    delta(epsilon) <= e^(-s epsilon) / Lambda  sum_n e^(K(z_n) - i u_n epsilon) / (z_n (z_n + 1)),

u_n = 2 pi n / Lambda, z_n = s + i u_n, n over all integers. By Poisson summation the right side is the sum over k of
e^(s k Lambda) delta(epsilon + k Lambda), whose terms are at least 0 and whose term k = 0 is delta(epsilon). Releasing a
Gaussian mechanism of sensitivity tau and deviation 1 as well can only raise delta; it adds tau^2 z (z + 1) / 2 to K(z).
Since |E e^(z L)| <= E e^(s L), the terms beyond u_N = U are then at most e^(K(s) - s epsilon - tau^2 U^2 / 2) / (pi U).
That bound is added, as is the rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import permutations
from typing import Self

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import isotonic_regression

from opusim import checks
from opusim.accounting.guarantee import EpsilonBounds
from opusim.accounting.numerics.loss_laws import LARGEST_LOSS

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
        """Return the bounds at the best of some orders, and if `nearby` of more near it.

        epsilon = D + log((a - 1) / a) - (log delta + log a) / (a - 1) at order a (Canonne, Kamath and Steinke 2020,
        proposition 12). Rates, expected counts, have shape (patterns, pixels).
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
    """Return the least bounds over orders, and the order minus 1 at which the largest bound is least."""
    bounds, best, above_best = np.full((len(rates), len(rates)), np.inf), math.inf, math.nan
    for above in orders_above.tolist():
        order = 1 + above
        if order == 1:  # the rates are so far apart that the order rounds to 1
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

    Those are of the same rates, shape (patterns, pixels); their best order is the tilt.
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
        rounding: Rounding error of K(z_n) - K(s).
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


METHOD = "exact Poisson loss distribution"
_ADDED_VARIANCE = 1e-3
"""Share of the loss's variance that the grid adds."""
_TAIL = 1e-7
"""Share of delta that lies beyond the window on each side."""
_WINDOWS = (2**13, 2**15, 2**17, 2**20)
"""Most points of a transform on each grid; a pair is bounded on ever finer grids while it may be the worst."""
_FINE_WINDOW = _WINDOWS[-1]
_CLOSE, _MANY = 0.9, 12
"""With more than 12 pairs within 0.9 of the largest Renyi bound, `tilted_bounds` come before any grid."""
_FAIR = 2
"""Index of the first grid that is sharper than `tilted_bounds`."""
_ROUNDING_PER_COUNT, _ROUNDING_PER_POINT = 4e-14, 1e-16
"""Total variation that the transform's rounding may add."""
_CHERNOFF_ORDERS = np.logspace(-2, 2, 33)
"""Orders that are tried, times the larger of the loss's deviation and its longest jump."""
_BINS = 64
"""Bins of jumps for a first guess of the loss's reach."""
_DISCOUNT = 300.0
"""Largest exponent within a block of a discounted sum."""
_NEAR = 0.1
_ROUNDING = 1e-15
"""Difference that rounding may make between equal values, relative to 1 or to the larger one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """Two products of Poisson laws, without the pixels that reveal nothing.

    Attributes:
        a: Rates of the first law where both are above 0 and differ.
        b: Rates of the second law there.
        surely: Probability that the first law gives a count where the second gives none: an infinite loss.
        shift: Loss of no counts at the pixels that only one law lights.
    """

    a: np.ndarray
    b: np.ndarray
    surely: float
    shift: float

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> _Pair:
        tells = (a > 0) & (b > 0) & (a != b)
        only_first = float(np.sum(a[b == 0]))
        return cls(
            a=a[tells],
            b=b[tells],
            surely=-math.expm1(-only_first),
            shift=float(np.sum(b[a == 0])) - only_first,
        )

    def jumps(self) -> np.ndarray:
        """Return c = log(a / b) of a count at each pixel."""
        gap = np.clip((self.a - self.b) / self.b, -_NEAR, _NEAR)
        return np.where(np.abs(gap) < _NEAR, np.log1p(gap), np.log(self.a) - np.log(self.b))


@dataclass(frozen=True, kw_only=True, eq=False)
class _OnGrid:
    """Intensities, expected counts of the first law, whose jumps are multiples j of h."""

    interval: float
    numbers: np.ndarray
    intensities: np.ndarray


def poisson_bounds(a: np.ndarray, b: np.ndarray, delta: float) -> EpsilonBounds:
    """Return bounds on the least epsilon with P(S) <= e^epsilon Q(S) + delta for products of Poisson laws P and Q.

    a and b are their rates, expected counts of independent pixels and frames. If doubles cannot follow, (0, infinity).
    """
    pair = _checked_pair(a, b, delta)
    upper, _ = _upper(pair, delta, _FINE_WINDOW)
    return EpsilonBounds(lower=min(_lower(pair, delta), upper), upper=upper, method=METHOD)


def poisson_upper(a: np.ndarray, b: np.ndarray, delta: float) -> float:
    """Return the upper bound of `poisson_bounds`."""
    return _upper(_checked_pair(a, b, delta), delta, _FINE_WINDOW)[0]


def _checked_pair(a: np.ndarray, b: np.ndarray, delta: float) -> _Pair:
    checks.in_unit_interval(closed="neither", delta=delta)
    checks.non_negative(a=a, b=b)
    checks.shape((None,), a=a)
    checks.shape(np.shape(a), b=b)
    return _Pair.of(np.asarray(a, dtype=float), np.asarray(b, dtype=float))


def pattern_bounds(rates: np.ndarray, delta: float) -> EpsilonBounds:
    """Return bounds on epsilon between known patterns, shape (patterns, pixels): the largest over ordered pairs."""
    patterns = np.asarray(rates, dtype=float)
    (i, j), upper = _worst(patterns, delta)
    lower = _lower(_Pair.of(patterns[i], patterns[j]), delta)
    return EpsilonBounds(lower=min(lower, upper), upper=upper, method=METHOD)


def pattern_upper(rates: np.ndarray, delta: float) -> float:
    """Return the upper bound of `pattern_bounds`."""
    return _worst(np.asarray(rates, dtype=float), delta)[1]


def worst_patterns(rates: np.ndarray, delta: float) -> tuple[int, int]:
    """Return the ordered pair of known patterns whose upper bound is that of all; arguments as in `pattern_bounds`."""
    return _worst(np.asarray(rates, dtype=float), delta)[0]


def _worst(rates: np.ndarray, delta: float) -> tuple[tuple[int, int], float]:
    """The ordered pair with the largest epsilon, and its upper bound.

    Every pair has a bound by Renyi divergences, at one matrix product an order; if many of these are close,
    `tilted_bounds` are sharper. The pair with the largest bound is bounded on the next finer grid, until a bound of the
    finest grid is the largest of all.
    """
    checks.in_unit_interval(closed="neither", delta=delta)
    checks.non_negative(rates=rates)
    checks.shape((None, None), rates=rates)
    if len(rates) < 2:
        raise ValueError(f"rates has {len(rates)} pattern: at least two are needed")
    return _worst_of(np.ascontiguousarray(rates).tobytes(), len(rates), delta)


@lru_cache(maxsize=64)
def _worst_of(content: bytes, patterns: int, delta: float) -> tuple[tuple[int, int], float]:
    """`_worst` of rates in row order, kept because a search asks first for the pair and then for the bounds."""
    rates = np.frombuffer(content).reshape(patterns, -1)
    # upper bounds, and the number of the next finer grid
    bounds, level = np.full((patterns, patterns), np.inf), _FAIR
    if patterns > 2:
        renyi = RenyiBounds.of(rates, delta)
        few = np.count_nonzero(renyi.bounds > _CLOSE * renyi.bounds.max()) <= _MANY
        bounds, level = (renyi.bounds, 0) if few else (tilted_bounds(rates, delta, renyi), _FAIR)
    bounded = [(-bounds[i, j], level, i, j) for i, j in permutations(range(len(rates)), 2)]
    heapify(bounded)
    while bounded[0][1] < len(_WINDOWS):
        before, grids, i, j = bounded[0]
        pair = _Pair.of(rates[i], rates[j])
        found, is_finest = _upper(pair, delta, _WINDOWS[grids])
        if is_finest:
            heapreplace(bounded, (-found, len(_WINDOWS), i, j))
        else:
            heapreplace(bounded, (max(-found, before), grids + 1, i, j))
    upper, _, i, j = bounded[0]
    return (i, j), -upper


def _upper(pair: _Pair, delta: float, window: int) -> tuple[float, bool]:
    """Return the pair's epsilon from split pixels, and whether no larger window has a finer grid.

    Epsilon is infinite if there is none or doubles cannot follow.
    """
    left = _finite_share(pair, delta)
    if left <= 0:
        return math.inf, True
    if pair.a.size == 0:
        return max(0.0, pair.shift + math.log1p(-left) + 1e-12 * abs(pair.shift)), True
    if not _can_follow(pair, left):
        return math.inf, True
    jumps = pair.jumps()
    interval, is_finest = _interval(pair, jumps, left, window)
    if not interval < LARGEST_LOSS:
        return math.inf, is_finest
    return _epsilon(_split(pair, jumps, interval), pair.shift, left, above=True), is_finest


def _lower(pair: _Pair, delta: float) -> float:
    """Return the pair's epsilon from counts sent to grid points; 0 if the grid is too coarse."""
    left = _finite_share(pair, delta)
    if left <= 0:
        return math.inf
    if pair.a.size == 0:
        return max(0.0, pair.shift + math.log1p(-left) - 1e-12 * abs(pair.shift))
    if not _can_follow(pair, left):
        return 0.0
    jumps = pair.jumps()
    interval = _interval(pair, jumps, left, _FINE_WINDOW)[0]
    grid = np.arange(math.floor(jumps.min() / interval) - 1, math.ceil(jumps.max() / interval) + 2)
    order = np.argsort(jumps)
    places = np.searchsorted(jumps[order], (grid[:-1] + 0.5) * interval)
    tails = [np.append(np.cumsum(rates[order][::-1])[::-1], 0.0)[places] for rates in (pair.a, pair.b)]
    total_a, total_b = float(np.sum(pair.a)), float(np.sum(pair.b))
    points = np.exp(grid * interval) * (total_b / total_a)
    if not np.all(np.diff(points) > 0):  # neighbouring ratios are equal in doubles
        return 0.0
    found = polygon_below(points, tails[0] / total_a, tails[1] / total_b)
    if found is None:
        return 0.0
    first, masses = found
    routed = _merged(grid[first : first + len(masses)], masses * (total_a / masses.sum()), interval)
    return _epsilon(routed, pair.shift, left, above=False)


def _finite_share(pair: _Pair, delta: float) -> float:
    """The delta that finite losses may take, given that no infinite one occurs."""
    return (delta - pair.surely) / (1 - pair.surely) if pair.surely < 1 else -math.inf


def _can_follow(pair: _Pair, delta: float) -> bool:
    """Whether doubles can follow the loss of this many counts, and of jumps this long."""
    longest = float(np.max(np.abs(np.log(pair.a) - np.log(pair.b))))
    return longest < LARGEST_LOSS and _ROUNDING_PER_COUNT * (10 + float(np.sum(pair.a))) < delta / 2


def _interval(pair: _Pair, jumps: np.ndarray, delta: float, window: int) -> tuple[float, bool]:
    """Return the interval that adds `_ADDED_VARIANCE`, or the finest that fits, and whether no larger window is finer.

    The longest jump lies on the grid.
    """
    variance, counts = float(np.sum(pair.a * np.square(jumps))), float(np.sum(pair.a))
    log_tail = math.log(_TAIL * delta)
    low, width = float(jumps.min()), max(float(np.ptp(jumps)) / _BINS, 1e-300)
    bins = np.minimum((jumps - low) / width, _BINS - 1).astype(np.int64)
    rates, ends = np.bincount(bins, weights=pair.a, minlength=_BINS), low + width * np.arange(_BINS + 1)
    reach = _reach(rates, ends[1:], log_tail) + _reach(rates, -ends[:-1], log_tail)
    wanted, possible = math.sqrt(6 * _ADDED_VARIANCE * variance / counts), 1.1 * reach / window
    interval, is_finest = max(wanted, possible), wanted >= possible or window >= _FINE_WINDOW
    longest = float(np.abs(jumps).max())
    return (longest / math.floor(longest / interval) if interval < longest else interval), is_finest


def _reach(intensities: np.ndarray, jumps: np.ndarray, log_tail: float) -> float:
    """Distance above its mean beyond which the loss has probability at most e^log_tail (Chernoff)."""
    orders = _CHERNOFF_ORDERS / max(
        math.sqrt(float(intensities @ np.square(jumps))), float(np.abs(jumps).max())
    )
    with np.errstate(over="ignore", invalid="ignore"):
        exponents = np.outer(orders, jumps)
        cumulants = (np.expm1(exponents) - exponents) @ intensities
        found = (cumulants - log_tail) / orders
    return float(np.min(np.where(np.isfinite(found), found, np.inf)))


def _split(pair: _Pair, jumps: np.ndarray, interval: float) -> _OnGrid:
    """Split each pixel into two whose jumps are neighbouring grid points.

    a' + a'' = a and a' e^(-l') + a'' e^(-l'') = b give, for l' <= c <= l'' = l' + h,
        a' / a = (e^(l'' - c) - 1) / (e^h - 1),  a'' / a = (1 - e^(l' - c)) / (1 - e^(-h)).
    Neither is computed as 1 minus the other: on a coarse grid a' may be below the last digit of a, while a' e^(-l') is
    most of b.
    """
    below = np.floor(jumps / interval)
    lower = np.clip(np.expm1((below + 1) * interval - jumps) / math.expm1(interval), 0.0, 1.0)
    upper = np.clip(np.expm1(below * interval - jumps) / math.expm1(-interval), 0.0, 1.0)
    numbers = np.concatenate([below, below + 1]).astype(np.int64)
    return _merged(numbers, np.concatenate([pair.a * lower, pair.a * upper]), interval)


def polygon_below(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Masses at the points x whose divergence curve is nowhere above that of a pair of measures of mass 1.

    The curve delta(x) = P(ratio > x) - x Q(ratio > x) is convex and has at a middle m the tangent A - x B. A polygon
    with corners at the increasing points x_i > 0, which enclose all ratios, lies below the curve if its value at x_i is
    at most that of both neighbouring tangents, which differ there by w_i = x_i Q_i - P_i (Q_i, P_i the masses between
    two middles). Its slopes are -B_i + (max(0, w_i) + min(0, w_{i+1})) / (x_{i+1} - x_i), and the mass of Q at x_i is
    the change of slope. a and b have the masses of P and Q beyond a middle of each interval. Returns the first point
    that is used and the masses of P from there on, or None if the points are too far apart.
    """
    # The polygon may leave 1 - x at x_i if 1 - x is at most the tangents after it at their points, and end at x_i if
    # the tangents before it are not negative there. (Both fail only near a loss that the mechanism cannot fall below or
    # exceed.) Both allow for rounding between equal values.
    below = np.flatnonzero(x[:-1] * (1 - b) < (1 - a) - _ROUNDING)
    negative = np.flatnonzero(a < (1 - _ROUNDING) * x[1:] * b)
    first = int(below[-1]) + 1 if below.size else 0
    last = int(negative[0]) if negative.size else len(x) - 1
    if last <= first:
        return None
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


def _merged(numbers: np.ndarray, masses: np.ndarray, interval: float) -> _OnGrid:
    some = masses > 0
    numbers, masses = numbers[some], masses[some]
    low = int(numbers.min())
    if int(numbers.max()) - low <= _FINE_WINDOW:
        summed = np.bincount(numbers - low, weights=masses)
        places = np.flatnonzero(summed)
        return _OnGrid(interval=interval, numbers=places + low, intensities=summed[places])
    places, where = np.unique(numbers, return_inverse=True)
    return _OnGrid(interval=interval, numbers=places, intensities=np.bincount(where, weights=masses))


def _epsilon(grid: _OnGrid, shift: float, delta: float, *, above: bool) -> float:
    """Epsilon of a pair on the grid, rounded up (`above`) or down; infinite or 0 if rounding rivals delta."""
    jumps, masses = grid.numbers * grid.interval, grid.intensities
    log_tail = math.log(_TAIL * delta)
    up, down = _reach(masses, jumps, log_tail), _reach(masses, -jumps, log_tail)
    points = (up + down) / grid.interval + 4
    slack = _TAIL * delta + _ROUNDING_PER_COUNT * (10 + masses.sum()) + _ROUNDING_PER_POINT * points
    if slack > delta / 2 or points > 4 * _FINE_WINDOW:
        return math.inf if above else 0.0
    size = int(next_fast_len(math.ceil(points), real=True))
    first = math.floor(float(masses @ grid.numbers) - down / grid.interval)
    folded = np.bincount(grid.numbers % size, weights=masses, minlength=size)
    law = np.roll(irfft(np.exp(rfft(folded) - masses.sum()), size), -(first % size))
    start = float(masses @ np.expm1(-jumps)) + shift
    losses = start + grid.interval * (first + np.arange(size))
    allowed = delta - slack if above else delta + slack
    return _least_epsilon(losses, np.maximum(law, 0.0), grid.interval, allowed)


def _least_epsilon(losses: np.ndarray, masses: np.ndarray, interval: float, delta: float) -> float:
    """Solve sum over losses l > epsilon of p (1 - e^(epsilon - l)) = delta, epsilon at least 0; losses increase."""
    some = losses > 0
    losses, masses = losses[some], masses[some]
    if losses.size == 0:
        return 0.0
    beyond = np.cumsum(masses[::-1])[::-1]  # P(L >= l)
    # E[e^(l - L); L >= l], by blocks in which no exponential overflows
    block, later, discounted = max(1, int(_DISCOUNT / interval)), 0.0, np.empty_like(masses)
    for start in reversed(range(0, len(masses), block)):
        part = masses[start : start + block]
        decay = np.exp(-interval * np.arange(len(part)))
        sums = np.cumsum((part * decay)[::-1])[::-1] + later * math.exp(-interval * len(part))
        discounted[start : start + block] = sums / decay
        later = float(discounted[start])
    if beyond[0] - math.exp(-losses[0]) * discounted[0] <= delta:
        return 0.0
    at = int(np.argmax(beyond - discounted <= delta))
    return max(0.0, float(losses[at] + np.log((beyond[at] - delta) / discounted[at])))
