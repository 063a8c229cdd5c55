"""Ways out of torch: methods that hand numbers to code that no operator shows, and what has to ask before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

_METHODS = (
    "numpy", "tolist", "untyped_storage", "storage", "apply_", "map_", "map2_", "__dlpack__",
    "__reduce_ex__", "__repr__",
)  # fmt: skip
_PLACES = "tensor_split"
"""Splits where a tensor says, which torch reads without an operator."""
_SHAPE = "_shape_as_tensor"
"""Writes the number of records into memory, without an operator."""


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
