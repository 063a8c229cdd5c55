"""Simultaneous perturbation in place: to both sides of a direction, back, and a step along it.

One step with directions z_1 .. z_n moves the parameters, in their own memory and in this order of roundings:
for each j: + phi z_j, - 2 phi z_j, + phi z_j; then theta <- (1 - eta lambda) theta + sum_j m_j z_j, m_j = -eta s_j / n.
The same entry repeats the same roundings, with data or without, on every machine and thread count: float32 parameters
are rebuilt from a log to the bit, including what perturbing and returning changed in their last digits.

Half precision would lose more than last digits: after each return 8 or 11 bits are left of what was there, and updates
smaller than half a unit vanish. Such parameters have float32 copies in a file on disk, which the entries alone move;
every few steps the parameters are set to the copies, rounded. What they are then does not depend on any perturbation.
Source: Spall 1992; Malladi et al. 2023 for the steps in place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from opusim.directions import Direction
from training.zo.entry import StepEntry


class Walk:
    """Moves a fixed list of tensors.

    Args:
        tensors: Floating-point, contiguous; moved in place.
        perturbation: phi > 0.
        weight_decay: lambda >= 0.
        settle_every: Steps between two settlings of half-precision tensors, at least 1.
        scratch: Folder of the file with their float32 copies; None for the system's temporary folder.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        perturbation: float,
        weight_decay: float = 0.0,
        settle_every: int = 64,
        scratch: Path | None = None,
    ) -> None:
        self._tensors = list(tensors)
        self._phi, self._decay = perturbation, weight_decay
        self._settle_every = settle_every
        self._pending: list[StepEntry] = []
        self.copies = _float32_copies(self._tensors, scratch)

    def to_plus(self, seed: int) -> None:
        """From theta to theta + phi z."""
        self._add(seed, self._phi)

    def to_minus(self, seed: int) -> None:
        """From theta + phi z to theta - phi z."""
        self._add(seed, -2 * self._phi)

    def back(self, seed: int) -> None:
        """From theta - phi z to theta."""
        self._add(seed, self._phi)

    def finish(self, entry: StepEntry) -> None:
        """From the minus side of the last direction to where the step leads."""
        *others, last = zip(entry.seeds, entry.moves, strict=True)
        keep = entry.keep(self._decay)
        direction = Direction(last[0])
        for number, tensor in enumerate(self._tensors):
            direction.return_and_move(tensor, number, back=self._phi, keep=keep, move=last[1])
        for seed, move in others:
            self._add(seed, move)
        if self.copies:
            self._pending.append(entry)
            if len(self._pending) >= self._settle_every:
                self.settle()

    def repeat(self, entry: StepEntry) -> None:
        """All that a step does to the parameters, without looking at any data."""
        if len(self.copies) == len(self._tensors):  # perturbations leave nothing behind once settled
            self._pending.append(entry)
            if len(self._pending) >= self._settle_every:
                self.settle()
            return
        for seed in entry.seeds[:-1]:
            self.to_plus(seed)
            self.to_minus(seed)
            self.back(seed)
        self.to_plus(entry.seeds[-1])
        self.to_minus(entry.seeds[-1])
        self.finish(entry)

    def settle(self) -> None:
        """Bring the float32 copies up to date and set the half-precision tensors to them."""
        for number, copy in self.copies.items():
            for entry in self._pending:
                keep = entry.keep(self._decay)
                for seed, move in zip(entry.seeds, entry.moves, strict=True):
                    Direction(seed).return_and_move(copy, number, back=0.0, keep=keep, move=move)
                    keep = 1.0
            self._tensors[number].detach().copy_(copy)
        self._pending.clear()

    def restart(self) -> None:
        """Take the copies anew from the tensors, which somebody has set."""
        self._pending.clear()
        for number, copy in self.copies.items():
            copy.copy_(self._tensors[number].detach())

    def _add(self, seed: int, scale: float) -> None:
        direction = Direction(seed)
        for number, tensor in enumerate(self._tensors):
            direction.add_to(tensor, number, scale)


def _float32_copies(tensors: Sequence[Tensor], scratch: Path | None) -> dict[int, Tensor]:
    """A float32 copy of every tensor of less precision, by number, in one file that the system may page out."""
    short = {n: t for n, t in enumerate(tensors) if t.dtype in (torch.float16, torch.bfloat16)}
    if not short:
        return {}
    with tempfile.NamedTemporaryFile(dir=scratch, prefix="opusim-float32-") as file:
        size = sum(tensor.numel() for tensor in short.values())
        whole = torch.from_file(
            file.name, shared=True, size=size, dtype=torch.float32
        )  # stays mapped, unnamed
    copies, start = {}, 0
    for number, tensor in short.items():
        copies[number] = whole[start : start + tensor.numel()].view(tensor.shape)
        copies[number].copy_(tensor.detach())
        start += tensor.numel()
    return copies
