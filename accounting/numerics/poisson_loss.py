"""Bounds on epsilon between products of Poisson laws: the exact privacy loss of photon counts, without Renyi orders.

With rates a and b of independent counts N_i the loss is sum N_i c_i - sum (a_i - b_i), c_i = log(a_i / b_i): under the
first law a compound Poisson number, whose jumps c have the intensity a_i at c_i. The second law has b_i there.

**Upper bound.** Counts of two pixels can be added, so a pixel (a, b) is post-processing of two pixels (a', b') and
(a'', b'') with a' + a'' = a and b' + b'' = b. Each pixel is split so that its parts have ratios at neighbouring grid
points e^(j h). The pair on the grid therefore dominates, and its loss is h times a compound Poisson integer plus a
constant: one Fourier transform gives its law. This is "connect the dots" (Doroshenko et al. 2022) for intensities; it
adds at most h^2 / 4 for each expected count to the loss's variance.

**Lower bound.** A count may be sent to a random grid point, which is post-processing. The polygon below the
intensities' divergence curve, with corners on the grid (`polygon_below`), is reached that way (Blackwell
1953).

Losses beyond the window of the transform (Chernoff bounds) and the transform's rounding are taken off delta, or added
to it, on the safe side. A count that only the first law can give is an infinite loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import permutations

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import isotonic_regression

from opusim import checks
from opusim.accounting.guarantee import EpsilonBounds
from opusim.accounting.numerics.loss_laws import LARGEST_LOSS
from opusim.accounting.numerics.poisson_loss import RenyiBounds, tilted_bounds

METHOD = "exact Poisson loss distribution"
_ADDED_VARIANCE = 1e-3
"""Share of the loss's variance that the grid adds."""
_TAIL = 1e-7
"""Share of delta that lies beyond the window on each side."""
_WINDOWS = (2**13, 2**15, 2**17, 2**20)
"""Most points of a transform: on which grids a pair is bounded, one after the other, while it may be the worst."""
_FINE_WINDOW = _WINDOWS[-1]
_CLOSE, _MANY = 0.9, 12
"""With more than 12 pairs within 0.9 of the largest Renyi bound, `tilted_bounds` come before any grid."""
_FAIR = 2
"""Number of the grid that is finer than those bounds."""
_ROUNDING_PER_COUNT, _ROUNDING_PER_POINT = 4e-14, 1e-16
"""Total variation that the transform's rounding may add."""
_CHERNOFF_ORDERS = np.logspace(-2, 2, 33)
"""Orders that are tried, in units of the larger of the loss's deviation and its longest jump."""
_BINS = 64
"""Bins of jumps for a first guess of the loss's reach."""
_DISCOUNT = 300.0
"""Largest exponent within a block of a discounted sum."""
_NEAR = 0.1
_ROUNDING = 1e-15
"""What rounding may make of two equal values, relative to 1 or to the larger one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """Two products of Poisson laws, without the pixels that tell nothing.

    Attributes:
        a: Rates of the first law where both are above 0 and differ.
        b: Rates of the second law there.
        surely: Probability that the first law gives a count where the second gives none: an infinite loss.
        shift: Loss of an empty picture at the pixels that only one law lights, if they are empty.
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
    """Intensities whose jumps lie on a grid.

    Attributes:
        interval: h.
        numbers: j of each jump j h, integers.
        intensities: Of the first law, expected counts.
    """

    interval: float
    numbers: np.ndarray
    intensities: np.ndarray


def poisson_bounds(a: np.ndarray, b: np.ndarray, delta: float) -> EpsilonBounds:
    """Return bounds on the least epsilon with P(S) <= e^epsilon Q(S) + delta for products of Poisson laws P and Q.

    Args:
        a: Rates of P, expected counts of independent pixels and frames, at least 0, shape (pixels,).
        b: Rates of Q, same shape.
        delta: In (0, 1).

    Returns:
        Bounds of this one direction; (0, infinity) if doubles cannot follow.
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
    """Return bounds on epsilon between known patterns: the largest over ordered pairs.

    Args:
        rates: Expected counts of each pattern at every pixel and frame, at least 0, shape (patterns, pixels).
        delta: In (0, 1).
    """
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

    Every pair has a bound by Renyi divergences, which cost one matrix product an order; of many pairs with close ones
    `tilted_bounds` tells more. The pair with the largest bound is bounded on the next finer grid, until a bound of the
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
    bounds, level = (
        np.full((patterns, patterns), np.inf),
        _FAIR,
    )  # upper bounds, and the number of the next finer grid
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
    """Epsilon of the pair that the split pixels give, and whether no larger window has a finer grid.

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
    """Epsilon of the pair that routed counts give; 0 if the grid is too coarse for one."""
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
    if not np.all(np.diff(points) > 0):  # doubles do not tell neighbouring ratios apart
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
    """Whether doubles can follow so many counts, and jumps so long."""
    longest = float(np.max(np.abs(np.log(pair.a) - np.log(pair.b))))
    return longest < LARGEST_LOSS and _ROUNDING_PER_COUNT * (10 + float(np.sum(pair.a))) < delta / 2


def _interval(pair: _Pair, jumps: np.ndarray, delta: float, window: int) -> tuple[float, bool]:
    """The interval that adds `_ADDED_VARIANCE`, or the finest whose window fits; the longest jump lies on the grid.

    Also whether no larger window has a finer one.
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
    Neither is taken as 1 less the other: on a coarse grid a' may be below the last digit of a, while a' e^(-l') is
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
    # The polygon may leave 1 - x at x_i if 1 - x is at most the tangents behind it at their points, and end at x_i if
    # the tangents before it are not negative there. (Both fail only near a loss that the mechanism cannot fall below or
    # exceed.) Neither counts what rounding may make of values that are equal.
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
