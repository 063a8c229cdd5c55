"""Arguments of operators, and access to a batch without an operator: generators, and methods that leave torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
