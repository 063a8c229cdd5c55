"""Noise that a graphics card draws itself and that no one can replay: ChaCha20, normal numbers, exact rounding.

**Words.** ChaCha20 with 20 rounds (RFC 8439) turns a key of 256 bits, a counter of 32 and a nonce of 96 into 16 words
of 32 bits. The key comes from the operating system's entropy, for each stream, process and card; the nonce is the
number of the draw, the counter that of the block within it. So no block is drawn twice.

**Normal numbers.** A block makes four pairs, each of four words: 64 digits of U and 64 of V, with the pair's meaning in
`opusim.randomness.kernels`. A draw of n numbers has B = ceil(n / 8) blocks; pair p = g B + b is group g of block b,
and the numbers are first the cosine halves of all 4 B pairs, then their sine halves.

**Exact rounding**, r = h round((s + sigma G) / h), is that of `opusim.randomness.rounded`, in float64 for each number:
the error of `normal_pairs` has the bound of `rounded._standard`, and a number is certain if that reaches no edge of a
cell. Some 1 in 10^10 numbers are open. The host reads once for each draw whether there are any, and settles these from
more digits in interval arithmetic. So r is a function of the real number, whatever card and code computed it.

Each function runs in torch operations on any device, and as one kernel of Triton where that is installed
(`opusim.randomness.card_kernels`); words are equal bit for bit, and so is every r. A card is compared with the
processor before its first draw.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from opusim.plugins import FOREIGN_ERRORS, Deferred
from opusim.randomness.rounded import ERROR, grid_of, kept_digits, settled

card_kernels = Deferred("opusim.randomness.card_kernels")

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_LOW = 0xFFFFFFFF
_DOUBLE_ROUNDS = 10
ARC = math.pi / 4 * 2.0**-63
"""The arc of one unit of 62 digits of V in two's complement, shifted by two places."""
NUMBERS = 8
"""Normal numbers of a block."""
_PART = 2**23
"""Numbers of one draw; longer arrays take several, so that temporary arrays stay small."""
_DRAWS = 2**31
"""Draws under one key; a kernel takes the nonce as a number of 32 bits."""
_CHECKED = 1028
"""Blocks with which a card is checked once in each process."""
MOST_OPEN = 1024
"""Numbers of a draw for which a kernel can note that they are open; 10^-3 are expected."""


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four quarter rounds (RFC 8439, section 2.1), one for each row of four words."""
    for first, second in ((16, 12), (8, 7)):
        a = (a + b) & _LOW
        d = d ^ a
        d = ((d << first) | (d >> (32 - first))) & _LOW
        c = (c + d) & _LOW
        b = b ^ c
        b = ((b << second) | (b >> (32 - second))) & _LOW
    return a, b, c, d


def chacha_words(key: Tensor, nonce: int, counters: Tensor) -> Tensor:
    """Return blocks of ChaCha20 (RFC 8439, section 2.3), int64 in [0, 2^32), shape (16, blocks).

    Args:
        key: Its eight words, int64 in [0, 2^32), shape (8,).
        nonce: In [0, 2^96).
        counters: The blocks' counters, int64 in [0, 2^32), shape (blocks,), on the key's device.
    """
    start = torch.empty(4, 4, len(counters), dtype=torch.int64, device=key.device)
    for number, word in enumerate(_CONSTANTS):
        start[0, number].fill_(word)
    start[1:3] = key.view(2, 4, 1)
    start[3, 0] = counters
    for number in range(3):
        start[3, 1 + number].fill_(nonce >> (32 * number) & _LOW)
    a, b, c, d = start.unbind(0)
    for _ in range(_DOUBLE_ROUNDS):
        a, b, c, d = _quarter_rounds(a, b, c, d)  # columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _quarter_rounds(a, b, c, d)  # diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return ((torch.stack([a, b, c, d]) + start) & _LOW).view(16, -1)


def normal_pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of blocks in the order of a draw, and a bound on the error of each pair, float64.

    The bound is that of `rounded._standard`: it lets a logarithm err by 4 units in the last place and sine and cosine
    by 2^-51 (CUDA's documentation, table of double-precision functions: 1 and 2 units).

    Args:
        words: Blocks, shape (16, B).

    Returns:
        Shapes (2, 4 B), with the cosine halves first, and (4 B,).
    """
    high, low, angle, more = words.view(4, 4, -1).transpose(0, 1).reshape(4, -1).unbind(0)
    # 1. -ln U from the distance of U to the nearer of 0 and 1, so that it keeps its digits near both.
    top = high >= 2**31
    first, last = (torch.where(top, _LOW - word, word).double() for word in (high, low))
    near = (first * 2.0**32 + (last + 0.5)) * 2.0**-64
    exponential = torch.where(top, -torch.log1p(-near), -torch.log(near))
    smallest = torch.where(top, 0.5, (first * 2.0**32 + last) * (1 - 2.0**-52) * 2.0**-64)
    radius = (2 * exponential).sqrt()
    error = (2 * (ERROR * exponential + 2.0**-64 / smallest) / radius + 2 * ERROR * radius) * (1 + 2.0**-20)
    # 2. The arc of V; its first digit negates both numbers, its second exchanges them.
    t = (((angle << 34) | (more << 2)).double() + 2.0) * ARC
    sine, cosine = t.sin(), t.cos()
    exchanged = (angle & 2**30) != 0
    radius = torch.where(angle >= 2**31, -radius, radius)
    pair = torch.stack([torch.where(exchanged, sine, cosine), torch.where(exchanged, cosine, sine)])
    return pair * radius, error


def add_rounded(y: Tensor, grid: float, ratio: float, words: Tensor) -> Tensor:
    """Add noise to y and round, in place; return which numbers are open, bool, of y's shape. These stay.

    Args:
        y: s, then r; float32 or float64, shape (n,).
        grid: h, a power of two.
        ratio: sigma over grid, in [2^10, 2^11).
        words: Blocks, shape (16, ceil(n / 8)).
    """
    numbers, errors = normal_pairs(words)
    x, error = numbers.view(-1)[: len(y)], errors.repeat(2)[: len(y)]
    value = y.double()
    steps = value * (1 / grid)  # exact: a power of two
    whole = steps.round()
    noise = x * ratio
    part = (steps - whole) + noise
    nearest = part.round()
    bound = error * ratio * (1 + ERROR) + 2.0**-52 * (noise.abs() + part.abs())
    certain = (part - nearest).abs() + bound < 0.5  # NaN and infinity are never certain
    y.copy_(torch.where(certain, (whole + nearest) * grid + 0.0, value))
    return ~certain & value.isfinite()


@cache
def _agrees(device: torch.device, *, fused: bool) -> bool:
    """Return whether a card computes what the processor does: numbers within their bounds, and equal sums."""
    key, sums = torch.arange(8, device="cpu"), torch.linspace(-3.0, 3.0, NUMBERS * _CHECKED - 5, device="cpu")
    ratio = 1.7 / grid_of(1.7)
    for nonce in (0, _DRAWS - 1):
        words = chacha_words(key, nonce, torch.arange(_CHECKED, device="cpu"))
        numbers, errors = normal_pairs(words)
        expected, found = sums.clone(), sums.to(device, copy=True)
        opened = add_rounded(expected, grid_of(1.7), ratio, words)
        own = torch.empty(numbers.numel(), dtype=torch.float64, device=device)
        if fused:
            card_kernels.fill(own, key.to(device), nonce)
            card_kernels.add_rounded(found, grid_of(1.7), ratio, key.to(device), nonce)
        else:
            words = chacha_words(key.to(device), nonce, torch.arange(_CHECKED, device=device))
            own.copy_(normal_pairs(words)[0].view(-1))
            add_rounded(found, grid_of(1.7), ratio, words)
        found = found.cpu()
        equal = (found == expected) & (found.signbit() == expected.signbit()) | opened
        if not equal.all() or not ((own.view(2, -1).cpu() - numbers).abs() <= errors).all():
            return False
    return True


def _fault_of_kernels(device: torch.device) -> str:
    """Return what is wrong with the kernels of Triton on a card; empty if nothing is."""
    try:
        return "" if _agrees(device, fused=True) else "do not compute what they should"
    except FOREIGN_ERRORS as error:  # no compiler, or a card that is too old
        return f"do not run ({type(error).__name__}: {error})"


class CardCipher:
    """Noise of one stream on one card, in one process.

    Args:
        device: The card; any torch device with int64 and float64.
        fused: Whether kernels of Triton draw; None takes them on a card of CUDA if Triton is installed.

    Raises:
        RuntimeError: The card's float64 does not compute what the processor's does.
    """

    def __init__(self, device: torch.device, *, fused: bool | None = None) -> None:
        self._device = device
        self._fused = device.type == "cuda" and find_spec("triton") is not None if fused is None else fused
        if self._fused and (fault := _fault_of_kernels(device)):
            warnings.warn(
                f"the kernels of noise {fault} on {device}; torch's operations draw it, slower", stacklevel=2
            )
            self._fused = False
        if not self._fused and not _agrees(device, fused=False):
            raise RuntimeError(
                f"{device}: its float64 logarithm, sine or cosine is wrong; train on another device"
            )
        self._new_key()

    def _new_key(self) -> None:
        words = np.frombuffer(os.urandom(32), dtype=np.uint32).astype(np.int64)
        self._key, self._draws = torch.from_numpy(words).to(self._device), itertools.count()

    def _next(self) -> int:
        """Return the nonce of the next draw; a key that has no more is replaced.

        Raises:
            RuntimeError: A CUDA graph is being captured.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a captured CUDA graph would repeat its release noise; draw it outside of the graph"
            )
        nonce = next(self._draws)
        if nonce >= _DRAWS:
            self._new_key()
            nonce = next(self._draws)
        return nonce

    def __reduce__(self) -> tuple[type[CardCipher], tuple[torch.device]]:
        """Copy and pickle as a new cipher: the key never leaves the process."""
        return type(self), (self._device,)

    def _words(self, nonce: int, numbers: int) -> Tensor:
        return chacha_words(self._key, nonce, torch.arange(-(-numbers // NUMBERS), device=self._device))

    def normal(self, count: int) -> Tensor:
        """Return independent N(0, 1), float32, shape (count,): the nearest to the float64 numbers."""
        out = torch.empty(count, dtype=torch.float32, device=self._device)
        for part in out.split(_PART):
            nonce = self._next()
            if self._fused:
                card_kernels.fill(part, self._key, nonce)
            else:
                part.copy_(normal_pairs(self._words(nonce, len(part)))[0].view(-1)[: len(part)])
        return out

    def add_rounded(self, y: Tensor, std: float, more: Callable[[], int]) -> None:
        """Add std times fresh noise to y, in place, exactly rounded to multiples of `grid_of(std)`.

        Args:
            y: float32 or float64, shape (n,), contiguous.
            std: Standard deviation, a normal float32 number above 0.
            more: Returns 64 further random digits.
        """
        grid = grid_of(std)
        for part in y.split(_PART):
            nonce = self._next()
            if self._fused:
                places = card_kernels.add_rounded(part, grid, std / grid, self._key, nonce)
            else:
                opened = add_rounded(part, grid, std / grid, self._words(nonce, len(part)))
                places = opened.nonzero().view(-1).tolist() if bool(opened.any()) else []
            if places:
                self._settle(part, std, nonce, places, more)

    def _settle(self, y: Tensor, std: float, nonce: int, places: list[int], more: Callable[[], int]) -> None:
        """Round the open numbers of a draw on the host, from their words, drawn again, and more digits."""
        blocks, digits = -(-len(y) // NUMBERS), kept_digits(more)
        for place in places:
            half, pair = divmod(place, 4 * blocks)
            group, block = divmod(pair, blocks)
            words = chacha_words(self._key, nonce, torch.tensor([block], device=self._device))
            high, low, angle, last = words.view(4, 4)[group].tolist()
            u, v = (high << 32) | low, (angle << 32) | last
            y[place] = settled(float(y[place]), u, v, std, digits(pair), sine=bool(half))
