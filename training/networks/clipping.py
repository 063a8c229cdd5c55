"""Clip records: norms and factors that hold for every finite float32 number, and the operators of the PDFA paper.

A clip must hold in the arithmetic that runs. Float32 breaks it in three ways:

- squares below 7e-46 vanish and squares above 3e38 overflow, so the norm of tiny or huge numbers is 0 or infinite;
- long sums round: the norm of 10^6 nearly equal numbers may be off by 0.1 %;
- sums of many signed products cancel: only rounding errors remain, which no norm of the exact sum bounds.

Therefore norms are accumulated in float64, whose range holds every product of four float32 numbers; a factor times a
row is formed in float32 only if no result is near the smallest float32; and the norm of a contribution that is itself a
sum of products is raised by the largest possible rounding error of that sum (`product_slack`). Whatever a record holds,
its contribution then has norm at most C (1 + 1e-6).

Operators of the PDFA paper (section 3.1, eqs. 8 and 9): `clip_entries`, `offset_entries`, `scale_to_ball`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.config.sections import ClippedLayers, WidthRule

_FLOAT64_CHUNK = 2**20
"""Numbers converted to float64 at once, 8 MiB."""
_SHORT_ROW = 1600
"""Length up to which a float32 sum of squares, in any order, is off by less than 1e-4 of the norm."""
_BLOCK = 256
"""Numbers of a longer row whose squares are summed in float32; the sum over blocks takes float64."""
_SAFE_NORMS = (1e-15, 1e15)
"""Range of float32 norms whose squares neither overflowed nor lost terms; vanished squares are below 1e-45 each."""
_SUBNORMAL_GUARD = 2.0**-60
"""Products with numbers below it may be subnormal, and then round by more than 2^-24 of themselves."""
_EXACT_ROWS = 4096
"""Rows whose products are summed at once in float64, so that the error does not grow with the batch's whole size."""
CANCELLED = 2.0**-14
"""Share of sum_p |s_p| |u_p| by which the norm of a contribution of several uses is raised, see `SUM_ERROR`."""
SUM_ERROR = 0.01
"""Largest change of the rounding of a sum by one record, over C, for weights that are used several times.

Products of several uses may cancel, so that their magnitudes A_i = sum_p |s_ip| |u_ip| exceed a record's norm without
limit. Since the norm is raised by 2^-14 A_i, factors keep f_i A_i <= 2^14 C. A float64 sum over n records with P
positions, in blocks of R rows, then rounds by at most (R + n P / R) 2^-53 n 2^14 C, and its rounding to float32 by
n 2^-24 C; all layers together too, by the triangle inequality. Twice that, for two batches, is below 0.01 C for up to
`MOST_RECORDS` records and 128 positions.
"""
_MILD = 2.0**7
"""Products of one use of magnitude up to this many norms of a record are summed in float32, others in float64.

A float32 sum over n records of P positions then rounds by at most n P 2^-24 n 2^7 C, and by far less if errors of both
signs occur; records with larger products would raise that without limit.
"""
MOST_RECORDS = 2**16
"""Records of a batch for which `SUM_ERROR` is proven, divided by the number of processes that add their sums."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Factors that scale the contributions of a batch's records to one layer.

    Attributes:
        factors: Multiply the contributions, in [0, 1], float64, shape (batch,); 0 removes a record, whatever it holds.
        norms: The norms from which the factors were computed, float64, shape (batch,). A layer that computes a
            contribution again must keep it within factor times norm.
    """

    factors: Tensor
    norms: Tensor


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each record's numbers, float64, shape (batch,).

    Finite for all finite float32 numbers, with a relative error below 1e-12; NaN or infinite only if a number is.

    Args:
        rows: Shape (batch, ...).
    """
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    parts = flat.split(max(1, _FLOAT64_CHUNK // max(flat.shape[1], 1)))
    norms = [torch.linalg.vector_norm(part.double(), dim=1) for part in parts]
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def norm_bounds(rows: Tensor) -> Tensor:
    """Return an upper bound on the norm of each record's numbers, at most 1e-4 above it, float64, shape (batch,).

    A row whose norm is neither tiny nor huge takes a fraction of the time of `row_norms`: float32 norms of the whole
    row, or of blocks of a long one, are raised by (n + 8) 2^-24, the largest error of a float32 sum of n squares in any
    order. Each row's bound depends on that row only; otherwise one record would move the factors of others.

    Args:
        rows: Shape (batch, ...).
    """
    flat = rows.flatten(1)
    terms = flat.shape[1]
    if terms <= _SHORT_ROW:
        norms = torch.linalg.vector_norm(flat, dim=1).double()
    else:
        terms, whole = _BLOCK, flat.shape[1] // _BLOCK * _BLOCK
        blocks = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
        norms = torch.linalg.vector_norm(torch.cat([blocks, rest], dim=1).double(), dim=1)
    bounds = norms * (1 + (terms + 8) * 2.0**-24)
    unsafe = torch.nonzero(~safe_in_float32(norms)).flatten()
    return bounds.index_copy(0, unsafe, row_norms(flat[unsafe])) if len(unsafe) else bounds


def safe_in_float32(norms: Tensor) -> Tensor:
    """Return whether float32 products of rows with these norms lose at most 1e-15 of the largest, shape (batch,)."""
    return (norms > _SAFE_NORMS[0]) & (norms < _SAFE_NORMS[1])


def bounded_factors(norms: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm) for each record, and 0 if the norm is not finite, float64, shape (batch,)."""
    exact = norms.double()
    factors = (bound / exact.clamp_min(torch.finfo(exact.dtype).tiny)).clamp(max=1.0)
    return torch.where(torch.isfinite(exact), factors, 0.0)


@dataclass(frozen=True, kw_only=True)
class ScaledRows:
    """Factors times rows, each row with an error of at most 2^-22 of its norm.

    Rows that float32 cannot hold are found one by one and stored separately. If one record switched all sums from
    float32 to float64, the rounding of the other records would change by up to the batch size times 2^-24 of their sum,
    which exceeds a clip from a few thousand records on.

    Attributes:
        rows: float32, shape (batch, ...); 0 for the separate rows.
        apart: Positions of the separate rows, which would be subnormal in float32, or cancel, shape (m,), int64.
        exact: These rows, float64, shape (m, ...); sums of their products need float64.
    """

    rows: Tensor
    apart: Tensor
    exact: Tensor

    def totals(self, others: Tensor, products: Callable[[Tensor, Tensor], list[Tensor]]) -> list[Tensor]:
        """Sum products of these rows and others over the records, float32.

        Args:
            others: float32 or indices, shape (batch, ...).
            products: Maps rows and others of one dtype to sums over records.
        """
        totals = products(self.rows, others)
        if not len(self.apart):
            return totals
        own = others[self.apart]
        added = products(self.exact, own.double() if own.is_floating_point() else own)
        return [(total.double() + more).float() for total, more in zip(totals, added, strict=True)]


def cancels(magnitudes: Tensor, norms: Tensor) -> Tensor:
    """Return which records have products that cancel so far that a batch's sum of them needs float64, shape (batch,).

    Args:
        magnitudes: Bounds on sum_p |s_p| |u_p|, float64, shape (batch,).
        norms: Of the records' contributions, float64, shape (batch,).
    """
    return magnitudes > _MILD * norms


@dataclass(frozen=True, kw_only=True)
class ExactRows:
    """Factors times rows for sums in float64, which products that cancel need; see `SUM_ERROR`.

    Attributes:
        rows: Finite, float32, shape (batch, ...).
        factors: In [0, 1], float64, shape (batch,).
        positions: Products of each record.
    """

    rows: Tensor
    factors: Tensor
    positions: int

    def totals(self, others: Tensor, products: Callable[[Tensor, Tensor], list[Tensor]]) -> list[Tensor]:
        """Sum products of these rows and others over the records, float64; arguments as `ScaledRows.totals` takes."""
        step = max(1, _EXACT_ROWS // self.positions)
        totals: list[Tensor] = []
        for rows, factors, own in zip(
            self.rows.split(step), self.factors.split(step), others.split(step), strict=True
        ):
            wide = own.double() if own.is_floating_point() else own
            added = products(rows.double() * by_record(factors, rows), wide)
            totals = (
                [total.add_(more) for total, more in zip(totals, added, strict=True)] if totals else added
            )
        return totals


def scaled_rows(rows: Tensor, factors: Tensor, cancelling: Tensor | None = None) -> ScaledRows:
    """Multiply rows by factors.

    Args:
        rows: Finite, float32, shape (batch, ...).
        factors: In [0, 1], float64, shape (batch,).
        cancelling: Marks rows whose products need float64, as `cancels` finds them, shape (batch,); None for none.
    """
    scaled = rows * by_record(factors.float(), rows)
    norms = norm_bounds(scaled)
    normal = (
        (factors > _SUBNORMAL_GUARD) & ((norms == 0) | (norms > _SUBNORMAL_GUARD))
        | (factors == 0)
        | (factors == 1)
    )
    if cancelling is not None:
        normal &= ~cancelling
    apart = torch.nonzero(~normal).flatten()
    exact = rows[apart].double() * by_record(factors[apart], rows)
    return ScaledRows(rows=finite_rows(scaled, normal) if len(apart) else scaled, apart=apart, exact=exact)


def weighted_sums(parts: Sequence[Tensor], factors: Tensor, norms: Tensor) -> list[Tensor]:
    """Return sum_i f_i rows_i of each part, shape (n,), each term with an error of at most 2^-22 of its norm.

    Terms that float32 cannot hold are added in float64, one by one, as in `scaled_rows`.

    Args:
        parts: What each record's row consists of, float32 or float64, shapes (batch, n).
        factors: In [0, 1], float64, shape (batch,); 0 removes a row, whatever it holds.
        norms: Norms of the whole rows, over all parts, float64, shape (batch,).
    """
    used = factors > 0
    kept = parts if bool(used.all()) else [finite_rows(rows, used) for rows in parts]
    normal = (factors == 1) | ((factors > _SUBNORMAL_GUARD) & (factors * norms > _SUBNORMAL_GUARD))
    rounded = torch.where(normal, factors, 0.0).float()
    apart = torch.nonzero(used & ~normal).flatten()
    sums = []
    for rows in kept:
        if rows.dtype == torch.float64:
            sums.append(factors @ rows)
            continue
        total = rounded @ rows
        sums.append(total.double() + factors[apart] @ rows[apart].double() if len(apart) else total)
    return sums


def multipliers(factors: Tensor) -> Tensor:
    """Round factors to float32, except those that would be subnormal or infinite there.

    Each factor is rounded on its own: if one record's factor decided for all, the last bits of others would change.

    Args:
        factors: At least 0 or NaN, float64.

    Returns:
        float32, or float64 if some factor needs it; both give the same float32 products with float32 rows.
    """
    extreme = ((factors > 0) & (factors < _SUBNORMAL_GUARD)) | (factors > 1 / _SUBNORMAL_GUARD)
    rounded = factors.float()
    return torch.where(extreme, factors, rounded.double()) if bool(extreme.any()) else rounded


def product_slack(terms: int) -> float:
    """Bound the error of a float32 sum of `terms` products, relative to the sum of the products' magnitudes.

    The bound is (terms + 7) 2^-24 in any order of summation, with one rounding per product and four for scaling (Higham
    2002, section 3.1), doubled. By Cauchy and Schwarz, sum_p |a_p| |b_p| <= |a| |b| over all positions p.
    """
    return (terms + 7) * 2.0**-23


def finite_rows(rows: Tensor, keep: Tensor) -> Tensor:
    """Return the rows (batch, ...) that `keep` marks and zeros elsewhere, so that no factor of 0 meets a NaN."""
    return torch.where(by_record(keep, rows), rows, 0.0)


def by_record(values: Tensor, rows: Tensor) -> Tensor:
    """Reshape one value per record, shape (batch,), to broadcast over rows (batch, ...)."""
    return values.view(-1, *[1] * (rows.ndim - 1))


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 numbers in float32, even if the process allows TF32 (11 bits) or bfloat16 (8).

    cuDNN is switched off too: its fast convolutions round by more than `product_slack`.
    """
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        torch.set_float32_matmul_precision(precision)


def clip_entries(v: Tensor, bound: float) -> Tensor:
    """clip_c(v)_k = sign(v_k) min(c, |v_k|), entry by entry.

    Args:
        v: Any shape.
        bound: c >= 0.
    """
    return v.clamp(-bound, bound)


def offset_entries(v: Tensor, offset: float) -> Tensor:
    """offset_nu(v)_k = v_k + nu."""
    return v + offset if offset else v


def ball_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """Return min(gain, s / ||v||_2) for each row, the factors that bring gain v into the ball, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; both multiply float32 rows in place.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
        gain: Public constant, > 0.
    """
    norms = row_norms(v).clamp_min_(torch.finfo(torch.float64).tiny)
    return multipliers((radius / norms).clamp_max_(gain)[:, None])


def scale_to_ball(v: Tensor, radius: float) -> Tensor:
    """scale_s(v) = min(s, ||v||_2) v / ||v||_2 for each row; a zero row stays zero.

    Guarantees that every finite float32 row has norm at most s (1 + 1e-6) and that rows within the ball are unchanged.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
    """
    return (v * ball_factors(v, radius)).to(v.dtype)


def sphere_factors(v: Tensor, radius: float, *, gain: float = 1.0) -> Tensor:
    """Return s / ||v||_2, the factor that brings each row to the sphere, 0 for a zero row, shape (batch, 1).

    float32, or float64 if a factor would be subnormal or infinite in float32; both multiply float32 rows in place.
    Section 4 of the PDFA paper describes a signal whose norm *is* tau_f; the scale of eq. 9 only bounds it.

    Args:
        v: Vectors as rows, shape (batch, n).
        radius: s > 0.
        gain: Has no effect, because gain v reaches the same sphere.
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
        """Return the activations that the update of a layer uses for h_(l-1).

        Args:
            h: Activations h_(l-1), shape (batch, n_(l-1)).
            layer: Layer number, 0 .. depth-1.
            depth: Number of layers L.
            n_layer: Width n_l of the updated layer.
        """
        if self.tau_h_max is None or not self.applies_to(layer, depth):
            return h
        root = (h.shape[1] if self.width == "fan-in" else n_layer) ** 0.5
        return clip_entries(offset_entries(h, self.tau_h_min / root), self.tau_h_max / root)
