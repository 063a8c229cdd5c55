"""Seeds of named uses, derived from one seed, without importing torch."""

from __future__ import annotations

import hashlib

from opusim import checks

MAX_SEED = 2**64 - 1


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
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        checks.integer(seed=seed, minimum=0, maximum=MAX_SEED)
    parts = [f"s{len(label)}:{label}" if isinstance(label, str) else f"i{int(label)}" for label in labels]
    text = "|".join([str(int(seed)), *parts])  # lengths separate labels of any content
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
