"""Steps of zeroth-order training in the parameters' own memory: perturbations, updates, copies of half precision.

A step with directions z_1 .. z_n moves the parameters in this order: for each j by + phi z_j, - 2 phi z_j, + phi z_j;
then theta <- (1 - eta lambda) theta + sum_j m_j z_j with m_j = -eta s_j / n (SPSA; Spall 1992; Malladi et al. 2023).
The order fixes all roundings, with data or without, on every machine and thread count: the step log rebuilds float32
parameters to the bit, including the last digits that perturbing changed. Directions that are evaluated at once (see
at_once.py) perturb no parameter, and a step is its last line only.

With a rank r, the direction of a matrix of m rows and n columns is z = A B^T / sqrt(r), with standard normal factors
A (m, r) and B (n, r), so that entries have variance 1 and are uncorrelated. Directions are full in vectors and other
tensors, and in matrices that have no more entries than their factors. The factors' entries are multiples of 2^-17 of
magnitude below 8, and the moves times A are rounded to so few bits that sum_j m_j A_j B_j^T is exact in float64: its
value does not depend on the order in which a library of linear algebra adds.

Half precision would lose more than last digits: 8 or 11 bits remain after each return, and updates below half a unit
vanish. Such parameters have float32 copies in a file on disk, which only the logged entries move. Every few steps the
parameters are settled: set to the rounded copies. Settled parameters do not depend on any perturbation. A checkpoint
settles them temporarily; the file keeps the unsettled values, from which training continues, so the times of
checkpoints do not change a run.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opusim.medium.transmission import Direction

_CAN_RELEASE_MEMORY = hasattr(mmap, "MADV_DONTNEED")
_PENDING_LIMIT = 256
"""Largest number of entries that the float32 copies may lag behind."""
_FACTOR_BITS, _FRACTION_BITS, _SUM_BITS = 20, 17, 53
"""Bits of a factor's entry and of its fraction; bits of an exact sum in float64."""
_AT_ONCE = 2**20
"""Entries of a matrix that are moved at a time along directions of low rank."""


def has_factors(shape: Sequence[int], rank: int | None) -> bool:
    """Return whether directions have a rank in a tensor of this shape, rather than being full."""
    return rank is not None and len(shape) == 2 and rank * sum(shape) < math.prod(shape)


def factors(
    directions: Sequence[Direction],
    number: int,
    shape: Sequence[int],
    rank: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:  # (K, rank, m), (K, rank, n)
    """Return A^T and B^T of a matrix's K directions z = A B^T / sqrt(rank), float32, for its shape (m, n)."""
    rows, columns = shape
    entries = torch.zeros(len(directions), rank * (rows + columns), device=device)
    for direction, row in zip(directions, entries, strict=True):
        direction.add_to(row, number, 1.0)
    entries.mul_(2.0**_FRACTION_BITS).round_().mul_(2.0**-_FRACTION_BITS)
    left, right = entries[:, : rank * rows], entries[:, rank * rows :]
    return left.unflatten(1, (rank, rows)), right.unflatten(1, (rank, columns))


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


@dataclass(frozen=True, kw_only=True)
class UnreadEntry:
    """One step whose scalars s are on a card; it moves the parameters as the entry that `read` returns does."""

    rate: float
    seeds: tuple[int, ...]
    scalars: Tensor

    @classmethod
    def rounded(cls, *, rate: float, seeds: tuple[int, ...], scalars: Tensor) -> UnreadEntry:
        """See StepEntry.rounded."""
        return cls(rate=float(np.float32(rate)), seeds=seeds, scalars=scalars.float())

    @property
    def moves(self) -> tuple[Tensor, ...]:
        """See StepEntry.moves; float32 scalars."""
        return (self.scalars.double() * -self.rate / len(self.seeds)).float().unbind()

    def read(self, scalars: Sequence[float]) -> StepEntry:
        """Return the entry for the log with the numbers of `scalars`."""
        return StepEntry(rate=self.rate, seeds=self.seeds, scalars=tuple(scalars))


class MemoryMappedTensors:
    """Copies of tensors, by number, in one unnamed file that is mapped into memory; None keeps each one's type."""

    def __init__(self, like: Mapping[int, Tensor], *, dtype: torch.dtype | None = None) -> None:
        self.tensors: dict[int, Tensor] = {}
        types = {number: dtype or tensor.dtype for number, tensor in like.items()}
        size = sum(tensor.numel() * types[number].itemsize for number, tensor in like.items())
        if not size:
            return
        with tempfile.TemporaryFile(prefix="opusim-zo-") as file:
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
        tensors: The tensors that are moved.
        phi: Length of the move to each side.
        rank: Rank of the directions in matrices, or None if all are full.
        copies: float32 copies of the half-precision tensors, by number; only entries move them. Part of a run's state.
        drifted: Unsettled values of the same tensors, in their own type, kept while they are settled temporarily.

    Args:
        tensors: Floating-point, contiguous; moved in place.
        perturbation: phi > 0.
        weight_decay: lambda >= 0.
        rank: From 1 to 8, or None.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        perturbation: float,
        weight_decay: float = 0.0,
        rank: int | None = None,
    ) -> None:
        self.tensors, self.phi, self.rank = list(tensors), perturbation, rank
        self._decay = weight_decay
        self._pending: list[StepEntry | UnreadEntry] = []
        self._seed = 0  # of the current direction
        self._offsets = [0] * len(self.tensors)  # of each tensor along it, in phi z: 1, -1 or 0
        half = {n: t for n, t in enumerate(tensors) if t.dtype in (torch.float16, torch.bfloat16)}
        self._copies = MemoryMappedTensors(half, dtype=torch.float32)
        self._drifted = MemoryMappedTensors(half)
        self.copies, self.drifted = self._copies.tensors, self._drifted.tensors
        self._settled_temporarily = True

    def shift(self, seed: int, offset: int, numbers: Sequence[int] | None = None) -> None:
        """Move tensors by offset phi z: 1 from theta to the plus side, then -2 to the minus side, then 1 back."""
        self._seed, directions = seed, [Direction(seed)]
        for number in range(len(self.tensors)) if numbers is None else numbers:
            self._move(self.tensors[number], number, directions, [offset * self.phi])
            self._offsets[number] += offset

    def restore(self) -> None:
        """Return to theta from an interrupted step: float32 up to rounding, half precision settled."""
        for number, offset in enumerate(self._offsets):
            if offset and number not in self.copies:
                self._move(self.tensors[number], number, [Direction(self._seed)], [-offset * self.phi])
            self._offsets[number] = 0
        self.settle()

    def replay(self, entry: StepEntry, *, at_once: bool = False) -> None:
        """Move the parameters as the whole step did, perturbations included, without any data.

        Half-precision tensors wait for `settle`, because perturbations do not change settled values. Directions
        evaluated at once perturb no parameter.
        """
        whole = [number for number in range(len(self.tensors)) if number not in self.copies]
        for place, seed in enumerate(() if at_once else entry.seeds, start=1):
            for offset in (1, -2, 1) if place < len(entry.seeds) else (1, -2):
                self.shift(seed, offset, whole)
        self.update(entry, whole)

    def settle(self) -> None:
        """Update the float32 copies and set the half-precision tensors to them."""
        self._update_copies()
        for number, copy in self.copies.items():
            self.tensors[number].detach().copy_(copy)
            self._copies.release_memory()

    def settle_temporarily(self) -> None:
        """Settle, but keep the unsettled values for `undo_settling`."""
        if not self._settled_temporarily:
            for number, kept in self.drifted.items():
                kept.copy_(self.tensors[number].detach())
                self._drifted.release_memory()
        self._settled_temporarily = True
        self.settle()

    def undo_settling(self) -> None:
        """Undo `settle_temporarily`; a new or restored object counts as settled temporarily."""
        if self._settled_temporarily:
            for number, kept in self.drifted.items():
                self.tensors[number].detach().copy_(kept)
                self._drifted.release_memory()
        self._settled_temporarily = False

    def reset_copies(self) -> None:
        """Take all copies from the tensors again, after the caller has set these."""
        self._pending.clear()
        self._settled_temporarily = True
        for number, copy in self.copies.items():
            copy.copy_(self.tensors[number].detach())
            self.drifted[number].copy_(self.tensors[number].detach())

    def update(self, entry: StepEntry | UnreadEntry, numbers: Sequence[int] | None = None) -> None:
        """Take the step in the tensors of these numbers, from the minus side of its last direction, or from theta."""
        moves: Sequence[float | Tensor] = entry.moves
        directions, moves = [Direction(seed) for seed in entry.seeds], [moves[-1], *moves[:-1]]
        directions = [directions[-1], *directions[:-1]]
        keep = 1.0 - entry.rate * self._decay
        for number in range(len(self.tensors)) if numbers is None else numbers:
            back = -self._offsets[number] * self.phi
            self._move(self.tensors[number], number, directions, moves, keep=keep, back=back)
            self._offsets[number] = 0
        if self.copies:
            self._pending.append(entry)
            if len(self._pending) >= _PENDING_LIMIT:
                self._update_copies()

    def _update_copies(self) -> None:
        """Apply the pending entries to the float32 copies."""
        for number, copy in self.copies.items():
            for entry in self._pending:
                moves = [float(move) for move in entry.moves]
                directions, keep = [Direction(seed) for seed in entry.seeds], 1.0 - entry.rate * self._decay
                self._move(copy, number, directions, moves, keep=keep, back=0.0)
            self._copies.release_memory()
        self._pending.clear()

    def _move(
        self,
        tensor: Tensor,
        number: int,
        directions: Sequence[Direction],
        moves: Sequence[float | Tensor],
        *,
        keep: float = 1.0,
        back: float | None = None,
    ) -> None:
        """Set a tensor, or a copy of it, to keep (tensor + back z_1) + sum_j moves_j z_j.

        `number` is that of the tensor. `back` is None if there is neither a return nor a decay; `keep` is 1, or 1 minus
        the weights' decay, as float32.
        """
        if self.rank is None or not has_factors(tensor.shape, self.rank):
            rest = list(zip(directions, moves, strict=True))
            if back is not None:
                (direction, move), *rest = rest
                direction.return_and_move(tensor, number, back=back, keep=keep, move=move)
            for direction, move in rest:
                direction.add_to(tensor, number, move)
            return
        if back:
            self._move(tensor, number, directions[:1], [back])
        left, right = factors(directions, number, tensor.shape, self.rank, tensor.device)
        scales = torch.stack(
            [torch.as_tensor(move, dtype=torch.float32, device=tensor.device) for move in moves]
        )
        scales = scales.double() / math.sqrt(self.rank)
        # 1. The unit of the scaled A: a power of two, so that the products have few enough bits for their exact sum.
        bits = _SUM_BITS - _FACTOR_BITS - math.ceil(math.log2(len(directions) * self.rank))
        largest = scales.abs().max()
        power = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
        unit = power * 2.0 ** (_FACTOR_BITS - _FRACTION_BITS - bits)
        # 2. sum_j moves_j A_j B_j^T / sqrt(rank), exact and rounded once to float32, some rows at a time.
        wide = right.flatten(0, 1).double()
        at_once = max(1, _AT_ONCE // tensor.shape[1])
        for first in range(0, len(tensor), at_once):
            scaled = left[:, :, first : first + at_once].double() * scales[:, None, None]
            scaled = scaled.div_(unit).round_().mul_(unit).flatten(0, 1)
            change, part = (scaled.T @ wide).float(), tensor.detach()[first : first + at_once]
            moved = part.float() if keep == 1.0 else part.float().mul_(float(np.float32(keep)))
            part.copy_(moved.add_(change))
