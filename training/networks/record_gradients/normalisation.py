"""Gradients of single records of layer, group and root-mean-square norms: sums of delta x and of delta."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opusim.training.networks.record_gradients.calls import Bound, Call, CallUse, Site
from opusim.training.networks.record_gradients.layout import split_records


class NormalisationUse(CallUse):
    """v = w x + b with x normalised by a layer, group or root-mean-square norm: sums of delta x and of delta."""

    def __init__(
        self,
        call: Call,
        records: int,
        h: int,
        weight: Tensor | None,
        bias: Tensor | None,
        normalise: Callable[[Tensor], Tensor],
        keep: int,
    ) -> None:
        super().__init__(call, records)
        self._weight, self._bias, self._normalise, self._keep = weight, bias, normalise, keep
        self._delta, self._h = call.output(0, records), call.argument(h, records)

    @property
    def numbers(self) -> int:
        """See Use: the signals, the inputs and their products."""
        return 3 * self._delta[:1].numel()

    def rows(self, part: slice) -> list[Tensor]:
        """See Use."""
        delta, h = self._delta[part].float(), self._h[part].float()
        x = self._normalise(h.flatten(0, 1)).unflatten(0, h.shape[:2])
        return [self._sum(delta * x) if tensor is self._weight else self._sum(delta) for tensor in self.wrt]

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over all dimensions but the record and those of the parameter, of which the first is `keep`."""
        shape = (self._weight if self._weight is not None else self._bias).shape  # type: ignore[union-attr]
        first = self._keep % values.ndim
        kept = {0, *range(first, first + len(shape))}
        other = [d for d in range(values.ndim) if d not in kept]
        return values.sum(dim=other) if other else values


class GroupNormUse(NormalisationUse):
    """A group norm whose forward pass kept its statistics: one pass over delta and h gives both sums of every record.

    With mean m and r = 1 / standard deviation of a group, the sum of delta x is (sum delta h - m sum delta) r. torch's
    backward pass forms it for a batch; here the channels of all records are channels of one record.
    """

    def __init__(
        self,
        call: Call,
        records: int,
        h: int,
        parameters: tuple[Tensor | None, Tensor | None],
        groups: int,
        eps: float,
    ) -> None:
        def normalise(values: Tensor) -> Tensor:
            return functional.group_norm(values, groups, eps=eps)

        super().__init__(call, records, h, *parameters, normalise, 2)
        layout = call.site.layout(h)
        self._statistics: list[Tensor] | None = None
        if call.statistics is not None and layout is not None:
            self._statistics = [split_records(values, layout, records) for values in call.statistics]

    def rows(self, part: slice) -> list[Tensor]:
        """See Use."""
        if self._statistics is None:
            return super().rows(part)
        delta, h = self._delta[part], self._h[part]  # (some, rows, channels, ...)
        lead, channels = h.shape[:3], h.shape[:3].numel()
        mean, scale = (values[part].reshape(1, -1) for values in self._statistics)
        _, weight, bias = torch.ops.aten.native_group_norm_backward(
            delta.reshape(1, channels, -1),
            h.reshape(1, channels, -1),
            mean,
            scale,
            h.new_ones(channels),
            1,
            channels,
            h[0, 0, 0].numel(),
            mean.numel(),
            [False, True, True],
        )
        sums = {True: weight, False: bias}
        return [sums[tensor is self._weight].view(lead).sum(dim=1) for tensor in self.wrt]


def group_norm(
    call: Call,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return torch.nn.functional.group_norm, bit for bit; in float32 the call keeps its statistics.

    Args:
        call: The call.
        input: See torch, as the arguments that follow.
        num_groups: See torch.
        weight: See torch.
        bias: See torch.
        eps: See torch.
    """
    ordinary = input.dtype == torch.float32 and input.is_contiguous() and not call.autocast[0]
    if not ordinary or input.ndim < 2 or not len(input) or input[0].numel() <= num_groups:
        return functional.group_norm(input, num_groups, weight, bias, eps)  # it may refuse the batch
    records, channels = input.shape[:2]
    positions = math.prod(input.shape[2:])
    output, mean, scale = torch.native_group_norm(
        input, weight, bias, records, channels, positions, num_groups, eps
    )
    call.statistics = mean.detach(), scale.detach()
    return output


def normalisation(site: Site, leaves: Sequence[Any]) -> Callable[[Call, int], CallUse] | None:
    """Return the uses of a norm's parameters, or None if the records stand in another dimension than the first."""
    grouped, rms = site.func is functional.group_norm, site.func is functional.rms_norm
    second = "num_groups" if grouped else "normalized_shape"
    names = ("input", second, "weight", "eps") if rms else ("input", second, "weight", "bias", "eps")
    found = Bound.of(site, leaves, names, {"eps": None if rms else 1e-5})
    h, size, eps = found.places["input"], found.values[second], found.values["eps"]
    weight, bias = (found.learnt(site, name) for name in ("weight", "bias"))
    layout = site.layout(h)
    if layout is None or (grouped and layout.dim != 0):
        return None
    plain = functional.rms_norm if rms else functional.layer_norm

    def made(call: Call, records: int) -> CallUse:
        w, b = (None if n is None else call.wrt[n] for n in (weight, bias))
        if grouped:
            return GroupNormUse(call, records, h, (w, b), size, eps)
        shape = tuple(size)
        return NormalisationUse(
            call, records, h, w, b, lambda values: plain(values, shape, eps=eps), -len(shape)
        )

    return made
