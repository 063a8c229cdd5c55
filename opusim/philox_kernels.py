"""Numba kernels of Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011; the Random123 library).

Words of 32 bits are held in the low halves of 64-bit lanes, because a round needs 64-bit products: so LLVM keeps a
whole block of counters in vector registers with no packing between rounds. The high halves may hold anything: a product
takes the low half of its word, for which processors have one instruction, and whoever stores a word cuts it. The rounds
are written out, since a loop would stop the vectorisation. Storing each of the four words in an array of
its own is six times as fast as storing them side by side. The torch version is
`opusim.philox.philox_torch`; a plain Python twin stands beside the tests.
"""

from __future__ import annotations

import numba
import numpy as np

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
def _next_key(k0: np.uint64, k1: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The key of the next round: a Weyl sequence per word."""
    return k0 + _WEYL_0, k1 + _WEYL_1


@numba.njit(nogil=True, forceinline=True)
def philox_block(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Encrypts one counter by ten rounds; only the low 32 bits of every word, going in and coming out, mean anything.

    Args:
        c0: word 0 of the counter.
        c1: word 1.
        c2: word 2.
        c3: word 3.
        k0: low half of the key.
        k1: high half.

    Returns:
        The four output words.
    """
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = _next_key(k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@numba.njit(cache=True, nogil=True, error_model="numpy")
def encrypt_counters(counters: np.ndarray, words: np.ndarray, k0: int, k1: int) -> None:
    """Encrypts given counters one by one.

    Args:
        counters: uint32, shape (n, 4).
        words: uint32, shape (n, 4), is overwritten.
        k0: low 32 bits of the key.
        k1: high 32 bits.
    """
    key_0, key_1 = np.uint64(k0), np.uint64(k1)
    for i in range(counters.shape[0]):
        a, b, c, d = philox_block(
            np.uint64(counters[i, 0]),
            np.uint64(counters[i, 1]),
            np.uint64(counters[i, 2]),
            np.uint64(counters[i, 3]),
            key_0,
            key_1,
        )
        words[i, 0] = np.uint32(a)
        words[i, 1] = np.uint32(b)
        words[i, 2] = np.uint32(c)
        words[i, 3] = np.uint32(d)
