"""What an operator is called with: its arguments by name, what it overwrites, and where tensors stand in memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from training.networks.record_gradients.followed.placement import Held, Refused
from training.networks.record_gradients.followed.rules import Operation, Outputs
from training.networks.record_gradients.layout import Layout

_SIZES = frozenset({
    "size", "sizes", "shape", "self_size", "input_sizes", "input_size", "repeats", "split_size", "split_sizes", "N",
})  # fmt: skip
"""Arguments that may grow with the batch: the shape of the result tells whether they did so by the records only."""
PASS_SEED = 2**31 + 48611
"""Seed of torch's generator in a pass that is followed; no module is likely to take it."""
_STRIDED = frozenset({"as_strided", "new_empty_strided", "empty_strided"})
_CUTS = frozenset({
    "slice", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "split_copy",
})  # fmt: skip
memory = torch._C.TensorBase.untyped_storage
"""Return the memory of a tensor."""
Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The place of a tensor in its memory: offset, shape and steps."""


def require_dense(result: Any) -> None:
    """Refuse sparse, nested and other tensors that are not rows of numbers in memory."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            raise Refused(
                "makes a sparse or nested tensor, whose rows have no known owner", "take dense tensors"
            )


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, with those left out."""
    known = func._schema.arguments
    found = {each.name: each.default_value for each in known if each.has_default_value()}
    found.update(zip((each.name for each in known), args, strict=False))
    found.update(kwargs)
    return found


def operator_name(func: Any) -> str:
    """Return an operator's name without its package and the mark of an operator in place."""
    package, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return str(name) if package == "aten" else f"{package}.{name}"


def numbers(op: Operation) -> tuple[Any, ...]:
    """Return the arguments that are no tensors, without sizes that may grow with the batch."""
    left_out = set(_SIZES)
    if op.name in _STRIDED:
        left_out |= {"stride", "storage_offset"}
    kept = {name: value for name, value in op.arguments.items() if name not in left_out}
    return tuple(leaf for leaf in tree_leaves(kept) if not isinstance(leaf, (Tensor, torch.Generator)))


def cuts_of(op: Operation) -> tuple[Any, ...]:
    """Return where an operator cuts a dimension: its start, its end and its sizes; None for what cuts nothing."""
    if op.name not in _CUTS:
        return ()
    given = (op[name] for name in ("start", "end", "split_size", "split_sizes"))
    return tuple(None if each in (0, sys.maxsize) else each for each in given)


def cuts_of_records(op: Operation) -> tuple[Any, ...] | None:
    """Return where an operator cuts the dimension of records, or None."""
    state = op.state(op["self"]) if op.name in _CUTS else None
    if not isinstance(state, Held) or state.layout.dim != op["dim"] % op["self"].ndim:
        return None
    return cuts_of(op)


def own_draws(op: Operation) -> bool:
    """Whether an operator draws from a generator of the module's own, or from torch's after the module seeded it."""
    if torch.Tag.nondeterministic_seeded not in op.func.tags or op["dropout_p"] == 0:
        return False
    given = [leaf for leaf in tree_leaves(op.arguments) if isinstance(leaf, torch.Generator)]
    return any(each is not torch.default_generator for each in given) or torch.initial_seed() != PASS_SEED


def outputs_of(result: Any) -> Outputs:
    """Return the tensors of what an operator returns, and None in place of others."""
    leaves = list(result) if isinstance(result, (tuple, list)) else [result]
    flat = [each for leaf in leaves for each in (leaf if isinstance(leaf, list) else [leaf])]
    return [leaf if isinstance(leaf, Tensor) else None for leaf in flat]


def overwritten(op: Operation) -> list[Tensor]:
    """Return the tensors that an operator overwrites."""
    names = [each.name for each in op.func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(op[name]) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> tuple[Any, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return the memory of a tensor and its place there."""
    return memory(tensor), (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def overlap(first: Key, second: Key) -> bool:
    """Whether two views may share numbers."""
    ends = [
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape
        else offset - 1
        for offset, shape, stride in (first, second)
    ]
    return first[0] <= ends[1] and second[0] <= ends[0]


def same_owners(first: Key, layout: Layout, second: Key, other: Layout, records: int) -> bool:
    """Whether two views of the same memory give each number that they share to the same record."""
    places, owners = _owners(first, layout, records)
    more, others = _owners(second, other, records)
    found = torch.full((int(max(places.max(), more.max())) + 1,), -1)
    found[places] = owners
    return bool(((found[more] == others) | (found[more] < 0)).all())


def _owners(key: Key, layout: Layout, records: int) -> tuple[Tensor, Tensor]:
    """Return the places in memory of all numbers of a view, and the record of each."""
    offset, shape, stride = key
    places = torch.full((), offset)
    for size, step in zip(shape, stride, strict=True):
        places = places[..., None] + torch.arange(size) * step
    across = [1] * len(shape)
    across[layout.dim] = -1
    owners = layout.owners(records).view(across).expand(shape)
    return places.flatten(), owners.flatten()
