"""Hold records out at random, without looking at their labels: by index, by content, or by ID.

By index the number of records decides as well: an added record can push another one over to the other side. By content
or ID each record's side is a function of that record alone (and of a public key), so the kept records are the data cut
with a fixed set, and adding a record adds at most that record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch

from opusim.randomness.streams import derive_seed

Ids = np.ndarray | torch.Tensor | Sequence[str] | Sequence[int]
"""One ID a record: whole numbers or strings."""


def seeded_permutation(n: int, seed: int) -> torch.Tensor:
    """Return a uniformly random order of ``0 .. n - 1``.

    The order sorts raw 64-bit words of PCG64. NumPy promises the stream of a bit generator for ever and that
    of ``Generator.permutation`` only until it is improved, so a split stays the same split across versions.
    Two equal words would keep their order; that has a probability below n^2 / 2^65.

    Args:
        n: Number of things to order, at least 0.
        seed: At least 0.

    Returns:
        Shape (n,), int64.
    """
    words = np.random.PCG64(seed).random_raw(n)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def split_by_index(n: int, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide ``0 .. n - 1`` at random into a part that is kept and a part that is held out.

    The split depends on the number of records and the seed alone. It is not stratified: equal shares of
    classes would let a label decide on which side another record falls, which no label guarantee covers.
    Both parts are in random order, so that consecutive blocks of the kept part are random batches.

    Args:
        n: Number of records, at least 1.
        fraction: Share to hold out, in [0, 1); ``round(fraction * n)`` records are held out.
        seed: At least 0.

    Returns:
        The positions kept and those held out, both int64 and one-dimensional.

    Raises:
        ValueError: `fraction` is outside its range, or a part that was asked for would be empty.
    """
    _check_fraction(fraction)
    n_out = round(fraction * n)
    if n_out == n or (fraction > 0 and n_out == 0):
        raise ValueError(
            f"validation_fraction={fraction} of {n} records holds out {n_out} and leaves {n - n_out}; "
            "use 0 for no validation, or another fraction"
        )
    order = seeded_permutation(n, seed)
    return order[n_out:], order[:n_out]


def split_by_content(features: torch.Tensor, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide records by a keyed hash of each one's own features.

    A record is held out if BLAKE2b-64 of its features as little-endian float32, under the key
    ``derive_seed(seed, "split by content")``, is below ``fraction * 2^64``. -0.0 counts as 0.0, and every NaN as the
    same one. Equal records fall on one side, either side may be empty, and labels have no say.

    Args:
        features: Shape (n, d), float32.
        fraction: Probability of being held out, in [0, 1).
        seed: Public, in [0, 2^64).

    Returns:
        The positions kept and those held out, both int64, in the order of the records.

    Raises:
        ValueError: `fraction` is outside its range.
    """
    rows = features.detach().cpu().numpy().astype("<f4")  # a copy
    rows[np.isnan(rows)] = np.nan
    rows[rows == 0] = 0.0
    return _divided((row.tobytes() for row in rows), fraction, derive_seed(seed, "split by content"))


def split_by_id(ids: Ids, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide records by a keyed hash of each one's ID; as `split_by_content` but for the key and what is hashed.

    A whole number is hashed as ``i`` and its decimal digits, a string as ``s`` and its UTF-8 bytes. Records of one ID
    fall on one side.

    Args:
        ids: One ID a record.
        fraction: Probability of being held out, in [0, 1).
        seed: Public, in [0, 2^64).

    Raises:
        TypeError: An ID is neither a whole number nor a string.
        ValueError: `fraction` is outside its range.
    """
    return _divided(_id_bytes(ids), fraction, derive_seed(seed, "split by ID"))


def _id_bytes(ids: Ids) -> Iterable[bytes]:
    values = ids.tolist() if isinstance(ids, np.ndarray | torch.Tensor) else list(ids)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError(
                f"ids must be whole numbers or strings, got {type(value).__name__} at position {position}; "
                "use ids.astype(str)"
            )
        yield f"{'s' if isinstance(value, str) else 'i'}{value}".encode()


def _divided(contents: Iterable[bytes], fraction: float, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions whose keyed hash is at least the fraction of 2^64, and the others."""
    _check_fraction(fraction)
    threshold = int(Fraction(fraction) * 2**64)  # exact: a double below 1 has at most 53 digits
    public = key.to_bytes(8, "little")
    held_out = [
        int.from_bytes(hashlib.blake2b(content, digest_size=8, key=public).digest(), "little") < threshold
        for content in contents
    ]
    marks = torch.tensor(held_out, dtype=torch.bool)
    return torch.nonzero(~marks).reshape(-1), torch.nonzero(marks).reshape(-1)


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction must be at least 0 and below 1, got {fraction}")
