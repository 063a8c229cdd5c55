"""Recurrent layers, with the products of their weights seen one by one and their backward pass written out.

torch computes a whole nn.RNN, nn.GRU or nn.LSTM in one function, and a step of their cells in another one, whose
per-record gradients would take one call for each record. Here the inputs of all positions are one call of `linear`, and
so are the states that the recurrent weights multiply, which a scan without gradients finds first. Backwards, a scan
goes from the last position to the first with what does not depend on gradients computed for all positions at once
(backpropagation through time; Werbos 1990). Equations: those of the modules in torch's documentation; results agree
with torch's up to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Input, weight and bias to output, as torch.nn.functional.linear, but seen."""


class _Cell(ABC):
    """The equations of a cell, of width n and k gates; tensors of all positions have shape (T, batch, ...).

    `forward` and `backward` keep what they need in attributes, so that an object serves one scan.
    """

    @abstractmethod
    def forward(
        self, xs: Tensor, weight: Tensor, bias: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs h_t of all positions, and the last state.

        Args:
            xs: W_x x_t + b_x, shape (T, batch, k n).
            weight: W_h, shape (k n, n).
            bias: b_h, or None.
            state: h_0, and c_0 of an LSTM.
        """

    @abstractmethod
    def backward(
        self, deltas: Tensor, last: list[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients at the gates from the inputs and from the state, and those at the first state.

        Args:
            deltas: Gradients at h_t, shape (T, batch, n).
            last: Those at the last state, besides h_T.
            weight: W_h.
        """


class _Lstm(_Cell):
    """c_t = f c_(t-1) + i g and h_t = o tanh(c_t), with gates i, f, g, o = W_x x_t + b_x + W_h h_(t-1) + b_h."""

    def forward(
        self, xs: Tensor, weight: Tensor, bias: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """See _Cell."""
        h, c = state
        gates, news, tanhs, outputs = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        cells = [c]
        recurrent = weight.t()
        for x in (xs if bias is None else xs + bias).unbind(0):
            z = torch.addmm(x, h, recurrent)
            gate, new = torch.sigmoid(z), torch.tanh(z.chunk(4, dim=1)[2])
            take, keep, _, show = gate.chunk(4, dim=1)
            c = torch.addcmul(keep * c, take, new)
            tanh = torch.tanh(c)
            h = show * tanh
            for kept, value in zip(
                (gates, news, cells, tanhs, outputs), (gate, new, c, tanh, h), strict=True
            ):
                kept.append(value)
        self._gates, self._news, self._tanhs = torch.stack(gates), torch.stack(news), torch.stack(tanhs)
        self._cells = torch.stack(cells[:-1])
        return torch.stack(outputs), [h, c]

    def backward(
        self, deltas: Tensor, last: list[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See _Cell."""
        take, keep, _, show = self._gates.chunk(4, dim=2)
        slope = show * (1 - self._tanhs.square())
        factors = torch.stack(
            [
                self._news * take * (1 - take),
                self._cells * keep * (1 - keep),
                take * (1 - self._news.square()),
                self._tanhs * show * (1 - show),
            ],
            dim=2,
        )
        (dc,), found = last, []
        dh = deltas[-1]
        for t in range(len(deltas) - 1, -1, -1):
            dc = torch.addcmul(dc, dh, slope[t])
            dz = (torch.stack([dc, dc, dc, dh], dim=1) * factors[t]).flatten(1)
            found.append(dz)
            dc = dc * keep[t]
            dh = torch.addmm(deltas[t - 1], dz, weight) if t else dz @ weight
        whole = torch.stack(found[::-1])
        return whole, whole, [dh, dc]


class _Gru(_Cell):
    """h_t = (1 - z) n + z h_(t-1), with n = tanh(x_n + r own_n), where own = W_h h_(t-1) + b_h."""

    def forward(
        self, xs: Tensor, weight: Tensor, bias: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """See _Cell."""
        (h,) = state
        width = h.shape[1]
        gates, news, owns, befores = list[Tensor](), list[Tensor](), list[Tensor](), [h]
        for x in xs.unbind(0):
            own = functional.linear(h, weight, bias)
            gate = torch.sigmoid(x[:, : 2 * width] + own[:, : 2 * width])
            reset, update = gate.chunk(2, dim=1)
            new = torch.tanh(torch.addcmul(x[:, 2 * width :], reset, own[:, 2 * width :]))
            h = torch.lerp(new, h, update)
            for kept, value in zip(
                (gates, news, owns, befores), (gate, new, own[:, 2 * width :], h), strict=True
            ):
                kept.append(value)
        self._gates, self._news, self._owns = torch.stack(gates), torch.stack(news), torch.stack(owns)
        outputs = torch.stack(befores)
        self._befores = outputs[:-1]
        return outputs[1:], [h]

    def backward(
        self, deltas: Tensor, last: list[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See _Cell; every gradient at a gate is dh_t times a factor."""
        reset, update = self._gates.chunk(2, dim=2)
        new = (1 - update) * (1 - self._news.square())
        shared = [
            new * self._owns * reset * (1 - reset),
            (self._befores - self._news) * update * (1 - update),
        ]
        inputs, own = torch.stack([*shared, new], dim=2), torch.stack([*shared, new * reset], dim=2)
        found = []
        dh = deltas[-1]
        for t in range(len(deltas) - 1, -1, -1):
            found.append(dh)
            dz = (dh.unsqueeze(1) * own[t]).flatten(1)
            dh = torch.addmm(dh * update[t], dz, weight)
            if t:
                dh = dh + deltas[t - 1]
        whole = torch.stack(found[::-1]).unsqueeze(2)
        return (whole * inputs).flatten(2), (whole * own).flatten(2), [dh]


class _Rnn(_Cell):
    """h_t = phi(W_x x_t + b_x + W_h h_(t-1) + b_h), with phi tanh or ReLU."""

    def __init__(self, phi: Callable[[Tensor], Tensor]) -> None:
        self._phi = phi

    def forward(
        self, xs: Tensor, weight: Tensor, bias: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """See _Cell."""
        (h,) = state
        outputs, recurrent = [], weight.t()
        for x in (xs if bias is None else xs + bias).unbind(0):
            h = self._phi(torch.addmm(x, h, recurrent))
            outputs.append(h)
        self._outputs = torch.stack(outputs)
        return self._outputs, [h]

    def backward(
        self, deltas: Tensor, last: list[Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See _Cell."""
        h = self._outputs
        slope = 1 - h.square() if self._phi is torch.tanh else (h > 0).to(h.dtype)
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
        """Return the outputs, and the last state besides h_T."""
        ctx.cell, ctx.weight = cell, weight
        count = len(states) // 2
        return (outputs.clone(), *(state.clone() for state in states[count + 1 :]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients at the gates and at the first state."""
        deltas, *last = gradients
        with torch.autocast(deltas.device.type, enabled=False):
            inputs, own, first = ctx.cell.backward(deltas, last, ctx.weight.to(deltas.dtype))
        return (None, None, None, inputs, own, *first, *(None for _ in first))


def _seen_scan(
    linear: Linear, cell: _Cell, xs: Tensor, weight: Tensor, bias: Tensor | None, state: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all positions and the last state; the recurrent weights take part in one product."""
    wide = xs.dtype if xs.dtype == torch.float64 else torch.float32  # also within torch.autocast
    with torch.no_grad(), torch.autocast(xs.device.type, enabled=False):
        shift = None if bias is None else bias.to(wide)
        outputs, last = cell.forward(xs.to(wide), weight.to(wide), shift, [part.to(wide) for part in state])
        before = state[0].unsqueeze(0)
        if len(outputs) > 1:
            before = torch.cat([before, outputs[:-1]])
    own = linear(before, weight, bias)  # only its gradient counts: the scan has used its numbers
    found, *others = _Scan.apply(cell, weight.detach(), outputs, xs, own, *state, *last)
    return found, [found[-1], *others]


_CELLS: dict[Callable[..., Any], Callable[[], _Cell]] = {
    torch.gru: _Gru,
    torch.lstm: _Lstm,
    torch.rnn_tanh: lambda: _Rnn(torch.tanh),
    torch.rnn_relu: lambda: _Rnn(torch.relu),
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


def require_no_packing(args: Sequence[Any]) -> None:
    """Refuse the arguments of a packed sequence, (data, batch_sizes, ...).

    Raises:
        ValueError: The second argument holds whole numbers.
    """
    if len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        raise ValueError(
            "model: a recurrent layer takes a packed sequence, whose rows have no fixed owner; give padded sequences"
        )


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
    """Return what torch's function returns: the outputs, then the last states.

    Args:
        linear: Takes part in every product with a weight.
        func: torch.gru, torch.lstm, torch.rnn_tanh or torch.rnn_relu.
        x: Inputs, shape (batch, T, n) or (T, batch, n).
        initial: First states, shape (layers x directions, batch, width); two of them for torch.lstm.
        weights: Of each layer and direction: for the input, for the state, their biases, for the projection.
        has_biases: Whether there are biases.
        num_layers: Number of layers.
        dropout: Probability of dropping an output between layers.
        train: Whether outputs are dropped.
        bidirectional: Whether a second direction reads from the end.
        batch_first: Whether records come first.
    """
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
            output, final = _direction(
                linear, _CELLS[func](), steps, own, has_biases, state, backwards=direction == 1
            )
            outputs.append(output)
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
    """Return what torch's function returns: the new state, or two of them for torch.lstm_cell.

    Args:
        linear: Takes part in every product with a weight.
        func: torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell or torch.rnn_relu_cell.
        x: Input, shape (batch, n).
        initial: State, shape (batch, width); two of them for torch.lstm_cell.
        w_ih: For the input.
        w_hh: For the state.
        b_ih: For the input.
        b_hh: For the state.
    """
    state = [initial] if isinstance(initial, Tensor) else list(initial)
    inputs = linear(x, w_ih, b_ih)
    _, found = _seen_scan(linear, CELLS[func](), inputs.unsqueeze(0), w_hh, b_hh, state)
    return found[0] if len(found) == 1 else tuple(found)


def _direction(
    linear: Linear,
    cell: _Cell,
    steps: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    state: list[Tensor],
    *,
    backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs (T, batch, width) of one layer in one direction, and its last states."""
    biases = weights[2:4] if has_biases else [None, None]
    inputs = linear(steps, weights[0], biases[0])
    inputs = inputs.flip(0) if backwards else inputs
    if len(weights) % 2:
        outputs, last = _projected(linear, inputs, weights, biases[1], state)
    else:
        outputs, last = _seen_scan(linear, cell, inputs, weights[1], biases[1], state)
    return outputs.flip(0) if backwards else outputs, last


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
