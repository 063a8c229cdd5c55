"""Simultaneous perturbation in place: to both sides of a direction, back, and a step along it.

One step with directions z_1 .. z_n moves the parameters, in their own memory and in this order of roundings:
for each j: + phi z_j, - 2 phi z_j, + phi z_j; then theta <- (1 - eta lambda) theta + sum_j m_j z_j, m_j = -eta s_j / n.
The same entry repeats the same roundings, with data or without, on every machine and thread count: float32 parameters
are rebuilt from a log to the bit, including what perturbing and returning changed in their last digits.

Half precision would lose more than last digits: after each return 8 or 11 bits are left of what was there, and updates
smaller than half a unit vanish. Such parameters have float32 copies in a file on disk, which the entries alone move;
every few steps the parameters are set to the copies, rounded. What they are then does not depend on any perturbation.
A checkpoint settles them too, but training goes on from where roundings had led, which the file keeps beside the
copies: when checkpoints are written changes nothing of a run.
Source: Spall 1992; Malladi et al. 2023 for the steps in place.

Copies of tensors that live in a file and take memory only while they are used.
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

from opusim.medium.directions import Direction


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """One line of a step log.

    Attributes:
        rate: eta, the step's learning rate, a float32 value.
        seeds: Of the directions, each in [0, 2^64).
        scalars: s of each direction, float32 values: the noised sum over batch size and 2 phi.
    """

    rate: float
    seeds: tuple[int, ...]
    scalars: tuple[float, ...]

    @classmethod
    def rounded(cls, *, rate: float, seeds: tuple[int, ...], scalars: tuple[float, ...]) -> StepEntry:
        """The entry as a log holds it; a step moves by these numbers and no others."""
        with np.errstate(over="ignore"):
            return cls(
                rate=float(np.float32(rate)),
                seeds=seeds,
                scalars=tuple(float(np.float32(scalar)) for scalar in scalars),
            )

    @property
    def moves(self) -> tuple[float, ...]:
        """-eta s / n: how far the parameters go along each of the n directions."""
        return tuple(-self.rate * scalar / len(self.scalars) for scalar in self.scalars)

    def keep(self, weight_decay: float) -> float:
        """1 - eta lambda: what the decay leaves of the parameters."""
        return 1.0 - self.rate * weight_decay


_CAN_PAGE_OUT = hasattr(mmap, "MADV_DONTNEED")


class MemoryMappedTensors:
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
            self.release_memory()

    def release_memory(self) -> None:
        """Give the memory back; what was written stays in the file, or on its way there."""
        if _CAN_PAGE_OUT and self.tensors:
            self._memory.madvise(mmap.MADV_DONTNEED)


_PENDING_LIMIT = 256
"""Entries after which the float32 copies are brought up to date at the latest."""


class InPlacePerturbation:
    """Moves a fixed list of tensors.

    Attributes:
        copies: Of tensors in half precision, by number: float32, moved by the entries alone. Part of a run's state.
        drifted: Of the same, in their own type: where roundings had led when they were settled for a while.

    Args:
        tensors: Floating-point, contiguous; moved in place.
        perturbation: phi > 0.
        weight_decay: lambda >= 0.
        scratch: Folder of the files with what is kept of half-precision tensors; None for the system's temporary one.
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
        self._along = 0  # seed of the direction that is looked along
        self._sides = [0] * len(self._tensors)  # where each tensor stands on it, in phi z: 1, -1 or 0
        short = {n: t for n, t in enumerate(tensors) if t.dtype in (torch.float16, torch.bfloat16)}
        self._copies = MemoryMappedTensors(short, dtype=torch.float32, scratch=scratch)
        self._drifted = MemoryMappedTensors(short, scratch=scratch)
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
        """From theta to theta + phi z."""
        self._shift(seed, 1)

    def move_to_minus(self, seed: int) -> None:
        """From theta + phi z to theta - phi z."""
        self._shift(seed, -2)

    def move_back(self, seed: int) -> None:
        """From theta - phi z to theta."""
        self._shift(seed, 1)

    def restore(self) -> None:
        """From where a step broke off before `update` to theta: float32 up to roundings, half precision settled."""
        for number, sides in enumerate(self._sides):
            if sides and number not in self.copies:
                Direction(self._along).add_to(self._tensors[number], number, -sides * self._phi)
            self._sides[number] = 0
        self.settle()

    def update(self, entry: StepEntry) -> None:
        """From the minus side of the last direction to where the step leads."""
        self._update(entry, range(len(self._tensors)))

    def replay(self, entry: StepEntry) -> None:
        """All that a step does to the parameters, without looking at any data.

        Half-precision tensors are left alone until `settle`: perturbations leave nothing behind in a settled one.
        """
        whole = [number for number in range(len(self._tensors)) if number not in self.copies]
        *others, last = entry.seeds
        for seed in others:
            for sides in (1, -2, 1):
                self._add(seed, sides * self._phi, whole)
        for sides in (1, -2):
            self._add(last, sides * self._phi, whole)
        self._update(entry, whole)

    def settle(self) -> None:
        """Bring the float32 copies up to date and set the half-precision tensors to them."""
        self._catch_up()
        for number, copy in self.copies.items():
            self._tensors[number].detach().copy_(copy)
            self._copies.release_memory()

    def settle_temporarily(self) -> None:
        """Settle, but keep where roundings had led; `undo_settling` returns there."""
        if not self._settled_temporarily:
            for number, kept in self.drifted.items():
                kept.copy_(self._tensors[number].detach())
                self._drifted.release_memory()
        self._settled_temporarily = True
        self.settle()

    def undo_settling(self) -> None:
        """Undo `settle_temporarily`; a new walk, or one whose state was restored, stands as after it."""
        if self._settled_temporarily:
            for number, kept in self.drifted.items():
                self._tensors[number].detach().copy_(kept)
                self._drifted.release_memory()
        self._settled_temporarily = False

    def reset_copies(self) -> None:
        """Take what is kept anew from the tensors, which somebody has set."""
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
            self._sides[number] = 0
        for seed, move in others:
            self._add(seed, move, numbers)
        if self.copies:
            self._pending.append(entry)
            if len(self._pending) >= _PENDING_LIMIT:
                self._catch_up()

    def _catch_up(self) -> None:
        """Have the float32 copies where the entries lead."""
        for number, copy in self.copies.items():
            for entry in self._pending:
                keep = entry.keep(self._decay)
                for seed, move in zip(entry.seeds, entry.moves, strict=True):
                    Direction(seed).return_and_move(copy, number, back=0.0, keep=keep, move=move)
                    keep = 1.0
            self._copies.release_memory()
        self._pending.clear()

    def _shift(self, seed: int, sides: int) -> None:
        direction, self._along = Direction(seed), seed
        for number, tensor in enumerate(self._tensors):
            direction.add_to(tensor, number, sides * self._phi)
            self._sides[number] += sides

    def _add(self, seed: int, scale: float, numbers: Iterable[int]) -> None:
        direction = Direction(seed)
        for number in numbers:
            direction.add_to(self._tensors[number], number, scale)
