"""Which records belong to which user, and which of them a step takes.

If users are protected, a step draws users, and at most k records of each. Everything here that concerns a user is
computed from that user's records only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

import numpy as np
import torch

from opusim import checks
from opusim.randomness.streams import SystemUniforms, derive_seed

OwnIds = Sequence[Any] | np.ndarray | torch.Tensor
"""The ID of each record's user: a whole number or a text, or None or a blank text for none."""
_MISSING = frozenset({"nan", "none", "nat", "<na>", "null"})
"""Texts that other programs write for a missing value, in lower case."""
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")
"""A text that writes a number."""


@dataclass(frozen=True)
class Users:
    """The users of a data set.

    Attributes:
        records: Numbers of each user's records, int64.
        most: k, the most records of a user that a step takes.
        seed: Fixes which records these are, in [0, 2^64); None draws them by the operating system's entropy.
    """

    records: tuple[np.ndarray, ...]
    most: int
    seed: int | None = None

    @classmethod
    def of(cls, ids: OwnIds, *, count: int, most: int, name: str) -> Self:
        """Number the users of `count` records; a record without an ID (None, a blank text) is a user of its own.

        Numbers of equal value are one ID, and so is a text that writes the number; blanks around a text do not count.
        `name` is the argument or key that gives the IDs, for messages. Raises TypeError for an ID that is neither a
        whole number nor a text (a float, NaN), and ValueError for another number of IDs or for IDs that write one
        number in two ways.
        """
        keys = keys_of(ids, count=count, name=name)
        numbers: dict[object, list[int]] = {}
        for record, key in enumerate(keys):
            numbers.setdefault(key or record, []).append(record)
        return cls(tuple(np.array(own) for own in numbers.values()), most)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def digest(self) -> str:
        """BLAKE2b of the grouping of records by user, whatever the IDs."""
        found = hashlib.blake2b(digest_size=16)
        for own in self.records:
            found.update(np.array([len(own), *own], dtype="<i8").data)
        return found.hexdigest()

    def chosen(self, user: int, step: int) -> list[int]:
        """Return the records of a user that a step takes: all, or k of them at random, by a draw of this user's own."""
        own = self.records[user]
        if len(own) > self.most:
            source = (
                SystemUniforms()
                if self.seed is None
                else np.random.default_rng(derive_seed(self.seed, "records of a user", step, user))
            )
            own = own[source.random(len(own)).argsort()[: self.most]]
        found: list[int] = own.tolist()
        return found

    def rows(self, users: Sequence[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the records that a step takes of users, and which rows are only fillers, shapes (users x k,).

        A user's rows stand together; its first row fills the rows it lacks.
        """
        chosen = [self.chosen(user, step) for user in users]
        rows = [n for own in chosen for n in own + own[:1] * (self.most - len(own))]
        filled = [n >= len(own) for own in chosen for n in range(self.most)]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(filled, dtype=torch.bool)


def keys_of(ids: OwnIds, *, count: int, name: str) -> list[str | None]:
    """Return each record's ID as text, equal for IDs that count as one; None if a record has no ID.

    See `Users.of` for arguments and errors.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(values) != count:
        raise ValueError(
            f"{name}: has {len(values)} IDs for {count} records; give one for each record, in their order"
        )
    keys = [_key(value, name) for value in values]
    written: dict[Decimal, str] = {}
    for key in {key for key in keys if key is not None and _NUMBER.fullmatch(key)}:
        if written.setdefault(Decimal(key), key) != key:
            raise ValueError(
                f"{name}: two IDs are one number written in two ways, as '07' and 7 are, and would be two users; "
                "write each user's ID in one way, and different IDs with a letter, such as 'u07'"
            )
    return keys


def id_warnings(ids: OwnIds, *, count: int, name: str) -> Iterator[str]:
    """Yield warnings about IDs, which depend on them, so that no file may hold one.

    Records have no ID, a text such as "nan" is the ID of several records, IDs differ in case or blanks only, or no user
    has two records.
    See `Users.of` for arguments and errors.
    """
    records = Counter(key for key in keys_of(ids, count=count, name=name) if key is not None)
    if missing := count - records.total():
        yield (
            f"{name}: {missing:,} records have no ID, and each counts as a user of its own: a person with such records "
            "is not protected as one user"
        )
    for key, own in records.items():
        if own > 1 and key.lower() in _MISSING:
            yield (
                f"{name}: several records have the text {key!r} as ID and count as one user; give None for records "
                "without a user"
            )
    if alike := len(records) - len({" ".join(key.casefold().split()) for key in records}):
        yield (
            f"{name}: some IDs ({alike}) equal another one but for case or blanks, as 'a7' equals 'A7', and count as "
            "other users: a person with two IDs is protected as two users, not as one; write each user's ID in one way"
        )
    if len(records) == records.total():
        yield (
            f"{name}: no user has two records, so that only single records are protected; give each record the ID of "
            "its user, or leave the IDs out"
        )


def _key(value: Any, name: str) -> str | None:
    """Return the text of an ID, or None for a record without one."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value.strip() or None
    missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and math.isnan(value)
    )
    if value is None or missing:  # pandas' missing values
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: an ID has the type {type(value).__name__}; IDs must be int, str, or None, which marks a "
            "record without a user (convert a pandas column of floats by .astype('Int64'))"
        )
    return str(value)


def require_users(ids: object, most: int | None) -> None:
    """Refuse (TypeError, ValueError) IDs of users without a number of records per user, and that number without IDs."""
    if most is not None:
        checks.integer(minimum=1, records_per_user=most)
    if (ids is None) != (most is None):
        missing, given = ("user_ids", "records_per_user") if ids is None else ("records_per_user", "user_ids")
        what = (
            "the ID of each record's user"
            if ids is None
            else "how many records of a user a step uses at most"
        )
        raise ValueError(f"{missing} is missing and {given} is given; give {what}, or neither")
