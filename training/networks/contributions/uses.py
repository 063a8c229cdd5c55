"""Uses of parameters at which every record adds sums of outer products: linear maps, embeddings and convolutions.

With delta the gradient at the output of a use and h its input, record i adds sum_p s_ip u_ip^T over positions p to a
matrix, where s comes from delta and u from h, or the other way round. The norm of that sum is found without forming it
if that takes fewer products. Other uses form the gradients of some records at once (`Use.rows`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from typing_extensions import override

from opusim.training.networks.clipping import (
    MILD,
    MOST_POSITIONS,
    Clip,
    Measured,
    by_record,
    finite_rows,
    measured,
    product_slack,
)

_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
_GRAM_COST = 2
"""Time of a multiplication in Gram matrices, over one in a gradient."""
_GRAM_RAISES = 2.0**-8
"""Twice the largest share by which float32 Gram matrices may raise a norm, for orthogonal positions."""
_FORMED_POSITIONS = 8
"""Least positions of a record for which forming its gradient is faster than summing its products in float64."""
_FORMED_AT_ONCE = 2**19
"""Numbers of gradients that are formed at once and added, so that they stay in a processor's cache."""
_EXACT_ROWS = 4096
"""Rows whose products are summed at once in float64, so that the error does not grow with the batch's whole size."""
_NUMBERS_LIMIT = 2**24
"""Numbers of per-record gradients or unfolded inputs in memory at once, counted in float32; on a card 16 times that."""
ALL = slice(None)
"""All records of a batch."""
NOWHERE: Mapping[int, Tensor] = {}
"""No tensors to write sums into."""


class Part(NamedTuple):
    """A part of a contribution, of norm at most max(formed + slack |s| |u|, least |s| |u|).

    Attributes:
        formed: Norm of the formed sum; None if only the product bounds the part.
        s: Norm of the signals; None counts as 1.
        u: Norm of the inputs; None counts as 1.
        slack: Rounding error over |s| |u|, or 1 if the part *is* that product; 0 if s and u are None.
        least: Least norm over |s| |u|, see `MILD`.
    """

    formed: Measured | None
    s: Measured | None = None
    u: Measured | None = None
    slack: float = 0.0
    least: float = 0.0


class Use(ABC):
    """What the records add to the gradients of some tensors.

    Attributes:
        wrt: Parameters, or tensors computed from parameters only.
        records: Number of records in the batch.
        numbers: Numbers that `rows` holds for one record while it computes, about.
    """

    wrt: list[Tensor]
    records: int
    numbers: int

    @abstractmethod
    def rows(self, part: slice) -> list[Tensor]:
        """Return J_i^T delta_i of the records of a part, one tensor (some, *shape) for each of `wrt`."""


class OuterUse(Use):
    """A use that adds sum_p s_p u_p^T to a matrix, and sum_p s_p to a bias if there is one.

    Attributes:
        weight: The matrix, of whatever shape.
        bias: The bias, or None; `wrt` holds the weight, then the bias.
        sizes: Numbers of a row of s and of u, over all groups of outputs.
        positions: Number of positions p of a record.
        single: Whether one position is a single product, of norm |s| |u|.
        reach: Upper bound on sum_p |s_p| |u_p| over |delta| |h| (Cauchy and Schwarz).
        delta: Signals, float32, shape (records, ...).
        h: Inputs, float32, or indices, shape (records, ...).
        forms_sums: Whether it has `formed_totals`.
    """

    forms_sums = False
    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, int]
    positions: int
    single: ClassVar[bool] = False
    reach: float = 1.0
    delta: Tensor
    h: Tensor

    @abstractmethod
    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return s and u of some records as columns, (some, groups, a, positions) and (some, groups, b, positions)."""

    def sizes_of(self) -> tuple[Measured, Measured, float]:
        """Return |s|, |u| and a factor, whose product bounds sum_p |s_p| |u_p| of the matrix, with bias if any."""
        s, u = measured((self.delta, self.h), coarsely=True)
        return s, u, self.reach

    @abstractmethod
    def products(self, delta: Tensor, h: Tensor, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """Return the sums over records and positions of signals times inputs, one tensor for each of `wrt`.

        Rows of signals and inputs are float32 or float64; `into` has tensors, by the parameter's id, that may be
        overwritten.
        """

    @classmethod
    def totals_of(
        cls,
        uses: Sequence[tuple[Self, Clip]],
        into: Mapping[int, Tensor] = NOWHERE,
        block: int | None = None,
    ) -> list[list[Tensor]]:
        """Return sum_i f_i J_i^T delta_i of each use, one tensor for each of `wrt`.

        Args:
            uses: The uses, and the factors of each.
            into: Float32 tensors that may be overwritten and returned, by the id of the parameter.
            block: Records whose products are summed at once in float32, if they have one position each or their
                gradients are formed (`formed_totals`). 0: float64 sums, by blocks of some thousand rows. None: one
                float32 sum of all.

        Raises:
            ValueError: A record has more positions than `CountedSums` counts.
        """
        found = []
        for use, clip in uses:
            if block is not None and use.positions > MOST_POSITIONS:
                raise ValueError(
                    f"a record has {use.positions:,} positions in a layer, and rounding is counted for at most "
                    f"{MOST_POSITIONS:,}; cut records into shorter ones"
                )
            if block and use.forms_sums and use.positions >= _FORMED_POSITIONS:
                found.append(use.formed_totals(clip, block))
                continue
            kept, inputs, signals = clip.kept, use.h, use.delta
            exact = block == 0 or (block is not None and use.positions > 1)
            if not exact:
                signals = signals * clip.rounded.view(-1, *[1] * (signals.ndim - 1))
            if kept is not None:
                signals = finite_rows(signals, kept)
                inputs = finite_rows(inputs, kept) if inputs.is_floating_point() else inputs
            step = max(1, _EXACT_ROWS // max(1, use.positions) if exact else block or use.records)
            totals: list[Tensor] = []
            for start in range(0, max(1, use.records), step):  # also for no record
                own, x = signals[start : start + step], inputs[start : start + step]
                if exact:
                    own = own.double() * by_record(clip.factors[start : start + step], own)
                    x = x.double() if x.is_floating_point() else x
                added = use.products(own, x, NOWHERE if exact or totals else into)
                totals = (
                    [total.add_(more) for total, more in zip(totals, added, strict=True)] if totals else added
                )
            found.append(totals)
        return found

    def formed_totals(self, clip: Clip, block: int) -> list[Tensor]:
        """Return the same from gradients that are formed in float32, some records at a time, and then added.

        The norms include the rounding of forming, so only the sum over records counts, as for single products.
        """
        raise NotImplementedError

    def signals(self, part: slice = ALL) -> Tensor:
        """Return the sum over positions that some records add to the bias, shape (some, outputs)."""
        return self.pairs(part)[0].sum(dim=-1).flatten(1)

    def matrices(self, part: slice) -> Tensor:
        """Return sum_p s_p u_p^T of some records, shape (some, groups, a, b)."""
        s, u = self.pairs(part)
        return s @ u.mT

    def sums(self, part: slice) -> list[Tensor]:
        """Return what some records add as it is measured: `matrices`, and `signals` if there is a bias."""
        whole = self.matrices(part)
        return [whole] if self.bias is None else [whole, self.signals(part)]

    @override
    def rows(self, part: slice) -> list[Tensor]:
        whole = self.matrices(part)
        weight = whole.reshape(len(whole), *self.weight.shape)
        return [weight] if self.bias is None else [weight, self.signals(part)]

    @classmethod
    def parts_of(cls, uses: Sequence[Self]) -> list[list[Part]]:
        """Return the parts of the norm of each record's contribution as `totals_of` forms it in float32."""
        # 1. |s| and |u|: their product is the norm of a single product, and bounds the rounding of sums.
        single = [cls.single and use.positions == 1 for use in uses]
        sizes = {
            alone: iter(
                measured(
                    (
                        values
                        for use, own in zip(uses, single, strict=True)
                        if own is alone
                        for values in (use.delta, use.h)
                    ),
                    coarsely=not alone,
                )
            )
            for alone in set(single)
        }
        # 2. How the sum over positions is found: by forming it, or by Gram matrices; some records at a time.
        several = [use for use, alone in zip(uses, single, strict=True) if not alone]
        formed = [_GRAM_COST * use.positions * sum(use.sizes) >= math.prod(use.sizes) for use in several]
        plan = list(zip(several, formed, chunked(several), strict=True))

        def sums() -> Iterator[Tensor]:
            """Form the sums one after another, and those for biases, and hold none that was handed out."""
            for use, whole, cut in plan:
                for part in cut:
                    own = use.sums(part) if whole else [] if use.bias is None else [use.signals(part)]
                    while own:
                        yield own.pop(0)

        # 3. Their norms, and the largest that rounding may leave.
        found = iter(measured(sums()))
        slacks = {p: product_slack(p) for p in {use.positions for use in several}}
        plans, parts = iter(plan), []
        for use, alone in zip(uses, single, strict=True):
            s, u = next(sizes[alone]), next(sizes[alone])
            if alone:
                own = [Part(None, s, u, slack=1.0), Part(s)]
            else:
                _, whole, cut = next(plans)
                weights, biases = list[Measured](), list[Measured]()
                for part in cut:
                    weights.append(next(found) if whole else measured_by_gram(*use.pairs(part)))
                    if use.bias is not None:
                        biases.append(next(found))
                rounding, root = slacks[use.positions], use.positions**0.5
                norms = [each[0] if len(cut) == 1 else joined(each) for each in (weights, biases) if each]
                slack = rounding * (2 if whole else 1)  # the formed sum rounds too
                own = [Part(norms[0], s, u, slack * use.reach, MILD * use.reach)]
                if use.bias is not None:
                    own.append(Part(norms[1], s, None, 2 * rounding * root, MILD * root))
            parts.append(own if use.bias is not None else own[:1])
        return parts


class LinearUse(OuterUse):
    """v = W h + b at every position: delta has shape (records, ..., a), h (records, ..., b), b may be None."""

    single = True
    forms_sums = True

    def __init__(self, delta: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.sizes = weight.shape[0], weight.shape[1] + (bias is not None)
        self.wrt = [weight] if bias is None else [weight, bias]
        self.records, width = len(delta), delta.shape[-1]
        self.positions = math.prod(delta.shape[1:-1])
        self.delta = delta.reshape(self.records, self.positions, width).float()
        self.h = h.reshape(self.records, self.positions, h.shape[-1]).float()
        self.numbers = 3 * self.positions * sum(self.sizes) + min(math.prod(self.sizes), self.positions**2)

    @override
    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        return self.delta[part].mT[:, None], self.h[part].mT[:, None]

    @override
    def signals(self, part: slice = ALL) -> Tensor:
        return self.delta[part].sum(dim=1) if self.positions > 1 else self.delta[part, 0]

    @override
    def formed_totals(self, clip: Clip, block: int) -> list[Tensor]:
        delta, h = clip.finite(self.delta), clip.finite(self.h)
        step = max(1, _FORMED_AT_ONCE // self.weight.numel())
        totals: list[Tensor] = []
        for start in range(0, self.records, block):
            stop = min(start + block, self.records)
            weight = delta.new_zeros(self.weight.numel())
            for first in range(start, stop, step):
                part = slice(first, min(first + step, stop))
                weight.addmv_(torch.bmm(delta[part].mT, h[part]).flatten(1).t(), clip.rounded[part])
            added = [weight.view_as(self.weight)]
            if self.bias is not None:
                added.append(clip.rounded[start:stop] @ delta[start:stop].sum(dim=1))
            totals = [t.double() + more for t, more in zip(totals, added, strict=True)] if totals else added
        return totals

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: a matrix product for each record, and a sum for its bias."""
        delta = self.delta[part]
        weight = torch.bmm(delta.mT, self.h[part])
        return [weight] if self.bias is None else [weight, delta.sum(dim=1)]

    sums = rows

    def products(self, delta: Tensor, h: Tensor, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """See OuterUse: one matrix product, and a sum for the bias."""
        signals = delta.flatten(0, 1)
        weight = torch.mm(signals.t(), h.flatten(0, 1), out=into.get(id(self.weight)))
        return [weight] if self.bias is None else [weight, signals.sum(dim=0)]


class EmbeddingUse(OuterUse):
    """v_p = W[id_p], ids (records, ...): signals of equal ids add up, those of the padding id, if any, count as 0."""

    bias = None

    def __init__(self, delta: Tensor, ids: Tensor, weight: Tensor, padding: int | None = None) -> None:
        self.weight, self.wrt, self.records = weight, [weight], len(ids)
        self.sizes = weight.shape[0], weight.shape[1]
        self.h = ids.flatten(1)
        self.delta = delta.reshape(self.records, -1, delta.shape[-1]).float()
        if padding is not None:
            self.delta = torch.where((self.h == padding % len(weight))[..., None], 0.0, self.delta)
        self.positions = self.h.shape[1]
        self.numbers = 3 * self.positions * sum(self.sizes) + min(math.prod(self.sizes), self.positions**2)

    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """See OuterUse; s is 1 at the id."""
        once = functional.one_hot(self.h[part], len(self.weight)).mT
        return once[:, None].float(), self.delta[part].mT[:, None]

    def sizes_of(self) -> tuple[Measured, Measured, float]:
        """See OuterUse; a signal of each position is 1."""
        (found,) = measured([self.delta], coarsely=True)
        ones = Measured(torch.ones_like(found.norms), 0.0, 0.0)
        return found, ones, self.positions**0.5

    @classmethod
    def parts_of(cls, uses: Sequence[Self]) -> list[list[Part]]:
        """See OuterUse; signals of an id are added at its first place in the record's sorted ids."""
        parts = []
        for use in uses:
            (n, p), delta = use.h.shape, use.delta
            if p == 1:
                parts.append([Part(measured([delta])[0])])
                continue
            places = torch.searchsorted(use.h.sort(dim=1).values, use.h.contiguous())
            places += torch.arange(0, n * p, p, device=places.device)[:, None]
            sums = torch.zeros_like(delta).flatten(0, 1)
            sums.index_add_(0, places.flatten(), delta.flatten(0, 1))
            size, _, root = use.sizes_of()
            slack = 2 * product_slack(p) * root  # of each sum over an id's positions, here and in the total
            parts.append([Part(measured([sums.view(n, -1)])[0], size, None, slack, MILD * root)])
        return parts

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: signals are added to the rows of their ids."""
        ids, delta = self.h[part], self.delta[part]
        found = delta.new_zeros(len(ids), *self.weight.shape)
        first = torch.arange(len(ids), device=ids.device)[:, None] * len(self.weight)
        found.flatten(0, 1).index_add_(0, (first + ids).flatten(), delta.flatten(0, 1))
        return [found]

    def products(self, delta: Tensor, h: Tensor, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """See OuterUse: one indexed sum."""
        total = delta.new_zeros(self.weight.shape)
        return [total.index_add_(0, h.flatten(), delta.flatten(0, 1))]


class ConvolutionUse(OuterUse):
    """v_op = w_o . u_p + b_o at every position p, u_p the patch under the kernel, in one to three dimensions.

    delta and h have shape (records, images, channels, *positions) or lack the images; options are those of torch.
    """

    def __init__(
        self, delta: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> None:
        self.weight, self.bias = weight, bias
        self.sizes = weight.shape[0], weight.shape[1:].numel() + (bias is not None)
        self.wrt = [weight] if bias is None else [weight, bias]
        self._dims, self.records = weight.ndim - 2, len(delta)
        images = [v if v.ndim == self._dims + 3 else v.unsqueeze(1) for v in (delta, h)]
        self.delta, self.h = (values.float() for values in images)
        sides = {name: _per_dim(options[name], self._dims) for name in ("stride", "padding", "dilation")}
        self._options = {**sides, "groups": options["groups"]}
        self.positions = math.prod(self.delta.shape[3:]) * self.delta.shape[1]
        self.reach = (
            math.prod(weight.shape[2:]) ** 0.5
        )  # an input is in as many patches as the kernel has places
        inputs = weight.shape[1:].numel() * options["groups"]
        self.numbers = 2 * inputs * self.positions + weight.numel()  # the patches, in float64

    @override
    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        groups = self._options["groups"]
        delta, h = self.delta[part], self.h[part]
        patches = self._patches(h.flatten(0, 1)).unflatten(1, (groups, -1))
        signals = delta.flatten(0, 1).flatten(2).unflatten(1, (groups, -1))
        return _merged(signals, len(delta)), _merged(patches, len(delta))

    def factor_rows(self) -> Tensor:
        """Return the patch of each position with a last entry of 1 for a bias, (records, positions, inputs)."""
        patches = self._patches(self.h.flatten(0, 1)).mT
        rows = patches.unflatten(0, (self.records, -1)).flatten(1, 2)
        return rows if self.bias is None else torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)

    @override
    def signals(self, part: slice = ALL) -> Tensor:
        return self.delta[part].flatten(3).sum(dim=(1, 3))

    def products(self, delta: Tensor, h: Tensor, into: Mapping[int, Tensor] = NOWHERE) -> list[Tensor]:
        """See OuterUse: the convolution's weight gradient."""
        signals, size = delta.flatten(0, 1), list(self.weight.shape)
        weight = _WEIGHT_GRADIENTS[self._dims](h.flatten(0, 1), size, signals, **self._options)
        return [weight] if self.bias is None else [weight, signals.transpose(0, 1).flatten(1).sum(dim=1)]

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: one convolution's weight gradient, where the channels of each record are groups of their own.

        On a graphics card torch processes the groups one by one, so patches are multiplied instead.
        """
        if self.delta.device.type != "cpu":
            return super().rows(part)
        delta, h = (values[part].transpose(0, 1) for values in (self.delta, self.h))
        records = delta.shape[1]
        size = [records * len(self.weight), *self.weight.shape[1:]]
        options = {**self._options, "groups": records * self._options["groups"]}
        weight = _WEIGHT_GRADIENTS[self._dims](h.flatten(1, 2), size, delta.flatten(1, 2), **options)
        rows = weight.unflatten(0, (records, -1))
        return [rows] if self.bias is None else [rows, delta.sum(dim=(0, *range(3, delta.ndim)))]

    def _patches(self, h: Tensor) -> Tensor:
        """Shape (images, channels x kernel, positions)."""
        if self._dims == 2 and h.device.type == "cpu":  # on a card, unfold takes the images one by one
            sizes = {"kernel_size": self.weight.shape[2:], **self._options}
            del sizes["groups"]
            return functional.unfold(h, **sizes)
        sides = [side for padding in reversed(self._options["padding"]) for side in (padding, padding)]
        h = functional.pad(h, sides)
        for axis in range(self._dims):
            step, reach = self._options["stride"][axis], self._options["dilation"][axis]
            h = h.unfold(2 + axis, (self.weight.shape[2 + axis] - 1) * reach + 1, step)[..., ::reach]
        kernel = range(2 + self._dims, 2 + 2 * self._dims)
        ordered = h.permute(0, 1, *kernel, *range(2, 2 + self._dims))
        return ordered.flatten(2 + self._dims).flatten(1, 1 + self._dims)


def chunked(uses: Sequence[Any]) -> list[list[slice]]:
    """Cut the batch of each use into parts whose numbers fit into memory; a card needs large ones to be busy.

    A use has the attributes `wrt`, `records` and `numbers` of `Use`.
    """
    cuts = []
    for use in uses:
        limit = _NUMBERS_LIMIT if use.wrt[0].device.type == "cpu" else 16 * _NUMBERS_LIMIT
        step = max(1, limit // max(1, use.numbers))
        cuts.append([slice(n, min(n + step, use.records)) for n in range(0, use.records, step)])
    return cuts


def joined(found: Sequence[Measured]) -> Measured:
    """Join the norms of parts of a batch that were measured alike."""
    if len(found) == 1:
        return found[0]
    return Measured(torch.cat([each.norms for each in found]), found[0].relative, found[0].absolute)


def measured_by_gram(s: Tensor, u: Tensor) -> Measured:
    """Bound the norm of sum_p s_p u_p^T of each record, over all groups, by Gram matrices.

    s and u have shapes (records, groups, a, P) and (records, groups, b, P), float32 or float64. The square is the sum
    over p and q of (s_p . s_q) (u_p . u_q). A computed product s_p . s_q is off by at most gamma |s_p| |s_q|, gamma of
    as many terms as s has numbers (Higham 2002, section 3.1), and by what vanishes. By Cauchy and Schwarz all of them
    move the square by at most (gamma_s + gamma_u) |s|^2 |u|^2, which is added. The sum over orthogonal positions is |s|
    |u| / sqrt(P) long, so this raises its norm by P (gamma_s + gamma_u) / 2 of itself: float32 serves up to
    `_GRAM_RAISES`, else the products are float64.
    """
    terms, positions = s.shape[-2] + u.shape[-2] + 8, s.shape[-1]
    unit = 2.0**-24
    if s.dtype == torch.float64 or positions * terms * unit > _GRAM_RAISES:
        s, u, unit = s.double(), u.double(), 2.0**-53
    # 1. Both matrices of every record and group, in float64.
    groups = s.shape[:-2].numel()
    grams = s.new_empty(2, groups, positions, positions)
    for columns, gram in zip((s, u), grams.unbind(0), strict=True):
        flat = columns.reshape(groups, columns.shape[-2], positions)
        torch.bmm(flat.mT, flat, out=gram)
    own, other = grams = grams.double()
    # 2. |s|^2 and |u|^2; products below 2^-126 vanish, which changes them by less than P 2^-100 after the factor.
    sizes = grams.diagonal(dim1=-2, dim2=-1).sum(dim=-1) + positions * 2.0**-100
    # 3. The sum of the products with its error, and so at least 0.
    error = 1.02 * terms * unit + positions**2 * 2.0**-52
    squares = torch.addcmul((own * other).sum(dim=(-2, -1)), *sizes, value=error)
    if groups > len(s):
        squares = squares.view(len(s), -1).sum(dim=1)
    return Measured(squares.sqrt(), 2.0**-22, 0.0)


def _merged(columns: Tensor, records: int) -> Tensor:
    """(records images, groups, a, positions) to (records, groups, a, images positions)."""
    return columns.unflatten(0, (records, -1)).permute(0, 2, 3, 1, 4).flatten(3)


def _per_dim(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
