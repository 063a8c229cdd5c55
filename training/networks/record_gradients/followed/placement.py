"""States of tensors while the records of a batch are followed operator by operator.

A tensor holds no record (None), or every record in rows of its own (`Held`), or numbers that depend on several
(`Mixed`). Data movement, such as a view, is followed by moving codes that number the records. Below: the arguments of
operators, and access to a batch without an operator, by generators and by methods that leave torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from opusim.training.networks.record_gradients.calls import Layout


@dataclass(frozen=True)
class Held:
    """Every record has rows of its own, and a row depends on no other record.

    Attributes:
        layout: Which rows belong to a record.
        free: Whether the numbers depend on no record and are alike at every place, as zeros and random draws are; they
            may then stand for rows in any order.
    """

    layout: Layout
    free: bool = False


@dataclass(frozen=True)
class Mixed:
    """Numbers that depend on several records, on their order or on their number.

    Attributes:
        reason: What made them so, a part of a sentence.
        remedy: What to write instead.
        placed: Whether they depend on no record, only on their order and number, such as 0, 1, ... up to the batch's
            size.
        counts: Whether they are whole numbers 0, k, 2 k, ... that torch.arange made, and nothing has changed since.
    """

    reason: str
    remedy: str
    placed: bool = False
    counts: bool = False


State = Held | Mixed | None


class Refused(Exception):
    """An operator whose rows have no known owner.

    Args:
        reason: What it does, a part of a sentence.
        remedy: What to write instead.
        sizes: Whether sizes, which Python code sees, depend on what the records hold.
    """

    def __init__(self, reason: str, remedy: str, *, sizes: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.remedy, self.sizes = reason, remedy, sizes


def joined(
    states: Sequence[tuple[Tensor, State]], ndim: int, *, leading: bool = False
) -> tuple[State, int | None]:
    """Return the state of tensors combined number by number to `ndim` dimensions, and the size of the records' one.

    `leading` counts dimensions from the first, instead of from the last as torch broadcasts. Raises Refused if they
    hold records in different dimensions or orders.
    """
    found: Held | None = None
    size = None
    for tensor, state in states:
        if isinstance(state, Mixed):
            return state, None
        if state is None:
            continue
        shift = 0 if leading else ndim - tensor.ndim
        layout = state.layout._replace(dim=state.layout.dim + shift)
        own = tensor.shape[state.layout.dim]
        if found is None:
            found, size = Held(layout, state.free), own
        elif found.layout == layout:
            found = Held(layout, found.free and state.free)
        elif found.layout.dim == layout.dim and size == own and (found.free or state.free):
            found = Held(found.layout if state.free else layout, found.free and state.free)
        else:
            raise Refused(
                "combines rows of different records",
                "let every record stand in the same dimension of all tensors, in the same order",
            )
    return found, size


def layouts(dim: int, rows: int) -> Iterator[Layout]:
    """Yield the ways in which some rows of each record can stand in a dimension, neighbours first."""
    for inner in range(rows, 0, -1):
        if rows % inner == 0:
            yield Layout(dim, rows // inner, inner)


def codes(tensor: Tensor, layout: Layout, records: int, *, by_place: bool = False) -> Tensor:
    """Return a tensor of the same shape that holds the number of the record, from 1, at each place.

    `by_place` gives each number of a record a code of its own, records x place + number of the record.
    """
    shape = [1] * tensor.ndim
    shape[layout.dim] = -1
    owners = (layout.owners(records) + 1).double().view(shape)
    if not by_place:
        return owners.expand(tensor.shape)
    rows = torch.arange(layout.rows, dtype=torch.float64).view(layout.outer, 1, layout.inner)
    own = rows.expand(-1, records, -1).reshape(shape)
    rest = [size for dim, size in enumerate(tensor.shape) if dim != layout.dim]
    others = torch.arange(math.prod(rest), dtype=torch.float64).view(rest).unsqueeze(layout.dim)
    return owners + records * (own + layout.rows * others)


def decoded(moved: Tensor, records: int) -> State:
    """Return the state of a tensor from the codes that were moved into it; 0 stands for no record.

    Raises Refused if the places of a record, or what it holds there, depend on which it is, or records are left out.
    """
    if not moved.numel() or not bool(moved.any()):
        return None
    for dim in range(moved.ndim):
        rows, rest = divmod(moved.shape[dim], records)
        if rest or not rows:
            continue
        coded = moved.movedim(dim, 0).reshape(moved.shape[dim], -1)
        lines = torch.where(coded == 0, 0, (coded - 1) % records + 1)
        owner = lines.amax(dim=1)
        if not bool(((lines == owner[:, None]) | (lines == 0)).all()):
            continue
        for layout in layouts(dim, rows):
            wanted = layout.owners(records) + 1
            places = torch.where(coded == 0, -1, (coded - 1) // records)
            apart = places.unflatten(0, (layout.outer, records, layout.inner))
            if bool(((owner == wanted) | (owner == 0)).all()) and bool((apart == apart[:, :1]).all()):
                return Held(layout)
    raise Refused(
        "moves the rows of records, or leaves some out",
        "keep the records of a batch in their order, in one dimension, and mask what does not count",
    )


def moved_state(
    tensors: Sequence[tuple[Tensor, State]],
    records: int,
    move: Callable[[dict[int, Tensor]], list[Tensor]],
    *,
    by_place: bool = False,
) -> list[State]:
    """Return the states of the results of data movement, found by moving codes of the records.

    The codes take the places of the tensors, `Held` or None, with these ids. Different numbers of different records may
    be moved `by_place`.
    """
    frees = [state.free for _, state in tensors if isinstance(state, Held)]
    found: list[State] = []
    refusal: Refused | None = None
    for choice in choices(tensors):
        coded = {
            id(tensor): torch.zeros(tensor.shape)
            if layout is None
            else codes(tensor, layout, records, by_place=by_place)
            for (tensor, _), layout in zip(tensors, choice, strict=True)
        }
        try:
            found = [decoded(each, records) for each in move(coded)]
        except Refused as error:
            refusal = refusal or error
            continue
        return [Held(s.layout, all(frees)) if isinstance(s, Held) else s for s in found]
    raise refusal or Refused("moves rows", "keep records in their order")


def choices(tensors: Sequence[tuple[Tensor, State]]) -> Iterator[list[Layout | None]]:
    """Yield the layouts to try: those known, and others for numbers that depend on no record."""
    known = [state.layout if isinstance(state, Held) else None for _, state in tensors]
    yield known
    for number, (_, state) in enumerate(tensors):
        if isinstance(state, Held) and state.free and state.layout.rows > 1:
            for layout in layouts(state.layout.dim, state.layout.rows):
                if layout != state.layout:
                    yield [*known[:number], layout, *known[number + 1 :]]


def constant_state(value: Tensor, shape: tuple[int, ...], counts: tuple[int, int]) -> Held | None:
    """Return the state of a constant tensor that holds the same numbers for each record, or None if they differ.

    It is of a batch of the second of two sizes, and its shape in a batch of the first one is given.
    """
    scaled = scaled_dimension(shape, tuple(value.shape), counts)
    if scaled is None:
        return None
    dim, rows = scaled
    for layout in layouts(dim, rows):
        apart = value.detach().unflatten(dim, (layout.outer, counts[1], layout.inner)).movedim(dim + 1, 0)
        same = (apart == apart[:1]) | ((apart != apart) & (apart[:1] != apart[:1]))
        if bool(same.all()):
            return Held(layout)
    return None


def scaled_dimension(
    few: tuple[int, ...], many: tuple[int, ...], counts: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the only dimension whose size is a multiple of the batch's, and the multiple; else None."""
    if len(few) != len(many):
        return None
    dims = [d for d in range(len(few)) if few[d] != many[d]]
    if len(dims) != 1:
        return None
    rows, rest = divmod(many[dims[0]], counts[1])
    return None if rest or few[dims[0]] != rows * counts[0] else (dims[0], rows)


def strided_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return values in the memory order of a tensor; refuse (Refused) one whose numbers share memory."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype)
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and reach != tensor.numel():
        raise Refused("views memory that several numbers share", "view a contiguous tensor (x.contiguous())")
    return found.copy_(values)


# Memory

Key = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""The place of a tensor in its memory: offset, shape and steps in numbers, and the bytes of a number."""


def overlap(first: Key, second: Key) -> bool:
    """Return whether two views may share numbers."""
    ends = [
        width * (offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) - 1
        if 0 not in shape
        else width * offset - 1
        for offset, shape, stride, width in (first, second)
    ]
    return first[0] * first[3] <= ends[1] and second[0] * second[3] <= ends[0]


def same_owners(first: Key, layout: Layout, second: Key, other: Layout, records: int) -> bool:
    """Return whether two views of the same memory assign each shared number to the same record."""
    width = math.gcd(first[3], second[3])
    places, owners = _owners(first, layout, records, width)
    more, others = _owners(second, other, records, width)
    found = torch.full((int(max(places.max(), more.max())) + 1,), -1)
    found[places] = owners
    return bool(((found[more] == others) | (found[more] < 0)).all())


def _owners(key: Key, layout: Layout, records: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the places in memory of all numbers of a view, in parts of some bytes, and the record of each."""
    offset, shape, stride, size = key
    places = torch.full((), offset * size)
    for length, step in zip(shape, stride, strict=True):
        places = places[..., None] + torch.arange(length) * step * size
    parts = places.flatten()[:, None] + torch.arange(0, size, width)
    across = [1] * len(shape)
    across[layout.dim] = -1
    owners = layout.owners(records).view(across).expand(shape)
    return parts.flatten() // width, owners.flatten().repeat_interleave(size // width)


_SIZES = frozenset({
    "size", "sizes", "shape", "self_size", "input_sizes", "input_size", "repeats", "split_size", "split_sizes", "N",
})  # fmt: skip
"""Arguments that may grow with the batch: the shape of the result tells whether they did so by the records only."""
_STRIDED = frozenset({"as_strided", "new_empty_strided", "empty_strided"})
_RESHAPES = frozenset({"squeeze", "unsqueeze", "t", "transpose", "as_strided"})
"""Operators whose in-place form changes the shape of a tensor, and no number."""
WRITES = dict.fromkeys(["native_batch_norm", "cudnn_batch_norm"], ("running_mean", "running_var"))
"""The names of arguments that operators overwrite in training, though their schemas do not say so."""
_SEED = 2**31 + 48611
"""Seed of torch's generator in a pass that is followed; no module is likely to take it."""
_METHODS = (
    "numpy", "tolist", "untyped_storage", "storage", "apply_", "map_", "map2_", "__dlpack__",
    "__reduce_ex__", "__repr__",
)  # fmt: skip
CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__", "__complex__")
"""How torch.tensor reads the elements of a list, while it keeps their operators from every mode."""
_CAPSULE = "to_dlpack"
"""Hands out a tensor's memory."""
_PLACES = "tensor_split"
"""Splits at the places that a tensor holds, which torch reads without an operator."""
_SHAPE = "_shape_as_tensor"
"""Writes the number of records into memory, without an operator."""


class Operator(NamedTuple):
    """An operator, independent of the arguments of a call.

    Attributes:
        name: Its name without the mark of an operator in place, and without its package if that is torch's.
        defaults: Defaults of optional arguments.
        names: The names of all arguments, in order.
        counted: The names of arguments that, if they are numbers, may not vary with the batch's size.
        written: The names of arguments that it overwrites.
        reshapes: Whether it changes the shape of a tensor in place, and no number.
    """

    name: str
    defaults: dict[str, Any]
    names: tuple[str, ...]
    counted: tuple[str, ...]
    written: tuple[str, ...]
    reshapes: bool


@cache
def operator_of(func: Any) -> Operator:
    """Return what is known of an operator."""
    package, _, name = func._schema.name.partition("::")
    in_place = name.endswith("_") and not name.endswith("__")
    name = name[:-1] if in_place else name
    if func is torch.ops.aten.where.default:  # inference mode shows it whole
        name = "nonzero"
    left_out = _SIZES | ({"stride", "storage_offset"} if name in _STRIDED else set())
    known = func._schema.arguments
    written = [each.name for each in known if each.alias_info and each.alias_info.is_write]
    return Operator(
        name if package == "aten" else f"{package}.{name}",
        {each.name: each.default_value for each in known if each.has_default_value()},
        tuple(each.name for each in known),
        tuple(each.name for each in known if each.name not in left_out),
        () if name in _RESHAPES else tuple(written),
        in_place and name in _RESHAPES,
    )


# Draws


def seed_pass() -> None:
    """Seed the global generators, so that passes draw alike."""
    torch.manual_seed(_SEED)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def has_own_generator(arguments: Mapping[str, Any]) -> bool:
    """Return whether an operator draws from the module's own generator, or from torch's after the module seeded it."""
    given = [leaf for leaf in tree_leaves(dict(arguments)) if isinstance(leaf, torch.Generator)]
    return any(each is not torch.default_generator for each in given) or torch.initial_seed() != _SEED


# Ways out


active: list[Any] = []
"""The trackers (`tracking.RowTracker`) whose passes run, the innermost last."""


def active_tracker() -> Any:
    """Return the tracker of the running pass, or None.

    Under a tracker, a function that leaves torch, such as one that reads a device, does not run; it notes where the
    records stand in its result.
    """
    return active[-1] if active else None


def _is_hidden() -> bool:
    """Return whether torch keeps operators from modes."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def _guard(
    owner: Any, name: str, *, first: bool, when: Callable[[], bool] = lambda: True
) -> tuple[Any, str, Callable[..., Any]]:
    """Return a function that checks with the tracker, `when` told so, before it calls an owner's function.

    It checks the first tensor that the function is called on, or those that follow.
    """
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for each in (tensor,) if first else (*args, *kwargs.values()):
            if active and isinstance(each, Tensor) and when():
                active[-1].require_inside(each, name)
        return method(tensor, *args, **kwargs)

    return owner, name, checked


GUARDS = (
    *(_guard(Tensor, name, first=True) for name in _METHODS),
    *(_guard(Tensor, name, first=True, when=_is_hidden) for name in CONVERSIONS),
    *(_guard(owner, _PLACES, first=False) for owner in (Tensor, torch)),
    *(_guard(owner, _CAPSULE, first=True) for owner in (torch, torch.utils.dlpack)),
    (torch, _SHAPE, lambda tensor: torch.tensor(list(tensor.shape))),
)
"""Methods that hand numbers to code outside of torch, and their replacements, which check with the tracker first.

They replace methods of the tensor class, since autograd runs the backward pass without modes of torch functions.
"""
