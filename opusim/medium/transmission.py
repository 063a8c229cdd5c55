"""The scattering medium, and random directions taken from it: Gaussian entries that are computed, not stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.medium import OUTPUTS_PER_BLOCK
from opusim.plugins import Deferred
from opusim.processes import PRODUCTS_PER_BLOCK, pause
from opusim.randomness.streams import MAX_SEED, philox_torch, split_key

kernels, splitting = Deferred("opusim.medium.kernels"), Deferred("opusim.randomness.kernels")

MAX_INPUTS = 2**32
MAX_OUTPUTS = OUTPUTS_PER_BLOCK * 2**32
TABLE_STEP = 2.0**-12
REAL_PLANE, IMAGINARY_PLANE = 1, 2
"""Counter words of the two real media of a complex one; plane 0 is B of the ideal and the gaussian device."""
_OUTPUTS_PER_TILE = 2048
_INPUTS_PER_TILE = 2048  # with the above, tiles of 16 MiB
INPUTS_PER_EXACT_SUM = 2**17
_ENTRIES_PER_BLOCK = 2**25  # computed between two pauses, in less than a tenth of a second
_TORCH_ROWS = 2**19  # counters encrypted at a time by the torch path; each takes about 100 bytes meanwhile


@cache
def gaussian_table() -> np.ndarray:
    """Return the 65,536 values that an entry of the medium can take, float32, read-only.

    Value k is Phi^-1((k + 1/2) / 65536), divided by the root mean square of all values, then rounded to a
    multiple of 2^-12. The table is odd (value 65535 - k is minus value k). Measured on the table: mean 0
    exactly, variance 1 - 8.8e-7, kurtosis 2.9992 (a Gaussian: 3), largest magnitude 4.32495, beyond which a
    Gaussian has probability 1.53e-5; 19,323 distinct values. tests/opusim/medium/test_medium.py computes these
    figures and pins the table's bytes.
    """
    values = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536).numpy()
    values /= np.sqrt(np.mean(values**2))
    table = (np.rint(values / TABLE_STEP) * TABLE_STEP).astype(np.float32)
    table.flags.writeable = False
    return table


@cache
def _table_on(device: torch.device) -> Tensor:
    return torch.from_numpy(gaussian_table().copy()).to(device)


class Medium:
    """The matrix B of a device, shape (n_outputs, n_inputs), N(0, 1) up to rounding and tail cut (`gaussian_table`).

    Rule of the entries, which never changes: entry (j, i) is ``gaussian_table()[h]``, where h is the 16-bit half
    number j mod 8 (low half of word 0 first) of the Philox4x32-10 block with the counter (j // 8, i, plane,
    epoch) and the seed as key. Entries depend on neither n_inputs nor n_outputs: a window of a larger device has the
    same entries. They are small integers over 4096, equal to the last bit on every processor, thread count and tiling.

    Exactness: with x in {-1, 0, 1} float32 holds every sum of entries below 4096 in magnitude exactly; sums over 2^17
    inputs stay below it up to 11 standard deviations. Longer sums are added up in float64 from blocks of 2^17 inputs
    and rounded once. Hence `project` of a ternary x depends on neither tiling nor order. Reduced-precision products
    (TF32, bfloat16) would break this: leave `torch.set_float32_matmul_precision` at "highest". The tail cut makes the
    medium unfit as privacy noise.

    Args:
        n_inputs: number of inputs, 1 to 2^32.
        n_outputs: number of outputs, 1 to 2^35.
        seed: in [0, 2^64).
        plane: counter word 2, which tells apart the matrices of one seed (real and imaginary part), in [0, 2^32).
        epoch: counter word 3, which tells apart the states of a drifting medium, in [0, 2^32).
        dense_limit_mib: size of the largest matrix that is kept in memory once computed, MiB; at least 0.

    Raises:
        TypeError, ValueError: an argument out of range.
    """

    def __init__(
        self,
        n_inputs: int,
        n_outputs: int,
        seed: int,
        *,
        plane: int = 0,
        epoch: int = 0,
        dense_limit_mib: float = 1024,
    ) -> None:
        for name, value, least, most in (
            ("n_inputs", n_inputs, 1, MAX_INPUTS),
            ("n_outputs", n_outputs, 1, MAX_OUTPUTS),
            ("seed", seed, 0, MAX_SEED),
            ("plane", plane, 0, 2**32 - 1),
            ("epoch", epoch, 0, 2**32 - 1),
        ):
            if not (type(value) is int and least <= value <= most):
                named: dict[str, Any] = {name: value}
                checks.integer(minimum=least, maximum=most, **named)
        if not (type(dense_limit_mib) in (int, float) and 0 <= dense_limit_mib < math.inf):
            checks.non_negative(dense_limit_mib=dense_limit_mib)
        self.n_inputs = int(n_inputs)
        self.n_outputs = int(n_outputs)
        self.seed = int(seed)
        self.plane = int(plane)
        self.epoch = int(epoch)
        self.dense_limit_mib = dense_limit_mib
        self._dense: dict[torch.device, torch.Tensor] = {}

    @property
    def fits_dense(self) -> bool:
        """Whether the float32 matrix takes at most dense_limit_mib."""
        return 4 * self.n_inputs * self.n_outputs <= self.dense_limit_mib * 2**20

    def tile(
        self, outputs: slice | range, inputs: slice | range, device: torch.device | str = "cpu"
    ) -> torch.Tensor:  # (inputs, outputs)
        """Compute a tile of the transposed matrix.

        Args:
            outputs: contiguous outputs, step 1.
            inputs: contiguous inputs, step 1.
            device: torch device of the result.

        Returns:
            float32, shape (len(inputs), len(outputs)): row i holds input i's weight at each output.

        Raises:
            ValueError: a range is not contiguous or leaves the medium.
        """
        columns, rows = _windows(outputs=(outputs, self.n_outputs), inputs=(inputs, self.n_inputs))
        if torch.device(device).type != "cpu":
            return self._torch_tile(columns, rows, torch.device(device))
        tile = torch.empty((len(rows), len(columns)), dtype=torch.float32)
        self._fill(tile.numpy(), columns, rows)
        return tile

    def _fill(self, array: np.ndarray, columns: range, rows: range) -> None:
        """Write a tile into an array of its shape, on the CPU."""
        table, key, width = gaussian_table(), split_key(self.seed), max(1, len(columns))
        at_once = max(1, _ENTRIES_PER_BLOCK // width)
        for begin in range(0, len(rows), at_once):
            pause()
            part, first = array[begin : begin + at_once], rows.start + begin

            def work(start: int, stop: int, part: np.ndarray = part, first: int = first) -> None:
                kernels.fill_tile(
                    part[start:stop], table, first + start, columns.start, self.plane, self.epoch, key
                )

            splitting.run_split(work, len(part), grain=max(1, 2**17 // width))

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:  # (n_inputs, n_outputs)
        """Return the whole transposed matrix, float32, shape (n_inputs, n_outputs), kept after the first call.

        Raises:
            ValueError: it exceeds dense_limit_mib.
        """
        if not self.fits_dense:
            size = 4 * self.n_inputs * self.n_outputs / 2**20
            raise ValueError(
                f"dense_limit_mib = {self.dense_limit_mib:g}: the dense matrix takes {size:.0f} MiB; "
                "raise the limit, or use project() and tile(), which compute what they need"
            )
        where = torch.empty(0, device=device).device  # resolves "cuda" to "cuda:0"
        matrix = self._dense.get(where)
        if matrix is None:
            matrix = self._dense[where] = self.tile(range(self.n_outputs), range(self.n_inputs), where)
        return matrix

    def project(
        self, x: torch.Tensor, outputs: slice | range | None = None
    ) -> torch.Tensor:  # (batch, n_inputs) -> (batch, outputs)
        """Return B x for each row of x.

        Args:
            x: float32, shape (batch, n_inputs), on any torch device.
            outputs: contiguous outputs to compute, step 1; or None for all.

        Returns:
            float32, shape (batch, number of outputs), on the same device. Exact for a ternary x (see the class), else
            within float32 rounding of the sum. Beyond the dense limit, tiles of 16 MiB are computed one after the
            other.

        Raises:
            TypeError, ValueError: x is not a float32 tensor of that shape, or outputs leave the medium.
        """
        if not (type(x) is torch.Tensor and x.ndim == 2 and x.shape[1] == self.n_inputs):
            checks.instance(torch.Tensor, x=x)
            checks.shape((None, self.n_inputs), x=x)
        if x.dtype != torch.float32:
            raise TypeError(f"x has dtype {x.dtype}: must be torch.float32; use x.float()")
        wanted = range(self.n_outputs)
        if outputs is not None:
            (wanted,) = _windows(outputs=(outputs, self.n_outputs))
        if self.fits_dense and self.n_inputs <= INPUTS_PER_EXACT_SUM:
            return blocked_product(x, self.dense(x.device)[:, wanted.start : wanted.stop])
        y = torch.empty((x.shape[0], len(wanted)), dtype=torch.float32, device=x.device)
        on_cpu, rows_at_once = x.device.type == "cpu", min(_INPUTS_PER_TILE, self.n_inputs)
        for part in blocks(len(wanted), _OUTPUTS_PER_TILE):
            columns = range(wanted.start + part.start, wanted.start + part.stop)
            room = torch.empty((rows_at_once if on_cpu else 0, len(columns)), dtype=torch.float32)

            def tile(rows: range, columns: range = columns, room: torch.Tensor = room) -> torch.Tensor:
                if self.fits_dense:
                    return self.dense(x.device)[rows.start : rows.stop, columns.start : columns.stop]
                if not on_cpu:
                    return self.tile(columns, rows, x.device)
                # reused: fresh memory takes as long as the entries
                self._fill(room[: len(rows)].numpy(), columns, rows)
                return room[: len(rows)]

            y[:, part.start : part.stop] = exact_product(x, tile, len(columns))
        return y

    def _torch_tile(self, columns: range, rows: range, device: torch.device) -> torch.Tensor:
        """Return a tile through torch operations, a bounded number of rows at a time."""
        table, first = _table_on(device), columns.start // OUTPUTS_PER_BLOCK
        last = -(-columns.stop // OUTPUTS_PER_BLOCK)
        skip = columns.start - first * OUTPUTS_PER_BLOCK
        tile = torch.empty((len(rows), len(columns)), dtype=torch.float32, device=device)
        numbers = torch.arange(first, last, dtype=torch.int64, device=device)
        at_once = max(1, _TORCH_ROWS // max(1, last - first))
        for part in blocks(len(rows), at_once):
            pause()
            inputs = torch.arange(
                rows.start + part.start, rows.start + part.stop, dtype=torch.int64, device=device
            )
            words = philox_torch(numbers, inputs[:, None], self.plane, self.epoch, self.seed)
            halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
            tile[part.start : part.stop] = table[halves.flatten(1)[:, skip : skip + len(columns)]]
        return tile


def exact_product(
    x: torch.Tensor, tile: Callable[[range], torch.Tensor], n_outputs: int
) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
    """Return the product of x with a matrix in tiles, added up in float64 from blocks of 2^17 inputs and rounded once.

    `tile` gives the rows of the transposed matrix for a range of inputs, float32, shape (len(range), n_outputs). The
    sum is exact before the one rounding if entries are multiples of 2^-12 and x is ternary (see `Medium`).
    """
    total = torch.zeros((x.shape[0], n_outputs), dtype=torch.float64, device=x.device)
    partial = torch.zeros_like(total, dtype=torch.float32)
    vectors_at_once = max(1, PRODUCTS_PER_BLOCK // (_INPUTS_PER_TILE * max(1, n_outputs)))
    for rows in blocks(x.shape[1], _INPUTS_PER_TILE):
        part = tile(rows)
        for vectors in blocks(x.shape[0], vectors_at_once):
            pause()
            shown = x[vectors.start : vectors.stop, rows.start : rows.stop]
            partial[vectors.start : vectors.stop].addmm_(shown, part)
        if rows.stop % INPUTS_PER_EXACT_SUM == 0 or rows.stop == x.shape[1]:
            total += partial
            partial.zero_()
    return total.float()


def blocked_product(
    x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:  # (batch, n_inputs), (n_inputs, n_outputs) -> (batch, n_outputs)
    """Return x @ matrix, float32; a long product is computed in blocks of rows with pauses between them."""
    if len(x) * matrix.numel() <= PRODUCTS_PER_BLOCK:
        return torch.mm(x, matrix, out=out)
    at_once = max(1, PRODUCTS_PER_BLOCK // matrix.numel())
    if out is None:
        out = torch.empty((x.shape[0], matrix.shape[1]), dtype=x.dtype, device=x.device)
    for rows in blocks(x.shape[0], at_once):
        pause()
        torch.mm(x[rows.start : rows.stop], matrix, out=out[rows.start : rows.stop])
    return out


def blocks(length: int, size: int) -> Iterator[range]:
    """Return [0, length) in ranges of at most `size`."""
    return (range(start, min(start + size, length)) for start in range(0, length, size))


def _windows(**wanted: tuple[slice | range, int]) -> list[range]:
    """Return windows as ranges; refuse one that is not contiguous or leaves [0, length)."""
    found = []
    for name, (window, length) in wanted.items():
        if not isinstance(window, slice | range):
            named: dict[str, Any] = {name: window}
            checks.instance((slice, range), **named)
        resolved = range(*window.indices(length)) if isinstance(window, slice) else window
        if resolved.step != 1 or not 0 <= resolved.start <= resolved.stop <= length:
            raise ValueError(
                f"{name} = {window}: must be contiguous and within [0, {length}); use a range of step 1"
            )
        found.append(resolved)
    return found


_STRIDES_PER_THREAD = 64  # below 131,072 entries a second thread costs more than it saves
_PIECE_STRIDES = 16  # entries of other types than float32 moved at a time: 128 KiB
_TORCH_STRIDES = 256  # entries drawn at a time by the torch path, in strides: 2 MiB of float32


class Direction:
    """One random direction over any number of tensors, which it moves along itself and back in their own memory.

    Entry j of tensor t of the direction of a seed is entry (j, t) of the `Medium` of that seed: N(0, 1) up
    to the rounding and the tail cut of its table (4.32 standard deviations). The seed alone determines the direction,
    whatever the thread count, the processor or the torch device. Directions are public; the tail cut makes them unfit
    as privacy noise.

    Args:
        seed: in [0, 2^64).
    """

    def __init__(self, seed: int) -> None:
        checks.integer(seed=seed, minimum=0, maximum=MAX_SEED)
        self.seed = int(seed)
        self._key = split_key(self.seed)

    def add_to(self, tensor: Tensor, number: int, scale: float | Tensor, *, start: int = 0) -> None:
        """Add scale z to a tensor, in place; each operation rounds to float32, the last to the tensor's type.

        The tensor, the direction's `number`-th in [0, 2^32), is contiguous, of any floating type and device; a scale
        may be a float32 scalar there. `start`, a multiple of `STRIDE`, is the entry for the first element.
        """
        self.return_and_move(tensor, number, back=0.0, keep=1.0, move=scale, start=start)

    def return_and_move(
        self, tensor: Tensor, number: int, *, back: float, keep: float, move: float | Tensor, start: int = 0
    ) -> None:
        """The tensor becomes keep (tensor + back z) + move z, in place, in one pass over the memory; see `add_to`.

        `back` undoes an earlier perturbation, `keep` is 1 or 1 minus the weights' decay, `move` the update's factor.
        """
        flat = _flat(tensor, number, start)
        if flat.device.type == "cpu":
            first, second, third = np.float32(back), np.float32(keep), np.float32(move)

            def shift(part: np.ndarray, place: int) -> None:
                kernels.return_and_move(
                    part, first, second, third, gaussian_table(), place, number, self._key
                )

            _moved_by_kernel(flat, start, shift)
            return
        last = (
            move if isinstance(move, Tensor) else float(np.float32(move))
        )  # the host need not wait for a tensor
        for low in range(0, len(flat), _TORCH_STRIDES * kernels.STRIDE):
            part = flat[low : low + _TORCH_STRIDES * kernels.STRIDE]
            z, moved = self.entries(number, start + low, len(part), part.device), part.float()
            if back:
                moved.add_(z * float(np.float32(back)))
            if keep != 1:
                moved.mul_(float(np.float32(keep)))
            part.copy_(moved.add_(z.mul_(last)))

    def entries(
        self, number: int, start: int, count: int, device: torch.device | str = "cpu"
    ) -> Tensor:  # (count,)
        """Return entries from `start`, a multiple of 8, of a tensor's direction, float32, by torch operations only."""
        blocks = -(-count // OUTPUTS_PER_BLOCK)
        counters = start // OUTPUTS_PER_BLOCK + torch.arange(blocks, device=device)
        words = torch.stack(philox_torch(counters, number, 0, 0, self.seed), dim=1)  # (blocks, 4)
        halves = torch.stack([words & 0xFFFF, words >> 16], dim=2).reshape(-1)[:count]
        return _table_on(torch.device(device))[halves]


def _moved_by_kernel(flat: Tensor, start: int, move: Callable[[np.ndarray, int], None]) -> None:
    """Call move(part, place) on all of a flat tensor on the CPU, in float32, on as many threads as torch uses."""
    if flat.dtype == torch.float32 and len(flat) < _STRIDES_PER_THREAD * kernels.STRIDE:
        move(flat.numpy(), start)  # most calls of a small model; the code below would double their time
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
    """Return the tensor's memory as one axis, without a copy and without a graph; refuse one in pieces."""
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
