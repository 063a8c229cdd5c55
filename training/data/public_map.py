"""Replace the features of records by a public map of them: one that was fixed without the records.

A map is computed in blocks and kept in half precision, in a folder of the user if the same records will come again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from opusim.errors import ConfigError
from opusim.files import make_folder
from opusim.processes import require_memory
from opusim.training.data.dataset import Dataset, Split, in_single_precision

CACHE_VARIABLE = "OPUSIM_CACHE"
RECORDS_AT_ONCE = 1000
"""Records that are mapped at once; part of the law of a noisy map, whose noise is drawn block by block."""


@dataclass(frozen=True, kw_only=True)
class PublicMap(ABC):
    """A map x -> f(x) of each record, into which no other record enters, so that its outputs are public features.

    Attributes:
        record_shape: Shape of one record before; `PublicMap.n_inputs` numbers.
        groups: Number of groups of neighbouring features, each of which is shifted and scaled to mean 0 and variance 1
            within its record (torch.nn.functional.group_norm, which adds 1e-5 to the variance); None leaves features
            as they are.
    """

    kind: ClassVar[str]
    record_shape: tuple[int, ...]
    groups: int | None = None

    def __post_init__(self) -> None:
        channels, asked = self.mapped_shape[0], self.groups
        if asked is None or (channels % asked == 0 and asked < self.n_features):
            return
        whole = (n for n in range(1, channels + 1) if channels % n == 0 and n < self.n_features)
        near = sorted(sorted(whole, key=lambda n: abs(n - asked))[:3])
        raise ConfigError(
            "configuration",
            "data.features_groups",
            f"{asked} does not divide the {channels} channels of data.features; take "
            f"{', '.join(map(str, near))}, or leave it out",
        )

    @property
    @abstractmethod
    def mapped_shape(self) -> tuple[int, ...]:
        """Shape of one record behind the map: (c, h, w) for images."""

    @property
    @abstractmethod
    def own_facts(self) -> dict[str, Any]:
        """What rebuilds the map besides its fields here: JSON values."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return what maps blocks of records, shape (n, *record_shape), to features, shape (n, *mapped_shape)."""

    @property
    def depends_on_order(self) -> bool:
        """Whether a record that is added or removed changes the features of others, by noise that a seed repeats."""
        return False

    @property
    def joins_records(self) -> bool:
        """Whether the features of a record may hold what was read of another."""
        return False

    @property
    def n_inputs(self) -> int:
        """Features of a record before."""
        return math.prod(self.record_shape)

    @property
    def n_features(self) -> int:
        """Features of a record behind the map."""
        return math.prod(self.mapped_shape)

    @property
    def facts(self) -> dict[str, Any]:
        """What `config.json` says of the map: JSON values."""
        return {
            "map": self.kind,
            "public": True,
            "record_shape": list(self.record_shape),
            "groups": self.groups,
            "n_inputs": self.n_inputs,
            "n_features": self.n_features,
            **self.own_facts,
        }

    def blocks(self, x: Tensor) -> Iterator[np.ndarray]:
        """Yield the features of records, float16, shape (n, n_features), some records at a time.

        Args:
            x: Standardised features, shape (records, n_inputs).

        Raises:
            ConfigError: A feature does not fit half precision.
        """
        with self.opened() as read, torch.no_grad():
            for start in range(0, len(x), RECORDS_AT_ONCE):
                records = in_single_precision(x[start : start + RECORDS_AT_ONCE]).cpu()
                found = read(records.reshape(-1, *self.record_shape)).reshape(len(records), -1)
                if self.groups is not None:
                    found = functional.group_norm(found.unsqueeze(-1), self.groups).squeeze(-1)
                half = found.half()
                if not torch.isfinite(half).all():
                    reason = (
                        "a feature of a record exceeds 65504, the largest in half precision; lower data.std"
                    )
                    raise ConfigError("configuration", "data.features", reason)
                yield half.numpy()

    def require_room(self, records: int) -> None:
        """Refuse a map to more features than fit into memory, before a device is opened for it.

        Raises:
            ValueError: It is one.
        """
        require_memory(
            2 * records * self.n_features,
            why="features in half precision",
            remedy="lower data.n_features, or give fewer records",
            data__features=self.kind,
            n_features=self.n_features,
            records=records,
        )

    def apply(self, x: Tensor) -> Tensor:
        """Return the features of records, float16, shape (records, n_features), on x's torch device.

        Args:
            x: Standardised features, shape (records, n_inputs).
        """
        self.require_room(len(x))
        found = torch.empty(len(x), self.n_features, dtype=torch.float16)
        start = 0
        for block in self.blocks(x):
            found[start : start + len(block)] = torch.from_numpy(block)
            start += len(block)
        return found.to(x.device)


def with_public_features(dataset: Dataset, public: PublicMap, *, cached: bool) -> Dataset:
    """Return the data set with every record's features replaced by those of a map.

    Args:
        dataset: Standardised features.
        public: The map.
        cached: Whether features are kept in a folder of the user (`OPUSIM_CACHE`, else ~/.cache/opusim), and taken from
            there, mapped into memory, if the same map saw the same records.
    """
    public.require_room(len(dataset.train))

    def mapped(split: Split) -> Split:
        return Split(public_features(public, split.x, cached=cached), split.y)

    return replace(
        dataset,
        train=mapped(dataset.train),
        validation=mapped(dataset.validation),
        test=None if dataset.test is None else mapped(dataset.test),
        record_shape=public.mapped_shape,
        public_map=public.facts,
    )


def public_features(public: PublicMap, x: Tensor, *, cached: bool) -> Tensor:
    """Return the features of records, float16; from the cache, or kept there, if `cached`.

    Args:
        public: The map.
        x: Standardised features, shape (records, n_inputs).
        cached: See `with_public_features`.
    """
    if not cached:
        return public.apply(x)
    digest = hashlib.blake2b(json.dumps(public.facts, sort_keys=True).encode(), digest_size=16)
    digest.update(x.cpu().contiguous().numpy().view(np.uint8).data)
    file = cache_folder() / f"{digest.hexdigest()}.npy"
    with suppress(OSError, ValueError):
        return _from_cache(file, (len(x), public.n_features)).to(x.device)
    try:
        make_folder(file.parent)
        _write(file, public, x)
        return _from_cache(file, (len(x), public.n_features)).to(x.device)
    except (OSError, ValueError):  # a full or read-only disk costs time, not the run
        return public.apply(x)


def _from_cache(file: Path, shape: tuple[int, int]) -> Tensor:
    """Return what `_write` wrote, mapped into memory.

    Raises:
        OSError, ValueError: There is none, or it was cut.
    """
    found = np.load(file, allow_pickle=False, mmap_mode="c" if shape[0] else None)
    if found.shape != shape or found.dtype != np.float16:
        raise ValueError(f"{file} holds {found.dtype} of shape {found.shape}")
    return torch.from_numpy(found)


def _write(file: Path, public: PublicMap, x: Tensor) -> None:
    """Write the features of records block by block, and put the file in its place once it is whole."""
    header = {"descr": "<f2", "fortran_order": False, "shape": (len(x), public.n_features)}
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            for block in public.blocks(x):
                stream.write(np.ascontiguousarray(block, dtype="<f2").data)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return where computed features are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named or Path.home() / ".cache" / "opusim") / "features"
