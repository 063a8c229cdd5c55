"""Triton kernels of `opusim.randomness.cards`: ChaCha20, normal numbers and exact rounding in one pass over memory.

Words are those of `cards.chacha_words`, bit for bit. Logarithm, sine and cosine are polynomials in float64 of
additions, products and divisions only, so that every card computes them alike, also if a product and a sum are fused.
tests/opusim/randomness/test_cards.py holds the numbers against those of `cards.normal_pairs` and their bound, and those
against exact arithmetic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opusim.randomness.cards import ARC, MOST_OPEN, NUMBERS
from opusim.randomness.rounded import ERROR

_BLOCKS = 128
"""Blocks of ChaCha20 for each program: one for each thread."""
_C0, _C1, _C2, _C3 = (tl.constexpr(word) for word in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574))
_ERROR, _ARC = tl.constexpr(ERROR), tl.constexpr(ARC)
_LN2 = tl.constexpr(math.log(2))
_ROOT = tl.constexpr(0x3FE6A09E667F3BCD)  # bits of sqrt(1/2): mantissas are taken in [sqrt(1/2), sqrt(2))
_MANTISSA = tl.constexpr(2**52 - 1)
_MOST_OPEN = tl.constexpr(MOST_OPEN)


@triton.jit
def _rotated(x, places: tl.constexpr):
    return (x << places) | (x >> (32 - places))


@triton.jit
def _quarter_round(a, b, c, d):
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _chacha(key, nonce, counter):
    """Return the 16 words of blocks, uint32, of the counters' shape."""
    zero = counter * 0
    c0, c1, c2, c3 = zero + _C0, zero + _C1, zero + _C2, zero + _C3
    k0 = zero + tl.load(key + 0).to(tl.uint32)
    k1 = zero + tl.load(key + 1).to(tl.uint32)
    k2 = zero + tl.load(key + 2).to(tl.uint32)
    k3 = zero + tl.load(key + 3).to(tl.uint32)
    k4 = zero + tl.load(key + 4).to(tl.uint32)
    k5 = zero + tl.load(key + 5).to(tl.uint32)
    k6 = zero + tl.load(key + 6).to(tl.uint32)
    k7 = zero + tl.load(key + 7).to(tl.uint32)
    n0 = zero + nonce.to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = c0, c1, c2, c3, k0, k1, k2, k3
    w8, w9, w10, w11, w12, w13, w14, w15 = k4, k5, k6, k7, counter, n0, zero, zero
    for _ in range(10):
        w0, w4, w8, w12 = _quarter_round(w0, w4, w8, w12)
        w1, w5, w9, w13 = _quarter_round(w1, w5, w9, w13)
        w2, w6, w10, w14 = _quarter_round(w2, w6, w10, w14)
        w3, w7, w11, w15 = _quarter_round(w3, w7, w11, w15)
        w0, w5, w10, w15 = _quarter_round(w0, w5, w10, w15)
        w1, w6, w11, w12 = _quarter_round(w1, w6, w11, w12)
        w2, w7, w8, w13 = _quarter_round(w2, w7, w8, w13)
        w3, w4, w9, w14 = _quarter_round(w3, w4, w9, w14)
    w0, w1, w2, w3 = w0 + c0, w1 + c1, w2 + c2, w3 + c3
    w4, w5, w6, w7 = w4 + k0, w5 + k1, w6 + k2, w7 + k3
    w8, w9, w10, w11 = w8 + k4, w9 + k5, w10 + k6, w11 + k7
    return w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12 + counter, w13 + n0, w14, w15


@triton.jit
def _minus_log(near, top):
    """Return -ln U for U = near, or for U = 1 - near where top, with near in (0, 1/2]."""
    u = tl.where(top, 1.0 - near, near)
    shifted = u.to(tl.int64, bitcast=True) - _ROOT
    exponent = shifted >> 52
    mantissa = ((shifted & _MANTISSA) + _ROOT).to(tl.float64, bitcast=True)
    f = tl.where(top & (exponent == 0), -near, mantissa - 1.0)
    # ln(1 + f) = 2 atanh(g), with |g| below 0.172: the next term is below 2^-58 of the sum
    g = f / (2.0 + f)
    z = g * g
    p = z * (1.0 / 21) + 1.0 / 19
    p = p * z + 1.0 / 17
    p = p * z + 1.0 / 15
    p = p * z + 1.0 / 13
    p = p * z + 1.0 / 11
    p = p * z + 1.0 / 9
    p = p * z + 1.0 / 7
    p = p * z + 1.0 / 5
    p = p * z + 1.0 / 3
    return -(exponent.to(tl.float64) * _LN2 + 2.0 * (g * z * p + g))


@triton.jit
def _sine_and_cosine(t):
    """Return both of an angle within an eighth turn, by Taylor's series up to t^17 and t^18."""
    z = t * t
    s = z * (1.0 / 355687428096000) - 1.0 / 1307674368000
    s = s * z + 1.0 / 6227020800
    s = s * z - 1.0 / 39916800
    s = s * z + 1.0 / 362880
    s = s * z - 1.0 / 5040
    s = s * z + 1.0 / 120
    s = s * z - 1.0 / 6
    c = z * (-1.0 / 6402373705728000) + 1.0 / 20922789888000
    c = c * z - 1.0 / 87178291200
    c = c * z + 1.0 / 479001600
    c = c * z - 1.0 / 3628800
    c = c * z + 1.0 / 40320
    c = c * z - 1.0 / 720
    c = c * z + 1.0 / 24
    return s * z * t + t, c * z * z - 0.5 * z + 1.0


@triton.jit
def _pair(high, low, angle, more):
    """Return two numbers, and the bound of their error; see `cards.normal_pairs`."""
    first, last = high.to(tl.int64), low.to(tl.int64)
    top = first >= 2147483648
    first = tl.where(top, 4294967295 - first, first).to(tl.float64)
    last = tl.where(top, 4294967295 - last, last).to(tl.float64)
    near = (first * 2.0**32 + (last + 0.5)) * 2.0**-64
    exponential = _minus_log(near, top)
    smallest = (first * 2.0**32 + last) * (2.0**-64 * (1 - 2.0**-52))
    smallest = tl.where(top, 0.5, smallest)
    radius = tl.sqrt(2.0 * exponential)
    error = _ERROR * exponential + 2.0**-64 / smallest
    error = (2.0 * error / radius + 2.0 * _ERROR * radius) * (1 + 2.0**-20)
    digits = ((angle.to(tl.uint64) << 34) | (more.to(tl.uint64) << 2)).to(tl.int64, bitcast=True)
    s, c = _sine_and_cosine((digits.to(tl.float64) + 2.0) * _ARC)
    exchanged = (angle & 1073741824) != 0
    radius = tl.where(angle >= 2147483648, -radius, radius)
    return tl.where(exchanged, s, c) * radius, tl.where(exchanged, c, s) * radius, error


@triton.jit
def _store_pair(out, high, low, angle, more, at, pairs, count):
    x, y, _ = _pair(high, low, angle, more)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=(at >= 0) & (at < count))
    tl.store(out + at + pairs, y.to(out.dtype.element_ty), mask=(at >= 0) & (at + pairs < count))


@triton.jit(do_not_specialize=["nonce"])
def _fill(out, key, nonce, count, blocks, size: tl.constexpr):
    block = tl.program_id(0) * size + tl.arange(0, size)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(
        key, nonce, block.to(tl.uint32)
    )
    valid = block < blocks
    _store_pair(out, w0, w1, w2, w3, tl.where(valid, block, -1), 4 * blocks, count)
    _store_pair(out, w4, w5, w6, w7, tl.where(valid, block + blocks, -1), 4 * blocks, count)
    _store_pair(out, w8, w9, w10, w11, tl.where(valid, block + 2 * blocks, -1), 4 * blocks, count)
    _store_pair(out, w12, w13, w14, w15, tl.where(valid, block + 3 * blocks, -1), 4 * blocks, count)


@triton.jit
def _round_one(out, x, error, at, valid, scale, opened):
    """Round the numbers at some places with their noise, and note those that are open."""
    grid, per_grid, ratio = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    value = tl.load(out + at, mask=valid, other=0.0).to(tl.float64)
    steps = value * per_grid
    whole = tl.floor(steps + 0.5)
    noise = x * ratio
    part = (steps - whole) + noise
    nearest = tl.floor(part + 0.5)
    bound = error * ratio * (1 + _ERROR) + 2.0**-52 * (tl.abs(noise) + tl.abs(part))
    certain = tl.abs(part - nearest) + bound < 0.5
    found = ((whole + nearest) * grid + 0.0).to(out.dtype.element_ty)  # see `rounded`, The sign of zero
    tl.store(out + at, found, mask=valid & certain)
    left = valid & (certain == 0) & (tl.abs(value) < float("inf"))
    slot = tl.atomic_add(opened + at * 0, (at * 0 + 1).to(tl.int64), mask=left)
    tl.store(opened + 1 + slot, at.to(tl.int64), mask=left & (slot < _MOST_OPEN))


@triton.jit
def _round_pair(out, high, low, angle, more, at, pairs, count, scale, opened):
    x, y, error = _pair(high, low, angle, more)
    _round_one(out, x, error, at, (at >= 0) & (at < count), scale, opened)
    _round_one(out, y, error, at + pairs, (at >= 0) & (at + pairs < count), scale, opened)


@triton.jit(do_not_specialize=["nonce"])
def _add_rounded(out, scale, key, nonce, opened, count, blocks, size: tl.constexpr):
    block = tl.program_id(0) * size + tl.arange(0, size)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha(
        key, nonce, block.to(tl.uint32)
    )
    valid, pairs = block < blocks, 4 * blocks
    _round_pair(out, w0, w1, w2, w3, tl.where(valid, block, -1), pairs, count, scale, opened)
    _round_pair(out, w4, w5, w6, w7, tl.where(valid, block + blocks, -1), pairs, count, scale, opened)
    _round_pair(out, w8, w9, w10, w11, tl.where(valid, block + 2 * blocks, -1), pairs, count, scale, opened)
    _round_pair(out, w12, w13, w14, w15, tl.where(valid, block + 3 * blocks, -1), pairs, count, scale, opened)


def fill(out: Tensor, key: Tensor, nonce: int) -> None:
    """Fill out, float32 or float64, shape (n,), with the numbers of `cards.normal_pairs`; see `cards.chacha_words`."""
    blocks = _blocks_of(out)
    with _current(out):
        _fill[-(-blocks // _BLOCKS),](out, key, nonce, len(out), blocks, size=_BLOCKS)


def add_rounded(y: Tensor, grid: float, ratio: float, key: Tensor, nonce: int) -> list[int]:
    """Add noise to y and round, in place; return the places of open numbers. See `cards.add_rounded`.

    Raises:
        RuntimeError: More numbers are open than a sound card leaves.
    """
    blocks = _blocks_of(y)
    scale = torch.empty(3, dtype=torch.float64, device=y.device)
    for place, number in zip(scale.split(1), (grid, 1 / grid, ratio), strict=True):
        place.fill_(number)  # without a copy from the host, which would wait
    opened = torch.zeros(1 + MOST_OPEN, dtype=torch.int64, device=y.device)
    with _current(y):
        _add_rounded[-(-blocks // _BLOCKS),](y, scale, key, nonce, opened, len(y), blocks, size=_BLOCKS)
    count = int(opened[0])
    if count > MOST_OPEN:
        y.fill_(torch.nan)  # it holds numbers without noise
        raise RuntimeError(
            f"the kernel of noise on {y.device} left {count} numbers unrounded, of which 10^-3 are expected; all are "
            "NaN now. Train on the processor, and report it"
        )
    return sorted(opened[1 : 1 + count].tolist())


def _blocks_of(numbers: Tensor) -> int:
    """Return how many blocks fill a vector; refuse one with gaps, which a kernel would not leave out."""
    if numbers.ndim != 1 or not numbers.is_contiguous():
        raise ValueError(
            f"numbers: have shape {tuple(numbers.shape)} and strides {numbers.stride()}; give a vector"
        )
    return -(-len(numbers) // NUMBERS)


def _current(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the card of a tensor the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
