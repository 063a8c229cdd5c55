"""Each use of a parameter in a forward pass, and what every record of the batch adds to the parameter's gradient there.

A use is one call of a torch function on a parameter, or on a tensor computed from parameters only. With delta the
gradient at the call's output and h its other arguments, record i adds J_i^T delta_i.

- Linear maps, embeddings and convolutions add sums of outer products sum_p s_ip u_ip^T over positions p, which are
  measured without being formed (`opusim.training.networks.contributions.uses`).
- Every other use forms the gradients of some records at once (`Use.rows`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from opusim.training.networks.contributions.uses import ConvolutionUse, EmbeddingUse, LinearUse, Use
from opusim.training.networks.record_gradients.calls import (
    Bound,
    Call,
    CallUse,
    Form,
    Site,
    real_tensors,
    split_records,
)
from opusim.training.networks.record_gradients.layers import normalisation

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BAG = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
EMBEDDINGS = {functional.embedding: _EMBEDDING, functional.embedding_bag: _BAG}
"""The functions that look up rows of a table, and the names of their arguments."""


class FunctionUse(CallUse):
    """Any other call: torch.func.vjp of the call for each record, in a loop if torch.func.vmap does not take it."""

    def __init__(self, call: Call, records: int) -> None:
        super().__init__(call, records)
        site = call.site
        self._used = [n for n, found in enumerate(call.deltas) if found]
        self._varying = [
            n for n, layout in zip(site.others, site.layouts, strict=False) if layout is not None
        ]
        outputs, leaves = (((call, n) for n in numbers) for numbers in (self._used, self._varying))
        found = split_records(records, outputs, leaves)
        self._deltas, self._values = found[: len(self._used)], found[len(self._used) :]
        self._vectorised = True

    @override
    def rows(self, part: slice) -> list[Tensor]:
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
        site, leaves = self.call.site, list(self.call.leaves)
        for place, tensor in zip((*site.places, *self._varying), (*wrt, *values), strict=True):
            leaves[place] = tensor.clone() if site.in_place and not place else tensor
        args, kwargs = site.spec.unflatten(leaves)
        enabled, dtype = self.call.autocast
        with torch.autocast(self.wrt[0].device.type, dtype, enabled, cache_enabled=False):
            outputs = real_tensors(site.func(*args, **kwargs))
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


class CopiesUse(CallUse):
    """A tensor computed from parameters that holds a copy for each record, such as an expanded class token."""

    def __init__(self, call: Call, records: int) -> None:
        super().__init__(call, records)
        self.numbers = sum(delta.numel() for delta in call.deltas[0][:1])

    def rows(self, part: slice) -> list[Tensor]:
        """See Use: the signal of one record, zero elsewhere, for some records at once."""
        (delta,) = split_records(self.records, [(self.call, 0)])
        numbers = range(self.records)[part]
        single = delta.new_zeros(len(numbers), *delta.shape)
        for row, number in enumerate(numbers):
            single[row, number] = delta[number]
        layout = self.call.site.layouts[-1]
        if layout is None or layout.rows > 1:
            raise ValueError(
                f"model: {self.call.site.where} merges records and positions; expand it by record"
            )
        # Undo `split_records`: (some, records, ..., group, ...) to (some, ..., records x group, ...).
        return [single.movedim(1, 1 + layout.dim).flatten(1 + layout.dim, 2 + layout.dim)]


def copies(values: Tensor) -> Tensor:
    """Return a tensor that holds a copy of parameters for each record."""
    return values.clone()


def require_separate_records(site: Site, leaves: Sequence[Any]) -> None:
    """Refuse (ValueError) embeddings whose gradients are not sums over records of a matrix's size."""
    defaults = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    found = Bound.of(site, leaves, EMBEDDINGS[site.func], defaults).values
    if found["max_norm"] is not None or found["scale_grad_by_freq"]:
        raise ValueError(
            f"model: {site.where} is an embedding with max_norm or scale_grad_by_freq, which let one record change "
            "what others add; leave both out"
        )
    if found["sparse"]:
        raise ValueError(
            f"model: {site.where} is an embedding with sparse gradients, whose noise would be dense; build it with "
            "sparse=False"
        )


Made = Form | Callable[[Call, int], Use]
"""How the use of a call is made: from its signals and an argument, or from the call and the number of records."""


def _linear(call: Call) -> Made | None:
    site, leaves, wrt = call.site, call.leaves, call.wrt
    found = Bound.of(site, leaves, ("input", "weight", "bias"), {})
    h, weight, bias = found.places["input"], found.learnt(site, "weight"), found.learnt(site, "bias")
    if weight is None or leaves[found.places["weight"]].ndim != 2 or h in site.places:
        return None
    return Form(partial(LinearUse, weight=wrt[weight], bias=None if bias is None else wrt[bias]), h)


def _embedding(call: Call) -> Made | None:
    found = Bound.of(call.site, call.leaves, _EMBEDDING, {"padding_idx": None})
    padding = found.values["padding_idx"]
    return Form(partial(EmbeddingUse, weight=call.wrt[0], padding=padding), found.places["input"])


def _convolution(call: Call) -> Made | None:
    site, wrt = call.site, call.wrt
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    found = Bound.of(site, call.leaves, ("input", "weight", "bias", *defaults), defaults)
    h, weight, bias = found.places["input"], found.learnt(site, "weight"), found.learnt(site, "bias")
    if weight is None or h in site.places or isinstance(found.values["padding"], str):
        return None
    layout = site.layout(h)
    if layout is None or layout.dim != 0:
        return None
    options = {name: found.values[name] for name in defaults}
    own = None if bias is None else wrt[bias]
    return Form(partial(ConvolutionUse, weight=wrt[weight], bias=own, options=options), h)


CLOSED: dict[Callable[..., Any], Callable[[Call], Made | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
    functional.layer_norm: normalisation,
    functional.group_norm: normalisation,
    functional.rms_norm: normalisation,
    copies: lambda call: CopiesUse,
}
"""Makers of the uses of functions in closed form; other functions are called again for each record."""
