"""Bring errors and outputs of feedback points to rows, and rows of feedback to the shape of a point's output.

Which entries of a reading a point receives is fixed (`Slice`) or learnt (`LearntReadout`).

A tensor of any shape is seen as (records, positions, channels). Symbols: N records, P positions, C channels of a point;
e row of the error, n numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from opusim.randomness.seeds import derive_seed

Rows = Literal["each", "sum"] | int


class Extent(NamedTuple):
    """Sizes of a tensor seen as rows."""

    records: int
    positions: int
    channels: int


@dataclass(frozen=True, kw_only=True)
class View:
    """How tensors of a model are seen as rows.

    Attributes:
        batch_dim: Dimension of the records, for tensors of at least three dimensions.
        channel_dim: Dimension of the channels, or None for 1 in four and five dimensions and the last in others.
    """

    batch_dim: int = 0
    channel_dim: int | None = None

    def extent(self, shape: Sequence[int]) -> Extent:
        """Return the sizes of a tensor of some shape."""
        if len(shape) < 3:
            return Extent(shape[0] if shape else 1, 1, shape[1] if len(shape) == 2 else 1)
        batch, channel = self._dims(len(shape))
        n, c = shape[batch], shape[channel]
        return Extent(n, math.prod(shape) // max(n * c, 1), c)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor as (records, positions, channels)."""
        if tensor.ndim < 3:
            return tensor.reshape(self.extent(tensor.shape))
        batch, channel = self._dims(tensor.ndim)
        return tensor.movedim((batch, channel), (0, -1)).flatten(1, -2)

    def shaped(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Return rows (records, positions, channels) in the shape that they come from."""
        if len(shape) < 3:
            return rows.reshape(tuple(shape))
        batch, channel = self._dims(len(shape))
        moved = [size for dim, size in enumerate(shape) if dim not in (batch, channel)]
        return rows.reshape(shape[batch], *moved, shape[channel]).movedim((0, -1), (batch, channel))

    def _dims(self, ndim: int) -> tuple[int, int]:
        channel = self.channel_dim
        if channel is None:
            channel = 1 if ndim in (4, 5) else ndim - 1
        return self.batch_dim % ndim, channel % ndim


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The outputs of B, from `offset`, of one call of a point: C channels at 1 position, or all if spread = 'full'."""

    name: str
    offset: int
    channels: int
    positions: int

    @property
    def end(self) -> int:
        """Exclusive end of the outputs."""
        return self.offset + self.channels * self.positions


def one_to_one(error: Extent, point: Extent, rows: Rows) -> bool:
    """Return whether every row of a point has its own row of the error, in the same order."""
    same = (error.records, error.positions) == (point.records, point.positions)
    flattened = 1 in (error.positions, point.positions)  # one of them has positions among its records
    return rows != "sum" and (
        same or (flattened and error.records * error.positions == point.records * point.positions)
    )


def arrange(
    error: Extent,
    points: Sequence[tuple[str, Extent]],
    *,
    rows: Rows,
    full: bool,
    shared: bool,
    records_first: bool = True,
) -> list[Slice]:
    """Return the slices of B of all calls of points, by name and sizes.

    With `full` a record's one row gives every position its own outputs; `shared` points use the same outputs. Records
    are the first dimension unless told otherwise, so that rows flattened by the model have a known order. Raises
    ValueError if a point has neither the error's rows nor its records, or its rows have another order.
    """
    slices: list[Slice] = []
    for name, point in points:
        own_rows = one_to_one(error, point, rows)
        if not own_rows and error.records != point.records:
            raise ValueError(
                f"point {name!r} has {point.records} records of {point.positions} positions and the error "
                f"{error.records} of {error.positions}; give batch_dim or channel_dim, or another point"
            )
        if own_rows and not records_first and error[:2] != point[:2]:
            raise ValueError(
                f"point {name!r} or the error holds records and positions in one dimension, and batch_dim says that "
                "records are not the first; name a point and an error_at that keep both dimensions"
            )
        positions = point.positions if full and not own_rows else 1
        offset = 0 if shared or not slices else slices[-1].end
        slices.append(Slice(name=name, offset=offset, channels=point.channels, positions=positions))
    return slices


def chosen_rows(error: Tensor, rows: Rows, *, seed: int) -> tuple[Tensor, Tensor | None]:
    """Return the rows of E, (records, positions, n), to project, shape (records, chosen, n), and the drawn positions.

    Rows are "each", "sum", or a number of positions to draw by the seed, the same for all records.
    """
    if rows == "each":
        return error, None
    if rows == "sum":
        return error.sum(dim=1, keepdim=True), None
    positions = error.shape[1]
    if rows >= positions:
        return error, None
    generator = torch.Generator().manual_seed(derive_seed(seed, "positions") % 2**63)
    drawn = torch.randperm(positions, generator=generator)[:rows].sort().values
    drawn = drawn.to(error.device, non_blocking=True)
    return error[:, drawn], drawn


def spread(
    reading: Tensor,
    part: Slice,
    error: Extent,
    point: Extent,
    *,
    drawn: Tensor | None,
    rows: Rows,
    gain: float,
) -> Tensor:
    """Return the feedback of one point, shape (records, positions, channels), from its slice of a reading of B.

    The reading has shape (records, chosen, n_outputs) for rows at the drawn positions, None for all. `gain` is in
    addition to that of the width.
    """
    own = reading[..., part.offset : part.end]
    if drawn is not None:
        gain *= error.positions / len(drawn)
    if one_to_one(error, point, rows):
        if drawn is not None:
            own = own.new_zeros(error.records, error.positions, own.shape[2]).index_copy_(1, drawn, own)
        return (own * (gain / part.channels**0.5)).reshape(point)
    total = own.sum(dim=1)  # (records, channels x positions with their own outputs)
    total = total.mul_(gain / (part.channels * point.positions) ** 0.5)
    return total.view(len(total), part.positions, part.channels).expand(tuple(point))


def through_layer_norm(signal: Tensor, h: Tensor) -> Tensor:
    """Return J^T s with J the Jacobian of (h - mean h) / std h, for each row; no gain and no bias.

    J^T s = (s - mean s - x mean(s x)) / std h, with x = (h - mean h) / std h (Ba et al., "Layer normalization", 2016).
    """
    centred = h - h.mean(dim=-1, keepdim=True)
    std = _root_mean_square(centred)
    x = centred / std
    return (signal - signal.mean(dim=-1, keepdim=True) - x * (signal * x).mean(dim=-1, keepdim=True)) / std


def row_std(h: Tensor) -> Tensor:
    """Return std h of each row as a layer norm takes it, shape (..., 1)."""
    return _root_mean_square(h - h.mean(dim=-1, keepdim=True))


def _root_mean_square(rows: Tensor) -> Tensor:
    return rows.square().mean(dim=-1, keepdim=True).add_(1e-5).sqrt_()


_DECAY, _RIDGE = 0.9, 1e-3
"""Learnt read-out: factor on earlier updates at each new one, and ridge in mean squares of a reading."""


class LearntReadout:
    """A learnt read-out: the matrices M_l of all calls of points, and the sums that they are fitted to.

    A medium's matrix T cannot be trained, but a matrix M_l behind it can. Point l then receives s J_i M_l r_i instead
    of s J_i times a slice of r_i, the reading of T e_i, with s its scale gain / sqrt(C P) and J_i the Jacobian of a
    layer norm where the feedback is normalised (`through_layer_norm`), else the identity. M_l starts as the slice, and
    then is the best linear predictor of the true gradient,

        M_l = argmin sum_i |s M r_i / std_i - g_i|^2 + ridge |M|^2  over the rows i of some batches,

    to which a share of the slice P_l is added, M_l + p |M_l| / |P_l| P_l in the Frobenius norm. g_i is dL/dh_l by
    backpropagation. The fit takes 1 / std(h_i) for J_i: the rest of J_i removes directions that the true gradient lacks
    as well. It uses readings with their noise, so that M_l gives noisy readings less weight. With p = 0, M_l sends each
    block its direct effect on the output, and the cosine with the true gradient is high; but blocks that all write
    towards the output compute little for each other, and nanoGPT learns slower than from plain feedback
    (benchmarks/known_models). With p = 1 it does not.

    Sources: Launay et al. 2020 (fixed feedback); GrAPE (ICLR 2026), which learns feedback from a backpropagated batch
    in an epoch; the least-squares form is ours.

    Args:
        slices: The outputs of B of each call of a point, at which the read-out starts: plain feedback.
        n_outputs: Outputs of B that are read.
        device: Torch device of its tensors.
    """

    def __init__(self, slices: Sequence[Slice], n_outputs: int, device: torch.device) -> None:
        one = torch.eye(n_outputs, device=device)
        self._plain = [one[part.offset : part.end] for part in slices]
        self._matrices = [matrix.clone() for matrix in self._plain]
        self._squares = [torch.zeros_like(one, dtype=torch.float64) for _ in slices]
        self._products = [torch.zeros_like(matrix, dtype=torch.float64) for matrix in self._matrices]
        self._updates = torch.zeros((), dtype=torch.int64)

    @property
    def updates(self) -> int:
        """Batches that it was fitted to."""
        return int(self._updates)

    @property
    def state(self) -> dict[str, Tensor]:
        """All that a resumed run needs; the tensors are no copies."""
        kinds = {"matrix": self._matrices, "squares": self._squares, "products": self._products}
        each = {f"{kind} {at}": tensor for kind, own in kinds.items() for at, tensor in enumerate(own)}
        return {"updates": self._updates, **each}

    def apply(self, number: int, reading: Tensor) -> Tensor:
        """Return M_l r for the readings of rows at call `number` of a point, shape (records, rows, n_outputs)."""
        matrix = self._matrices[number]
        return reading[..., : matrix.shape[1]] @ matrix.T

    def fit(self, number: int, features: Tensor, gradient: Tensor, *, plain: float) -> None:
        """Fit the matrix of a call to the rows of a batch and of earlier ones, with p = `plain` at least 0.

        Features are s r_i / std_i, shape (rows, n_outputs), gradients g_i, shape (rows, outputs of the point).
        """
        # 1. Add the batch to the sums, in which earlier ones fade.
        squares, products = self._squares[number], self._products[number]
        features = features[:, : len(squares)].double()
        squares.mul_(_DECAY).add_(features.T @ features)
        products.mul_(_DECAY).add_(gradient.double().T @ features)
        # 2. Solve the normal equations.
        ridge = _RIDGE * squares.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        damped = squares + ridge * torch.eye(len(squares), dtype=torch.float64, device=squares.device)
        matrix = torch.linalg.solve(damped, products.T).T.float()
        # 3. Add the share of plain feedback.
        start = self._plain[number]
        self._matrices[number].copy_(matrix + plain * (matrix.norm() / start.norm()) * start)

    def add_update(self) -> None:
        """Count a batch that all matrices were fitted to."""
        self._updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of what a resumed run needs."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise ValueError for the state of points of other sizes."""
        found, wanted = (
            {name: tuple(tensor.shape) for name, tensor in each.items()} for each in (state, self.state)
        )
        if found != wanted:
            raise ValueError(
                f"state: has tensors of shapes {found}, and the points need {wanted}; load it into the model that it "
                "was saved from"
            )
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def fits_at(step: int, every: int) -> bool:
    """Return whether a read-out is fitted before a step: at multiples of `every` > 0, three more in the first."""
    return every > 0 and (step % every == 0 or step in (every // 10, every // 4, every // 2))
