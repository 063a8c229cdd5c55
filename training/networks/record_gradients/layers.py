"""Uses of norms, and of recurrent layers, whose products are recorded one by one.

In layer, group and root-mean-square norms, each record adds sums of delta x and of delta.

torch computes a whole nn.RNN, nn.GRU or nn.LSTM in one function, and a step of their cells in another one, whose
per-record gradients would take one call for each record. Here torch's function finds the outputs without gradients;
then the inputs of all positions are one call of `linear`, and so are the states that the recurrent weights multiply.
Backwards, a scan goes from the last position to the first; factors that depend on no gradient are computed for all
positions at once (backpropagation through time; Werbos 1990). Equations: those of the modules in torch's documentation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from opusim.training.networks.contributions.uses import Use
from opusim.training.networks.record_gradients.calls import Bound, Call, Form, split_records


class NormalisationUse(Use):
    """v = w x + b with x normalised by a layer, group or root-mean-square norm: sums of delta x and of delta."""

    def __init__(
        self,
        delta: Tensor,
        h: Tensor,
        wrt: list[Tensor],
        weight: Tensor | None,
        normalise: Callable[[Tensor], Tensor],
        keep: int,
    ) -> None:
        self.wrt, self.records = wrt, len(delta)
        self._weight, self._normalise = weight, normalise
        self._delta, self._h = delta, h
        # Sums run over all dimensions but the record and those of the parameter, of which the first is `keep`.
        shape, ndim = wrt[0].shape, delta.ndim
        self._summed = [d for d in range(1, ndim) if not 0 <= d - keep % ndim < len(shape)]
        self.numbers = 3 * delta.numel() // self.records  # signals, inputs and their products

    @override
    def rows(self, part: slice) -> list[Tensor]:
        delta, h = self._delta[part].float(), self._h[part].float()
        x = self._normalise(h.flatten(0, 1)).unflatten(0, h.shape[:2])
        found = [delta * x if tensor is self._weight else delta for tensor in self.wrt]
        return [values.sum(dim=self._summed) for values in found] if self._summed else found


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
        weight: Tensor | None,
        groups: int,
        eps: float,
    ) -> None:
        normalise = partial(functional.group_norm, num_groups=groups, eps=eps)
        further = [(call, h, values) for values in call.statistics or ()]
        delta, x, *statistics = split_records(records, [(call, 0)], [(call, h)], further)
        super().__init__(delta, x, call.wrt, weight, normalise, 2)
        self._statistics = statistics

    @override
    def rows(self, part: slice) -> list[Tensor]:
        if not self._statistics:
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
    """Return torch.nn.functional.group_norm, bit for bit; in float32 the call keeps its statistics."""
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


def normalisation(call: Call) -> Form | Callable[[Call, int], Use] | None:
    """Return the uses of a norm's parameters, or None if the records stand in another dimension than the first."""
    site = call.site
    grouped, rms = site.func is functional.group_norm, site.func is functional.rms_norm
    second = "num_groups" if grouped else "normalized_shape"
    names = ("input", second, "weight", "eps") if rms else ("input", second, "weight", "bias", "eps")
    found = Bound.of(site, call.leaves, names, {"eps": None if rms else 1e-5})
    h, size, eps = found.places["input"], found.values[second], found.values["eps"]
    number = found.learnt(site, "weight")
    weight = None if number is None else call.wrt[number]
    layout = site.layout(h)
    if layout is None or (grouped and layout.dim != 0):
        return None
    if grouped:
        return partial(GroupNormUse, h=h, weight=weight, groups=size, eps=eps)
    plain, shape = functional.rms_norm if rms else functional.layer_norm, tuple(size)
    normalise = partial(plain, normalized_shape=shape, eps=eps)
    return Form(
        partial(NormalisationUse, wrt=call.wrt, weight=weight, normalise=normalise, keep=-len(shape)), h
    )


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps input, weight and bias to output as torch.nn.functional.linear does, and records the call."""


class _Forward(NamedTuple):
    """What the forward pass of a scan leaves.

    Attributes:
        weight: W_h, shape (k n, n).
        xs: W_x x_t + b_x, shape (T, batch, k n).
        own: W_h h_(t-1) + b_h, shape (T, batch, k n).
        outputs: h_t, shape (T, batch, n).
        state: h_0, and c_0 of an LSTM, shapes (batch, n).
    """

    weight: Tensor
    xs: Tensor
    own: Tensor
    outputs: Tensor
    state: list[Tensor]


_Gradients = tuple[Tensor, Tensor, list[Tensor]]
"""Gradients of a scan: at W_x x_t + b_x and at W_h h_(t-1) + b_h, shape (T, batch, k n), and at the first state."""


class _Cell(ABC):
    """The equations of a cell, of width n and k gates; tensors of all positions have shape (T, batch, ...).

    Attributes:
        function: torch's function of a layer of such cells.
    """

    function: Callable[..., Any]

    @abstractmethod
    def backward(self, deltas: Tensor, last: list[Tensor], scan: _Forward) -> _Gradients:
        """Go back through a scan: `deltas` at h_t, shape (T, batch, n), and `last` at the last state except h_T."""


class _Lstm(_Cell):
    """c_t = f c_(t-1) + i g and h_t = o tanh(c_t), with gates i, f, g, o = W_x x_t + b_x + W_h h_(t-1) + b_h."""

    function = staticmethod(torch.lstm)

    def backward(self, deltas: Tensor, last: list[Tensor], scan: _Forward) -> _Gradients:
        """See _Cell."""
        weight, xs, own, outputs, state = scan
        # 1. The gates and the cells again; torch's function returns only the last cell.
        z = xs + own
        gates = torch.sigmoid(z)
        take, keep, _, show = gates.chunk(4, dim=2)
        new = torch.tanh(z.chunk(4, dim=2)[2])
        cells = [state[1]]
        for added, kept in zip((take * new).unbind(0), keep.unbind(0), strict=True):
            cells.append(torch.addcmul(added, kept, cells[-1]))
        everything = torch.stack(cells)
        tanhs = torch.tanh(everything[1:])
        # 2. Factors: of dh_t in the gradient at o and in dc_t; of dc_t in those at i, f and g, and in dc_(t-1).
        slopes = gates.addcmul(gates, gates, value=-1)
        at_take, at_keep, _, at_show = slopes.chunk(4, dim=2)
        by_output, by_cell = tanhs * at_show, torch.addcmul(show, show, tanhs.square(), value=-1)
        of_cell = torch.stack(
            [
                new * at_take,
                everything[:-1] * at_keep,
                torch.addcmul(take, take, new.square(), value=-1),
                keep,
            ],
            dim=2,
        )
        # 3. From the last position to the first; o comes first, so that one product forms the others and dc_(t-1).
        steps, batch, width = outputs.shape
        found = outputs.new_empty(batch, steps, 5, width)  # records first, as their gradients are measured
        ordered = torch.cat([weight[3 * width :], weight[: 3 * width]])
        dh, (dc,) = deltas[-1], last
        for t in range(steps - 1, -1, -1):
            own_dz = found[:, t]
            dc = torch.addcmul(dc, dh, by_cell[t])
            torch.mul(dh, by_output[t], out=own_dz[:, 0])
            torch.mul(dc.unsqueeze(1), of_cell[t], out=own_dz[:, 1:])
            dc = own_dz[:, 4]
            dz = own_dz[:, :4].flatten(1)
            dh = torch.addmm(deltas[t - 1], dz, ordered) if t else dz @ ordered
        whole = torch.cat([found[:, :, 1:4], found[:, :, :1]], dim=2).flatten(2).transpose(0, 1)
        return whole, whole, [dh, dc]


class _Gru(_Cell):
    """h_t = (1 - z) n + z h_(t-1), with n = tanh(x_n + r own_n), where own = W_h h_(t-1) + b_h."""

    function = staticmethod(torch.gru)

    def backward(self, deltas: Tensor, last: list[Tensor], scan: _Forward) -> _Gradients:
        """See _Cell; every gradient at a gate is dh_t times a factor."""
        weight, xs, own, outputs, state = scan
        # 1. The gates again.
        width = outputs.shape[2]
        reset, update = torch.sigmoid(xs[..., : 2 * width] + own[..., : 2 * width]).chunk(2, dim=2)
        owns = own[..., 2 * width :]
        news = torch.tanh(torch.addcmul(xs[..., 2 * width :], reset, owns))
        before = _shifted(state[0].unsqueeze(0), outputs)
        # 2. Factors of dh_t in the gradients at the gates r, z and n.
        new = (1 - update) * (1 - news.square())
        shared = [new * owns * reset * (1 - reset), (before - news) * update * (1 - update)]
        inputs, recurrent = torch.stack([*shared, new], dim=2), torch.stack([*shared, new * reset], dim=2)
        # 3. From the last position to the first.
        found = []
        dh = deltas[-1]
        for t in range(len(deltas) - 1, -1, -1):
            found.append(dh)
            dz = (dh.unsqueeze(1) * recurrent[t]).flatten(1)
            dh = torch.addmm(dh * update[t], dz, weight)
            if t:
                dh = dh + deltas[t - 1]
        whole = torch.stack(found[::-1]).unsqueeze(2)
        return (whole * inputs).flatten(2), (whole * recurrent).flatten(2), [dh]


class _Rnn(_Cell):
    """h_t = phi(W_x x_t + b_x + W_h h_(t-1) + b_h), with phi tanh or ReLU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def backward(self, deltas: Tensor, last: list[Tensor], scan: _Forward) -> _Gradients:
        """See _Cell."""
        weight, outputs = scan.weight, scan.outputs
        is_tanh = self.function is torch.rnn_tanh
        slope = 1 - outputs.square() if is_tanh else (outputs > 0).to(outputs.dtype)
        found = []
        dh = deltas[-1]
        for t in range(len(deltas) - 1, -1, -1):
            dz = dh * slope[t]
            found.append(dz)
            dh = torch.addmm(deltas[t - 1], dz, weight) if t else dz @ weight
        whole = torch.stack(found[::-1])
        return whole, whole, [dh]


class _Scan(torch.autograd.Function):
    """Hand out the outputs of a scan, and go back through it."""

    @staticmethod
    def forward(
        ctx: Any, cell: _Cell, weight: Tensor, outputs: Tensor, xs: Tensor, own: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs, and the last state except h_T."""
        count = len(states) // 2
        ctx.cell = cell
        ctx.save_for_backward(weight, outputs, xs, own, *states[:count])
        return (outputs.clone(), *(state.clone() for state in states[count + 1 :]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients at the gates and at the first state."""
        deltas, *last = gradients
        with torch.autocast(deltas.device.type, enabled=False):
            weight, outputs, xs, own, *state = (part.to(deltas.dtype) for part in ctx.saved_tensors)
            scan = _Forward(weight, xs, own, outputs, state)
            inputs, recurrent, first = ctx.cell.backward(deltas, last, scan)
        return (None, None, None, inputs, recurrent, *first, *(None for _ in first))


def _seen_layer(
    linear: Linear, cell: _Cell, steps: Tensor, weights: Sequence[Tensor | None], state: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all positions and the last state of one layer in one direction.

    `linear` computes and records the products with the weights W_x, W_h, b_x and b_h, the biases or None. The steps x_t
    have shape (T, batch, m); the state is h_0, and c_0 of an LSTM.
    """

    def product(values: Tensor, number: int) -> Tensor:
        """Apply a linear map with the records first, as their gradients are measured."""
        weight, bias = weights[number], weights[number + 2]
        return linear(values.transpose(0, 1), weight, bias).transpose(0, 1)  # type: ignore[arg-type]

    xs = product(steps, 0)
    wide = xs.dtype if xs.dtype == torch.float64 else torch.float32  # also within torch.autocast
    with torch.no_grad(), torch.autocast(xs.device.type, enabled=False):
        flat = [weight.to(wide) for weight in weights if weight is not None]
        initial = [part.to(wide).unsqueeze(0) for part in state]
        first = initial[0] if len(initial) == 1 else initial
        outputs, *finals = cell.function(
            steps.to(wide), first, flat, len(flat) == 4, 1, 0.0, False, False, False
        )
        before = _shifted(initial[0], outputs)
    own = product(before, 1)
    last = [part.squeeze(0) for part in finals]
    found, *others = _Scan.apply(cell, weights[1].detach(), outputs, xs, own, *state, *last)  # type: ignore[union-attr]
    return found, [found[-1], *others]


def _shifted(first: Tensor, outputs: Tensor) -> Tensor:
    """Return h_(t-1) of all positions, with the records first in memory."""
    if len(outputs) == 1:
        return first
    return torch.cat([first.transpose(0, 1), outputs[:-1].transpose(0, 1)], dim=1).transpose(0, 1)


_CELLS: dict[Callable[..., Any], Callable[[], _Cell]] = {
    torch.gru: _Gru,
    torch.lstm: _Lstm,
    torch.rnn_tanh: lambda: _Rnn(torch.rnn_tanh),
    torch.rnn_relu: lambda: _Rnn(torch.rnn_relu),
}
RECURRENT = frozenset(_CELLS)
"""The functions that `unrolled` takes."""
CELLS: dict[Callable[..., Any], Callable[[], _Cell]] = {
    torch.gru_cell: _Gru,
    torch.lstm_cell: _Lstm,
    torch.rnn_tanh_cell: _CELLS[torch.rnn_tanh],
    torch.rnn_relu_cell: _CELLS[torch.rnn_relu],
}
"""The functions that `unrolled_cell` takes."""


PACKED = (
    "whose rows have no fixed owner; give padded sequences (torch.nn.utils.rnn.pad_sequence) and their lengths, and "
    "take each record's last output by its length"
)
"""End of a message about a packed sequence: its fault and the remedy."""


def unrolled(
    linear: Linear,
    func: Callable[..., Any],
    x: Tensor,
    initial: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what torch.gru, torch.lstm, torch.rnn_tanh or torch.rnn_relu returns: the outputs, then the last states.

    `linear` computes every product with a weight. The arguments after `func` are those of that function: inputs (batch,
    T, n) or (T, batch, n), first states (layers x directions, batch, width), two of them for torch.lstm, and for each
    layer and direction the weights of the input and of the state, their biases, and the projection. Those of a packed
    sequence, (data, batch_sizes, ...), are refused (ValueError).
    """
    if isinstance(initial, Tensor) and not initial.is_floating_point():
        raise ValueError(f"model: a recurrent layer takes a packed sequence, {PACKED}")
    states = [initial] if isinstance(initial, Tensor) else list(initial)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    steps = x.transpose(0, 1) if batch_first else x
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = list(weights[number * each : (number + 1) * each])
            state = [part[number] for part in states]
            seen = steps.flip(0) if direction else steps
            biases = own[2:4] if has_biases else [None, None]
            if len(own) % 2:  # an LSTM whose outputs a matrix projects
                output, final = _projected(linear, linear(seen, own[0], biases[0]), own, biases[1], state)
            else:
                output, final = _seen_layer(linear, _CELLS[func](), seen, [*own[:2], *biases], state)
            outputs.append(output.flip(0) if direction else output)
            last.append(final)
        steps = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
        if dropout and layer < num_layers - 1:
            steps = functional.dropout(steps, dropout, train)
    finals = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (steps.transpose(0, 1) if batch_first else steps, *finals)


def unrolled_cell(
    linear: Linear,
    func: Callable[..., Any],
    x: Tensor,
    initial: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Return what a function of `CELLS` returns: the new state, or two of them for torch.lstm_cell; see `unrolled`."""
    state = [initial] if isinstance(initial, Tensor) else list(initial)
    _, found = _seen_layer(linear, CELLS[func](), x.unsqueeze(0), [w_ih, w_hh, b_ih, b_hh], state)
    return found[0] if len(found) == 1 else tuple(found)


def _projected(
    linear: Linear, inputs: Tensor, weights: list[Tensor], bias: Tensor | None, state: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs and last states of an LSTM whose outputs a matrix projects, position by position."""
    outputs = []
    h, c = state
    for x in inputs.unbind(0):
        take, keep, new, show = (x + linear(h, weights[1], bias)).chunk(4, dim=-1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(take) * torch.tanh(new)
        h = linear(torch.sigmoid(show) * torch.tanh(c), weights[-1], None)
        outputs.append(h)
    return torch.stack(outputs), [h, c]
