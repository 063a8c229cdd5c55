"""Numba kernels that move an array along a counter-based Gaussian direction, without a second array of its size.

The rule of the entries stands in `opusim.directions`. Every number is one multiplication and one addition away from
what was there, each rounded to float32 and never fused, so the result has the same bits on every processor.
"""

from __future__ import annotations

import numba
import numpy as np

from opusim.medium_kernels import BLOCKS_AT_ONCE, OUTPUTS_PER_BLOCK, encrypt_blocks, look_up

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
def add_direction(
    out: np.ndarray, scale: np.float32, table: np.ndarray, first: int, tensor: int, key: tuple[int, int]
) -> None:
    """Adds scale * z to out.

    Args:
        out: float32, one axis; its element 0 is element `first` of the tensor.
        scale: factor.
        table: float32, shape (65536,).
        first: a multiple of STRIDE.
        tensor: number of the tensor, counter word 1.
        key: low and high 32 bits of the seed.
    """
    words = np.empty((4, BLOCKS_AT_ONCE), np.uint32)
    z = np.empty(STRIDE, np.float32)
    for start in range(0, out.size, STRIDE):
        _draw(z, words, table, first + start, tensor, key)
        part = out[start : min(start + STRIDE, out.size)]
        for i in range(part.size):
            part[i] += scale * z[i]


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
    """Out becomes keep (out + back z) + move z: what `add_direction`, a multiplication and `add_direction` would give.

    Args:
        out: as for `add_direction`, like all that are not named here.
        back: factor of z in the first addition.
        keep: factor of the sum.
        move: factor of z in the second addition.
        table: float32, shape (65536,).
        first: a multiple of STRIDE.
        tensor: number of the tensor.
        key: low and high 32 bits of the seed.
    """
    words = np.empty((4, BLOCKS_AT_ONCE), np.uint32)
    z = np.empty(STRIDE, np.float32)
    for start in range(0, out.size, STRIDE):
        _draw(z, words, table, first + start, tensor, key)
        part = out[start : min(start + STRIDE, out.size)]
        for i in range(part.size):
            part[i] = keep * (part[i] + back * z[i]) + move * z[i]
