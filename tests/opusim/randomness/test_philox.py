import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opusim.randomness.kernels import philox_block
from opusim.randomness.streams import derive_seed, philox_torch, split_key
from tests.oracles import naive_philox

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
    with pytest.raises(ValueError, match="seed = -1"):
        derive_seed(-1)
