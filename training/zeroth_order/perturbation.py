"""Perturb and update parameters in their own memory (SPSA), so that a log of steps rebuilds them to the bit.

A step with directions z_1 .. z_n moves the parameters in this order: for each j by + phi z_j, - 2 phi z_j, + phi z_j;
then theta <- (1 - eta lambda) theta + sum_j m_j z_j with m_j = -eta s_j / n. The order fixes all roundings, with data
or without, on every machine and thread count: a log rebuilds float32 parameters to the bit, including the last digits
that perturbing changed.

Half precision would lose more than last digits: 8 or 11 bits remain after each return, and updates below half a unit
vanish. Such parameters have float32 copies in a file on disk, which only the logged entries move. Every few steps the
parameters are settled: set to the rounded copies. Settled parameters do not depend on any perturbation. A checkpoint
settles them temporarily; the file keeps the unsettled values, from which training continues, so the times of
checkpoints do not change a run.

Sources: Spall 1992; Malladi et al. 2023 for the steps in place.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opusim.medium.transmission import Direction

_CAN_RELEASE_MEMORY = hasattr(mmap, "MADV_DONTNEED")
_PENDING_LIMIT = 256
"""Largest number of entries that the float32 copies may lag behind."""


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One step as the step log records it.

    Attributes:
        rate: eta, the step's learning rate, a float32 value.
        seeds: Seeds of the directions, each in [0, 2^64).
        scalars: s of each direction, float32 values: the noised sum over batch size and 2 phi.
    """

    rate: float
    seeds: tuple[int, ...]
    scalars: tuple[float, ...]

    @classmethod
    def rounded(cls, *, rate: float, seeds: tuple[int, ...], scalars: tuple[float, ...]) -> StepEntry:
        """Round numbers to float32, as the log stores them; the step uses the rounded ones."""
        with np.errstate(over="ignore"):
            return cls(
                rate=float(np.float32(rate)),
                seeds=seeds,
                scalars=tuple(float(np.float32(scalar)) for scalar in scalars),
            )

    @property
    def moves(self) -> tuple[float, ...]:
        """-eta s / n: the move along each of the n directions."""
        return tuple(-self.rate * scalar / len(self.scalars) for scalar in self.scalars)

    def keep(self, weight_decay: float) -> float:
        """Return 1 - eta lambda, the factor of the weight decay."""
        return 1.0 - self.rate * weight_decay


class MemoryMappedTensors:
    """Copies of tensors in one unnamed file that is mapped into memory; they take memory only while in use.

    Attributes:
        tensors: The copies by number; reading and writing them reads and writes the file.

    Args:
        like: The tensors to copy.
        dtype: Type of the copies; None keeps each tensor's type.
        scratch: Folder of the file; None for the system's temporary folder.
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
            self.release_memory()

    def release_memory(self) -> None:
        """Return the memory to the system; the file keeps what was written."""
        if _CAN_RELEASE_MEMORY and self.tensors:
            self._memory.madvise(mmap.MADV_DONTNEED)


class InPlacePerturbation:
    """Moves a fixed list of tensors along random directions and by logged steps.

    Attributes:
        copies: float32 copies of the half-precision tensors, by number; only entries move them. Part of a run's state.
        drifted: Unsettled values of the same tensors, in their own type, kept while they are settled temporarily.

    Args:
        tensors: Floating-point, contiguous; moved in place.
        perturbation: phi > 0.
        weight_decay: lambda >= 0.
        scratch: Folder of the files for half-precision tensors; None for the system's temporary folder.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        perturbation: float,
        weight_decay: float = 0.0,
        scratch: Path | None = None,
    ) -> None:
        self._tensors = list(tensors)
        self._phi, self._decay = perturbation, weight_decay
        self._pending: list[StepEntry] = []
        self._seed = 0  # of the current direction
        self._offsets = [0] * len(self._tensors)  # of each tensor along it, in phi z: 1, -1 or 0
        half = {n: t for n, t in enumerate(tensors) if t.dtype in (torch.float16, torch.bfloat16)}
        self._copies = MemoryMappedTensors(half, dtype=torch.float32, scratch=scratch)
        self._drifted = MemoryMappedTensors(half, scratch=scratch)
        self._settled_temporarily = True

    @property
    def copies(self) -> dict[int, Tensor]:
        """See the class."""
        return self._copies.tensors

    @property
    def drifted(self) -> dict[int, Tensor]:
        """See the class."""
        return self._drifted.tensors

    def move_to_plus(self, seed: int) -> None:
        """Move from theta to theta + phi z."""
        self._shift(seed, 1)

    def move_to_minus(self, seed: int) -> None:
        """Move from theta + phi z to theta - phi z."""
        self._shift(seed, -2)

    def move_back(self, seed: int) -> None:
        """Move from theta - phi z to theta."""
        self._shift(seed, 1)

    def restore(self) -> None:
        """Return to theta from an interrupted step: float32 up to rounding, half precision settled."""
        for number, offset in enumerate(self._offsets):
            if offset and number not in self.copies:
                Direction(self._seed).add_to(self._tensors[number], number, -offset * self._phi)
            self._offsets[number] = 0
        self.settle()

    def update(self, entry: StepEntry) -> None:
        """Take the step, from the minus side of its last direction."""
        self._update(entry, range(len(self._tensors)))

    def replay(self, entry: StepEntry) -> None:
        """Move the parameters as the whole step did, perturbations included, without any data.

        Half-precision tensors wait for `settle`, because perturbations do not change settled values.
        """
        whole = [number for number in range(len(self._tensors)) if number not in self.copies]
        *others, last = entry.seeds
        for seed in others:
            for offset in (1, -2, 1):
                self._add(seed, offset * self._phi, whole)
        for offset in (1, -2):
            self._add(last, offset * self._phi, whole)
        self._update(entry, whole)

    def settle(self) -> None:
        """Update the float32 copies and set the half-precision tensors to them."""
        self._update_copies()
        for number, copy in self.copies.items():
            self._tensors[number].detach().copy_(copy)
            self._copies.release_memory()

    def settle_temporarily(self) -> None:
        """Settle, but keep the unsettled values for `undo_settling`."""
        if not self._settled_temporarily:
            for number, kept in self.drifted.items():
                kept.copy_(self._tensors[number].detach())
                self._drifted.release_memory()
        self._settled_temporarily = True
        self.settle()

    def undo_settling(self) -> None:
        """Undo `settle_temporarily`; a new or restored object counts as settled temporarily."""
        if self._settled_temporarily:
            for number, kept in self.drifted.items():
                self._tensors[number].detach().copy_(kept)
                self._drifted.release_memory()
        self._settled_temporarily = False

    def reset_copies(self) -> None:
        """Take all copies from the tensors again, after the caller has set these."""
        self._pending.clear()
        self._settled_temporarily = True
        for number, copy in self.copies.items():
            copy.copy_(self._tensors[number].detach())
            self.drifted[number].copy_(self._tensors[number].detach())

    def _update(self, entry: StepEntry, numbers: Iterable[int]) -> None:
        *others, last = zip(entry.seeds, entry.moves, strict=True)
        keep = entry.keep(self._decay)
        direction, numbers = Direction(last[0]), list(numbers)
        for number in numbers:
            direction.return_and_move(self._tensors[number], number, back=self._phi, keep=keep, move=last[1])
            self._offsets[number] = 0
        for seed, move in others:
            self._add(seed, move, numbers)
        if self.copies:
            self._pending.append(entry)
            if len(self._pending) >= _PENDING_LIMIT:
                self._update_copies()

    def _update_copies(self) -> None:
        """Apply the pending entries to the float32 copies."""
        for number, copy in self.copies.items():
            for entry in self._pending:
                keep = entry.keep(self._decay)
                for seed, move in zip(entry.seeds, entry.moves, strict=True):
                    Direction(seed).return_and_move(copy, number, back=0.0, keep=keep, move=move)
                    keep = 1.0
            self._copies.release_memory()
        self._pending.clear()

    def _shift(self, seed: int, offset: int) -> None:
        direction, self._seed = Direction(seed), seed
        for number, tensor in enumerate(self._tensors):
            direction.add_to(tensor, number, offset * self._phi)
            self._offsets[number] += offset

    def _add(self, seed: int, scale: float, numbers: Iterable[int]) -> None:
        direction = Direction(seed)
        for number in numbers:
            direction.add_to(self._tensors[number], number, scale)
