"""Clip records: norms and factors that hold for every finite float32 number, and the operators of the PDFA paper.

A clip must hold in the arithmetic that runs. Float32 breaks it in three ways:

- squares below 7e-46 vanish and squares above 3e38 overflow, so the norm of tiny or huge numbers is 0 or infinite;
- long sums round: the norm of 10^6 nearly equal numbers may be off by 0.1 %;
- sums of many signed products cancel: only rounding errors remain, which no norm of the exact sum bounds.

Therefore float32 norms are raised by the largest error that their sum of squares may have (`Measured`), the norm of a
contribution that is itself a sum of products by that sum's largest rounding error (`product_slack`), and all that
follows is float64. Records whose numbers float32 cannot hold, of norms from 2^60 on, count as not finite: they
contribute nothing. Whatever a record holds, its contribution then has norm at most C (1 + 1e-6).

No code here reads a tensor's value on the host: decisions that depend on records stay in tensors, so that a graphics
card does not wait, and timing reveals no record.

Operators of the PDFA paper (section 3.1, eqs. 8 and 9): `clip_entries`, `offset_entries`, `ball_factors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opusim.training.config.sections import ClippedLayers, WidthRule

_FLOAT64_CHUNK = 2**20
"""Numbers converted to float64 at once, 8 MiB."""
_SHORT_ROW = 1600
"""Length up to which a float32 sum of squares, in any order, is off by less than 1e-4 of the norm."""
_LONG_ROW = 2**20
"""Length up to which such a sum is off by less than 7 % of the norm, which serves a bound on rounding."""
_BLOCKS = range(512, 63, -1)
"""Lengths of the blocks that a longer row is cut into."""
_LARGEST_NORM = 2.0**60
"""Float32 norms from here on count as infinite; products of two numbers below it do not overflow."""
_VANISHED = 2.0**-62
"""Largest number whose square may vanish in float32, even if subnormal numbers are flushed to zero."""
LEAST_FACTOR = 2.0**-100
"""Factors below it are 0: float32 would hold them with few digits."""
CLIP_RANGE = (1e-12, 1e12)
"""Range of a clip norm and of a divisor in which clipped float32 rows and their sums keep all their digits."""
WITHOUT_FLOAT64 = {"mps"}
"""Kinds of torch devices that have no float64."""
CANCELLED = 2.0**-14
"""Share of sum_p |s_p| |u_p| by which the norm of a contribution of several uses is raised, see `SUM_ERROR`."""
SUM_ERROR = 0.01
"""Largest change that one record makes in the rounding of a sum, over C, for weights that are used several times.

Products of several uses may cancel, so that their magnitudes A_i = sum_p |s_ip| |u_ip| exceed a record's norm without
limit. Since the norm is raised by 2^-14 A_i, factors keep f_i A_i <= 2^14 C. A float64 sum over n records with P
positions, in blocks of R rows, then rounds by at most (R + n P / R) 2^-53 n 2^14 C, and its rounding to float32 by
n 2^-24 C; all layers together too, by the triangle inequality. Twice that, for two batches, is below 0.01 C for up to
`MOST_RECORDS` records and 128 positions.
"""
MILD = 2.0**-7
"""Least norm of a contribution of several products, in parts of the sum A of their magnitudes.

A float32 sum over n records of P positions then rounds by at most n P 2^-24 n 2^7 C, and by far less if errors of both
signs occur. A record whose products cancel further, to less than A / 128, contributes less than the clip allows.
"""
MOST_RECORDS = 2**16
"""Records of a batch for which `SUM_ERROR` is proven, divided by the number of processes that add their sums."""
_WANTED_ERROR, _LARGEST_ERROR = 0.04, 0.06
"""Change that one record may make in the rounding of float32 sums, over C: blocks aim at the first; sums above the
second are float64."""
MOST_POSITIONS = 2**20
"""Positions of a record up to which the rounding of float64 sums is counted."""
_LEAST_COUNTED = 2**16
"""Least number of records of a batch for which that rounding is counted."""


@dataclass(frozen=True, kw_only=True)
class CountedSums:
    """How to add clipped contributions so that the noise covers the change that one record makes in their rounding.

    A sum of m float32 products, in any order, is off by at most gamma_m = m u / (1 - m u) times the sum of their
    sizes, u = 2^-24 (Higham 2002, section 3.1). For an outer product s u^T, and for a gradient that was formed, these
    have the norm of the contribution itself: over n records of norm C all layers together are off by gamma_m n C.
    With blocks of k records, whose sums are added in float32, m is k plus their number. Records of several positions,
    whose products may cancel to 1 / 128 of their sizes (`MILD`), are added in float64 instead, or their gradients are
    formed first (`LinearUse.formed_totals`). Each of two neighbouring batches is off by that much.

    Records beyond `records` are added in float64, and the whole sum then stays float64 until it is rounded with its
    noise. So the bound holds for every batch of at most 2^16 records, or of twice the counted ones if they are more.

    Attributes:
        records: Records of a step on one process that are added in float32, at least 1; a public number.
        processes: The processes that add their sums, in float64.
        block: Records that are added at once in float32; 0 for float64 sums.
    """

    records: int
    processes: int
    block: int

    @classmethod
    def of(cls, records: int, *, processes: int) -> CountedSums:
        """Return the largest equal blocks of a step's `records` on a process whose error is small, or float64 sums."""
        count = records * processes
        wanted = max(_WANTED_ERROR * 2.0**23 / count, records**0.5)
        block = math.ceil(records / math.ceil(records / wanted))
        found = cls(records=records, processes=processes, block=block)
        return found if found.error <= _LARGEST_ERROR else replace(found, block=0)

    @property
    def error(self) -> float:
        """Largest change that one record makes in the rounding of the sum and of its own contribution, over C."""
        count = self.records * self.processes
        terms = self.block + math.ceil(self.records / self.block) if self.block else 0
        rounded = 2 if self.block else 0  # each part and the total, to float32
        most = max(2 * count, _LEAST_COUNTED)
        exact = most * (most + MOST_POSITIONS) * 2.0**-52 / MILD
        return 1.01 * (2 * count * (terms + rounded) * 2.0**-24 + exact) + 2.0**-19


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Factors that scale the contributions of a batch's records to one layer.

    Attributes:
        factors: Multiply the contributions, in [0, 2^60], float64, shape (batch,); 0 removes a record, whatever it
            holds.
        rounded: The factors in float32.
        squares: Squares of the norms from which the factors were computed, float64, shape (batch,). A layer that
            computes a contribution again must keep it within factor times norm.
        kept: Marks the records that contribute, bool, shape (batch,); None if all of them do.
    """

    factors: Tensor
    rounded: Tensor
    squares: Tensor
    kept: Tensor | None

    @classmethod
    def of_layers(cls, factors: Tensor, squares: Tensor) -> list[Clip]:
        """Return the clip of each layer, shapes (layers, batch).

        A record contributes if all its norms are finite and a factor is above 0. On the CPU the host checks once
        whether all records contribute, which costs nothing; on other devices the clip always masks.
        """
        kept = (squares.sum(dim=0) < torch.inf) & (factors.sum(dim=0) > 0)
        masks = None if are_all(kept) else kept
        return [
            cls(factors=factor, rounded=rounded, squares=own, kept=masks)
            for factor, rounded, own in zip(
                factors.unbind(0), factors.float().unbind(0), squares.unbind(0), strict=True
            )
        ]

    def finite(self, rows: Tensor) -> Tensor:
        """Return rows (batch, ...), zeros for records that do not contribute."""
        return rows if self.kept is None else finite_rows(rows, self.kept)


def are_all(kept: Tensor) -> bool:
    """Return whether all records are kept; False on a graphics card, where the host would wait for the answer."""
    return kept.device.type == "cpu" and bool(kept.all())


class Measured(NamedTuple):
    """Norms, and how far they may be off: the exact norm is at most norms (1 + relative) + absolute.

    Attributes:
        norms: float32 or float64, shape (batch,).
        relative: Of a sum of n squares in any order: (n + 8) 2^-24.
        absolute: For squares that vanish: sqrt(n) 2^-62.
    """

    norms: Tensor
    relative: float
    absolute: float


def measured(values: Iterable[Tensor], *, coarsely: bool = False) -> list[Measured]:
    """Measure the Euclidean norm of each record's numbers in several float32 or float64 tensors, formed one by one.

    Each record's norm depends on its numbers only; otherwise one record would move the factors of others. Coarsely, the
    norm of a long row may be off by more than 1e-4, which a bound on rounding allows.
    """
    found = []
    for each in values:
        flat, limit = each.flatten(1), _LONG_ROW if coarsely else _SHORT_ROW
        # 1. Replace a long row by the norms of its blocks, until it is short.
        cut: list[tuple[int, int]] = []
        while (terms := flat.shape[1]) > limit and flat.dtype != torch.float64:
            block, limit = _block(terms), _SHORT_ROW
            whole = terms // block * block
            norms = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, block)), dim=2)
            if whole < terms:
                rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
                norms = torch.cat([norms, rest], dim=1)
            flat = norms
            cut.append((terms, block))
        # 2. Its norm, and the errors of all levels.
        relative = 2.0**-23 if flat.dtype == torch.float64 else (terms + 8) * 2.0**-24
        absolute = terms**0.5 * _VANISHED
        for terms, block in reversed(cut):
            relative = (block + 8) * 2.0**-24 + 1.01 * relative
            absolute = terms**0.5 * _VANISHED + absolute
        found.append(Measured(torch.linalg.vector_norm(flat, dim=1).float(), relative, absolute))
        del each, flat  # before the next is formed
    return found


@lru_cache(maxsize=1024)
def _block(terms: int) -> int:
    """Return a block length that divides a row evenly, or a middle one if none does."""
    return next((length for length in _BLOCKS if terms % length == 0), _BLOCKS[len(_BLOCKS) // 2])


def resolved(found: Sequence[Measured]) -> Tensor:
    """Return upper bounds on the norms, float64, shape (len(found), batch); infinite from 2^60 on, or for NaN."""
    norms = torch.stack([each.norms for each in found])
    relative, absolute = constants(
        (tuple(1 + each.relative for each in found), tuple(each.absolute for each in found)), norms.device
    )
    bounds = torch.addcmul(absolute, norms, relative)  # float64
    return bounds / (norms < _LARGEST_NORM)  # by 1, or by 0: infinite


@lru_cache(maxsize=512)
def constants(values: tuple[tuple[float, ...], ...], place: torch.device) -> tuple[Tensor, ...]:
    """Return columns of public float64 numbers on a torch device, shapes (n, 1); copied there once."""
    return tuple(torch.tensor(column, dtype=torch.float64, device=place)[:, None] for column in values)


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each record's numbers, rows of any shape, float64, shape (batch,).

    Finite for all finite float32 numbers, with a relative error below 1e-12; NaN or infinite only if a number is.
    """
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    parts = flat.split(max(1, _FLOAT64_CHUNK // max(flat.shape[1], 1)))
    norms = [torch.linalg.vector_norm(part.double(), dim=1) for part in parts]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def norm_bounds(rows: Tensor) -> Tensor:
    """Return an upper bound on the norm of each record's numbers, float64, shape (batch,).

    It takes a fraction of the time of `row_norms`. It is at most 1e-4 of the norm and sqrt(n) 2^-62 above it, and
    infinite for norms from 2^60 on.
    """
    return resolved(measured([rows]))[0]


def bounded_factors(norms: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm) for each record, float64, shape (batch,).

    0 if the norm is not finite, or above 2^100 bound, because float32 holds such factors with few digits.
    """
    factors = (bound / norms.double()).clamp(max=1.0)
    return torch.where(factors >= LEAST_FACTOR, factors, 0.0)  # 0 for NaN and 1 / infinity, too


def multipliers(factors: Tensor) -> Tensor:
    """Round float64 factors, at least 0 or NaN, to float32, unless some would be subnormal or infinite there.

    Each factor is rounded on its own: if one record's factor decided for all, the last bits of others would change. The
    result is float32 on a CPU if every factor allows it, else float64; both give equal products with float32 rows.
    """
    extreme = ((factors > 0) & (factors < 2.0**-60)) | (factors > 2.0**60)
    rounded = factors.float()
    if extreme.device.type == "cpu" and not bool(extreme.any()):
        return rounded
    return torch.where(extreme, factors, rounded.double())


def product_slack(terms: int) -> float:
    """Bound the error of a float32 sum of `terms` products, relative to the sum of the products' magnitudes.

    The bound is (terms + 7) 2^-24 in any order of summation, with one rounding per product and four for scaling (Higham
    2002, section 3.1), doubled. By Cauchy and Schwarz, sum_p |a_p| |b_p| <= |a| |b| over all positions p.
    """
    return (terms + 7) * 2.0**-23


def finite_rows(rows: Tensor, keep: Tensor) -> Tensor:
    """Return the rows (batch, ...) that `keep` marks and zeros elsewhere, so that no factor of 0 meets a NaN."""
    return torch.where(keep.view(-1, *[1] * (rows.ndim - 1)), rows, 0.0)


def widest(place: torch.device) -> torch.dtype:
    """Return the type of sums on a torch device: float64, or float32 where there is none."""
    return torch.float32 if place.type in WITHOUT_FLOAT64 else torch.float64


def by_record(values: Tensor, rows: Tensor) -> Tensor:
    """Reshape one value per record, shape (batch,), to broadcast over rows (batch, ...)."""
    return values.view(-1, *[1] * (rows.ndim - 1))


@contextmanager
def full_precision(place: str = "cpu") -> Iterator[None]:
    """Compute products of float32 numbers in float32, without a graph, even if the process allows fewer digits.

    TF32 has 11 bits and bfloat16 8; torch.autocast, on the kind of torch device `place`, allows as few. cuDNN is
    switched off too: its fast convolutions round by more than `product_slack`.
    """
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled
    on_processor: Any = getattr(torch.backends.mkldnn, "conv", None)  # from torch 2.9
    convolutions = getattr(on_processor, "fp32_precision", None)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.enabled = False
    if convolutions is not None:
        on_processor.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(place, enabled=False):
            yield
    finally:
        if convolutions is not None:
            on_processor.fp32_precision = convolutions
        torch.backends.cudnn.enabled = cudnn
        torch.set_float32_matmul_precision(precision)


def clip_entries(v: Tensor, bound: float) -> Tensor:
    """clip_c(v)_k = sign(v_k) min(c, |v_k|), entry by entry, c >= 0."""
    return v.clamp(-bound, bound)


def offset_entries(v: Tensor, offset: float) -> Tensor:
    """offset_nu(v)_k = v_k + nu."""
    return v + offset if offset else v


def ball_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """Return min(gain, s / ||v||_2) for each row v, the factors that bring gain v into the ball, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; both multiply float32 rows in place.
    """
    norms = row_norms(v).clamp_min_(torch.finfo(torch.float64).tiny)
    return multipliers((radius / norms).clamp_max_(gain)[:, None])


def sphere_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """Return s / ||v||_2, the factor that brings each row to the sphere, 0 for a zero row, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; both multiply float32 rows in place. A
    gain has no effect. Section 4 of the PDFA paper describes a signal whose norm *is* tau_f; the scale of eq. 9 only
    bounds it.
    """
    norms = row_norms(v)
    return multipliers(torch.where(norms > 0, radius / norms, 0.0)[:, None])


class ClippedNeurons(nn.Module):
    """Neurons that output clip_c(offset_nu(h)) in the forward pass, and therefore at inference too.

    c = tau_h_max / sqrt(n) and nu = tau_h_min / sqrt(n) with n the layer's width, eq. 9 of the PDFA paper.

    Args:
        width: n, the number of neurons.
        tau_h_max: tau_h^max > 0.
        tau_h_min: tau_h^min in [0, tau_h_max].
    """

    def __init__(self, width: int, tau_h_max: float, tau_h_min: float = 0.0) -> None:
        super().__init__()
        self.width, self.tau_h_max, self.tau_h_min = width, tau_h_max, tau_h_min

    def forward(self, h: Tensor) -> Tensor:
        """Clip activations of shape (batch, width)."""
        root = self.width**0.5
        return clip_entries(offset_entries(h, self.tau_h_min / root), self.tau_h_max / root)

    def passes(self, h: Tensor) -> Tensor:
        """Return the derivative of the clip: 1 inside the interval, 0 outside, shape (batch, width)."""
        root = self.width**0.5
        return (offset_entries(h, self.tau_h_min / root).abs() < self.tau_h_max / root).to(h.dtype)

    def extra_repr(self) -> str:
        """Return the arguments that torch prints."""
        return f"{self.width}, tau_h_max={self.tau_h_max}, tau_h_min={self.tau_h_min}"


@dataclass(frozen=True, kw_only=True)
class ActivationClipping:
    """clip_c(offset_nu(h)) on the activations that enter a weight update.

    Eq. 8 writes h_l although the update of layer l needs h_(l-1), and eq. 9 divides by sqrt(n_l). So the clipped layers
    and the width in the bound are options.

    Attributes:
        tau_h_max: tau_h^max > 0; c = tau_h_max / sqrt(n). None switches the clip off.
        tau_h_min: tau_h^min >= 0; the offset is nu = tau_h_min / sqrt(n).
        layers: "all"; "hidden": not the network's input; "feedback": only layers that receive a
            projected error, so not the output layer; "none".
        width: n above: "fan-in" takes the width of the clipped vector, "layer" that of the updated layer.
    """

    tau_h_max: float | None = None
    tau_h_min: float = 0.0
    layers: ClippedLayers = "all"
    width: WidthRule = "fan-in"

    def applies_to(self, layer: int, depth: int) -> bool:
        """Return whether the update of a layer (0 .. depth-1) uses clipped activations."""
        if self.tau_h_max is None or self.layers == "none":
            return False
        if self.layers == "hidden":
            return layer > 0
        if self.layers == "feedback":
            return layer < depth - 1
        return True

    def __call__(self, h: Tensor, *, layer: int, depth: int, n_layer: int) -> Tensor:
        """Return what the update of a layer (0 .. depth - 1) of n_layer neurons uses for h_(l-1), shape (batch, n)."""
        if self.tau_h_max is None or not self.applies_to(layer, depth):
            return h
        root = (h.shape[1] if self.width == "fan-in" else n_layer) ** 0.5
        return clip_entries(offset_entries(h, self.tau_h_min / root), self.tau_h_max / root)
