"""What an operator is called with, where tensors stand in memory, and what leaves torch without an operator."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opusim.training.networks.record_gradients.followed.placement import Held, Refused
from opusim.training.networks.record_gradients.followed.rules import Operation, Outputs
from opusim.training.networks.record_gradients.layout import Layout

_SIZES = frozenset({
    "size", "sizes", "shape", "self_size", "input_sizes", "input_size", "repeats", "split_size", "split_sizes", "N",
})  # fmt: skip
"""Arguments that may grow with the batch: the shape of the result tells whether they did so by the records only."""
_STRIDED = frozenset({"as_strided", "new_empty_strided", "empty_strided"})
_CUTS = frozenset({
    "slice", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "split_copy",
})  # fmt: skip
_SEED = 2**31 + 48611
"""Seed of torch's generator in a pass that is followed; no module is likely to take it."""
_METHODS = (
    "numpy", "tolist", "untyped_storage", "storage", "apply_", "map_", "map2_", "__dlpack__",
    "__reduce_ex__", "__repr__",
)  # fmt: skip
_PLACES = "tensor_split"
"""Splits where a tensor says, which torch reads without an operator."""
_SHAPE = "_shape_as_tensor"
"""Writes the number of records into memory, without an operator."""
_RESHAPES = frozenset({"squeeze", "unsqueeze", "t", "transpose", "as_strided"})
"""Operators that in place change the shape of a tensor, and no number."""
memory = torch._C.TensorBase.untyped_storage
"""Return the memory of a tensor."""
Key = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""The place of a tensor in its memory: offset, shape, steps, and the size of a number; in bytes but for the shape."""


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


def keep_shape(func: Any, name: str, arguments: dict[str, Any]) -> None:
    """Give an operator that is about to change a tensor's shape another view of it, so that the old shape stays."""
    if name in _RESHAPES and func._schema.name.endswith("_"):
        arguments["self"] = arguments["self"].detach()


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


def outputs_of(result: Any) -> Outputs:
    """Return the tensors of what an operator returns, and None in place of others."""
    leaves = list(result) if isinstance(result, (tuple, list)) else [result]
    flat = [each for leaf in leaves for each in (leaf if isinstance(leaf, list) else [leaf])]
    return [leaf if isinstance(leaf, Tensor) else None for leaf in flat]


def overwritten(op: Operation) -> list[Tensor]:
    """Return the tensors that an operator overwrites."""
    if op.name in _RESHAPES:
        return []
    names = [each.name for each in op.func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(op[name]) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> tuple[Any, Key]:
    """Return the memory of a tensor and its place there."""
    size = tensor.element_size()
    place = (
        int(tensor.storage_offset()) * size,
        tuple(tensor.shape),
        tuple(step * size for step in tensor.stride()),
    )
    return memory(tensor), (*place, size)


def overlap(first: Key, second: Key) -> bool:
    """Whether two views may share numbers."""
    ends = [
        offset + width - 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape
        else offset - 1
        for offset, shape, stride, width in (first, second)
    ]
    return first[0] <= ends[1] and second[0] <= ends[0]


def same_owners(first: Key, layout: Layout, second: Key, other: Layout, records: int) -> bool:
    """Whether two views of the same memory give each number that they share to the same record."""
    width = math.gcd(first[3], second[3])
    places, owners = _owners(first, layout, records, width)
    more, others = _owners(second, other, records, width)
    found = torch.full((int(max(places.max(), more.max())) + 1,), -1)
    found[places] = owners
    return bool(((found[more] == others) | (found[more] < 0)).all())


def _owners(key: Key, layout: Layout, records: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the places in memory of all numbers of a view, in parts of some bytes, and the record of each."""
    offset, shape, stride, size = key
    places = torch.full((), offset)
    for length, step in zip(shape, stride, strict=True):
        places = places[..., None] + torch.arange(length) * step
    parts = places.flatten()[:, None] + torch.arange(0, size, width)
    across = [1] * len(shape)
    across[layout.dim] = -1
    owners = layout.owners(records).view(across).expand(shape)
    return parts.flatten() // width, owners.flatten().repeat_interleave(size // width)


# Draws


def seed_pass() -> None:
    """Seed the global generators, so that passes draw alike."""
    torch.manual_seed(_SEED)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def own_draws(op: Operation) -> bool:
    """Whether an operator draws from a generator of the module's own, or from torch's after the module seeded it."""
    if torch.Tag.nondeterministic_seeded not in op.func.tags or op["dropout_p"] == 0:
        return False
    given = [leaf for leaf in tree_leaves(op.arguments) if isinstance(leaf, torch.Generator)]
    return any(each is not torch.default_generator for each in given) or torch.initial_seed() != _SEED


# Ways out


class _Asks(Protocol):
    def require_inside(self, tensor: Tensor, method: str) -> None: ...


@contextmanager
def guarded(tracker: _Asks) -> Iterator[None]:
    """Let methods that hand numbers to code outside of torch ask the tracker first, in this block.

    They stand on the class of tensors, since autograd leaves modes of torch functions out of the backward pass.
    """
    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (Tensor, name, _guard(tracker, name, getattr(Tensor, name))) for name in _METHODS
    ]
    found += [(owner, _PLACES, _split(tracker, getattr(owner, _PLACES))) for owner in (Tensor, torch)]
    found.append((torch, _SHAPE, lambda tensor: torch.tensor(list(tensor.shape))))
    before = [vars(owner).get(name) for owner, name, _ in found]
    for owner, name, method in found:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for (owner, name, _), method in zip(found, before, strict=True):
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


def _guard(tracker: _Asks, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def asked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tracker.require_inside(tensor, name)
        return method(tensor, *args, **kwargs)

    return asked


def _split(tracker: _Asks, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def asked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor):
                tracker.require_inside(each, _PLACES)
        return method(tensor, *args, **kwargs)

    return asked
