"""Hold records out at random, without looking at their labels: by index, by content, or by ID.

By index, the split also depends on the number of records: adding a record can move another one to the other part. By
content or ID, a record's part depends only on that record and a public key, so adding a record changes one part by that
record and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch

from opusim import checks
from opusim.randomness.streams import derive_seed
from training.config.sections import SplitRule

Ids = np.ndarray | torch.Tensor | Sequence[str] | Sequence[int]
"""One ID per record: whole numbers or strings."""


def seeded_permutation(n: int, seed: int) -> torch.Tensor:
    """Return a uniformly random order of ``0 .. n - 1``.

    The order sorts raw 64-bit words of PCG64. NumPy never changes the stream of a bit generator, but may change that of
    ``Generator.permutation``, so this split is the same in all versions. Two equal words keep their order; the
    probability of any is below n^2 / 2^65.

    Args:
        n: Number of items to order, at least 0.
        seed: At least 0.

    Returns:
        Shape (n,), int64.
    """
    words = np.random.PCG64(seed).random_raw(n)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def split_by_index(n: int, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``0 .. n - 1`` at random into a kept part and a held-out part.

    The split depends only on the number of records and the seed. It is not stratified: with equal shares of classes, a
    label would decide which part another record falls into, which no label guarantee covers. Both parts are in random
    order, so consecutive blocks of the kept part are random batches.

    Args:
        n: Number of records, at least 1.
        fraction: Share to hold out, in [0, 1); ``round(fraction * n)`` records are held out.
        seed: At least 0.

    Returns:
        The positions kept and those held out, both int64 and one-dimensional.

    Raises:
        ValueError: `fraction` is outside its range, or a part would be empty.
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
    """Split records by a keyed hash of each one's features.

    A record is held out if BLAKE2b-64 of its features as little-endian float32, under the key
    ``derive_seed(seed, "split by content")``, is below ``fraction * 2^64``. -0.0 counts as 0.0, and all NaN as one.
    Equal records fall into the same part, and either part may be empty.

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
    return _split_by_hash((row.tobytes() for row in rows), fraction, derive_seed(seed, "split by content"))


def split_by_id(ids: Ids, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split records by a keyed hash of each one's ID; otherwise like `split_by_content`, with a key of its own.

    A whole number is hashed as ``i`` and its decimal digits, a string as ``s`` and its UTF-8 bytes. Records that share
    an ID fall into the same part.

    Args:
        ids: One ID per record.
        fraction: Probability of being held out, in [0, 1).
        seed: Public, in [0, 2^64).

    Returns:
        The positions kept and those held out, both int64, in the order of the records.

    Raises:
        TypeError: An ID is neither a whole number nor a string.
        ValueError: `fraction` is outside its range.
    """
    return _split_by_hash(_id_bytes(ids), fraction, derive_seed(seed, "split by ID"))


def split_records(
    features: torch.Tensor, ids: Ids | None, split: SplitRule, fraction: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of training and validation records under a rule.

    Raises:
        ValueError: The rule is unknown, IDs are missing, superfluous or too few, or no record is left to train on.
    """
    checks.choice(("index", "content", "id"), split=split)
    if (ids is not None) != (split == "id"):
        raise ValueError(
            f"split = {split!r} with{'out' if ids is None else ''} ids: split = 'id' needs ids, and only it takes them"
        )
    if split == "index":
        return split_by_index(len(features), fraction, derive_seed(seed, "validation"))
    if ids is None:
        kept, held_out = split_by_content(features, fraction, seed)
    else:
        if len(ids) != len(features):
            raise ValueError(
                f"x has {len(features)} records and ids {len(ids)} entries; give one ID per record"
            )
        kept, held_out = split_by_id(ids, fraction, seed)
    if not len(kept):
        raise ValueError(
            f"validation_fraction = {fraction:g} leaves no record for training under split = {split!r}; lower it, or "
            "change split_seed"
        )
    return kept, held_out


def _id_bytes(ids: Ids) -> Iterable[bytes]:
    values = ids.tolist() if isinstance(ids, np.ndarray | torch.Tensor) else list(ids)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError(
                f"ids must be whole numbers or strings, got {type(value).__name__} at position {position}; "
                "use ids.astype(str)"
            )
        yield f"{'s' if isinstance(value, str) else 'i'}{value}".encode()


def _split_by_hash(contents: Iterable[bytes], fraction: float, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions whose keyed hash is at least the fraction of 2^64, and the others."""
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
