"""Exactly rounded noise on long arrays: the two tiers decide as exact arithmetic does, and no digit tells of a sum."""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import mpmath
import numba
import numpy as np
import pytest
import torch
from scipy import stats

from opusim.randomness import kernels, streams
from opusim.randomness.kernels import (
    CHUNK,
    PAIRS,
    RADIUS_ERROR,
    TRIG_ERROR,
    add_rounded_from_words,
    nearest_by_64_digits,
)
from opusim.randomness.rounded import ExactNoise, _standard, grid_of, kept_digits, settle, turn_of_pair
from opusim.randomness.seeds import derive_seed
from opusim.randomness.streams import CorrelatedStream, NoiseStream, SeededStream, SystemStream, noise_stream
from tests.opusim.common import refuses, with_threads
from tests.oracles import naive_philox
from tests.support.subtraction import explained

MODES = ("experiment", "release")
STD = 1.7
H = grid_of(STD)
LEVEL = 5.7e-7
"""Probability beyond five standard errors, two-sided."""


def halves(_: int) -> Iterator[int]:
    """Further digits of every pair."""
    return itertools.repeat(2**63)


def random_words(seed: int, chunks: int) -> np.ndarray:
    """Words of whole chunks, the first pairs of which are extreme ones in every combination."""
    words = np.random.default_rng(seed).integers(0, 2**32, (chunks, 4, PAIRS), dtype=np.uint32)
    ends = [0, 1, 2**16, 2**17 - 1, 2**17, 2**31 - 1, 2**31, 2**32 - 2**17 - 1, 2**32 - 2**17, 2**32 - 1]
    turns = [0, 2**29 - 1, 2**29, 2**30 - 1, 2**30, 2**31, 2**31 + 2**29, 2**32 - 1]
    pairs = np.array([(u, v) for u in ends for v in turns], dtype=np.uint32)
    words[0, 0, : len(pairs)], words[0, 2, : len(pairs)] = pairs.T
    words[0, 1, :40] = 0
    return words


def digits_of(words: np.ndarray) -> np.ndarray:
    """64 digits of U and of V' (see turn_of_pair) for each number in the order of the array, shape (n, 2)."""
    high, low, angle, rest = (words[:, k].astype(np.uint64) for k in range(4))
    u, v = (high << np.uint64(32)) | low, (angle << np.uint64(32)) | rest
    rows = []
    for chunk in range(len(words)):
        for sine in (False, True):
            turns = [turn_of_pair(int(one), sine=sine) for one in v[chunk]]
            rows.append(np.stack([u[chunk], np.array(turns, dtype=np.uint64)], axis=1))
    return np.concatenate(rows)


def exact(digits: np.ndarray, values: np.ndarray, std: float) -> np.ndarray:
    """r by ExactNoise, whose numbers are sqrt(-2 ln U) cos(2 pi V')."""
    noise = ExactNoise(digits, lambda _: 2**63, std, "gaussian")
    return noise.added_to(torch.from_numpy(values)).numpy()


def near_edges(digits: np.ndarray, seed: int, std: float) -> np.ndarray:
    """Float32 values, of which every other one is within 10^-7 of a cell from an edge when its noise is added."""
    rng, grid, n = np.random.default_rng(seed), grid_of(std), len(digits)
    with np.errstate(invalid="ignore", over="ignore"):
        noise = std * np.nan_to_num(_standard(digits[:, 0], digits[:, 1], "gaussian")[0], posinf=0.0)
    offsets = rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(-7, -0.5, n) * grid
    near = (np.floor(noise / grid) + 0.5) * grid - noise + offsets  # below a cell: float32 holds 2^-25 of it
    return np.where(np.arange(n) % 2, near, rng.normal(0, 100 * std, n)).astype(np.float32)


def rounded_from(words: np.ndarray, values: np.ndarray, std: float) -> tuple[np.ndarray, int]:
    """r by the kernel, and how many numbers it left open."""
    out, grid = values.copy(), grid_of(std)
    opened = np.empty((out.size, 3), np.uint64)
    found = add_rounded_from_words(out, grid, std / grid, opened, words)
    settle(out, opened[:found], std, halves)
    return out, found


@pytest.mark.compiled
@pytest.mark.parametrize("std", [1.7, 1.0, 1.999999, 3e-7])
def test_two_tiers_round_as_exact_arithmetic_does(std: float, seed: int) -> None:
    """100,000 numbers near edges; float32 numbers alone, the planted fault, round thousands of them otherwise."""
    words = random_words(seed, 100)
    digits = digits_of(words)
    values = near_edges(digits, seed, std)
    expected = exact(digits, values, std)
    found, opened = rounded_from(words, values, std)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert 16 <= opened < 40  # U = 0 at eight turns, both of the pair; next to 0 and 1 few digits are known
    short = values[: 3 * CHUNK + 700]
    np.testing.assert_array_equal(rounded_from(words, short, std)[0], found[: short.size])
    numbers = np.empty(values.size, np.float32)
    kernels.fill_from_words(numbers, np.ascontiguousarray(words[:, :3]))
    alone = np.rint((values + std * numbers.astype(np.float64)) / grid_of(std)) * grid_of(std)
    assert (alone != expected).sum() > 1000


def test_numbers_that_64_digits_leave_open_are_settled_by_interval_arithmetic(seed: int) -> None:
    """Values put the middle of what the digits leave open on an edge, as near as float64 can."""
    words = np.random.default_rng(seed).integers(0, 2**64, (6, 2), dtype=np.uint64).tolist()
    for number, (u, v) in enumerate(words):
        sine = bool(number % 2)
        place, turn = number * CHUNK + PAIRS * sine, turn_of_pair(v, sine=sine)
        with mpmath.workdps(60):
            first, second = ((mpmath.mpf(word) + 0.5) / 2**64 for word in (u, turn))
            noise = STD * mpmath.sqrt(-2 * mpmath.log(first)) * mpmath.cos(2 * mpmath.pi * second)
            value = float(7.5 * mpmath.mpf(H) - noise)
        assert math.isnan(nearest_by_64_digits(value, H, STD / H, np.uint64(u), np.uint64(v), sine))
        near = nearest_by_64_digits(value + 1e-9 * H, H, STD / H, np.uint64(u), np.uint64(v), sine)
        assert near == 8 * H
        out = np.zeros(place + 1)
        out[place] = value
        settle(out, np.array([[place, u, v]], dtype=np.uint64), STD, halves)
        (expected,) = exact(np.array([[u, turn]], dtype=np.uint64), np.array([value]), STD)
        assert out[place] == expected
        assert expected in (7 * H, 8 * H)


def test_both_numbers_of_a_pair_get_the_same_further_digits() -> None:
    """Else they would not be independent normal numbers."""
    asked: list[int] = []
    out = np.zeros(2 * CHUNK)
    rows = np.array([(CHUNK + 3, 0, 5), (CHUNK + PAIRS + 3, 0, 5), (4, 0, 5)], dtype=np.uint64)

    def more(pair: int) -> Iterator[int]:
        asked.append(pair)
        return iter((2**63, 2**62))

    settle(out, rows, 1.0, more, first_pair=1000)
    assert asked == [1000 + PAIRS + 3, 1000 + PAIRS + 3, 1004]
    assert out[CHUNK + 3] == out[4] != 0
    fresh = iter(range(10))
    kept = kept_digits(lambda: next(fresh))
    first, second = kept(7), kept(7)
    found = [next(each) for each in (first, first, second, second, second, kept(8))]
    assert found == [0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("sine", [False, True])
def test_the_turn_of_a_pair_is_its_point(sine: bool, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**64, 50, np.uint64).tolist()
    for word in [0, 2**61, 2**62, 2**63, 2**64 - 1, *words]:
        pair = naive_philox.normal_pair(2**31, 0, word >> 32)
        radius = math.hypot(*pair)
        turn = turn_of_pair(word, sine=sine) / 2**64
        assert radius * math.cos(2 * math.pi * turn) == pytest.approx(pair[sine], abs=1e-8)


def seeded_digits(count: int, seed: int, purpose: str, step: int, reading: int) -> np.ndarray:
    """The digits of a seeded reading by the naive twin of the kernel, as `digits_of` orders them."""
    own = derive_seed(seed, "noise", purpose)
    further = derive_seed(own, "further digits")
    words = np.zeros((-(-count // CHUNK), 4, PAIRS), np.uint64)
    for chunk in range(len(words)):
        rest = reading, step & 0xFFFFFFFF, step >> 32
        blocks = [naive_philox.philox4x32((256 * chunk + i, *rest), own) for i in range(256)]
        for pair, (first, second) in enumerate([b[:2] for b in blocks] + [b[2:] for b in blocks]):
            counter = (PAIRS * chunk + pair, reading, step & 0xFFFFFFFF, step >> 32)
            more, last, _, _ = naive_philox.philox4x32(counter, further)
            u = (first << 32) | (second & 0xFF) << 24 | more & 0xFFFFFF
            v = (second >> 8) << 40 | (more >> 24) << 32 | last
            words[chunk, :, pair] = u >> 32, u & 0xFFFFFFFF, v >> 32, v & 0xFFFFFFFF
    return digits_of(words)[:count]


def test_seeded_numbers_are_exact_functions_of_their_digits(seed: int) -> None:
    count = CHUNK + 700
    digits = seeded_digits(count, seed, "a", 2**33 + 5, 1)
    values = near_edges(digits, seed, STD)
    stream = SeededStream(seed, "a")
    stream.seek(2**33 + 5, 1)
    found = stream.add_rounded(torch.from_numpy(values.copy()), STD).numpy()
    np.testing.assert_array_equal(found, exact(digits, values.astype(np.float64), STD))


def test_release_numbers_follow_from_the_ciphers_words(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.os, "urandom", random.Random(seed).randbytes)
    count, chunks = 9 * CHUNK + 5, 16  # two calls of the cipher
    cipher = SystemStream()._current_cipher()
    words = np.frombuffer(cipher.update(bytes(chunks * 4 * PAIRS * 4)), np.uint32).reshape(chunks, 4, PAIRS)
    digits = digits_of(words)[:count]
    values = near_edges(digits, seed, STD)
    monkeypatch.setattr(streams.os, "urandom", random.Random(seed).randbytes)
    found = SystemStream().add_rounded(torch.from_numpy(values.copy()), STD).numpy()
    np.testing.assert_array_equal(found, exact(digits, values.astype(np.float64), STD))


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
def test_the_bound_of_the_first_tier_holds_and_is_not_loose(mode: str, seed: int) -> None:
    """A tenth of the bound, the planted fault, does not hold."""
    words = np.random.default_rng(seed).integers(0, 2**32, (200, 3, PAIRS), dtype=np.uint32)
    low = words.copy()
    if mode == "experiment":  # V has 24 digits, and the others are cut to the middle
        low[:, 2] = (low[:, 2] & 0xFFFFFF00) | 128
    float32 = np.empty(200 * CHUNK, np.float32)
    kernels.fill_from_words(float32, low)
    x, y = float32.reshape(200, 2, PAIRS).astype(np.float64).transpose(1, 0, 2)
    u = (words[:, 0] + (words[:, 1] + 0.5) * 2.0**-32) * 2.0**-32
    point = (words[:, 2] & 0x3FFFFFFF).astype(np.int64)
    theta = np.where(point >= 2**29, point - 2**30, point) * (math.pi / 4 * 2.0**-29)
    swap, sign = (words[:, 2] & 2**30) != 0, np.where(words[:, 2] >= 2**31, -1, 1)
    radius = sign * np.sqrt(-2 * np.log(u))
    exact_x = radius * np.where(swap, np.sin(theta), np.cos(theta))
    error = np.abs(x - exact_x)
    bound = TRIG_ERROR[mode == "experiment"] * (np.abs(x) + np.abs(y)) + RADIUS_ERROR * np.abs(x)
    ordinary = (words[:, 0] >= 2**17) & (words[:, 0] < 2**32 - 2**17)
    assert (error < bound)[ordinary].all()
    assert not (error < 0.1 * bound)[ordinary].all()


@numba.njit(nogil=True, error_model="numpy")
def _worst_radius(first: int, last: int, top: bool) -> float:
    worst = 0.0
    for bits in range(first, last + 1):
        v = np.int32(bits).view(np.float32)
        u = np.float32(np.float32(1.0) - v) if top else v
        shifted = np.int32(np.float32(u).view(np.int32) - kernels._SQRT_HALF_BITS)
        exponent = np.int32(shifted >> kernels._MANTISSA_BITS)
        mantissa = np.int32(np.int32(shifted & kernels._MANTISSA) + kernels._SQRT_HALF_BITS).view(np.float32)
        f = np.float32(-v) if (top and exponent == 0) else np.float32(mantissa - np.float32(1.0))
        log = np.float32(exponent) * kernels._LN2 + (f + kernels._log1p(f))
        wide = np.float64(v)
        true = math.sqrt(-2 * (math.log1p(-wide) if top else math.log(wide)))
        worst = max(worst, abs(np.float64(np.float32(np.sqrt(np.float32(-2.0) * log))) / true - 1))
    return worst


@numba.njit(nogil=True, error_model="numpy")
def _worst_arcs(first: int, last: int, radius: float) -> float:
    """Of pairs with one radius, by angle words; that radius cancels up to its product's rounding."""
    worst = 0.0
    for word in range(first, last):
        x, y = kernels._normal_pair(np.uint32(2**31), np.uint32(0), np.uint32(word))
        theta = np.float64(word) * (math.pi / 4 * 2.0**-29)
        worst = max(worst, abs(x / radius - math.cos(theta)), abs(y / radius - math.sin(theta)))
    return worst


@pytest.mark.slow
@pytest.mark.compiled
def test_every_float32_radius_and_every_arc_is_within_what_the_proof_states() -> None:
    """All float32 numbers from 2^-15 to 1/2, as U and as 1 - U, and all 2^29 arcs of one sign; the others mirror them.

    The product with the radius rounds by 2^-24 more.
    """
    first, last = (int(np.float32(end).view(np.int32)) for end in (2.0**-15, 0.5))
    for top in (False, True):
        worst = _worst_radius(first, last, top)
        assert 0.5e-7 < worst < 1.49e-7
    radius = float(kernels._normal_pair(np.uint32(2**31), np.uint32(0), np.uint32(0))[0])
    worst = _worst_arcs(0, 2**29, radius)
    assert 0.5e-7 < worst < 1.09e-7 + 2.0**-24
    edge = kernels._normal_pair(np.uint32(2**31), np.uint32(0), np.uint32(2**29))  # -45 degrees
    assert max(abs(one / radius - math.copysign(0.5**0.5, one)) for one in edge) < 1.09e-7 + 2.0**-24


def statistics_hold(r: np.ndarray, values: np.ndarray, std: float) -> bool:
    """Moments, tails and neighbours of (r - s) / std at five standard errors, and Kolmogorov-Smirnov."""
    grid = grid_of(std)
    x = (r - values + grid * (np.random.default_rng(0).random(len(r)) - 0.5)) / std
    n, tail = len(x), 2 * stats.norm.sf(3)
    lags = [np.mean(x[:-lag] * x[lag:]) * math.sqrt(n - lag) for lag in (1, PAIRS, CHUNK)]
    moments = [(x.mean(), 1.0), (np.mean(x**2) - 1, 2.0), (np.mean(x**3), 15.0), (np.mean(x**4) - 3, 96.0)]
    return bool(
        all(abs(miss) < 5 * math.sqrt(variance / n) for miss, variance in moments)
        and abs(np.mean(np.abs(x) > 3) - tail) < 5 * math.sqrt(tail / n)
        and all(abs(lag) < 5 for lag in lags)
        and stats.kstest(x, "norm").pvalue > LEVEL
    )


@pytest.mark.compiled
@pytest.mark.parametrize("mode", MODES)
def test_long_arrays_have_the_law_on_the_grid(mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: 1 % too little noise, cut tails, one number for both of a pair."""
    monkeypatch.setattr(streams.os, "urandom", random.Random(seed).randbytes)
    n = 200_000
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 100 - 50
    r = noise_stream(mode, seed, "law").add_rounded(values.clone(), STD).double().numpy()
    s = values.double().numpy()
    assert (r / H % 1 == 0).all()
    odd = (r / H % 2 != 0).sum()
    assert abs(odd - n / 2) < 5 * math.sqrt(n / 4)
    assert statistics_hold(r, s, STD)
    assert not statistics_hold(s + 0.985 * (r - s), s, STD)
    assert not statistics_hold(s + np.clip(r - s, -3 * STD, 3 * STD), s, STD)
    assert not statistics_hold(s + np.repeat((r - s)[::2], 2), s, STD)


@pytest.mark.parametrize("shape", [(0,), (3, 5), (40, 200)])
def test_it_is_what_add_to_adds_up_to_half_a_cell(shape: tuple[int, ...]) -> None:
    """So experiments change by no more than that."""
    y = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) / 7
    first, second = (SeededStream(1, "a") for _ in range(2))
    for _ in range(2):  # two readings
        before, after = first.add_to(y.clone(), STD).double(), second.add_rounded(y.clone(), STD).double()
        assert ((before - after).abs() <= H / 2 + 1e-5 * STD + y.abs() * 2.0**-23).all()
    assert first.position == second.position == (0, 2)
    wide = torch.stack([y, y], dim=-1)
    found = SeededStream(1, "a").add_rounded(wide[..., 0], STD)  # not contiguous
    assert torch.equal(found, SeededStream(1, "a").add_rounded(y.clone(), STD))
    assert torch.equal(wide[..., 0], found)
    assert torch.equal(wide[..., 1], y)
    assert torch.equal(first.add_rounded(y.clone(), 0.0), y)
    assert first.position == (0, 3)


def test_experiments_repeat_and_releases_do_not() -> None:
    def drawn(stream: NoiseStream, count: int = 3000) -> torch.Tensor:
        stream.seek(6)
        return stream.add_rounded(torch.zeros(count), STD)

    stream = SeededStream(1, "a")
    whole = drawn(stream)
    assert torch.equal(drawn(stream), whole)
    assert torch.equal(drawn(SeededStream(1, "a"), 1500), whole[:1500])  # the beginning of a longer draw
    assert not torch.equal(stream.add_rounded(torch.zeros(3000), STD), whole)
    system = SystemStream()
    assert not torch.equal(drawn(system), drawn(system))
    assert set(vars(system)) == {"_owner", "_cipher", "_cards"}


@pytest.mark.compiled
def test_threads_do_not_change_numbers(seed: int) -> None:
    values = torch.randn(1_100_000)
    assert torch.equal(*with_threads(lambda: SeededStream(seed, "a").add_rounded(values.clone(), STD), 1, 2))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less itself, where not compiled
@pytest.mark.parametrize("mode", MODES)
def test_values_of_every_size_keep_their_noise(mode: str) -> None:
    """Grid steps beyond 2^24 round once more to float32; what is not finite stays."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 1e6, 2.0**40, -1e30] * 20)
    found = noise_stream(mode, 1, "a").add_rounded(values.clone(), STD)
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.isinf(), values.isinf())
    large = values.eq(1e6)
    assert (found[large].double() / H % 1 == 0).all()
    assert 0.5 * STD < float((found[large] - 1e6).std()) < 1.6 * STD
    assert torch.equal(found[values.abs() > 1e9], values[values.abs() > 1e9])


def test_sources_of_finished_numbers_add_as_before_by_the_same_constants() -> None:
    """A device's numbers and correlated ones carry a rounding of their own, which nothing undoes."""
    coefficients = (0.8, 0.6)
    options = {"size": 100, "stored": False}
    rounded, added = (CorrelatedStream(SeededStream(1, "a"), coefficients, **options) for _ in "ra")
    for stream in (rounded, added):
        stream.seek(0)
    assert torch.equal(rounded.add_rounded(torch.ones(100), 2.7), added.add_to(torch.ones(100), 2.7))
    from opusim.randomness import rounded

    assert rounded._PAIRS == PAIRS
    assert CHUNK % kernels._GROUP == PAIRS % kernels._GROUP == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda stream: stream.add_rounded(torch.zeros(3), math.nan), ValueError, "std = nan: must be 0 or"),
        (lambda stream: stream.add_rounded(torch.zeros(3), 1e-40), ValueError, "the normal float32 numbers"),
        (lambda stream: stream.add_rounded(torch.zeros(3).half(), 1.0), TypeError, "y has dtype"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_bad_arguments_are_named(mode: str, change: Callable, error: type[Exception], message: str) -> None:
    refuses(error, message, change, noise_stream(mode, 1, "a"))


@pytest.mark.parametrize("mode", MODES)
def test_subtracting_names_the_sum_of_added_noise_and_of_rounded_noise_nothing(mode: str, seed: int) -> None:
    """Two candidate sums of a step. With rounded noise both explain the same share, up to five standard errors."""
    rng, n, std = np.random.default_rng(seed), 4000, 0.03
    true = (rng.normal(size=n) * 1e-3).astype(np.float32)
    other = (true - rng.normal(size=n) / (50 * math.sqrt(n))).astype(np.float32)
    stream = noise_stream(mode, seed, "attack")
    added = stream.add_to(torch.from_numpy(true.copy()), std).numpy()
    assert explained(added, true, std) == 1.0 > explained(added, other, std) + 0.02  # the planted fault
    released = stream.add_rounded(torch.from_numpy(true.copy()), std).numpy()
    shares = [explained(released, guess, std) for guess in (true, other)]
    middle = sum(shares) / 2
    assert abs(shares[0] - shares[1]) < 5 * math.sqrt(2 * max(middle * (1 - middle), 1 / n) / n)
    assert (released.astype(np.float64) / grid_of(std) % 1 == 0).all()
