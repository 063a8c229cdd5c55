"""Numba kernels that write tiles of a counter-based Gaussian medium, or move an array along one of its directions.

`opusim.medium.transmission` states the rules of entries and directions. A move takes no second array of the array's
size. Every number is one multiplication and one addition away from what was there, each rounded to float32 and never
fused, so the result has the same bits on every processor.
"""

from __future__ import annotations

import numba
import numpy as np

from opusim.medium import OUTPUTS_PER_BLOCK
from opusim.randomness.kernels import philox_block

BLOCKS_AT_ONCE = 256  # words of 256 counters, 4 kB: they stay in the first-level cache
_U = np.uint32
_HALF, _SIXTEEN = np.uint32(0xFFFF), np.uint32(16)


@numba.njit(nogil=True, error_model="numpy")
def encrypt_blocks(
    words: np.ndarray,
    count: int,
    first_block: np.uint64,
    c1: np.uint64,
    c2: np.uint64,
    c3: np.uint64,
    key: tuple[int, int],
) -> None:
    """Encrypt consecutive blocks of one input; word k of all blocks goes to row k (uint32), so LLVM can use vectors."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    row_0, row_1, row_2, row_3 = words[0], words[1], words[2], words[3]
    for i in range(count):
        w0, w1, w2, w3 = philox_block(first_block + np.uint64(i), c1, c2, c3, k0, k1)
        row_0[i] = _U(w0)
        row_1[i] = _U(w1)
        row_2[i] = _U(w2)
        row_3[i] = _U(w3)


@numba.njit(nogil=True, error_model="numpy")
def look_up(row: np.ndarray, words: np.ndarray, count: int, table: np.ndarray) -> None:
    """Fill a row of 8 outputs a block with the table's values at the words' halves, low half of word 0 first."""
    row_0, row_1, row_2, row_3 = words[0], words[1], words[2], words[3]
    for i in range(count):
        j = OUTPUTS_PER_BLOCK * i
        row[j] = table[row_0[i] & _HALF]
        row[j + 1] = table[row_0[i] >> _SIXTEEN]
        row[j + 2] = table[row_1[i] & _HALF]
        row[j + 3] = table[row_1[i] >> _SIXTEEN]
        row[j + 4] = table[row_2[i] & _HALF]
        row[j + 5] = table[row_2[i] >> _SIXTEEN]
        row[j + 6] = table[row_3[i] & _HALF]
        row[j + 7] = table[row_3[i] >> _SIXTEEN]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fill_tile(
    tile: np.ndarray,
    table: np.ndarray,
    first_input: int,
    first_output: int,
    plane: int,
    epoch: int,
    key: tuple[int, int],
) -> None:
    """Overwrite a tile (inputs, outputs) of the transposed medium that begins at an input and an output.

    The table has the value of each 16-bit index; plane and epoch are counter words 2 and 3, key the halves of the seed.
    """
    words = np.empty((4, BLOCKS_AT_ONCE), np.uint32)
    edge = np.empty(BLOCKS_AT_ONCE * OUTPUTS_PER_BLOCK, np.float32)
    c2, c3 = np.uint64(plane), np.uint64(epoch)
    skip = first_output % OUTPUTS_PER_BLOCK
    end = tile.shape[1] + skip
    for i in range(tile.shape[0]):
        c1 = np.uint64(first_input + i)
        for start in range(0, end, BLOCKS_AT_ONCE * OUTPUTS_PER_BLOCK):
            stop = min(start + BLOCKS_AT_ONCE * OUTPUTS_PER_BLOCK, end)
            count = (stop - start + OUTPUTS_PER_BLOCK - 1) // OUTPUTS_PER_BLOCK
            first_block = np.uint64((first_output + start) // OUTPUTS_PER_BLOCK)
            encrypt_blocks(words, count, first_block, c1, c2, c3, key)
            first = skip if start == 0 else 0
            if first == 0 and (stop - start) % OUTPUTS_PER_BLOCK == 0:
                look_up(tile[i, start - skip : stop - skip], words, count, table)
            else:  # the row holds only part of its first or last block
                look_up(edge, words, count, table)
                tile[i, start + first - skip : stop - skip] = edge[first : stop - start]


STRIDE = BLOCKS_AT_ONCE * OUTPUTS_PER_BLOCK
"""Entries that are drawn at a time; a part given to a thread begins at a multiple of it."""


@numba.njit(nogil=True, error_model="numpy")
def _draw(
    z: np.ndarray, words: np.ndarray, table: np.ndarray, first: int, tensor: int, key: tuple[int, int]
) -> None:
    """Entries first .. first + STRIDE - 1 of a tensor's direction; `first` is a multiple of STRIDE."""
    block = np.uint64(first // OUTPUTS_PER_BLOCK)
    encrypt_blocks(words, BLOCKS_AT_ONCE, block, np.uint64(tensor), np.uint64(0), np.uint64(0), key)
    look_up(z, words, BLOCKS_AT_ONCE, table)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def return_and_move(
    out: np.ndarray,
    back: np.float32,
    keep: np.float32,
    move: np.float32,
    table: np.ndarray,
    first: int,
    tensor: int,
    key: tuple[int, int],
) -> None:
    """Out, from element `first` of a tensor on, becomes keep (out + back z) + move z; back 0, keep 1 just add move z.

    `first` is a multiple of STRIDE, `tensor` its number (counter word 1), `key` has the low and high half of the seed.
    """
    words = np.empty((4, BLOCKS_AT_ONCE), np.uint32)
    z = np.empty(STRIDE, np.float32)
    for start in range(0, out.size, STRIDE):
        _draw(z, words, table, first + start, tensor, key)
        part = out[start : min(start + STRIDE, out.size)]
        for i in range(part.size):
            part[i] = keep * (part[i] + back * z[i]) + move * z[i]
