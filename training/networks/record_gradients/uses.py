"""Each use of a parameter in a forward pass, and what every record of the batch adds to the parameter's gradient there.

A use is one call of a torch function on a parameter, or on a tensor computed from parameters only. With delta the
gradient at the call's output and h its other arguments, record i adds J_i^T delta_i.

- Linear maps, embeddings and convolutions add sums of outer products sum_p s_ip u_ip^T over positions p, which are
  measured without being formed (`OuterUse`).
- Every other use forms the gradients of some records at once (`Use.rows`).
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from training.networks.clipping import ExactRows, ScaledRows, norm_bounds, product_slack
from training.networks.layers import outer_squared_norms, outer_sum_bounds
from training.networks.record_gradients.calls import Call, Use, affine, bound, real_tensors
from training.networks.record_gradients.layout import Layout
from training.networks.record_gradients.normalisation import normalisation

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BAG = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


class OuterUse(Use):
    """A use that adds sum_p s_p u_p^T to a matrix, and sum_p s_p to a bias if there is one.

    Attributes:
        weight: The matrix, of whatever shape.
        bias: The bias, or None.
        positions: Number of positions p of a record.
    """

    weight: Tensor
    bias: Tensor | None
    positions: int

    @abstractmethod
    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return s and u of some records as columns, (some, groups, a, positions) and (some, groups, b, positions).

        If there is a bias, the last entry of u is 1.
        """

    @abstractmethod
    def totals(
        self, keep: Callable[[Tensor], ScaledRows | ExactRows], finite: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return sum_i f_i J_i^T delta_i, one tensor for each of `wrt`, in the precision that `keep` asks for.

        Args:
            keep: Scales signals (records, ...) by the factors.
            finite: Replaces the numbers (records, ...) of records that are not finite by 0.
        """

    def norms(self, part: slice) -> Tensor:
        """Return bounds on the norms of the contributions as `totals` forms them, float64, shape (some,)."""
        return outer_sum_bounds(*self.pairs(part)).square().sum(dim=1).sqrt()

    def magnitudes(self, part: slice) -> Tensor:
        """Return bounds on sum_p |s_p| |u_p|, float64, shape (some,)."""
        s, u = self.pairs(part)
        sizes = [norm_bounds(rows.flatten(0, 1)).view(rows.shape[:2]) for rows in (s, u)]
        return (sizes[0] * sizes[1]).sum(dim=1)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of a row of s and of u, over all groups of outputs."""
        return len(self.weight), self.weight[0].numel() + (self.bias is not None)

    def rows(self, part: slice) -> list[Tensor]:
        """See Use."""
        s, u = self.pairs(part)
        whole = s @ u.mT  # (some, groups, a, b)
        bias = whole[..., -1].flatten(1) if self.bias is not None else None
        weight = (whole if bias is None else whole[..., :-1]).reshape(len(whole), *self.weight.shape)
        return self._ordered(weight, bias)

    def _ordered(self, weight: Tensor, signals: Tensor | None) -> list[Tensor]:
        """Return totals in the order of `wrt`."""
        return [weight if tensor is self.weight or signals is None else signals for tensor in self.wrt]


class LinearUse(OuterUse):
    """v = W h + b at every position."""

    def __init__(self, call: Call, records: int, h: int, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(call, records)
        self.weight, self.bias = weight, bias
        self._delta = _positions(call.output(0, records))
        self._h = _positions(call.argument(h, records))
        self.positions = self._delta.shape[1]

    @property
    def numbers(self) -> int:
        """See Use: signals and inputs, also in float64."""
        return 3 * self.positions * (self._delta.shape[-1] + self._h.shape[-1])

    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """See OuterUse."""
        h = self._h[part]
        if self.bias is not None:
            h = torch.cat([h, h.new_ones(*h.shape[:-1], 1)], dim=-1)
        return self._delta[part].mT[:, None], h.mT[:, None]

    def magnitudes(self, part: slice) -> Tensor:
        """See OuterUse, by Cauchy and Schwarz."""
        ones = self.positions * float(self.bias is not None)
        return norm_bounds(self._delta[part]) * (norm_bounds(self._h[part]).square() + ones).sqrt()

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: a matrix product for each record, and a sum for its bias."""
        delta = self._delta[part]
        return self._ordered(delta.mT @ self._h[part], delta.sum(dim=1))

    def norms(self, part: slice) -> Tensor:
        """See OuterUse; one position per record is a single product."""
        if self.positions > 1:
            return super().norms(part)
        delta, h = self._delta[part].flatten(1), self._h[part].flatten(1)
        return outer_squared_norms(delta, h, bias=self.bias is not None).sqrt()

    def totals(
        self, keep: Callable[[Tensor], ScaledRows | ExactRows], finite: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See OuterUse: one matrix product, and a sum for the bias."""

        def products(delta: Tensor, h: Tensor) -> list[Tensor]:
            signals = delta.flatten(0, 1)
            return self._ordered(signals.t() @ h.flatten(0, 1), signals.sum(dim=0))

        return keep(finite(self._delta)).totals(finite(self._h), products)


class PlantedUse(LinearUse):
    """s_i u_i^T for each record, which no call made: an audit adds it to a weight.

    Args:
        weight: The matrix, shape (a, b).
        signals: s, shape (records, a).
        inputs: u, shape (records, b).
    """

    def __init__(self, weight: Tensor, signals: Tensor, inputs: Tensor) -> None:
        self.records, self.weight, self.bias, self.wrt = len(signals), weight, None, [weight]
        self._delta, self._h, self.positions = signals[:, None], inputs[:, None], 1


class EmbeddingUse(OuterUse):
    """v_p = W[id_p]: the signals of equal ids add up, and those of the padding id count as 0."""

    def __init__(self, call: Call, records: int, ids: int, padding: int | None) -> None:
        super().__init__(call, records)
        (self.weight,), self.bias = call.wrt, None
        delta = call.output(0, records)
        self._ids = call.argument(ids, records).flatten(1)
        self._delta = delta.reshape(records, -1, delta.shape[-1]).float()
        if padding is not None:
            padding %= len(self.weight)
            self._delta = torch.where((self._ids == padding)[..., None], 0.0, self._delta)
        self.positions = self._ids.shape[1]

    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """See OuterUse; s is 1 at the id."""
        once = functional.one_hot(self._ids[part], len(self.weight)).mT
        return once[:, None].float(), self._delta[part].mT[:, None]

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: signals are added to the rows of their ids."""
        ids, delta = self._ids[part], self._delta[part]
        found = delta.new_zeros(len(ids), *self.weight.shape)
        first = torch.arange(len(ids), device=ids.device)[:, None] * len(self.weight)
        found.flatten(0, 1).index_add_(0, (first + ids).flatten(), delta.flatten(0, 1))
        return [found]

    def norms(self, part: slice) -> Tensor:
        """See OuterUse; the signals of each id are added in float64."""
        ids, delta = self._ids[part], self._delta[part]
        record = torch.arange(len(ids), device=ids.device)[:, None]
        keys, inverse, counts = torch.unique(
            record * len(self.weight) + ids, return_inverse=True, return_counts=True
        )
        sums = delta.new_zeros(len(keys), delta.shape[-1], dtype=torch.float64)
        sums.index_add_(0, inverse.flatten(), delta.flatten(0, 1).double())
        owner = keys // len(self.weight)
        squares = sums.new_zeros(len(ids)).index_add_(0, owner, sums.square().sum(dim=1))
        repeats = counts[inverse].amax(dim=1).double()
        slack = (repeats + 7) * product_slack(1) / 8  # of a sum over the positions of one id
        return squares.sqrt() + slack * repeats.sqrt() * norm_bounds(delta)

    def magnitudes(self, part: slice) -> Tensor:
        """See OuterUse."""
        return self.positions**0.5 * norm_bounds(self._delta[part])

    def totals(
        self, keep: Callable[[Tensor], ScaledRows | ExactRows], finite: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See OuterUse: one indexed sum."""

        def products(delta: Tensor, ids: Tensor) -> list[Tensor]:
            total = delta.new_zeros(self.weight.shape)
            return [total.index_add_(0, ids.flatten(), delta.flatten(0, 1))]

        return keep(finite(self._delta)).totals(self._ids, products)


class ConvolutionUse(OuterUse):
    """v_op = w_o . u_p + b_o at every position p, u_p the patch under the kernel, in one to three dimensions."""

    def __init__(
        self, call: Call, records: int, h: int, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> None:
        super().__init__(call, records)
        self.weight, self.bias = weight, bias
        self._dims = weight.ndim - 2
        self._delta = call.output(0, records).float()  # (records, rows, channels, *positions)
        self._h = call.argument(h, records).float()
        stride, padding, dilation = (
            _per_dim(options[name], self._dims) for name in ("stride", "padding", "dilation")
        )
        self._options = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": options["groups"],
        }
        self.positions = math.prod(self._delta.shape[3:]) * self._delta.shape[1]

    @property
    def numbers(self) -> int:
        """See Use: the patches, in float64."""
        return 2 * self.weight[0].numel() * self._options["groups"] * self.positions + self.weight.numel()

    def pairs(self, part: slice) -> tuple[Tensor, Tensor]:
        """See OuterUse."""
        groups = self._options["groups"]
        delta, h = self._delta[part], self._h[part]
        patches = self._patches(h.flatten(0, 1)).unflatten(1, (groups, -1))
        if self.bias is not None:
            patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], dim=2)
        signals = delta.flatten(0, 1).flatten(2).unflatten(1, (groups, -1))
        return _merged(signals, len(delta)), _merged(patches, len(delta))

    def magnitudes(self, part: slice) -> Tensor:
        """See OuterUse, by Cauchy and Schwarz; an input is in as many patches as the kernel has places."""
        places = math.prod(self.weight.shape[2:])
        ones = self.positions * self._options["groups"] * float(self.bias is not None)
        squares = places * norm_bounds(self._h[part]).square() + ones
        return norm_bounds(self._delta[part]) * squares.sqrt()

    def totals(
        self, keep: Callable[[Tensor], ScaledRows | ExactRows], finite: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See OuterUse: the convolution's weight gradient."""

        def products(delta: Tensor, h: Tensor) -> list[Tensor]:
            signals = delta.flatten(0, 1)
            weight = _WEIGHT_GRADIENTS[self._dims](
                h.flatten(0, 1), list(self.weight.shape), signals, **self._options
            )
            return self._ordered(weight, signals.transpose(0, 1).flatten(1).sum(dim=1))

        return keep(finite(self._delta)).totals(finite(self._h), products)

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: one convolution's weight gradient, where the channels of each record are groups of their own.

        Outside the processor, where torch takes the groups one by one, patches are multiplied instead.
        """
        if self._delta.device.type != "cpu":
            return super().rows(part)
        delta, h = (values[part].transpose(0, 1) for values in (self._delta, self._h))
        records = delta.shape[1]
        size = [records * len(self.weight), *self.weight.shape[1:]]
        options = {**self._options, "groups": records * self._options["groups"]}
        weight = _WEIGHT_GRADIENTS[self._dims](h.flatten(1, 2), size, delta.flatten(1, 2), **options)
        bias = delta.sum(dim=(0, *range(3, delta.ndim)))
        return self._ordered(weight.unflatten(0, (records, -1)), bias)

    def _patches(self, h: Tensor) -> Tensor:
        """Shape (rows, channels x kernel, positions)."""
        sides = [side for padding in reversed(self._options["padding"]) for side in (padding, padding)]
        h = functional.pad(h, sides)
        for axis in range(self._dims):
            step, reach = self._options["stride"][axis], self._options["dilation"][axis]
            h = h.unfold(2 + axis, (self.weight.shape[2 + axis] - 1) * reach + 1, step)[..., ::reach]
        kernel = range(2 + self._dims, 2 + 2 * self._dims)
        ordered = h.permute(0, 1, *kernel, *range(2, 2 + self._dims))
        return ordered.flatten(2 + self._dims).flatten(1, 1 + self._dims)


class FunctionUse(Use):
    """Any other call: torch.func.vjp of the call for each record, in a loop if torch.func.vmap does not take it."""

    def __init__(self, call: Call, records: int) -> None:
        super().__init__(call, records)
        self._used = [n for n, delta in enumerate(call.deltas) if delta is not None]
        self._deltas = [call.output(n, records) for n in self._used]
        self._varying = [
            n for n, layout in zip(call.others, call.layouts, strict=False) if layout is not None
        ]
        self._values = [call.argument(n, records) for n in self._varying]
        self._vectorised = True

    def rows(self, part: slice) -> list[Tensor]:
        """See Use."""
        deltas, values = [d[part] for d in self._deltas], [v[part] for v in self._values]
        if self._vectorised:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    return list(torch.func.vmap(self._of_record)(deltas, values))
            except (RuntimeError, NotImplementedError):
                self._vectorised = False
        found = [
            self._differentiated(list(ds), list(vs))
            for ds, vs in zip(zip(*deltas, strict=True), zip(*values, strict=True), strict=True)
        ]
        return [torch.stack(rows) for rows in zip(*found, strict=True)]

    def _outputs(self, wrt: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the function on one record."""
        leaves = list(self.call.leaves)
        for place, tensor in zip((*self.call.places, *self._varying), (*wrt, *values), strict=True):
            leaves[place] = tensor.clone() if self.call.in_place and not place else tensor
        args, kwargs = self.call.spec.unflatten(leaves)
        enabled, dtype = self.call.autocast
        with torch.autocast(self.wrt[0].device.type, dtype, enabled, cache_enabled=False):
            outputs = real_tensors(self.call.func(*args, **kwargs))
        return tuple(outputs[n] for n in self._used)

    def _of_record(self, deltas: list[Tensor], values: list[Tensor]) -> tuple[Tensor, ...]:
        wrt = [tensor.detach() for tensor in self.wrt]
        pull = torch.func.vjp(lambda *tensors: self._outputs(tensors, values), *wrt)[1]
        gradients: tuple[Tensor, ...] = pull(tuple(deltas))
        return gradients

    def _differentiated(self, deltas: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            wrt = [tensor.detach().requires_grad_() for tensor in self.wrt]
            outputs = self._outputs(wrt, values)
            found = torch.autograd.grad(outputs, wrt, deltas, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, found, strict=True)]


class CopiesUse(Use):
    """A tensor computed from parameters that holds a copy for each record, such as an expanded class token."""

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: the signal of one record, zero elsewhere, for some records at once."""
        delta = self.call.output(0, self.records)
        numbers = range(self.records)[part]
        single = delta.new_zeros(len(numbers), *delta.shape)
        for row, number in enumerate(numbers):
            single[row, number] = delta[number]
        layout = self.call.layouts[-1]
        if layout is None or layout.rows > 1:
            raise ValueError(f"model: {self.call.where} merges records and positions; expand it by record")
        return [_joined(single, layout)]

    @property
    def numbers(self) -> int:
        """See Use."""
        return self.call.output(0, self.records).numel()


def _joined(single: Tensor, layout: Layout) -> Tensor:
    """Undo `split_records` for one row per record: (some, records, ..., 1, ...) to (some, ..., records, ...)."""
    return single.squeeze(2 + layout.dim).movedim(1, 1 + layout.dim)


def use_of(call: Call, records: int) -> Use | None:
    """Return what the records add in a call, or None if no gradient reached it."""
    if all(delta is None for delta in call.deltas):
        return None
    call.check_inputs()
    if call.func is copies:
        return CopiesUse(call, records)
    closed = _CLOSED.get(call.func)
    found = closed(call, records) if closed is not None else None
    return FunctionUse(call, records) if found is None else found


def copies(values: Tensor) -> Tensor:
    """Stand for a tensor that holds a copy of parameters for each record."""
    return values


def require_separate_records(call: Call) -> None:
    """Refuse embeddings whose gradients are not sums over records of a matrix's size.

    Raises:
        ValueError: An embedding rescales its weights or its gradient by the batch, or has sparse gradients.
    """
    names = {functional.embedding: _EMBEDDING, functional.embedding_bag: _BAG}.get(call.func)
    if names is None:
        return
    found, _ = bound(call, names, {"max_norm": None, "scale_grad_by_freq": False, "sparse": False})
    if found["max_norm"] is not None or found["scale_grad_by_freq"]:
        raise ValueError(
            f"model: {call.where} is an embedding with max_norm or scale_grad_by_freq, which let one record change "
            "what others add; leave both out"
        )
    if found["sparse"]:
        raise ValueError(
            f"model: {call.where} is an embedding with sparse gradients, whose noise would be dense; build it with "
            "sparse=False"
        )


def closed_form(func: Callable[..., Any]) -> bool:
    """Whether uses of a function are known; others are called again for each record."""
    return func in _CLOSED or func is copies


def _linear(call: Call, records: int) -> Use | None:
    _, places = bound(call, ("input", "weight", "bias"), {})
    weight, bias = affine(call, places)
    if weight is None or places["input"] in call.places:
        return None
    return LinearUse(call, records, places["input"], weight, bias)


def _embedding(call: Call, records: int) -> Use | None:
    found, places = bound(call, _EMBEDDING, {"padding_idx": None})
    return EmbeddingUse(call, records, places["input"], found["padding_idx"])


def _convolution(call: Call, records: int) -> Use | None:
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    found, places = bound(call, ("input", "weight", "bias", *defaults), defaults)
    weight, bias = affine(call, places)
    if weight is None or places["input"] in call.places or isinstance(found["padding"], str):
        return None
    layout = call.layouts[call.others.index(places["input"])]
    if layout is None or layout.dim != 0:
        return None
    options = {name: found[name] for name in defaults}
    return ConvolutionUse(call, records, places["input"], weight, bias, options)


_CLOSED: dict[Callable[..., Any], Callable[[Call, int], Use | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
    functional.layer_norm: normalisation,
    functional.group_norm: normalisation,
    functional.rms_norm: normalisation,
}


def _positions(values: Tensor) -> Tensor:
    """Return (records, positions, entries) in float32."""
    return values.reshape(len(values), -1, values.shape[-1]).float()


def _merged(columns: Tensor, records: int) -> Tensor:
    """(records rows, groups, a, positions) to (records, groups, a, rows positions)."""
    return columns.unflatten(0, (records, -1)).permute(0, 2, 3, 1, 4).flatten(3)


def _per_dim(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
