"""Copies of tensors that live in a file and take memory only while they are used."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_CAN_PAGE_OUT = hasattr(mmap, "MADV_DONTNEED")


class PagedTensors:
    """Copies of tensors, by number, in one unnamed file that is mapped into memory.

    Attributes:
        tensors: The copies; reading and writing them reads and writes the file.

    Args:
        like: What is copied.
        dtype: Type of the copies; None keeps each tensor's own.
        scratch: Folder of the file; None for the system's temporary one.
    """

    def __init__(
        self, like: Mapping[int, Tensor], *, dtype: torch.dtype | None = None, scratch: Path | None = None
    ) -> None:
        self.tensors: dict[int, Tensor] = {}
        types = {number: dtype or tensor.dtype for number, tensor in like.items()}
        size = sum(tensor.numel() * types[number].itemsize for number, tensor in like.items())
        if not size:
            return
        with tempfile.TemporaryFile(dir=scratch, prefix="opusim-zo-") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        start = 0
        wide_first = sorted(like, key=lambda number: -types[number].itemsize)  # keeps all aligned
        for number in wide_first:
            tensor, kind = like[number], types[number]
            flat = torch.frombuffer(self._memory, dtype=kind, count=tensor.numel(), offset=start)
            self.tensors[number] = flat.view(tensor.shape).copy_(tensor.detach())
            start += tensor.numel() * kind.itemsize
            self.page_out()

    def page_out(self) -> None:
        """Give the memory back; what was written stays in the file, or on its way there."""
        if _CAN_PAGE_OUT and self.tensors:
            self._memory.madvise(mmap.MADV_DONTNEED)
