"""Recurrent layers as sequences of linear maps, so that their uses of parameters can be caught one by one.

torch computes a whole nn.RNN, nn.GRU or nn.LSTM in one function, whose per-record gradients would take one call for
each record, and a step of their cells in another one. Here every position is a call of `linear` on the recurrent
weights; what stands between takes no parameters, and is not looked at. Equations: those of the modules in torch's documentation; results agree with torch's up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_Step = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Input, weight and bias to output, as torch.nn.functional.linear, but seen."""


def _gru(x: Tensor, own: Tensor, state: list[Tensor]) -> list[Tensor]:
    """Step: h' = (1 - z) n + z h, with n = tanh(x_n + r own_n)."""
    xs, hs = x.chunk(3, dim=-1), own.chunk(3, dim=-1)
    reset, update = torch.sigmoid(xs[0] + hs[0]), torch.sigmoid(xs[1] + hs[1])
    new = torch.tanh(xs[2] + reset * hs[2])
    return [new + update * (state[0] - new)]


def _lstm(x: Tensor, own: Tensor, state: list[Tensor]) -> list[Tensor]:
    """Step: c' = f c + i g and h' = o tanh(c')."""
    take, keep, new, show = (x + own).chunk(4, dim=-1)
    cell = torch.sigmoid(keep) * state[1] + torch.sigmoid(take) * torch.tanh(new)
    return [torch.sigmoid(show) * torch.tanh(cell), cell]


_STEPS: dict[Callable[..., Any], _Step] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: lambda x, own, state: [torch.tanh(x + own)],
    torch.rnn_relu: lambda x, own, state: [torch.relu(x + own)],
}
RECURRENT = frozenset(_STEPS)
"""The functions that `unrolled` takes."""
CELLS: dict[Callable[..., Any], _Step] = {
    torch.gru_cell: _gru,
    torch.lstm_cell: _lstm,
    torch.rnn_tanh_cell: _STEPS[torch.rnn_tanh],
    torch.rnn_relu_cell: _STEPS[torch.rnn_relu],
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
                linear, _STEPS[func], steps, own, has_biases, state, backwards=direction == 1
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
    inputs, own = linear(x, w_ih, b_ih), linear(state[0], w_hh, b_hh)
    found = CELLS[func](inputs, own, state)
    return found[0] if len(found) == 1 else tuple(found)


def _direction(
    linear: Linear,
    step: _Step,
    steps: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    state: list[Tensor],
    *,
    backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs (T, batch, width) of one layer in one direction, and its last states."""
    biases = weights[2:4] if has_biases else [None, None]
    projection = weights[-1] if len(weights) % 2 else None
    inputs = linear(steps, weights[0], biases[0])
    outputs = []
    for x in reversed(inputs.unbind(0)) if backwards else inputs.unbind(0):
        state = step(x, linear(state[0], weights[1], biases[1]), state)
        if projection is not None:
            state[0] = linear(state[0], projection, None)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state
