"""Keep records on disk that were mapped from a file, a block of them in memory at a time."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from opusim.training.errors import DataError

_BLOCK = 2**20
"""Numbers in memory at a time."""


def is_mapped(values: object) -> TypeGuard[np.ndarray]:
    """Return whether an array's numbers lie in a file, as those of ``numpy.load(file, mmap_mode="r")`` do."""
    base = values
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of consecutive records, each of about a million numbers; one, if there is no record."""
    n, width = shape[0], int(np.prod(shape[1:]))
    size = max(1, _BLOCK // max(width, 1))
    for start in range(0, max(n, 1), size):
        yield slice(start, min(start + size, n))


def on_disk(blocks: Iterable[Tensor]) -> Tensor:
    """Return rows as one float32 tensor, mapped from a temporary file that has no name and ends with its last user.

    Args:
        blocks: The rows in order, shapes (some, d).

    Raises:
        DataError: The folder of temporary files has too little room.
    """
    n, width = 0, 0
    try:
        with tempfile.TemporaryFile() as file:
            for block in blocks:
                file.write(block.contiguous().numpy().astype("=f4", copy=False).data)
                n, width = n + len(block), block.shape[1]
            file.flush()
            if not n * width:
                return torch.empty(n, width)
            return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(n, width)))
    except OSError as error:
        raise DataError(
            f"the records do not fit into the temporary folder {tempfile.gettempdir()} ({error.strerror}); name "
            "another by the environment variable TMPDIR"
        ) from error


def changed_on_disk(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return change(x) of records on disk, on disk."""
    return on_disk(change(x[part]) for part in row_blocks(tuple(x.shape)))
