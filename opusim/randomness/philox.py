"""Philox4x32-10: the one generator behind all simulated randomness of this project.

A counter of four 32-bit words is encrypted under a 64-bit key into four 32-bit words; any counter can be
asked for at any time, hence results never depend on tiling, thread count or order. Source: Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, and its known-answer vectors
(Random123). Philox is a statistical generator, not a cryptographic one: noise that protects data
comes from `opusim.randomness.streams.SystemStream`.
"""

from __future__ import annotations

import hashlib

import torch

from opusim import checks

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
MAX_SEED = 2**64 - 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def derive_seed(seed: int, *labels: str | int) -> int:
    """Return a 64-bit seed for one named use: blake2b(seed, labels), so that uses never share a stream.

    Args:
        seed: the seed of the run, in [0, 2^64).
        labels: what the derived seed is for; a string and an integer give different seeds.

    Returns:
        An integer in [0, 2^64).

    Raises:
        TypeError, ValueError: the seed is not an integer in range.
    """
    checks.integer(seed=seed, minimum=0, maximum=MAX_SEED)
    parts = [f"s{len(label)}:{label}" if isinstance(label, str) else f"i{int(label)}" for label in labels]
    text = "|".join([str(int(seed)), *parts])  # lengths separate labels of any content
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_key(key: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a 64-bit key."""
    return key & _LOW, key >> 32


def philox_torch(
    c0: torch.Tensor, c1: torch.Tensor | int, c2: torch.Tensor | int, c3: torch.Tensor | int, key: int
) -> Words:
    """Encrypt counters with torch operations, on any torch device, bit for bit as the kernel does.

    Words are int64 tensors in [0, 2^32). A product of two words wraps to a negative int64, whose arithmetic
    shift is masked back: the bits are those of the unsigned product.

    Args:
        c0: word 0 of the counters, int64; the others broadcast against it.
        c1: word 1.
        c2: word 2.
        c3: word 3.
        key: integer in [0, 2^64).

    Returns:
        The four output words, int64, of the broadcast shape.
    """
    words = [torch.as_tensor(word, dtype=torch.int64, device=c0.device) for word in (c0, c1, c2, c3)]
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
