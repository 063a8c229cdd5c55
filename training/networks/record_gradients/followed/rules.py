"""Rules of operators: where the records stand in the results, from where they stand in the arguments.

A rule takes an operation on tensors that hold records and returns the state of each result (see `placement` in this
folder); `tracking` says which operator has which rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from opusim.training.networks.record_gradients.calls import Layout
from opusim.training.networks.record_gradients.followed.placement import (
    Held,
    Mixed,
    Refused,
    State,
    choices,
    joined,
    moved_state,
    strided_like,
)
from opusim.training.networks.record_independence import MIXES_REMEDY

ORDER_REMEDY = (
    "keep every record in its own row, in the order of the batch, and leave positions out with torch.where or a "
    "product"
)
TABLE_REMEDY = "look rows up in parameters or constants, or in the record's own row (torch.gather)"


VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias", "view_copy", "reshape", "_reshape_copy"})
JOINS = frozenset({"cat", "stack", "_stack"})


BY_PLACE = frozenset({
    "index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put", "_embedding_bag",
    "_embedding_bag_forward_only",
})  # fmt: skip
"""Operators whose rules handle indices that count the places in a batch."""
_KEEPS = VIEWS | frozenset({
    "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "alias", "detach", "clone", "_to_copy",
})  # fmt: skip
"""Operators that leave numbers as they are."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of an operator.

    Attributes:
        func: The operator's overload.
        name: Its name, without the mark of an operator in place.
        where: Names the operator and the submodule, for messages.
        arguments: Its arguments by name, defaults included.
        numbers: Arguments that are no tensors, without sizes that may grow with the batch.
        tensors: All tensors among them.
        written: Those that it overwrites.
        states: The states of its tensors before the call, by id.
        records: Number of records.
    """

    func: Any
    name: str
    where: Callable[[], str]
    arguments: dict[str, Any]
    numbers: tuple[Any, ...]
    tensors: list[Tensor]
    written: list[Tensor]
    states: dict[int, State]
    records: int

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def state(self, tensor: Tensor | None) -> State:
        """Return the state of an argument before the call."""
        return None if tensor is None else self.states[id(tensor)]

    def pairs(self, *names: str) -> list[tuple[Tensor, State]]:
        """Return tensors of these names, or all, and their states."""
        given = [self[name] for name in names] if names else self.tensors
        return [(tensor, self.states[id(tensor)]) for tensor in given if isinstance(tensor, Tensor)]

    def mixed(self, reason: str, remedy: str = MIXES_REMEDY) -> Mixed:
        """Return the state of results that depend on several records."""
        return Mixed(f"{self.where()} {reason}", remedy)

    def require_none(self, *names: str) -> None:
        """Refuse records in arguments that every record shares."""
        for name in names:
            if self.state(self[name]) is not None:
                raise Refused(
                    f"takes numbers of the batch for its {name}",
                    "compute weights and tables from parameters and constants only",
                )


Outputs = list[Tensor | None]
Rule = Callable[[Operation, Outputs], State | list[State]]


def pointwise(op: Operation, outputs: Outputs) -> State | list[State]:
    """Combine numbers that stand at the same place, with broadcasting."""
    ndim = max(t.ndim for t in outputs if t is not None)
    state, size = joined(op.pairs(), ndim)
    if not isinstance(state, Held):
        return state
    # a result with a row for each record; others sum over the records, unless they are empty
    dim = state.layout.dim
    return [
        state
        if t is not None and t.ndim > dim and t.shape[dim] == size
        else None
        if t is None or not t.numel()
        else op.mixed("sums over the records")
        for t in outputs
    ]


def dimensions(op: Operation, ndim: int, name: str = "dim") -> list[int]:
    """Return dimensions as numbers from 0; all of them if none are given."""
    given = op[name]
    dims = [given] if isinstance(given, int) else list(given or ())
    return [dim % max(ndim, 1) for dim in dims] or list(range(ndim))


def reduced(op: Operation, outputs: Outputs) -> State:
    """Reduce dimensions, one result for all numbers along them."""
    tensor, state = _single(op)
    if not isinstance(state, Held):
        return state
    dims, dim = dimensions(op, tensor.ndim), state.layout.dim
    if dim in dims:
        return op.mixed("reduces over the records")
    moved = dim if op["keepdim"] else dim - sum(each < dim for each in dims)
    return Held(state.layout._replace(dim=moved))


def along(op: Operation, outputs: Outputs) -> State | list[State]:
    """Work along a dimension, numbers of one line depending on each other."""
    state = pointwise(op, outputs)
    for tensor, own in op.pairs():
        if isinstance(own, Held) and own.layout.dim in dimensions(op, tensor.ndim):
            raise Refused("works along the records", ORDER_REMEDY)
    return state


def _single(op: Operation) -> tuple[Tensor, State]:
    """Return the only tensor."""
    pair, *others = op.pairs()
    if others:
        raise Refused("takes a second tensor, such as out=", "leave it out")
    return pair


def moved(op: Operation, outputs: Outputs) -> State | list[State]:
    """Move numbers; codes of the records are moved likewise, to see where each record goes."""
    given = op.pairs()
    if mixed := first_mixed(given):
        return mixed
    as_strided = op.name == "as_strided"
    along = _moves_along(op)
    if any(isinstance(state, Held) and state.layout.dim in along for _, state in given):
        raise Refused("works along the records", ORDER_REMEDY)
    if op.name in VIEWS and "size" not in op.arguments:
        raise Refused("reads the bits of numbers as another type", "convert numbers with Tensor.to")

    def move(coded: dict[int, Tensor]) -> list[Tensor]:
        def place(leaf: Any) -> Any:
            return coded.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        arguments = tree_map(place, op.arguments)
        if op.name in VIEWS:
            return [arguments["self"].reshape(arguments["size"])]
        if as_strided:
            arguments["self"] = strided_like(op["self"], arguments["self"])
            arguments["storage_offset"] = (op["storage_offset"] or 0) - op["self"].storage_offset()
        if "value" in arguments and not isinstance(arguments["value"], Tensor):
            arguments["value"] = 0.0
        found = op.func(**arguments)
        return [found] if isinstance(found, Tensor) else list(found)

    fixed = [
        pair for pair in given if pair[0].dtype.is_floating_point or pair[1] is not None or op.name in JOINS
    ]
    return moved_state(fixed, op.records, move, by_place=_moves_by_place(op, fixed))


def _moves_along(op: Operation) -> list[int]:
    """Return the dimensions along which an operator moves numbers by their places, however many there are."""
    if op.name not in ("roll", "diagonal", "tril", "triu"):
        return []
    ndim = op["self"].ndim
    if op.name == "roll":
        return dimensions(op, ndim, "dims")
    return [ndim - 2, ndim - 1] if op.name != "diagonal" else [op["dim1"] % ndim, op["dim2"] % ndim]


def _moves_by_place(op: Operation, tensors: Sequence[tuple[Tensor, State]]) -> bool:
    """Return whether an operator may move different numbers of different records, as a slice with a step does."""
    if op.name in ("slice", "unfold"):
        dim = op["dim" if op.name == "slice" else "dimension"] % max(op["self"].ndim, 1)
        stepped = op.name == "unfold" or op["step"] != 1
        return stepped and any(isinstance(state, Held) and state.layout.dim == dim for _, state in tensors)
    return op.name in ("as_strided", "index", "_unsafe_index", "slice_backward", "diagonal_backward")


def squeezed(op: Operation, outputs: Outputs) -> State | list[State]:
    """Drop dimensions of size one."""
    if "dim" not in op.arguments and isinstance(_single(op)[1], Held):
        raise Refused(
            "drops the records' dimension in a batch of one", "name the dimension, as in x.squeeze(-1)"
        )
    return moved(op, outputs)


def unfolded_back(op: Operation, outputs: Outputs) -> State:
    """The gradient of windows along a dimension."""
    state = _single(op)[1]
    if isinstance(state, Held) and state.layout.dim == op["dim"] % len(op["input_sizes"]):
        raise Refused("works along the records", ORDER_REMEDY)
    return state


def loss(op: Operation, outputs: Outputs) -> State | list[State]:
    """A loss for each number, or one of all records."""
    if op["reduction"] == 0 and op.name != "nll_loss_forward":
        return pointwise(op, outputs)
    return first_mixed(op.pairs()) or op.mixed(
        "joins the losses of records", "return outputs; losses belong outside"
    )


def loss_backward(op: Operation, outputs: Outputs) -> State | list[State]:
    """The gradient of a loss for each number, of their sum or of their mean."""
    if op["reduction"] == 1:  # the mean
        return op.mixed("divides by the number of records", "return outputs; losses belong outside")
    return pointwise(op, outputs)


def first_mixed(pairs: Sequence[tuple[Tensor, State]]) -> Mixed | None:
    """Return the first state of numbers that records share."""
    return next((state for _, state in pairs if isinstance(state, Mixed)), None)


# Products


def product(op: Operation, a: Tensor, b: Tensor) -> State:
    """Return the state of a matrix product, (..., n, k) by (..., k, m)."""
    ndim, first, second = a.ndim, op.states[id(a)], op.states[id(b)]
    for state in (first, second):
        if isinstance(state, Mixed):
            return state
    inner = isinstance(first, Held) and first.layout.dim == ndim - 1
    if inner or (isinstance(second, Held) and second.layout.dim == ndim - 2):
        return op.mixed("sums over the records")
    if not isinstance(first, Held) or not isinstance(second, Held):
        return first or second
    if ndim < 3 or not first.layout.dim == second.layout.dim < ndim - 2:
        raise Refused("multiplies rows of different records", ORDER_REMEDY)
    return joined([(a, first), (b, second)], ndim)[0]


def mm(op: Operation, outputs: Outputs) -> State:
    """The product of two matrices, or of two batches of them."""
    return product(op, op["self"], op["mat2"])


def mv(op: Operation, outputs: Outputs) -> State:
    """A matrix times a vector."""
    vector = op["vec"]
    op.states[id(column := vector.unsqueeze(1))] = op.state(vector)
    return product(op, op["self"], column)


def dot(op: Operation, outputs: Outputs) -> State:
    """The sum of products of two vectors."""
    return first_mixed(op.pairs()) or op.mixed("sums over the records")


def added(product: Callable[[Operation], State]) -> Rule:
    """A tensor plus a product."""

    def rule(op: Operation, outputs: Outputs) -> State:
        (result,) = outputs
        if result is None:
            return None
        return joined([*op.pairs("self"), (result, product(op))], result.ndim)[0]

    return rule


def linear(op: Operation, outputs: Outputs) -> State:
    """A linear map of the last dimension."""
    op.require_none("weight", "bias")
    values = op["input"] if op["input"] is not None else op["self"]
    state = op.state(values)
    if isinstance(state, Held) and state.layout.dim == values.ndim - 1:
        return op.mixed("sums over the records")
    return state


def trilinear(op: Operation, outputs: Outputs) -> State:
    """The sum over some dimensions of the product of three tensors, which get new dimensions first."""
    pairs: list[tuple[Tensor, State]] = []
    ndim = op["i1"].ndim + len(op["expand1"])
    for n in (1, 2, 3):
        tensor, state = op[f"i{n}"], op.state(op[f"i{n}"])
        for dim in sorted(d % ndim for d in op[f"expand{n}"]):
            tensor = tensor.unsqueeze(dim)
            if isinstance(state, Held) and state.layout.dim >= dim:
                state = Held(state.layout._replace(dim=state.layout.dim + 1))
        pairs.append((tensor, state))
    state, _ = joined(pairs, ndim)
    if not isinstance(state, Held):
        return state
    dims = [dim % ndim for dim in op["sumdim"]]
    if state.layout.dim in dims:
        return op.mixed("sums over the records")
    return Held(state.layout._replace(dim=state.layout.dim - sum(d < state.layout.dim for d in dims)))


# Convolutions, norms, attention


def _with_weight_gradients(state: State, op: Operation, outputs: Outputs) -> list[State]:
    """The gradient of the input, then those of what every record shares."""
    return [state, *(op.mixed("sums gradients over the records") for _ in outputs[1:])]


def convolution(op: Operation, outputs: Outputs) -> State | list[State]:
    """A convolution over the last dimensions, and its gradients."""
    op.require_none("weight", "bias")
    pairs = op.pairs("input", "grad_output")
    state, _ = joined(pairs, pairs[0][0].ndim)
    if isinstance(state, Held) and state.layout.dim:
        raise Refused(
            "sees the records in another dimension than the first", "give it (records, channels, ...)"
        )
    return state if op["grad_output"] is None else _with_weight_gradients(state, op, outputs)


def norm(op: Operation, outputs: Outputs) -> State | list[State]:
    """A norm over the last dimensions, or over all but the first in groups of channels, and its gradients."""
    op.require_none("weight", "bias")
    shared, ndim = {id(op["weight"]), id(op["bias"])}, op["input"].ndim
    grouped = op["normalized_shape"] is None
    state, _ = joined([pair for pair in op.pairs() if id(pair[0]) not in shared], ndim, leading=grouped)
    if isinstance(state, Held) and state.layout.dim >= (1 if grouped else ndim - len(op["normalized_shape"])):
        return op.mixed("normalises over the records")
    return _with_weight_gradients(state, op, outputs) if op.name.endswith("backward") else state


_STATISTICS = (
    "weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var", "reserve", "reserveSpace",
)  # fmt: skip
"""Arguments of batch norms that hold a number for each channel, by the names of all backends."""


def batch_norm(op: Operation, outputs: Outputs) -> State | list[State]:
    """Statistics for each channel; they are a record's own if its channels are, as in an instance norm."""
    backward = op.name.endswith("backward")
    shared = [op[name] for name in _STATISTICS]
    ids = {id(tensor) for tensor in shared if tensor is not None}
    state, _ = joined([pair for pair in op.pairs() if id(pair[0]) not in ids], op["input"].ndim)
    own = first_mixed([(t, op.state(t)) for t in shared if t is not None])
    if own is not None or not isinstance(state, Held):
        return own or state
    training = op["train" if backward else "training"]
    if state.layout.dim == 1:
        channels = Held(state.layout._replace(dim=0))
        for tensor in shared:
            if tensor is not None and tensor.numel() and op.state(tensor) not in (None, channels):
                raise Refused("combines rows of different records", ORDER_REMEDY)
        return [state, *(channels if t is not None and t.numel() else None for t in outputs[1:])]
    if training or any(op.state(tensor) is not None for tensor in shared):
        return op.mixed("computes statistics over the records")
    return _with_weight_gradients(state, op, outputs) if backward else [state, *(None for _ in outputs[1:])]


def attention(op: Operation, outputs: Outputs) -> State | list[State]:
    """Attention over the last but one dimension, the records in a dimension before it."""
    pairs = [pair for name in _ATTENDS for pair in op.pairs(name)]
    state, size = joined(pairs, op["query"].ndim, leading=True)
    masks = [pair for name in ("attn_mask", "attn_bias") for pair in op.pairs(name)]
    if isinstance(state, Held) and masks:
        state, size = joined([*((pairs[0][0], state),), *masks], op["query"].ndim)
    if not isinstance(state, Held):
        return state
    if state.layout.dim >= op["query"].ndim - 2:
        raise Refused(
            "attends from one record to another", "let the records come first, as with batch_first=True"
        )
    dim, others = state.layout.dim, None
    if op.name.endswith("backward"):
        others = op.mixed("sums over the records")
    return [
        state
        if t is not None and t.ndim > dim and t.shape[dim] == size
        else others
        if t is not None and t.numel()
        else None
        for t in outputs
    ]


_ATTENDS = ("query", "key", "value", "grad_out", "grad_out_", "grad_output", "out", "logsumexp")


def spatial(op: Operation, outputs: Outputs) -> State | list[State]:
    """Pool, resample or pad the last one, two or three dimensions."""
    match = re.search(r"([123])d", op.name)
    return leading(int(match[1]) if match else 1, "give it (records, channels, ...)")(op, outputs)


def leading(trailing: int, remedy: str = ORDER_REMEDY) -> Rule:
    """Rule of operators on the last dimensions, batched over those before."""

    def rule(op: Operation, outputs: Outputs) -> State:
        pairs = op.pairs()
        state, _ = joined(pairs, max(tensor.ndim for tensor, _ in pairs), leading=True)
        if isinstance(state, Held) and state.layout.dim >= min(tensor.ndim for tensor, _ in pairs) - trailing:
            raise Refused("works along the records", remedy)
        return state

    return rule


def first_dimension(op: Operation, outputs: Outputs) -> State:
    """Patches of images, the records in the first dimension."""
    state = _single(op)[1]
    if isinstance(state, Held) and state.layout.dim:
        raise Refused(
            "sees the records in another dimension than the first", "give it (records, channels, ...)"
        )
    return state


# Factories


def recurrent(op: Operation, outputs: Outputs) -> State | list[State]:
    """A layer of a recurrent network on inputs (T, records, n) and states (records, n) or (1, records, n)."""
    inputs = [op[name] for name in ("input", "hx", "hx_", "cx", "cx_") if op[name] is not None]
    for tensor, state in op.pairs():
        if isinstance(state, Mixed):
            return state
        if state is not None and (
            state.layout != Layout(tensor.ndim - 2) or not any(tensor is each for each in inputs)
        ):
            raise Refused("works along the records", ORDER_REMEDY)
    if op.state(op["input"]) is None:
        raise Refused("takes states of records with inputs of none", ORDER_REMEDY)
    own = [Held(Layout(t.ndim - 2)) if t is not None else None for t in outputs[:3]]
    return [*own, *(op.mixed("keeps numbers of all records") for _ in outputs[3:])]


def like(op: Operation, outputs: Outputs) -> State:
    """A tensor of the same shape whose numbers depend on no record."""
    state = op.state(op["self"] if op["self"] is not None else op["input"])
    return Held(state.layout, free=True) if isinstance(state, Held) else state


def view_as_numbers(op: Operation, outputs: Outputs) -> State:
    """Complex numbers as pairs of real ones, and back."""
    return _single(op)[1]


# Look-ups: numbers that are taken or written at the places that other numbers name


def embedding(op: Operation, outputs: Outputs) -> State:
    """Rows of a table of parameters."""
    op.require_none("weight")
    return op.state(op["indices"])


def embedding_bag(op: Operation, outputs: Outputs) -> State | list[State]:
    """Bags of the same size; offsets that count them hold no record."""
    op.require_none("weight")
    state, offsets = op.state(op["indices"]), op["offsets"]
    weights = op["per_sample_weights"]
    if isinstance(state, Held) and weights is not None and op.state(weights) not in (None, state):
        raise Refused("combines rows of different records", ORDER_REMEDY)
    rows = state.layout.rows if isinstance(state, Held) else 0
    counted = torch.arange(op.records, device=offsets.device) * rows
    place = op.state(offsets)
    fixed = isinstance(place, Mixed) and place.counts
    known = isinstance(state, Held) and state.layout.outer == 1 and fixed
    if not known or not torch.equal(offsets, counted.to(offsets)):
        raise Refused(
            "takes bags that begin where offsets say",
            "give ids of shape (records, length), padded, without offsets",
        )
    return [Held(Layout(0)), *(op.mixed("counts over the bags") for _ in outputs[1:])]


def indexed_lines(op: Operation, outputs: Outputs) -> State:
    """Gather and scatter: places along one dimension, of the record's own numbers."""
    given = op.pairs()
    state, _ = joined(given, given[0][0].ndim)
    if isinstance(state, Mixed):
        return state
    dims = dimensions(op, given[0][0].ndim)
    if any(own is None or (isinstance(own, Held) and own.layout.dim in dims) for _, own in given):
        raise Refused("takes rows by their place in the batch", TABLE_REMEDY)
    return state


def selected(op: Operation, outputs: Outputs) -> State | list[State]:
    """index_select: whole lines at places along one dimension."""
    table, index = op.state(op["self"]), op.state(op["index"])
    dim = op["dim"] % max(op["self"].ndim, 1)
    if table is None and isinstance(index, Held):
        return Held(index.layout._replace(dim=dim))
    if isinstance(table, Held) and index is None and table.layout.dim != dim:
        return table
    raise Refused("takes rows by their place in the batch", TABLE_REMEDY)


def added_at(op: Operation, outputs: Outputs) -> State:
    """index_add and index_copy: whole lines at constant places of another dimension."""
    own = op.state(op["self"])
    given = [pair for name in ("self", "source", "value") for pair in op.pairs(name)]
    state, _ = joined([pair for pair in given if pair[0].ndim], op["self"].ndim)
    dim = op["dim"] % max(op["self"].ndim, 1)
    if isinstance(state, Mixed):
        return state
    if op.state(op["index"]) is not None or not isinstance(own, Held) or own.layout.dim == dim:
        raise Refused("puts rows where an index says", ORDER_REMEDY)
    return state


def _places(op: Operation, state: State) -> Held:
    """Return where x[...] puts the records; at least one of its indices depends on them or on their number.

    Raises Refused if they take rows of other records, or a number of rows that depends on records.
    """
    given = [(n, index) for n, index in enumerate(op["indices"]) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise Refused(
            "chooses rows by a mask, so that their number depends on the records",
            "keep all positions and mask them with torch.where, a product or masked_fill",
            sizes=True,
        )
    ndim = max(index.ndim for _, index in given)
    own, found = False, []
    for n, index in given:
        placed = op.state(index)
        if isinstance(placed, Mixed):
            at_records = isinstance(state, Held) and state.layout.dim == n and state.layout.rows == 1
            # the index must count the records along one dimension, and do nothing else
            dims = [d for d in range(index.ndim) if index.shape[d] > 1]
            counts = torch.arange(op.records, device=index.device).to(index)
            counted = placed.counts and at_records and len(dims) == 1
            if not counted or not torch.equal(index.flatten(), counts):
                raise Refused("takes rows by their place in the batch", TABLE_REMEDY)
            own = True
            found.append(Layout(dims[0] + ndim - index.ndim))
        elif isinstance(placed, Held):
            found.append(placed.layout._replace(dim=placed.layout.dim + ndim - index.ndim))
    if len(set(found)) > 1 or (isinstance(state, Held) and not own):
        raise Refused("takes rows of other records", TABLE_REMEDY)
    numbers = [n for n, _ in given]
    start = numbers[0] if numbers == list(range(numbers[0], numbers[-1] + 1)) else 0
    return Held(found[0]._replace(dim=start + found[0].dim))


def counts_on(op: Operation, output: Tensor) -> bool:
    """Return whether a result is 0, k, 2 k, ... as torch.arange makes it, in a type that is wide enough."""
    if output.dtype not in (torch.int32, torch.int64):
        return False
    if op.name == "arange":
        return not op["start"]
    given = list(op.states.values())
    return op.name in _KEEPS and bool(given) and all(isinstance(s, Mixed) and s.counts for s in given)


def _is_constant(op: Operation) -> bool:
    return all(index is None or op.state(index) is None for index in op["indices"])


def indexed(op: Operation, outputs: Outputs) -> State | list[State]:
    """x[indices]: constant places, places in a table, or each record's own places."""
    state = op.state(op["self"])
    if isinstance(state, Mixed):
        raise Refused("takes rows of numbers that all records share", state.remedy)
    if _is_constant(op):
        return moved(op, outputs)
    return _places(op, state)


def put(op: Operation, outputs: Outputs) -> State:
    """x[indices] = values, and x[mask] = number."""
    target, values = op["self"], op["values"]
    state, added = op.state(target), op.state(values)
    if mixed := first_mixed([(target, state), (values, added)]):
        return mixed
    mask = op["indices"][0]
    if len(op["indices"]) == 1 and mask is not None and mask.dtype == torch.bool and values.numel() == 1:
        return joined([(target, state), (mask, op.state(mask))], target.ndim, leading=True)[0]
    if not isinstance(state, Held):
        raise Refused(
            "writes rows of records into a tensor without them", "begin with zeros for every record"
        )
    shape = target.detach()[tuple(slice(None) if i is None else i for i in op["indices"])]
    refusal = Refused("writes to the places of some records only", ORDER_REMEDY)
    for (layout,) in choices([(target, state)]):
        try:
            within = _written(op, target, Held(layout)) if layout is not None else None
            if isinstance(within, Held):
                joined([(shape, within), (values, added)], shape.ndim)
                return Held(layout)  # type: ignore[arg-type]
        except Refused as error:
            refusal = error
    raise refusal


def _written(op: Operation, target: Tensor, state: Held) -> State:
    """Return the state of x[indices], where values are written."""
    if _is_constant(op):
        places = tuple(slice(None) if index is None else index for index in op["indices"])
        (found,) = moved_state(
            [(target, state)], op.records, lambda coded: [coded[id(target)][places]], by_place=True
        )
        return found
    return _places(op, state)
