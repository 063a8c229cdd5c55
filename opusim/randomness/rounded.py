"""Release numbers with noise, exactly rounded to a public grid, so that no digit of a value escapes its noise.

**The release.** r = h round((s + b X) / h), with s the value that the machine holds, X exactly N(0, 1) or Laplace of
scale 1, and the grid h = 2^(floor(log2 b) - 10), a public power of two. r is a function of the real number s + b X, so
it has the privacy of real-valued noise on s, in any dimension and under any sampling: rounding costs nothing. Noise
that is drawn in float32 or float64 and then added does not have it: it lies on a grid of its own, and an attacker who
subtracts a guess of s sees whether the rest lies on that grid (Mironov 2012).

**How.** U and V are uniform in (0, 1) with infinitely many binary digits; 64 of each are drawn at first. Then

    X = sqrt(-2 ln U) cos(2 pi V)   (Gaussian: Box and Muller 1958),   X = sign(V - 1/2) (-ln U)   (Laplace).

1. Compute s + b X in float64, and a bound on its error from the digits not drawn yet and from the arithmetic.
2. If the bound reaches no edge halfway between two points of the grid, the nearest point is r, whatever the other
   digits are.
3. Else draw 64 more digits of U and V and repeat in interval arithmetic with all digits, until step 2 decides.

If |s| is below 1,000 b, some 1 in 10^10 numbers needs step 3: twice the bound of step 1, some 2^-45 b, over a grid
step. It takes longer, so time reveals at most that a number was near an edge.

Long float32 arrays, such as a model's gradients, take their numbers in pairs and do step 1 in float32 first
(`opusim.randomness.kernels`); `settle` is their step 3.

**The sign of zero.** Rounding a negative number to zero gives minus zero, which would tell the sign of s or of the sum.
Every release adds 0.0, which makes it plus zero and changes no other number.

**Sums.** Noise hides a sum only if neighbouring data sets change the *computed* sum by at most the stated bound.
`toward_zero` rounds contributions to multiples of a power of two, so their sums are exact in any order.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from opusim import checks
from opusim.plugins import Deferred

mpmath = Deferred("mpmath")

Law = Literal["gaussian", "laplace"]
GRID_BITS = 10
"""The grid is 2^-10 to 2^-11 of the noise's scale."""
_DIGITS = 64
"""Binary digits of U and V that are drawn at a time."""
_PAIRS = 512
"""Pairs of a chunk of `kernels`; that module is loaded only to draw numbers."""
_SCALES = (2.0**-900, 2.0**900)
_LARGEST = 2.0**51
"""Largest |s + b X| / h; float64 holds twice that with a spare digit for the half."""
ERROR = 2.0**-48
"""Bound on the relative error of float64's -ln U, and on the absolute error of its cos(2 pi V); see `_standard`."""


class RoundedNoise(ABC):
    """Noise that was drawn for some numbers and is not released yet."""

    @abstractmethod
    def added_to(self, values: torch.Tensor) -> torch.Tensor:
        """Return the exactly rounded sums of values and noise, float64, multiples of `grid_of(scale)`.

        Args:
            values: Finite numbers, as many as the noise was drawn for.

        Raises:
            ValueError: The number of values is wrong, or a value is not finite or above 2^50 grid steps.
        """


def grid_of(scale: float) -> float:
    """Return h = 2^(floor(log2 scale) - 10), of a scale (sigma, or b of Laplace noise) in [2^-900, 2^900]."""
    if not _SCALES[0] <= scale <= _SCALES[1]:
        raise ValueError(
            f"scale = {scale:g}: must lie in [{_SCALES[0]:g}, {_SCALES[1]:g}]; rescale the values"
        )
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - GRID_BITS)


def toward_zero(values: torch.Tensor, *, bound: float, count: int) -> torch.Tensor:
    """Round contributions toward zero to multiples of a power of two g, so that their sums are exact in float64.

    With g = 2^(e - 52), 2^e >= count bound, every sum of at most `count` of them is below 2^53 g: no order of the
    additions rounds. Rounding raises no magnitude and no norm.
    """
    checks.positive(bound=bound)
    checks.integer(minimum=1, count=count)
    step = math.ldexp(1.0, math.frexp(bound)[1] + count.bit_length() - 52)
    return torch.trunc(values / step).mul_(step)


class ExactNoise(RoundedNoise):
    """Noise of exact law, given by its random digits.

    Args:
        words: The first 64 digits of U and of V for each number, uint64, shape (n, 2).
        more: Returns 64 further digits for one of the n numbers; called for U and V in turn.
        scale: Standard deviation of Gaussian noise, or b of Laplace noise.
        law: Law of X.
    """

    def __init__(self, words: np.ndarray, more: Callable[[int], int], scale: float, law: Law) -> None:
        self._words, self._more, self._scale, self._law = words, more, float(scale), law
        self._grid = grid_of(self._scale)

    def added_to(self, values: torch.Tensor) -> torch.Tensor:
        """See RoundedNoise.added_to."""
        s = values.detach().cpu().double().numpy().ravel()
        if len(s) != len(self._words):
            raise ValueError(
                f"values: are {len(s)}, but noise was drawn for {len(self._words)}; give as many"
            )
        if not (np.abs(s) <= _LARGEST / 2 * self._grid).all():
            raise ValueError(
                f"values: must be finite and at most {_LARGEST / 2 * self._grid:g}, 2^50 grid steps; bound them first"
            )
        x, error = _standard(self._words[:, 0], self._words[:, 1], self._law)
        noise = self._scale * x
        total = s + noise
        # product and sum each round by 2^-53 of their result; 2^-52 covers both, and the rounding of this bound
        error = self._scale * error * (1 + ERROR) + 2.0**-52 * (np.abs(noise) + np.abs(total))
        steps = total / self._grid  # exact: a power of two
        nearest = np.rint(steps)
        certain = 0.5 - np.abs(steps - nearest) > error / self._grid  # false for an infinite error
        for number in np.flatnonzero(~certain):
            nearest[number] = self._exact(int(number), s[number])
        released = torch.from_numpy(nearest * self._grid + 0.0).reshape(values.shape)
        return released.to(values.device)

    def _exact(self, number: int, value: float) -> int:
        """Return the grid point nearest to one noisy number, in grid steps, from as many digits as needed."""
        u, v = (int(word) for word in self._words[number])
        digits, shift, scale = _DIGITS, Fraction(value), Fraction(self._scale)
        half, grid = Fraction(1, 2), Fraction(self._grid)
        while True:
            if u:  # with u = 0 no lower limit of U is known
                low, high = _interval(u, v, digits, self._law)
                ends = [math.floor((shift + scale * x) / grid + half) for x in (low, high)]
                if ends[0] == ends[1]:
                    return ends[0]
            u, v = ((word << _DIGITS) | self._more(number) for word in (u, v))
            digits += _DIGITS


def settle(
    out: np.ndarray,
    opened: np.ndarray,
    scale: float,
    more: Callable[[int], Iterator[int]],
    *,
    first_pair: int = 0,
) -> None:
    """Round in place, by interval arithmetic, the numbers that `kernels` left open: place, 64 digits of U and 64 of V.

    `more` returns further digits of a pair, 64 at a time, for U and V in turn; the same ones at each call.
    """
    for place, u, v in opened.tolist():
        chunk, number = divmod(place, 2 * _PAIRS)
        sine, pair = divmod(number, _PAIRS)
        digits = more(first_pair + chunk * _PAIRS + pair)
        out[place] = settled(float(out[place]), u, v, scale, digits, sine=bool(sine))


def settled(value: float, u: int, v: int, scale: float, digits: Iterator[int], *, sine: bool) -> float:
    """Return one number of a pair with its noise, rounded by interval arithmetic.

    Args:
        value: s.
        u: The first 64 digits of U.
        v: The first 64 digits of V.
        scale: Standard deviation of the noise.
        digits: Further ones, 64 at a time, for U and V in turn.
        sine: Whether the number is the second of its pair.
    """
    words = np.array([[u, turn_of_pair(v, sine=sine)]], dtype=np.uint64)
    return ExactNoise(words, lambda _: next(digits), scale, "gaussian")._exact(0, value) * grid_of(scale)


def kept_digits(fresh: Callable[[], int]) -> Callable[[int], Iterator[int]]:
    """Return a `more` for `settle`: it gives a pair 64 fresh digits, and the same ones at each later call."""
    drawn: dict[int, list[int]] = {}

    def more(pair: int) -> Iterator[int]:
        words = drawn.setdefault(pair, [])
        for k in itertools.count():
            if k == len(words):
                words.append(fresh())
            yield words[k]

    return more


def turn_of_pair(v: int, *, sine: bool) -> int:
    """Return 64 digits of V' with X = sqrt(-2 ln U) cos(2 pi V') for the first or second (`sine`) number of a pair.

    The arc t is a whole turn times n 2^-64, with n the last 62 digits in two's complement, and sin t = cos(t - pi / 2).
    So V' and V have the same digits after the 64th.
    """
    quarter = 1 << 62
    n = (v + quarter // 2) % quarter - quarter // 2
    exchanged = bool(v & quarter)
    return (n - quarter * (sine != exchanged) + 2 * quarter * (v >> 63)) % (1 << 64)


class NormalNoise(RoundedNoise):
    """Noise from a source of finished N(0, 1) numbers, such as a device: rounded, but with the law of its source.

    The source's own rounding may still reveal something of a value. Laplace noise takes four numbers each,
    (a^2 + b^2 - c^2 - d^2) / 2.
    """

    def __init__(self, numbers: torch.Tensor, scale: float, law: Law) -> None:
        drawn = numbers.double()
        if law == "laplace":
            a, b, c, d = drawn.square().unbind(1)
            drawn = (a + b - c - d) / 2
        self._noise, self._grid = drawn.mul_(scale), grid_of(float(scale))

    def added_to(self, values: torch.Tensor) -> torch.Tensor:
        """See RoundedNoise.added_to."""
        if values.numel() != len(self._noise):
            raise ValueError(
                f"values: are {values.numel()}, but noise was drawn for {len(self._noise)}; give as many"
            )
        noise = self._noise.reshape(values.shape).to(values.device)
        return torch.round((values.detach().double() + noise) / self._grid).mul_(self._grid).add_(0.0)


def _standard(u: np.ndarray, v: np.ndarray, law: Law) -> tuple[np.ndarray, np.ndarray]:
    """Return X and a bound on its error, float64, from the first 64 digits of U and V, uint64.

    Error of E = -ln U, with `near` the distance of U from the nearer of 0 and 1, so that E keeps its digits near both:
        - near is rounded twice, by 2^-53 each, which moves E by at most 2^-51 E; the logarithm errs by at most 2^-50 E
          (4 units in the last place; libraries promise 1); together below 2^-48 E;
        - the digits not drawn move U by at most 2^-65, and E by at most 2^-65 over the smallest possible U.
    Of R = sqrt(2 E): |R - R'| = 2 |E - E'| / (R + R') is at most 2 error / R, plus its rounding.
    Of cos(2 pi V): V is cut to 53 digits and its middle taken, off by at most 2^-54; 2 pi V rounds twice; the cosine
    errs by at most 2^-51: together 2 pi (2^-54 + 2^-52) + 2^-51 < 2^-48.
    """
    top = u >= np.uint64(1 << 63)
    near = (np.where(top, ~u, u).astype(np.float64) + 0.5) * 2.0**-_DIGITS
    with np.errstate(divide="ignore"):
        exponential = np.where(top, -np.log1p(-near), -np.log(near))
        smallest = np.where(top, 0.5, u.astype(np.float64) * (1 - 2.0**-52) * 2.0**-_DIGITS)
        error = ERROR * exponential + 2.0**-64 / smallest
    if law == "laplace":
        return np.where(v >= np.uint64(1 << 63), exponential, -exponential), error
    radius = np.sqrt(2 * exponential)
    cosine = np.cos(2 * np.pi * (((v >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53))
    # |R c - R' c'| <= |R - R'| + R |c - c'|, up to a product of both errors and the roundings of R and R c
    return radius * cosine, (2 * error / radius + 2 * ERROR * radius) * (1 + 2.0**-20)


def _interval(u: int, v: int, digits: int, law: Law) -> tuple[Fraction, Fraction]:
    """Return bounds of X for U in [u, u + 1] 2^-digits and V in [v, v + 1] 2^-digits, u > 0."""
    context = mpmath.ctx_iv.MPIntervalContext()
    context.prec = digits + _DIGITS
    unit = context.mpf(2) ** -digits

    def between(word: int) -> object:
        return context.mpf([word, word + 1]) * unit

    exponential = -context.log(between(u))
    if law == "laplace":
        found = exponential if v >> (digits - 1) else -exponential
    else:
        found = context.sqrt(2 * exponential) * context.cos(2 * context.pi * between(v))
    low, high = (Fraction(*mpmath.libmp.to_rational(end)) for end in found._mpi_)
    return low, high
