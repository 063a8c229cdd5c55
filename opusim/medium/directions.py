"""Random directions that are computed, not stored: a tensor is moved along one, and back, in its own memory.

Entry j of tensor t of the direction of a seed is entry (j, t) of the `Medium` of that seed: N(0, 1) up
to the rounding and the tail cut of its table (4.32 standard deviations). It depends on nothing else, neither on the
thread count nor on the processor or the torch device, so the seed determines the direction. Directions are
public; the tail cut makes them unfit as privacy noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.medium import OUTPUTS_PER_BLOCK
from opusim.medium.transmission import gaussian_table
from opusim.plugins import Deferred
from opusim.randomness.streams import MAX_SEED, philox_torch, split_key

kernels, splitting = Deferred("opusim.medium.kernels"), Deferred("opusim.randomness.kernels")

_STRIDES_PER_THREAD = 64  # below 131,072 entries a second thread costs more than it saves
_PIECE_STRIDES = 16  # entries of another type than float32 that are moved at a time: 128 KiB
_TORCH_STRIDES = 256  # entries drawn at a time by the torch path, in strides: 2 MiB of float32


class Direction:
    """One random direction over any number of tensors.

    Args:
        seed: in [0, 2^64).
    """

    def __init__(self, seed: int) -> None:
        checks.integer(seed=seed, minimum=0, maximum=MAX_SEED)
        self.seed = int(seed)
        self._key = split_key(self.seed)

    def add_to(self, tensor: Tensor, number: int, scale: float, *, start: int = 0) -> None:
        """Add scale z to a tensor, in place; each operation rounds to float32, the last to the tensor's type.

        Args:
            tensor: Any floating type and shape, contiguous, on any torch device.
            number: Which tensor of the direction it is, in [0, 2^32).
            scale: Rounded to float32.
            start: Entry of the direction that belongs to the first element, a multiple of `STRIDE`.
        """
        flat = _flat(tensor, number, start)
        factor = np.float32(scale)
        if flat.device.type == "cpu":

            def move(part: np.ndarray, place: int) -> None:
                kernels.add_direction(part, factor, gaussian_table(), place, number, self._key)

            _moved_by_kernel(flat, start, move)
            return
        for part, z in self._parts(flat, number, start):
            part.copy_(part.float().add_(z.mul_(float(factor))))

    def return_and_move(
        self, tensor: Tensor, number: int, *, back: float, keep: float, move: float, start: int = 0
    ) -> None:
        """The tensor becomes keep (tensor + back z) + move z, in place, in one pass over the memory.

        Args:
            tensor: As for `add_to`.
            number: Which tensor of the direction it is.
            back: Factor that undoes an earlier perturbation.
            keep: 1, or 1 minus the decay of the weights.
            move: Factor of the update.
            start: As for `add_to`.
        """
        flat = _flat(tensor, number, start)
        first, second, third = np.float32(back), np.float32(keep), np.float32(move)
        if flat.device.type == "cpu":

            def shift(part: np.ndarray, place: int) -> None:
                kernels.return_and_move(
                    part, first, second, third, gaussian_table(), place, number, self._key
                )

            _moved_by_kernel(flat, start, shift)
            return
        for part, z in self._parts(flat, number, start):
            part.copy_(part.float().add_(z * float(first)).mul_(float(second)).add_(z.mul_(float(third))))

    def _parts(self, flat: Tensor, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return pieces of a tensor's memory with their entries."""
        for low in range(0, len(flat), _TORCH_STRIDES * kernels.STRIDE):
            part = flat[low : low + _TORCH_STRIDES * kernels.STRIDE]
            yield part, self.entries(number, start + low, len(part), part.device)

    def entries(
        self, number: int, start: int, count: int, device: torch.device | str = "cpu"
    ) -> Tensor:  # (count,)
        """Return the entries start .. start + count - 1 of a tensor's direction, by torch operations only.

        Args:
            number: Which tensor.
            start: A multiple of 8.
            count: At least 0.
            device: Torch device of the result.

        Returns:
            float32, shape (count,).
        """
        blocks = -(-count // OUTPUTS_PER_BLOCK)
        counters = start // OUTPUTS_PER_BLOCK + torch.arange(blocks, device=device)
        words = torch.stack(philox_torch(counters, number, 0, 0, self.seed), dim=1)  # (blocks, 4)
        halves = torch.stack([words & 0xFFFF, words >> 16], dim=2).reshape(-1)[:count]
        return _table_on(torch.device(device))[halves]


@cache
def _table_on(device: torch.device) -> Tensor:
    return torch.from_numpy(gaussian_table().copy()).to(device)


def _moved_by_kernel(flat: Tensor, start: int, move: Callable[[np.ndarray, int], None]) -> None:
    """Call move(part, place) on all of a tensor on the CPU, on as many threads as torch uses.

    Args:
        flat: One axis. Other types than float32 pass through a float32 piece that fits the cache.
        start: Place of its first element.
        move: Moves float32 numbers in place; the place is that of the first of them.
    """
    if flat.dtype == torch.float32 and len(flat) < _STRIDES_PER_THREAD * kernels.STRIDE:
        move(flat.numpy(), start)  # most calls of a small model; the rest below costs as much again
        return

    def work(low: int, high: int) -> None:
        pieces = range(low, high, max(high - low, 1) if flat.dtype == torch.float32 else _PIECE_STRIDES)
        for first in pieces:
            part = flat[first * kernels.STRIDE : min(first + pieces.step, high) * kernels.STRIDE]
            piece = part.float()  # the tensor's own memory if it is float32
            move(piece.numpy(), start + first * kernels.STRIDE)
            if flat.dtype != torch.float32:
                part.copy_(piece)

    splitting.run_split(work, -(-len(flat) // kernels.STRIDE), grain=_STRIDES_PER_THREAD)


def _flat(tensor: Tensor, number: int, start: int) -> Tensor:
    """Return the tensor's memory as one axis, without a copy and without a graph.

    Raises:
        TypeError, ValueError: It holds no floating-point numbers, or not in one piece; or the number is out of range.
    """
    checks.integer(number=number, minimum=0, maximum=2**32 - 1)
    checks.integer(start=start, minimum=0)
    if start % kernels.STRIDE:
        raise ValueError(f"start = {start}: must be a multiple of {kernels.STRIDE}")
    if not tensor.is_floating_point():
        raise TypeError(f"tensor has dtype {tensor.dtype}: a direction moves floating-point numbers; cast it")
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} is not contiguous: it is moved in place; use tensor.contiguous()"
        )
    return tensor.detach().view(-1)
