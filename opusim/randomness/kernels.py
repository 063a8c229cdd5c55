"""Numba kernels of the random numbers: Philox, standard normal numbers without libm, and their exact rounding.

**Normal numbers.** Box and Muller (1958): with U, V uniform, sqrt(-2 ln U) (cos 2 pi V, sin 2 pi V) are two independent
N(0, 1). From given words (release mode) U has 64 bits, so the radius reaches sqrt(2 ln 2^65) = 9.49, and V has 32. From
Philox (experiment mode) a block of 128 bits makes two pairs, U with 40 bits and V with 24: the radius reaches sqrt(2 ln
2^41) = 7.54, beyond which lies 5e-13 of the law, and angles are 2^-24 of a turn apart. Logarithm, sine and cosine are
branch-free float32 polynomials (coefficients of Moshier's Cephes library, logf and sinf), which LLVM turns into vector
instructions. Only correctly rounded operations are used and none is fused, so the numbers are the same bits on every
processor. Against exact arithmetic on the same words the error is below 4e-7 times the radius
(tests/opusim/randomness/test_randomness.py measures it).

Numbers come in chunks of 1024: 512 pairs, first their cosine halves, then their sine halves. An element
therefore depends on its index only.

**Philox4x32-10** (Salmon, Moraes, Dror, Shaw 2011; the Random123 library). Words of 32 bits are held in the low halves
of 64-bit lanes, because a round needs 64-bit products: so LLVM keeps a whole block of counters in vector registers with
no packing between rounds. The high halves may hold anything: a product takes the low half of its word, for which
processors have one instruction, and storing a word cuts it. The rounds are written out, since a loop would stop the
vectorisation. Storing each of the four words in an array of its own is six times as fast as storing them side by side.
The torch version is `opusim.randomness.streams.philox_torch`; tests/oracles has a plain Python twin.

**Threads.** `run_split` splits the work of a kernel over as many threads as torch uses, in a way that survives a fork.
Kernels release the interpreter lock, so plain threads suffice; numba's own threading layers are not safe to
enter from two threads at once, nor after a fork. Counter-based kernels give the same numbers for every split.

**Exact rounding** of long arrays, r = h round((s + sigma G) / h), takes two tiers. The noise is what is drawn here, as
an exact function of digits that never end. U and V are uniform in (0, 1), R = sqrt(-2 ln U), and a pair is R (cos t,
sin t), where the first digit of V negates both, the second exchanges them, and the others are t = pi / 4 w, with w in
[-1, 1) in two's complement. The pair is two independent N(0, 1), since the four arcs cover the circle once.

**Tier one** takes the float32 numbers x, y of `_normal_pair` for R cos t and R sin t. Each of its operations
rounds by 2^-24, and none is fused, so every processor has the same bits. Errors:

- U as float32 is off by 2 roundings of the nearer of U and 1 - U, if that is at least 2^-15; the digits of U not drawn
  move it by at most 2^-26 of itself there. This moves R by at most 2^-24 / ln 2 + 2^-27 < 9.4e-8 of itself.
- Logarithm and root move R by at most 1.49e-7 of itself for every such float32 number, and cosine and sine of each of
  the 2^30 arcs are off by at most 1.09e-7 (both by trying all: tests/opusim/randomness/test_rounding_kernels.py).
- V's digits after the 32nd move t by less than 1.47e-9 (release), those after the 24th by 1.89e-7 (experiment).
- The product with R rounds by 6e-8 of itself.

Together |x - R cos t| <= a (|x| + |y|) + b |x|, since R <= |R cos t| + |R sin t|, with a = `TRIG_ERROR` and b =
`RADIUS_ERROR`, which leave 1 % for products of errors. s + sigma x is formed in float64, in units of h and apart from
the whole part of s / h, so that no size of s costs digits. If no edge of a cell lies within the bound, the nearest
point is r. Else, and for the 6 in 10^5 pairs whose U is within 2^-15 of 0 or 1, the number goes to

**tier two**: U and V with 64 digits each in float64, with the bound of `opusim.randomness.rounded._standard`. That is
one number in 300 to 1,100. A number still open after it, one in 10^10, stays as it was and is reported; interval
arithmetic with more digits then decides it (`opusim.randomness.rounded.settle`).

Both tiers round the same real number, so r does not depend on the tier. The time does, and reveals how many numbers
came near an edge: a function of the released noisy numbers, up to the bound, 2^-20 of the noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@numba.njit(nogil=True, forceinline=True)
def _round(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """One round: two 32 x 32 -> 64 bit products, their halves crossed and mixed with the round's key."""
    product_0 = _MULTIPLIER_0 * (c0 & _LOW)
    product_1 = _MULTIPLIER_1 * (c2 & _LOW)
    return (product_1 >> _HALF) ^ c1 ^ k0, product_1, (product_0 >> _HALF) ^ c3 ^ k1, product_0


@numba.njit(nogil=True, forceinline=True)
def philox_block(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Encrypt one counter by ten rounds; only the low 32 bits of each word count. The key's low half comes first."""
    for _ in range(9):  # LLVM unrolls it
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1  # the next round's key: a Weyl sequence per word
    return _round(c0, c1, c2, c3, k0, k1)


PAIRS = 512
BLOCKS = PAIRS // 2
CHUNK = 2 * PAIRS

_F = np.float32
_U = np.uint32
_TOP_BIT = np.uint32(0x80000000)
_SWAP_BIT = np.uint32(0x40000000)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)  # float32 sqrt(1/2): mantissas are taken in [sqrt(1/2), sqrt(2))
_MANTISSA = np.int32(0x007FFFFF)
_MANTISSA_BITS = np.int32(23)
_ANGLE_BITS = np.uint32(0xFFFFFF00)
_ANGLE_MIDDLE = np.uint32(0x00000080)
_LOW_MIDDLE = np.uint32(0x00800000)
_LN2 = np.float32(0.6931471805599453)
_EIGHTH_TURN = np.float32(0.7853981633974483 * 2.0**-31)


@numba.njit(nogil=True, forceinline=True)
def _log1p(f: np.float32) -> np.float32:
    """ln(1 + f) - f for f in [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes logf)."""
    z = f * f
    p = _F(7.0376836292e-2)
    p = p * f + _F(-1.1514610310e-1)
    p = p * f + _F(1.1676998740e-1)
    p = p * f + _F(-1.2420140846e-1)
    p = p * f + _F(1.4249322787e-1)
    p = p * f + _F(-1.6668057665e-1)
    p = p * f + _F(2.0000714765e-1)
    p = p * f + _F(-2.4999993993e-1)
    p = p * f + _F(3.3333331174e-1)
    return p * f * z - _F(0.5) * z


@numba.njit(nogil=True, forceinline=True)
def _log_uniform(high: np.uint32, low: np.uint32) -> np.float32:
    """Return the logarithm of U = (high 2^32 + low + 1/2) / 2^64, precise at both ends.

    Above 1/2 the complemented words give 1 - U in place of U, so small radii keep all their digits.
    """
    top = high >= _TOP_BIT
    a = _U(~high) if top else high
    b = _U(~low) if top else low
    v = _F(a) * _F(2.0**-32) + (_F(b) * _F(2.0**-64) + _F(2.0**-65))  # U, or 1 - U; in (0, 1/2]
    u = _F(_F(1.0) - v) if top else v
    shifted = np.int32(_F(u).view(np.int32) - _SQRT_HALF_BITS)
    exponent = np.int32(shifted >> _MANTISSA_BITS)
    mantissa = np.int32(np.int32(shifted & _MANTISSA) + _SQRT_HALF_BITS).view(np.float32)
    f = _F(-v) if (top and exponent == 0) else _F(mantissa - _F(1.0))
    return _F(exponent) * _LN2 + (f + _log1p(f))


@numba.njit(nogil=True, forceinline=True)
def _normal_pair(high: np.uint32, low: np.uint32, angle: np.uint32) -> tuple[np.float32, np.float32]:
    """Return two independent N(0, 1) from 64 bits of radius and 32 of angle.

    The low 30 bits of the angle choose a point on the arc from -45 to 45 degrees; bit 30 reflects it in the
    diagonal and bit 31 in the origin. The four images cover the circle once.
    """
    radius = _F(np.sqrt(_F(-2.0) * _log_uniform(high, low)))
    radius = _F(-radius) if angle >= _TOP_BIT else radius
    t = _F(_U(angle << _U(2)).view(np.int32)) * _EIGHTH_TURN
    z = t * t
    s = _F(-1.9515295891e-4)
    s = s * z + _F(8.3321608736e-3)
    s = s * z + _F(-1.6666654611e-1)
    s = s * z * t + t
    c = _F(2.443315711809948e-5)
    c = c * z + _F(-1.388731625493765e-3)
    c = c * z + _F(4.166664568298827e-2)
    c = c * z * z - _F(0.5) * z + _F(1.0)
    swap = _U(angle & _SWAP_BIT) != _U(0)
    x = s if swap else c
    y = c if swap else s
    return x * radius, y * radius


@numba.njit(nogil=True, error_model="numpy")
def _philox_words(
    words: np.ndarray, base: np.uint64, c: tuple[int, int, int], k0: np.uint64, k1: np.uint64
) -> None:
    """One chunk's words, shape (3, PAIRS): radius high, radius low, angle.

    Words 0 and 1 of block i make pair i, words 2 and 3 make pair i + PAIRS / 2. The first word is the radius' high
    word; the lowest 8 bits of the second lead its low word, and the other 24 lead the angle. The missing bits take the
    middle of their range.
    """
    c1, c2, c3 = np.uint64(c[0]), np.uint64(c[1]), np.uint64(c[2])
    high, low, angle = words[0], words[1], words[2]
    for i in range(BLOCKS):
        w0, w1, w2, w3 = philox_block(base + np.uint64(i), c1, c2, c3, k0, k1)
        first, second = _U(w1), _U(w3)
        high[i] = _U(w0)
        low[i] = _U(first << _U(24)) | _LOW_MIDDLE
        angle[i] = (first & _ANGLE_BITS) | _ANGLE_MIDDLE
        high[i + BLOCKS] = _U(w2)
        low[i + BLOCKS] = _U(second << _U(24)) | _LOW_MIDDLE
        angle[i + BLOCKS] = (second & _ANGLE_BITS) | _ANGLE_MIDDLE


@numba.njit(nogil=True, error_model="numpy")
def _transform(words: np.ndarray, out: np.ndarray) -> None:
    """One chunk of normals, shape (CHUNK,), from its words, shape (3, PAIRS)."""
    high, low, angle = words[0], words[1], words[2]
    cosines, sines = out[:PAIRS], out[PAIRS:]
    for i in range(PAIRS):
        cosines[i], sines[i] = _normal_pair(high[i], low[i], angle[i])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_from_philox(
    out: np.ndarray, first_chunk: int, reading: int, step_low: int, step_high: int, k0: int, k1: int
) -> None:
    """Fill out, from a chunk of the draw on, with N(0, 1); the last chunk may be cut short.

    Block b of the draw is the counter (b, reading, step_low, step_high) encrypted by the key's low and high 32 bits.
    """
    words = np.empty((3, PAIRS), np.uint32)
    last = np.empty(CHUNK, np.float32)
    for start in range(0, out.size, CHUNK):
        base = np.uint64((first_chunk + start // CHUNK) * BLOCKS)
        _philox_words(words, base, (reading, step_low, step_high), np.uint64(k0), np.uint64(k1))
        if start + CHUNK <= out.size:
            _transform(words, out[start : start + CHUNK])
        else:
            _transform(words, last)
            out[start:] = last[: out.size - start]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def digits_from_philox(
    out: np.ndarray, reading: int, step_low: int, step_high: int, k0: int, k1: int
) -> None:
    """Fill out, uint64, shape (n, 2), with random words: row i is (i, reading, step_low, step_high) encrypted."""
    c1, c2, c3 = np.uint64(reading), np.uint64(step_low), np.uint64(step_high)
    for i in range(len(out)):
        w0, w1, w2, w3 = philox_block(np.uint64(i), c1, c2, c3, np.uint64(k0), np.uint64(k1))
        out[i, 0] = ((w1 & _LOW) << _HALF) | (w0 & _LOW)
        out[i, 1] = ((w3 & _LOW) << _HALF) | (w2 & _LOW)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_from_philox(
    out: np.ndarray,
    scale: np.float32,
    first_chunk: int,
    reading: int,
    step_low: int,
    step_high: int,
    k0: int,
    k1: int,
) -> None:
    """Add scale times the numbers of `fill_from_philox` to out, without a second array of its size."""
    words = np.empty((3, PAIRS), np.uint32)
    numbers = np.empty(CHUNK, np.float32)
    for start in range(0, out.size, CHUNK):
        base = np.uint64((first_chunk + start // CHUNK) * BLOCKS)
        _philox_words(words, base, (reading, step_low, step_high), np.uint64(k0), np.uint64(k1))
        _transform(words, numbers)
        part = out[start : min(start + CHUNK, out.size)]
        for i in range(part.size):
            part[i] += scale * numbers[i]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_from_words(out: np.ndarray, words: np.ndarray) -> None:
    """Fill out with N(0, 1) from words (chunks, 3, PAIRS), uint32: radius high, radius low and angle of each chunk."""
    last = np.empty(CHUNK, np.float32)
    for start in range(0, out.size, CHUNK):
        if start + CHUNK <= out.size:
            _transform(words[start // CHUNK], out[start : start + CHUNK])
        else:
            _transform(words[start // CHUNK], last)
            out[start:] = last[: out.size - start]


_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a child inherits the pool objects, but not their threads


def run_split(work: Callable[[int, int], None], count: int, *, grain: int) -> None:
    """Call work(start, stop) on ranges of [0, count), in parallel if there is a `grain` for each thread."""
    threads = min(torch.get_num_threads(), count // grain)
    if threads < 2:
        work(0, count)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, thread_name_prefix="opusim"))
    cuts = [count * index // threads for index in range(threads + 1)]
    futures = [pool.submit(work, cuts[i], cuts[i + 1]) for i in range(1, threads)]
    work(cuts[0], cuts[1])
    for future in futures:
        future.result()


RADIUS_ERROR = 3.1e-7
"""b of the module's text: 1.49e-7 + 9.4e-8 + 6e-8, and 2 % more."""
TRIG_ERROR = 1.13e-7, 3.02e-7
"""a of the module's text, with 32 and with 24 digits of V: 1.09e-7 + 1.47e-9 or 1.89e-7, and 1 % more."""
_GROUP = 64
"""Numbers that are searched together for any that tier one leaves open."""
_TAIL_BITS = np.uint32(17)
"""A pair goes to tier two if the first 15 digits of U are all 0 or all 1: U is within 2^-15 of 0 or 1."""
_ALL_ONE = np.uint32(0x7FFF)
_SLACK = 0.5 - 2.0**-30
"""Half a cell, minus a margin above the float64 rounding in tier one: twice 2^-53 of at most 2^15."""
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
_ARC = math.pi / 4 * 2.0**-63


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
    """Fill found with r of each s where its float32 number, with the other of its pair, decides it, else with NaN.

    The scale is grid, sigma over grid, and a of the module's text.
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
        # NaN and infinity are never certain
        found[i] = (whole + nearest) * grid + 0.0 if reach < _SLACK else np.nan


@numba.njit(nogil=True, error_model="numpy")
def _first_tier(
    values: np.ndarray,
    numbers: np.ndarray,
    high: np.ndarray,
    scale: tuple[float, float, float],
    found: np.ndarray,
    places: np.ndarray,
) -> int:
    """Round a chunk in place where the float32 numbers decide; return how many stay open, and in `places` which.

    Numbers with U in the tails become NaN, by `high`, the first 32 digits of U of each pair; `found` has room.
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
    """Return r of s, h, sigma / h and 64 digits of U and of V, or NaN if they do not decide it; `sine`: second."""
    if u == 0:
        return np.nan
    if u >= _TOP:
        exponential = -math.log1p(-(np.float64(~u) + 0.5) * 2.0**-64)
        smallest = 0.5
    else:
        exponential = -math.log((np.float64(u) + 0.5) * 2.0**-64)
        smallest = np.float64(u) * (1 - 2.0**-52) * 2.0**-64
    radius = math.sqrt(2 * exponential)
    t = (np.float64(np.uint64(v << _TWO).view(np.int64)) + 2.0) * _ARC  # middle of the digits not drawn
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
    return (whole + nearest) * grid + 0.0 if abs(part - nearest) + bound < 0.5 else np.nan


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
    """Round one finite number in place by tier two, or note it as open; return the new count of open ones."""
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
    """Round out, s + noise, from the digits of `fill_from_philox` and 64 more for each pair; return how many are open.

    `out`, float32 or float64, holds s, then r; open numbers are as they were. `grid` is h, `ratio` sigma over grid, in
    [2^10, 2^11). `opened`, uint64, (out.size, 3), receives place, 64 digits of U and 64 of V of each open number. Pair
    i of the draw has the further digits of counter (i, reading, step) under the key `more_k0`, `more_k1`.
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
    """Round as `add_rounded_from_philox` from words (chunks, 4, PAIRS), uint32, the last with digits of the angle."""
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
