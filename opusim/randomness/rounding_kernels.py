"""Numba kernels of exactly rounded Gaussian noise for long arrays: r = h round((s + sigma G) / h), in two tiers.

**The noise** is what `opusim.randomness.kernels` draws, as an exact function of digits that never end. U and V are
uniform in (0, 1), R = sqrt(-2 ln U), and a pair is R (cos t, sin t), where the first digit of V negates both, the
second exchanges them, and the others are t = pi / 4 w, with w in [-1, 1) in two's complement. The pair is two
independent N(0, 1), since the four arcs cover the circle once.

**Tier one** takes the float32 numbers x, y of `kernels._normal_pair` for R cos t and R sin t. Each of its operations
rounds by 2^-24, and none is fused, so every processor has the same bits. Errors:

- U as float32 is off by 2 roundings of the nearer of U and 1 - U, if that is at least 2^-15; U's digits that are not
  drawn move it by 2^-26 of itself there at most. This moves R by at most 2^-24 / ln 2 + 2^-27 < 9.4e-8 of itself.
- Logarithm and root move R by at most 1.49e-7 of itself for every such float32 number, and cosine and sine of each of
  the 2^30 arcs are off by at most 1.09e-7 (both by trying all: tests/opusim/randomness/test_rounding_kernels.py).
- V's digits behind the 32nd move t by less than 1.47e-9 (release), those behind the 24th by 1.89e-7 (experiment).
- The product with R rounds by 6e-8 of itself.

Together |x - R cos t| <= a (|x| + |y|) + b |x|, since R <= |R cos t| + |R sin t|, with a of `TRIG_ERROR` and b of
`RADIUS_ERROR`, in which 1 % is left for products of errors. s + sigma x is formed in float64, in units of h and apart
from the whole part of s / h, so that no size of s costs digits. If no edge of a cell lies within the bound, the
nearest point is r. Else, and for the 6 in 10^5 pairs whose U is within 2^-15 of 0 or 1, the number goes to

**tier two**: U and V with 64 digits each in float64, with the bound of `opusim.randomness.rounded._standard`. That is
one number in 300 to 1,100. What is open after it, one in 10^10, stays as it was and is returned; interval arithmetic
and more digits then decide it (`opusim.randomness.rounded.settle`).

Both tiers decide the same real number, so that r does not depend on them. They differ in time, which tells how many
numbers came near an edge: a function of the noisy numbers that are released, up to the bound, 2^-20 of the noise.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from opusim.randomness.kernels import (
    _ANGLE_BITS,
    _HALF,
    _LOW,
    BLOCKS,
    CHUNK,
    PAIRS,
    _philox_words,
    _transform,
    philox_block,
)

RADIUS_ERROR = 3.1e-7
"""b of the module's text: 1.49e-7 + 9.4e-8 + 6e-8, and 2 % more."""
TRIG_ERROR = 1.13e-7, 3.02e-7
"""a of the module's text, with 32 and with 24 digits of V: 1.09e-7 + 1.47e-9 or 1.89e-7, and 1 % more."""
_GROUP = 64
"""Numbers that are looked through together for one that tier one leaves open."""
_TAIL_BITS = np.uint32(17)
"""U whose digits before the last 17 of 32 are all 0 or all 1, 2^-15 from either end, goes to tier two."""
_ALL_ONE = np.uint32(0x7FFF)
_SLACK = 0.5 - 2.0**-30
"""Half a cell, less more than float64 rounds in tier one: twice 2^-53 of at most 2^15."""
_ERROR = 2.0**-48
"""See `opusim.randomness.rounded._standard`."""
_NAN = np.int64(0x7FF8000000000000)  # bits of np.nan
_TOP = np.uint64(1 << 63)
_SWAP = np.uint64(1 << 62)
_TWO = np.uint64(2)
_FIRST_8 = np.uint64(0xFF000000)
_LAST_24 = np.uint64(0x00FFFFFF)
_LAST_8 = np.uint64(0xFF)
_24 = np.uint64(24)
_EIGHTH_TURN = math.pi / 4 * 2.0**-63


@numba.njit(nogil=True, forceinline=True)
def _is_tail(high: np.uint32) -> bool:
    """Whether U with these first 32 digits is within 2^-15 of 0 or 1."""
    first = np.uint32(high >> _TAIL_BITS)
    return (first == 0) | (first == _ALL_ONE)


@numba.njit(nogil=True, error_model="numpy")
def _nearest(
    values: np.ndarray,
    numbers: np.ndarray,
    others: np.ndarray,
    scale: tuple[float, float, float],
    found: np.ndarray,
) -> None:
    """Fill found with r where float32 numbers tell it, else with NaN.

    Args:
        values: s.
        numbers: The float32 numbers that are added, at least as many.
        others: The others of their pairs.
        scale: Grid, sigma over grid, and a of the module's text.
        found: Receives the results, at least as many.
    """
    grid, ratio, trig_error = scale
    per_grid, trig, radius = 1 / grid, trig_error * ratio, RADIUS_ERROR * ratio
    for i in range(values.size):
        x, y = np.float64(numbers[i]), np.float64(others[i])
        steps = np.float64(values[i]) * per_grid
        whole = np.rint(steps)
        part = (steps - whole) + x * ratio
        nearest = np.rint(part)
        size = abs(x)
        reach = abs(part - nearest) + trig * (size + abs(y)) + radius * size
        found[i] = (
            (whole + nearest) * grid if reach < _SLACK else np.nan
        )  # NaN and infinity are never certain


@numba.njit(nogil=True, error_model="numpy")
def _first_tier(
    values: np.ndarray,
    numbers: np.ndarray,
    high: np.ndarray,
    scale: tuple[float, float, float],
    found: np.ndarray,
    places: np.ndarray,
) -> int:
    """Round a chunk in place as far as float32 numbers tell; what is open stays.

    Args:
        values: s, at most CHUNK.
        numbers: The chunk's float32 numbers, shape (CHUNK,); those of the tails become NaN.
        high: The first 32 digits of U of each pair, shape (PAIRS,).
        scale: As for `_nearest`.
        found: Room for CHUNK results, float64.
        places: Receives where numbers are open, in order.

    Returns:
        How many are open.
    """
    tails = 0
    for i in range(high.size):
        tails += _is_tail(high[i])
    if tails:
        for i in range(high.size):
            if _is_tail(high[i]):
                numbers[i] = numbers[i + PAIRS] = np.nan
    cosines, sines = numbers[:PAIRS], numbers[PAIRS:]
    _nearest(values[:PAIRS], cosines, sines, scale, found[:PAIRS])
    _nearest(values[PAIRS:], sines, cosines, scale, found[PAIRS:])
    bits, count = found.view(np.int64), 0
    for start in range(0, values.size, _GROUP):
        part, results = values[start : start + _GROUP], found[start : start + _GROUP]
        flags, left = bits[start : start + _GROUP], 0
        for i in range(part.size):
            left += flags[i] == _NAN
        for i in range(part.size):
            if left and math.isnan(results[i]):
                places[count] = start + i
                count += 1
            else:
                part[i] = results[i]
    return count


@numba.njit(nogil=True, error_model="numpy")
def nearest_by_64_digits(
    value: float, grid: float, ratio: float, u: np.uint64, v: np.uint64, sine: bool
) -> float:
    """Return r of one number from 64 digits of U and of V, or NaN if they do not tell.

    Args:
        value: s, finite.
        grid: h.
        ratio: sigma over grid.
        u: The digits of U.
        v: The digits of V.
        sine: Whether it is the second number of the pair.
    """
    if u == 0:
        return np.nan
    if u >= _TOP:
        exponential = -math.log1p(-(np.float64(~u) + 0.5) * 2.0**-64)
        smallest = 0.5
    else:
        exponential = -math.log((np.float64(u) + 0.5) * 2.0**-64)
        smallest = np.float64(u) * (1 - 2.0**-52) * 2.0**-64
    radius = math.sqrt(2 * exponential)
    t = (
        np.float64(np.uint64(v << _TWO).view(np.int64)) + 2.0
    ) * _EIGHTH_TURN  # middle of the digits not drawn
    x = radius * (math.sin(t) if sine != ((v & _SWAP) != 0) else math.cos(t))
    if v >= _TOP:
        x = -x
    error = (2 * (_ERROR * exponential + 2.0**-64 / smallest) / radius + 2 * _ERROR * radius) * (1 + 2.0**-20)
    steps = value / grid  # exact: a power of two
    whole = np.rint(steps)
    noise = x * ratio
    part = (steps - whole) + noise
    nearest = np.rint(part)
    bound = error * ratio * (1 + _ERROR) + 2.0**-52 * (abs(noise) + abs(part))
    return (whole + nearest) * grid if abs(part - nearest) + bound < 0.5 else np.nan


@numba.njit(nogil=True, error_model="numpy")
def _take(
    values: np.ndarray,
    at: int,
    place: int,
    scale: tuple[float, float, float],
    digits: tuple[np.uint64, np.uint64],
    opened: np.ndarray,
    count: int,
) -> int:
    """Round one number in place by tier two, or note it; a value that is not finite stays. Returns the new count."""
    value, (u, v) = np.float64(values[at]), digits
    if not math.isfinite(value):
        return count
    found = nearest_by_64_digits(value, scale[0], scale[1], u, v, at >= PAIRS)
    if math.isnan(found):
        opened[count, 0], opened[count, 1], opened[count, 2] = place + at, u, v
        return count + 1
    values[at] = found
    return count


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_rounded_from_philox(
    out: np.ndarray,
    grid: float,
    ratio: float,
    opened: np.ndarray,
    first_chunk: int,
    reading: int,
    step_low: int,
    step_high: int,
    k0: int,
    k1: int,
    more_k0: int,
    more_k1: int,
) -> int:
    """Add noise to out and round, from the digits of `kernels.fill_from_philox` and 64 more of each pair.

    Args:
        out: s, then r; float32 or float64, one axis of any length.
        grid: h.
        ratio: sigma over grid, in [2^10, 2^11).
        opened: Receives numbers that are still open: place in out, 64 digits of U, of V; uint64, shape (out.size, 3).
        first_chunk: As for `kernels.fill_from_philox`, like those that follow.
        reading: Counter word 1.
        step_low: Counter word 2.
        step_high: Counter word 3.
        k0: Low 32 bits of the key.
        k1: High 32 bits.
        more_k0: Low 32 bits of the key of further digits: pair i of the draw has those of counter (i, reading, step).
        more_k1: High 32 bits.

    Returns:
        How many are open; they are as they were.
    """
    c1, c2, c3 = np.uint64(reading), np.uint64(step_low), np.uint64(step_high)
    words, numbers = np.empty((3, PAIRS), np.uint32), np.empty(CHUNK, np.float32)
    found, places = np.empty(CHUNK, np.float64), np.empty(CHUNK, np.int64)
    scale, count = (grid, ratio, TRIG_ERROR[1]), 0
    for start in range(0, out.size, CHUNK):
        chunk = first_chunk + start // CHUNK
        base = np.uint64(chunk * BLOCKS)
        _philox_words(words, base, (reading, step_low, step_high), np.uint64(k0), np.uint64(k1))
        _transform(words, numbers)
        values = out[start : min(start + CHUNK, out.size)]
        for k in range(_first_tier(values, numbers, words[0], scale, found, places)):
            pair = places[k] % PAIRS
            number = np.uint64(chunk * PAIRS + pair)
            more, last, _, _ = philox_block(number, c1, c2, c3, np.uint64(more_k0), np.uint64(more_k1))
            low = (np.uint64(words[1, pair]) & _FIRST_8) | (more & _LAST_24)
            angle = np.uint64(words[2, pair] & _ANGLE_BITS) | ((more >> _24) & _LAST_8)
            u, v = (np.uint64(words[0, pair]) << _HALF) | low, (angle << _HALF) | (last & _LOW)
            count = _take(values, places[k], start, scale, (u, v), opened, count)
    return count


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_rounded_from_words(
    out: np.ndarray, grid: float, ratio: float, opened: np.ndarray, words: np.ndarray
) -> int:
    """Add noise to out and round, from given random words.

    Args:
        out: As for `add_rounded_from_philox`, like those that follow.
        grid: h.
        ratio: sigma over grid.
        opened: Receives numbers that are still open.
        words: uint32, shape (at least ceil(out.size / CHUNK), 4, PAIRS): radius high, radius low, angle, and its
            further 32 digits.

    Returns:
        How many are open; they are as they were.
    """
    numbers = np.empty(CHUNK, np.float32)
    found, places = np.empty(CHUNK, np.float64), np.empty(CHUNK, np.int64)
    scale, count = (grid, ratio, TRIG_ERROR[0]), 0
    for start in range(0, out.size, CHUNK):
        drawn = words[start // CHUNK]
        _transform(drawn, numbers)
        values = out[start : min(start + CHUNK, out.size)]
        for k in range(_first_tier(values, numbers, drawn[0], scale, found, places)):
            pair = places[k] % PAIRS
            u = (np.uint64(drawn[0, pair]) << _HALF) | np.uint64(drawn[1, pair])
            v = (np.uint64(drawn[2, pair]) << _HALF) | np.uint64(drawn[3, pair])
            count = _take(values, places[k], start, scale, (u, v), opened, count)
    return count
