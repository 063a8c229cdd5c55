"""Words of Philox, seeded and released normal numbers, and the seeds of purposes."""

import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opusim.randomness import kernels, streams
from opusim.randomness.kernels import PAIRS, fill_from_words, philox_block
from opusim.randomness.streams import (
    CorrelatedStream,
    SeededStream,
    SystemStream,
    derive_seed,
    noise_stream,
    philox_torch,
    split_key,
)
from tests.opusim.common import refuses, with_threads
from tests.oracles import naive_philox
from tests.support.forked import in_forked_process


def transform(words: np.ndarray) -> np.ndarray:
    """The kernel on given words, uint32, shape (3, 512), as 512 pairs."""
    out = np.empty(2 * PAIRS, dtype=np.float32)
    fill_from_words(out, words[None])
    return out.reshape(2, PAIRS).T


def test_kernel_follows_the_naive_twin_to_nine_standard_deviations(seed: int) -> None:
    out = np.empty(1500, dtype=np.float32)
    kernels.fill_from_philox(out, 0, 7, 3, 5, 11, 13)
    twin = naive_philox.normals(1500, reading=7, step=3 + (5 << 32), key=11 + (13 << 32))
    np.testing.assert_allclose(out, twin, rtol=0, atol=4e-7 * 5)
    words = np.random.default_rng(seed).integers(0, 2**32, (3, PAIRS), dtype=np.uint32)
    words[:2, :8] = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 3037000499])
    words[0, 8:40] = 2 ** np.arange(32, dtype=np.uint32)
    words[0, 40:72] = 2**32 - 1 - 2 ** np.arange(32, dtype=np.uint32)
    words[2, 72:76] = np.array([0, 2**29, 2**30, 2**31])
    twin = np.array([naive_philox.normal_pair(*(int(word) for word in column)) for column in words.T])
    radius = np.hypot(twin[:, 0], twin[:, 1])
    error = np.abs(transform(words) - twin).max(axis=1)
    assert np.max(error / radius) < 4e-7
    words = np.zeros((3, PAIRS), dtype=np.uint32)
    assert transform(words)[0, 0] == pytest.approx(np.sqrt(2 * 65 * np.log(2)), rel=1e-6)
    words[:2] = 2**32 - 1
    smallest = transform(words)[0, 0]
    assert 0 < smallest < 3e-10


@pytest.mark.parametrize("shape", [(0,), (1,), (1023,), (1024,), (1025,), (3, 700), ()])
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(shape: tuple[int, ...]) -> None:
    whole = SeededStream(1, "a").normal((4096,))
    part = SeededStream(1, "a").normal(shape)
    assert part.shape == shape
    assert torch.equal(part.reshape(-1), whole[: part.numel()])


def test_threads_do_not_change_numbers() -> None:
    one, two, five = with_threads(lambda: SeededStream(1, "a").normal((400_000,)), 1, 2, 5)
    assert torch.equal(one, two)
    assert torch.equal(one, five)


def test_every_key_part_gives_other_numbers_and_seek_repeats() -> None:
    stream = SeededStream(1, "a")
    draws = [stream.normal((64,)), stream.normal((64,))]
    for step in (1, 2**32, 2**64 - 1):
        stream.seek(step)
        draws.append(stream.normal((64,)))
    draws += [SeededStream(2, "a").normal((64,)), SeededStream(1, "b").normal((64,))]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws)
    stream.seek(0)
    assert torch.equal(stream.normal((64,)), draws[0])
    assert torch.equal(stream.normal((64,)), draws[1])


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("shape", [(3, 5), (40, 2000), (300, 700)])
def test_adding_draws_and_scales(mode: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.os, "urandom", lambda size: bytes(range(size)))  # makes release repeat
    y = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) / 7
    drawn = noise_stream(mode, 1, "a").normal(shape)
    expected = y + drawn * 2.7
    assert torch.equal(noise_stream(mode, 1, "a").add_to(y.clone(), 2.7), expected)
    columns = y.T.contiguous().T  # not contiguous
    assert torch.equal(noise_stream(mode, 1, "a").add_to(columns, 2.7), expected)
    stream = noise_stream(mode, 1, "a")
    assert not torch.equal(stream.add_to(y.clone(), 2.7), stream.add_to(y.clone(), 2.7))


def statistics_are_standard(x: np.ndarray) -> bool:
    """Moments, tails and neighbours of N(0, 1) at five standard errors, two-sided; KS for shape."""
    from scipy import stats

    n = x.size
    tail = 2 * stats.norm.sf(3)
    lags = (1, 2, PAIRS // 2, PAIRS, 2 * PAIRS, n // 2)
    neighbours = [np.mean(x[:-lag] * x[lag:]) * np.sqrt(n - lag) for lag in lags]
    y = x**2 - 1
    squares = [np.mean(y[:-lag] * y[lag:]) * np.sqrt(n - lag) / 2 for lag in (PAIRS // 2, PAIRS)]
    return bool(
        abs(x.mean()) < 5 / np.sqrt(n)
        and abs(np.mean(x**2) - 1) < 5 * np.sqrt(2 / n)
        and abs(np.mean(x**3)) < 5 * np.sqrt(15 / n)
        and abs(np.mean(x**4) - 3) < 5 * np.sqrt(96 / n)
        and abs(np.mean(np.abs(x) > 3) - tail) < 5 * np.sqrt(tail / n)
        and all(abs(value) < 5 for value in (*neighbours, *squares))
        and stats.kstest(x, "norm").pvalue > 5.7e-7
    )


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_numbers_are_standard_normal(mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the release stream is drawn from the seed: one key in 10^5 misses some limit by chance."""
    monkeypatch.setattr(streams.os, "urandom", random.Random(seed).randbytes)
    assert statistics_are_standard(noise_stream(mode, seed, "test").normal((300_000,)).double().numpy())


def test_planted_faults_are_seen(seed: int) -> None:
    x = SeededStream(seed, "test").normal((300_000,)).double().numpy()
    step = 10 * np.sqrt(1 / (2 * x.size))  # ten standard errors of the scale
    assert not statistics_are_standard(x * (1 + step))
    assert not statistics_are_standard(x / (1 + step))
    assert not statistics_are_standard(np.clip(x, -3, 3))
    assert not statistics_are_standard(np.concatenate([x[:150_000], -x[:150_000]]))
    assert not statistics_are_standard(np.repeat(x[::2], 2))


def test_readings_steps_and_purposes_are_independent(seed: int) -> None:
    n = 100_000
    stream = SeededStream(seed, "a")
    draws = [stream.normal((n,)), stream.normal((n,))]
    stream.seek(1)
    streams = (stream, SeededStream(seed, "b"), SeededStream(seed + 1, "a"))
    draws += [each.normal((n,)) for each in streams]
    correlation = torch.corrcoef(torch.stack(draws)).numpy()
    off = correlation[np.triu_indices(len(draws), 1)]
    assert np.all(np.abs(off) < 5 / np.sqrt(n))
    assert np.corrcoef(draws[0], draws[0] * 0.9 + draws[1] * 0.1)[0, 1] > 5 / np.sqrt(n)


def test_release_noise_never_repeats_and_a_fork_does_not_continue_it() -> None:
    stream = noise_stream("release", None, "a")
    first = stream.normal((64,))
    stream.seek(0)
    streams = (stream, SystemStream(), pickle.loads(pickle.dumps(stream)))
    others = [each.normal((64,)) for each in streams]
    assert not any(torch.equal(first, other) for other in others)
    assert set(vars(stream)) == {"_owner", "_cipher", "_cards"}  # an opaque cipher: no key, no seed
    # Its numbers would share those of earlier steps with its parent's
    stream = CorrelatedStream(SystemStream(), (0.8, 0.6), size=4, stored=False)
    stream.seek(0)
    stream.normal((4,))
    assert in_forked_process(lambda: stream.seek(1)).startswith("RuntimeError: correlated noise belongs")
    stream.seek(1)


def test_words_come_from_aes_in_counter_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.os, "urandom", lambda size: bytes(range(size)))
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(bytes(range(32))), modes.CTR(bytes(range(16)))).encryptor()
    words = np.frombuffer(cipher.update(bytes(2 * 3 * PAIRS * 4)), dtype=np.uint32).reshape(2, 3, PAIRS)
    expected = np.empty(1500, dtype=np.float32)
    fill_from_words(expected, words)
    np.testing.assert_array_equal(SystemStream().normal((1500,)).numpy(), expected)


def test_bad_arguments_are_named() -> None:
    refuses(ValueError, "mode = 'live': must be one of 'experiment', 'release'", noise_stream, "live", 1, "a")
    refuses(ValueError, "the mode 'experiment' needs a seed", noise_stream, "experiment", None, "a")
    refuses(ValueError, "length = -1", lambda: SeededStream(1, "a").normal((-1,)))
    refuses(ValueError, r"holds at most 2\^33 numbers", lambda: SeededStream(1, "a").normal((2**20, 2**14)))
    refuses(ValueError, "step = -1", lambda: SystemStream().seek(-1))


WORD = st.integers(0, 2**32 - 1)
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
KNOWN = [  # Random123, kat_vectors, philox4x32 10
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def by_numba(counter: tuple[int, ...], key: int) -> tuple[int, ...]:
    words = philox_block(*map(np.uint64, (*counter, *split_key(key))))
    return tuple(int(word) & 0xFFFFFFFF for word in words)


def by_torch(counter: tuple[int, ...], key: int) -> tuple[int, ...]:
    words = [torch.tensor([word], dtype=torch.int64) for word in counter]
    return tuple(int(word) for word in philox_torch(*words, key))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    assert by_numba(counter, key) == words
    assert by_torch(counter, key) == words
    assert naive_philox.philox4x32(counter, key) == words


@settings(max_examples=50, deadline=None)
@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.integers(0, 2**64 - 1))
def test_three_versions_agree(counter: tuple[int, ...], key: int) -> None:
    assert by_numba(counter, key) == by_torch(counter, key) == naive_philox.philox4x32(counter, key)


def test_torch_version_broadcasts() -> None:
    columns = torch.arange(5, dtype=torch.int64)
    rows = torch.arange(3, dtype=torch.int64)[:, None]
    words = philox_torch(columns, rows, 7, 11, 2**63)
    stacked = torch.stack(words, dim=-1).reshape(15, 4).tolist()
    assert stacked == [list(by_numba((c, r, 7, 11), 2**63)) for r in range(3) for c in range(5)]


def test_derived_seeds_differ_by_seed_label_and_type() -> None:
    seeds = [derive_seed(n, *names) for n, *names in ((1,), (2,), (1, "a"), (1, "b"), (1, "a", "b"))]
    seeds += [derive_seed(1, "a|s1:b"), derive_seed(1, 3), derive_seed(1, "3"), derive_seed(1, "b", "a")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**64 for value in seeds)
    assert derive_seed(1, "a") == 7844556216126916469  # pinned: runs recorded on disk rest on it
    refuses(ValueError, "seed = -1", derive_seed, -1)
