"""Rules of operators that take or write numbers at the places that other numbers name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opusim.training.networks.record_gradients.followed.placement import (
    Held,
    Mixed,
    Refused,
    State,
    choices,
    joined,
    moved_state,
)
from opusim.training.networks.record_gradients.followed.rules import (
    ORDER_REMEDY,
    TABLE_REMEDY,
    VIEWS,
    Operation,
    Outputs,
    dimensions,
    first_mixed,
    moved,
)
from opusim.training.networks.record_gradients.layout import Layout

BY_PLACE = frozenset({
    "index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put", "_embedding_bag",
    "_embedding_bag_forward_only",
})  # fmt: skip
"""Operators whose rules know what numbers of the places in a batch mean to them."""
_KEEPS = VIEWS | {
    "unsqueeze",
    "squeeze",
    "expand",
    "permute",
    "transpose",
    "t",
    "alias",
    "detach",
    "clone",
    "_to_copy",
}
"""Operators that leave numbers as they are."""


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
    told = op.state(offsets)
    fixed = told is None or (isinstance(told, Mixed) and told.counts)
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
    if mixed := first_mixed([(op["self"], table), (op["index"], index)]):
        raise Refused("takes rows by their place in the batch", mixed.remedy)
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


@dataclass(frozen=True)
class _Places:
    """The places that a list of indices takes.

    Attributes:
        own: Whether each record is taken at its own place, by 0, 1, ... in the dimension of records.
        dim: Where the records stand in the result, or None if the indices hold none.
        layout: Of the records among the indices.
    """

    own: bool
    dim: int | None
    layout: Layout | None


def _places(op: Operation, state: State) -> _Places:
    """Read the indices of x[...], of which at least one depends on records or on their number.

    Raises:
        Refused: They take rows of other records, or as many as the numbers say.
    """
    given = [(n, index) for n, index in enumerate(op["indices"]) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise Refused(
            "chooses rows by a mask, as many as the records' numbers say",
            "keep all positions and mask them with torch.where, a product or masked_fill",
            sizes=True,
        )
    ndim = max(index.ndim for _, index in given)
    own, found = False, []
    for n, index in given:
        placed = op.state(index)
        if isinstance(placed, Mixed):
            at_records = isinstance(state, Held) and state.layout.dim == n and state.layout.rows == 1
            dim = _counting_dimension(index, op.records) if placed.counts and at_records else None
            if dim is None:
                raise Refused("takes rows by their place in the batch", TABLE_REMEDY)
            own = True
            found.append(Layout(dim + ndim - index.ndim))
        elif isinstance(placed, Held):
            found.append(placed.layout._replace(dim=placed.layout.dim + ndim - index.ndim))
    if len(set(found)) > 1 or (isinstance(state, Held) and not own and found):
        raise Refused("takes rows of other records", TABLE_REMEDY)
    numbers = [n for n, _ in given]
    start = numbers[0] if numbers == list(range(numbers[0], numbers[-1] + 1)) else 0
    return _Places(own, start + found[0].dim, found[0]) if found else _Places(own, None, None)


def _counting_dimension(index: Tensor, records: int) -> int | None:
    """Return the dimension along which an index counts the records, if it does nothing else."""
    dims = [d for d in range(index.ndim) if index.shape[d] > 1]
    counts = torch.arange(records, device=index.device)
    if dims == [] or len(dims) > 1 or not torch.equal(index.flatten(), counts.to(index)):
        return None
    return dims[0]


def counts_on(op: Operation, output: Tensor) -> bool:
    """Whether a result is 0, k, 2 k, ... as torch.arange makes it, in a type that holds the numbers of all batches."""
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
    places = _places(op, state)
    if places.dim is None or places.layout is None:
        raise Refused("takes rows by their place in the batch", TABLE_REMEDY)
    return Held(places.layout._replace(dim=places.dim))


def put(op: Operation, outputs: Outputs) -> State:
    """x[indices] = values, and x[mask] = number."""
    target, values = op["self"], op["values"]
    state, added = op.state(target), op.state(values)
    if mixed := first_mixed([(target, state), (values, added)]):
        return mixed
    mask = op["indices"][0]
    if (
        len(op["indices"]) == 1
        and mask is not None
        and mask.dtype == torch.bool
        and added is None
        and values.numel() == 1
    ):
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
    own = _places(op, state)
    return None if own.dim is None or own.layout is None else Held(own.layout._replace(dim=own.dim))
