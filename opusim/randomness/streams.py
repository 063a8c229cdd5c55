"""Streams of standard normal noise: seeded and replayable, or from the operating system and never replayable.

Two modes, named in every run's configuration. `experiment`: a `SeededStream`, whose noise can be rebuilt from
the seed and is therefore not for release. `release`: a `SystemStream`, whose key is never stored. A stream
must not be shared by threads.

Philox4x32-10 generates all simulated randomness. A counter of four 32-bit words is encrypted under a 64-bit key into
four 32-bit words. Any counter can be asked for at any time, so results never depend on tiling, thread count or order.
Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, with its known-answer
vectors (Random123). Philox is a statistical generator, not a cryptographic one: noise that protects data comes from
`SystemStream`.
"""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from opusim import checks
from opusim.files import OwnProcess
from opusim.plugins import Deferred
from opusim.randomness.rounded import ExactNoise, Law, NormalNoise, RoundedNoise, grid_of, kept_digits, settle
from opusim.randomness.seeds import MAX_SEED as MAX_SEED
from opusim.randomness.seeds import derive_seed as derive_seed

if TYPE_CHECKING:
    from opusim.randomness.cards import CardCipher

kernels, cards = Deferred("opusim.randomness.kernels"), Deferred("opusim.randomness.cards")

CARDS = ("cuda",) if torch.version.hip is None else ()
"""Types of torch devices on which a `SystemStream` draws; AMD's, called the same, were never checked."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split_key(key: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a 64-bit key."""
    return key & _LOW, key >> 32


def philox_torch(
    c0: torch.Tensor, c1: torch.Tensor | int, c2: torch.Tensor | int, c3: torch.Tensor | int, key: int
) -> Words:
    """Encrypt counters (int64, below 2^32) with torch operations, on any torch device, bit for bit as the kernel does.

    A product of two words wraps to a negative int64, whose arithmetic shift is masked back: the bits are those of the
    unsigned product. Words 1 to 3 broadcast against word 0.
    """
    words = [  # fill numbers in on the card: a copy would make the host wait
        word if isinstance(word, torch.Tensor) else c0.new_full((), word) for word in (c0, c1, c2, c3)
    ]
    w0, w1, w2, w3 = torch.broadcast_tensors(*words)
    k0, k1 = split_key(key)
    for _ in range(_ROUNDS):
        product_0 = w0 * _MULTIPLIERS[0]
        product_1 = w2 * _MULTIPLIERS[1]
        w0, w1, w2, w3 = (
            ((product_1 >> 32) & _LOW) ^ w1 ^ k0,
            product_1 & _LOW,
            ((product_0 >> 32) & _LOW) ^ w3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return w0, w1, w2, w3


MODES = ("experiment", "release")
MAX_ELEMENTS = 2**33  # a draw's pairs are counted by one 32-bit word
_MAX_READINGS = 2**32
_LEAST_STD, _LARGEST_STD = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_CHUNKS_PER_THREAD = 512  # with fewer, a second thread meets a core on which torch still spins, and is slower
_CHUNKS_PER_CIPHER_CALL = 32  # 196 kB of words, small enough for the second-level cache

_CHUNKS_PER_ROUNDING = 8  # 64 kB of words


class NoiseStream(ABC):
    """A source of independent N(0, 1) numbers."""

    @abstractmethod
    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a fresh reading: independent N(0, 1), float32, of the given shape, on the given torch device.

        Raises:
            TypeError, ValueError: a length is not an integer of at least 0, or the draw exceeds 2^33 numbers.
        """

    def add_to(self, y: torch.Tensor, std: float) -> torch.Tensor:
        """Add std times a fresh reading of y's shape to y, in place; the numbers are those of `normal`.

        Args:
            y: float32 tensor that needs no gradient.
            std: factor of the reading: 0, or a normal float32 number above 0.

        Returns:
            y itself.

        Raises:
            ValueError: float32 would round std to 0, to infinity, or to few digits: the noise would not be as stated.
        """
        return y.add_(self.normal(y.shape, device=y.device).mul_(_checked_std(std)))

    def add_rounded(self, y: torch.Tensor, std: float) -> torch.Tensor:
        """Add std times a fresh reading to y, in place, exactly rounded to the multiples of `rounded.grid_of(std)`.

        Seeded and system streams do so on the CPU, with the numbers of `add_to` extended to all their digits: the
        result is a function of the real-valued sum. A system stream does so on a card of CUDA, too. On another torch
        device, and for a source of finished numbers such as a device or `CorrelatedStream`, it is `add_to`, which
        rounds the noise before adding it.

        Args:
            y: float32 tensor that needs no gradient; exact rounding also takes float64. Numbers that are not finite
                stay.
            std: Standard deviation: 0, which changes nothing, or a normal float32 number above 0.

        Returns:
            y itself. float32 holds the multiples below 2^24 grid steps, some 2^13 std; larger ones are rounded again.

        Raises:
            ValueError: std is out of range.
        """
        return self.add_to(y, std)

    def rounded(self, count: int, scale: float, law: Law = "gaussian") -> RoundedNoise:
        """Draw noise for numbers that are released as exactly rounded sums on a public grid.

        Seeded and system streams draw random digits on the CPU, and the noise has its law exactly. This method of the
        base class rounds finished numbers of `normal`; it cannot undo the rounding of a source such as a device.

        Args:
            count: Number of values.
            scale: Standard deviation, or b for Laplace noise, in [2^-900, 2^900].
            law: Law of the noise.

        Returns:
            The noise; its `added_to` adds it to the numbers and rounds (`opusim.randomness.rounded`).
        """
        return NormalNoise(self.normal((count, 4) if law == "laplace" else (count,)), scale, law)

    @abstractmethod
    def seek(self, step: int) -> None:
        """Position the stream at the start of a training step, in [0, 2^64)."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Tensors by name that a stream of dependent steps needs to continue; restore by copying into them."""
        return {}


class SeededStream(NoiseStream):
    """Replayable noise, keyed by (seed, purpose, step, reading within the step, element).

    On the CPU: Philox4x32-10 words through `opusim.randomness.kernels`; the counter is (block, reading, step), the
    key a hash of seed and purpose. The numbers depend neither on the thread count nor on the processor, and a
    shorter draw is the beginning of a longer one. After `seek(step)` the same readings give the same numbers,
    so a re-executed step repeats its noise, and so does a forked process; consecutive readings, other steps and other
    purposes are independent. On another torch device: a `torch.Generator` of that device, seeded from the same four;
    its numbers differ from the CPU's, but repeat in the same way.

    Args:
        seed: in [0, 2^64).
        purpose: what the noise is for; streams of different purposes are independent.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        checks.instance(str, purpose=purpose)
        self._seed = derive_seed(seed, "noise", purpose)
        self._key = split_key(self._seed)
        self._step, self._reading, self._step_words = 0, 0, (0, 0)

    def seek(self, step: int, reading: int = 0) -> None:
        """Position the stream at a reading, in [0, 2^32], of a training step, in [0, 2^64)."""
        if not (type(step) is type(reading) is int and 0 <= step < 2**64 and 0 <= reading <= _MAX_READINGS):
            checks.integer(step=step, minimum=0, maximum=2**64 - 1)
            checks.integer(reading=reading, minimum=0, maximum=_MAX_READINGS)
        self._step, self._reading = int(step), int(reading)
        self._step_words = self._step & _LOW, self._step >> 32

    @cached_property
    def _more_key(self) -> tuple[int, int]:
        """Key of the further digits that rounding needs."""
        return split_key(derive_seed(self._seed, "further digits"))

    @property
    def position(self) -> tuple[int, int]:
        """Training step and the number of its next reading; `seek` with both continues from here."""
        return self._step, self._reading

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the next reading of this step; see the base class."""
        _check_shape(shape)
        where = torch.device(device)
        if where.type == "cpu":
            out = torch.empty(tuple(shape), dtype=torch.float32)
            self._run(out.view(-1).numpy(), kernels.fill_from_philox)
            return out
        generator = torch.Generator(device=where)
        seed = derive_seed(self._seed, self._step, self._next_reading())
        generator.manual_seed(seed >> 1)  # 63 bits, which every torch generator takes
        return torch.randn(tuple(shape), generator=generator, device=where, dtype=torch.float32)

    def add_to(self, y: torch.Tensor, std: float) -> torch.Tensor:
        """Add std times the next reading to y, in place; on the CPU without a second array."""
        if y.device.type != "cpu" or y.dtype != torch.float32 or not y.is_contiguous():
            return super().add_to(y, std)
        _check_shape(y.shape)
        factor = np.float32(_checked_std(std))
        self._run(y.view(-1).numpy(), lambda out, *position: kernels.add_from_philox(out, factor, *position))
        return y

    def add_rounded(self, y: torch.Tensor, std: float) -> torch.Tensor:
        """See the base class; further digits come from a hash of the seed, the reading and the pair."""
        if y.device.type != "cpu" or not std:
            return super().add_rounded(y, std)
        grid, position = _checked_grid(y, std), (self._step, self._next_reading())
        keys = (position[1], *self._step_words, *self._key)
        more_key, chunk = self._more_key, kernels.CHUNK

        def more(pair: int) -> Iterator[int]:
            return (derive_seed(self._seed, "pair", *position, pair, k) for k in itertools.count())

        def work(start: int, stop: int) -> None:
            opened = np.empty((min(stop - start, _CHUNKS_PER_THREAD) * chunk, 3), np.uint64)
            for first in range(start, stop, _CHUNKS_PER_THREAD):
                out = flat[first * chunk : min(first + _CHUNKS_PER_THREAD, stop) * chunk]
                found = kernels.add_rounded_from_philox(
                    out, grid, std / grid, opened, first, *keys, *more_key
                )
                if found:
                    settle(out, opened[:found], std, more, first_pair=first * kernels.PAIRS)

        with _flat(y) as flat:
            kernels.run_split(work, -(-flat.size // chunk), grain=_CHUNKS_PER_THREAD)
        return y

    def _run(self, out: np.ndarray, kernel: Callable[..., None]) -> None:
        """Run a kernel with the numbers of the next reading over a flat array, in parallel if the array is long."""
        keys = (self._next_reading(), *self._step_words, *self._key)
        chunk = kernels.CHUNK

        def work(start: int, stop: int) -> None:
            kernel(out[start * chunk : stop * chunk], start, *keys)

        kernels.run_split(work, -(-out.size // chunk), grain=_CHUNKS_PER_THREAD)

    def rounded(self, count: int, scale: float, law: Law = "gaussian") -> RoundedNoise:
        """See the base class; number i takes block i of the next reading, and further digits from a hash of both."""
        _check_shape((count,))
        position, words = (self._step, self._next_reading()), np.empty((count, 2), dtype=np.uint64)
        kernels.digits_from_philox(words, position[1], *self._step_words, *self._key)
        calls = itertools.count()

        def more(number: int) -> int:
            return derive_seed(self._seed, "digits", *position, number, next(calls))

        return ExactNoise(words, more, scale, law)

    def _next_reading(self) -> int:
        """Return the number of this reading within the step."""
        if self._reading >= _MAX_READINGS:
            raise ValueError("a step holds at most 2^32 readings; call seek(step) at the start of every step")
        self._reading += 1
        return self._reading - 1


class SystemStream(NoiseStream):
    """Noise that cannot be replayed: AES-256 in counter mode under a key from the operating system's entropy.

    The key is drawn from `os.urandom`, lives in memory only, and is drawn again in a forked child, so two
    processes never share noise. The words go through the same Box-Muller kernel as the seeded stream's. A card of CUDA
    draws with a cipher and a key of its own (`opusim.randomness.cards`); other torch devices get their numbers copied
    from the CPU. In their last bits, the float32 numbers of `normal` and `add_to` are not the real-valued Gaussian of a
    privacy theorem (Mironov 2012); those of `rounded`, and of `add_rounded` on CPU and CUDA, are, rounded once.
    """

    def __init__(self) -> None:
        self._owner = OwnProcess()
        self._cipher: CipherContext | None = None
        self._cards: dict[torch.device, CardCipher] = {}

    def seek(self, step: int) -> None:
        """Check the step only: a re-executed step draws fresh noise."""
        checks.integer(step=step, minimum=0, maximum=2**64 - 1)

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return fresh noise; see the base class."""
        _check_shape(shape)
        if (where := torch.device(device)).type in CARDS:
            return self._card(where).normal(math.prod(shape)).view(tuple(shape))
        out = torch.empty(tuple(shape), dtype=torch.float32)
        flat = out.view(-1).numpy()
        block = _CHUNKS_PER_CIPHER_CALL * kernels.CHUNK
        for start in range(0, flat.size, block):
            part = flat[start : start + block]
            chunks = -(-part.size // kernels.CHUNK)  # three random words for each pair of numbers
            cipher = self._current_cipher().update(bytes(chunks * 3 * kernels.PAIRS * 4))
            words = np.frombuffer(cipher, dtype=np.uint32).reshape(chunks, 3, kernels.PAIRS)
            kernels.fill_from_words(part, words)
        return out.to(device)

    def add_rounded(self, y: torch.Tensor, std: float) -> torch.Tensor:
        """See the base class; 128 bits make a pair, and numbers that they leave open draw more."""
        if y.device.type in CARDS and std:
            _checked_grid(y, std)
            dense = y.detach().contiguous()
            self._card(y.device).add_rounded(dense.view(-1), std, self._more)
            return y if y.is_contiguous() else y.copy_(dense)
        if y.device.type != "cpu" or not std:
            return super().add_rounded(y, std)
        grid, chunk = _checked_grid(y, std), kernels.CHUNK
        zeros = bytes(_CHUNKS_PER_ROUNDING * 4 * kernels.PAIRS * 4)
        drawn = np.empty(len(zeros) + 16, np.uint8)  # the library may want a block more
        opened = np.empty((_CHUNKS_PER_ROUNDING * chunk, 3), np.uint64)
        words = drawn[: len(zeros)].view(np.uint32).reshape(_CHUNKS_PER_ROUNDING, 4, kernels.PAIRS)
        with _flat(y) as flat:
            for start in range(0, flat.size, len(opened)):
                out = flat[start : start + len(opened)]
                self._current_cipher().update_into(zeros, drawn.data)
                found = kernels.add_rounded_from_words(out, grid, std / grid, opened, words)
                if found:
                    settle(out, opened[:found], std, kept_digits(self._more))
        return y

    def rounded(self, count: int, scale: float, law: Law = "gaussian") -> RoundedNoise:
        """See the base class."""
        _check_shape((count,))
        words = np.frombuffer(self._current_cipher().update(bytes(16 * count)), dtype=np.uint64)
        return ExactNoise(words.reshape(count, 2), lambda _: self._more(), scale, law)

    def _more(self) -> int:
        """Return 64 random bits."""
        return int.from_bytes(self._current_cipher().update(bytes(8)), "little")

    def _current_cipher(self) -> CipherContext:
        """Return the cipher of the running process; a fork gets another key."""
        if self._cipher is None or not self._owner.is_this:
            self._owner, self._cards = OwnProcess(), {}
            self._cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
        return self._cipher

    def _card(self, device: torch.device) -> CardCipher:
        """Return the cipher of the running process on a card."""
        self._current_cipher()
        place = torch.empty(0, device=device).device  # resolves "cuda" to "cuda:0"
        if place not in self._cards:
            self._cards[place] = cards.CardCipher(place)
        return self._cards[place]

    def __reduce__(self) -> tuple[type[SystemStream], tuple[()]]:
        """Pickle as a new stream: the key never leaves the process."""
        return type(self), ()


class CorrelatedStream(NoiseStream):
    """Noise that is correlated over steps: X_t = (Z_t - sum over k from 1 to b - 1 of c_k X_(t-k)) / c_0.

    With Z_t the numbers of another stream, X = inverse(C) Z for the banded lower triangular Toeplitz matrix C of the
    coefficients. Numbers before the first step are 0. A step that does not follow the previous one, such as the first
    of a process, begins C anew: its numbers depend on no earlier ones. Arithmetic is float32 on the returned X, so
    rounding does not accumulate if coefficients do not increase.

    Args:
        source: Supplies Z.
        coefficients: c_0 above 0, c_1, ...; multiples of 2^-20 are exact in float32.
        size: Numbers that each step draws, over all its readings.
        stored: Whether `state` may hold the numbers of earlier steps. Anyone who has them can subtract noise, so a
            release run does not store them.
        device: The torch device that holds these numbers.

    Raises:
        ValueError: A step drew more or fewer numbers than `size`.
    """

    def __init__(
        self,
        source: NoiseStream,
        coefficients: Sequence[float],
        *,
        size: int,
        stored: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self._source, self._coefficients, self._stored = source, tuple(coefficients), stored
        self._rows = torch.zeros((len(self._coefficients), size), device=device)  # row t mod b holds X_t
        self._follows = torch.tensor(-1)  # the step that continues the rows
        self._process = OwnProcess()
        self._step, self._drawn = -1, 0

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the next numbers of this step; see the base class. Their variance is not 1."""
        fresh = self._source.normal(shape, device=device)
        part = slice(self._drawn, self._drawn + fresh.numel())
        if part.stop > self._rows.shape[1]:
            raise ValueError(
                f"size = {self._rows.shape[1]}: step {self._step} draws more numbers; state them all"
            )
        flat, bands = fresh.view(-1), len(self._coefficients)
        for back in range(1, bands):
            row = self._rows[(self._step - back) % bands, part]
            flat.add_(row.to(flat.device), alpha=-self._coefficients[back])
        self._rows[self._step % bands, part] = flat.div_(self._coefficients[0]).to(self._rows.device)
        self._drawn = part.stop
        if self._drawn == self._rows.shape[1]:
            self._follows.fill_(self._step + 1)
        return fresh

    def seek(self, step: int) -> None:
        """Position the stream at the start of a step; the step after the last one, if that is whole, continues it."""
        if 0 < self._drawn < self._rows.shape[1]:
            raise ValueError(
                f"size = {self._rows.shape[1]}: step {self._step} drew {self._drawn} numbers; state as many"
            )
        self._process.require("correlated noise")
        self._source.seek(step)
        if int(self._follows) != step:
            self._rows.zero_()
        self._step, self._drawn = step, 0

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The numbers of the last steps and the number of the next step; empty unless they may be stored."""
        return {"noise": self._rows, "noise_leads_to": self._follows} if self._stored else {}


def noise_stream(mode: str, seed: int | None, purpose: str) -> NoiseStream:
    """Return the stream of a mode.

    Args:
        mode: ``experiment`` (seeded, replayable) or ``release`` (from the operating system).
        seed: in [0, 2^64) for ``experiment``; not used, and not kept, for ``release``.
        purpose: what the noise is for.

    Raises:
        ValueError: an unknown mode, or no seed in ``experiment``.
    """
    if mode not in MODES:
        checks.choice(MODES, mode=mode)
    if mode == "release":
        return SystemStream()
    if seed is None:
        raise ValueError(
            "seed = None: the mode 'experiment' needs a seed; give an integer, or use mode='release'"
        )
    return SeededStream(seed, purpose)


def rounds_exactly(device: torch.device | str, mode: str) -> bool:
    """Return whether `add_rounded` of a mode's stream rounds exactly on a torch device."""
    where = torch.device(device).type
    return where == "cpu" or (where in CARDS and mode == "release")


class SystemUniforms:
    """Uniform numbers in [0, 1) from the operating system's cryptographic generator; never replayable."""

    def random(self, size: int | tuple[int, ...]) -> np.ndarray:
        """Return multiples of 2^-53, float64, of the given shape."""
        shape = size if isinstance(size, tuple) else (size,)
        words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64).reshape(shape)
        return (words >> np.uint64(11)) * 2.0**-53


def _checked_std(std: float) -> float:
    """Return the standard deviation; refuse one that is neither 0 nor a normal float32 number."""
    if std and not _LEAST_STD <= std <= _LARGEST_STD:
        raise ValueError(
            f"std = {std:g}: must be 0 or lie in [{_LEAST_STD:g}, {_LARGEST_STD:g}], the normal float32 numbers; "
            "rescale what the noise is added to"
        )
    return std


def _checked_grid(y: torch.Tensor, std: float) -> float:
    """Return the grid for noise that is added to y, float32 or float64."""
    if y.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"y has dtype {y.dtype}: must be torch.float32 or torch.float64; convert it")
    if y.numel() > MAX_ELEMENTS:
        _check_shape(y.shape)
    return grid_of(_checked_std(std))


@contextmanager
def _flat(y: torch.Tensor) -> Iterator[np.ndarray]:
    """Give the numbers of a tensor as one axis, and copy them back if that is a copy."""
    row = y.detach().reshape(-1)
    yield row.numpy()
    if row.data_ptr() != y.data_ptr():
        y.copy_(row.view(y.shape))


def _check_shape(shape: Sequence[int]) -> None:
    """Refuse a shape with lengths other than integers of at least 0, or with more than 2^33 numbers."""
    for length in shape:
        if not (type(length) is int and length >= 0):
            checks.integer(length=length, minimum=0)
    if math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"shape = {tuple(shape)}: a draw holds at most 2^33 numbers; draw it in parts")
