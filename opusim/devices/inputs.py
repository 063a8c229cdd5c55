"""Check what a caller gives to a device and what the device returns.

These are the only checks: a device class gets checked batches, and callers get checked readings in their array library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from opusim import checks
from opusim.encodings import check_ternary
from opusim.errors import DeviceFault

Array = TypeVar("Array", torch.Tensor, np.ndarray)


def ternary_batch(x: torch.Tensor | np.ndarray, n_inputs: int, device: torch.device) -> torch.Tensor:
    """Return a checked batch as a float32 tensor on the device's torch device.

    Args:
        x: shape (batch, n_inputs), any real, integer or boolean dtype, entries in {-1, 0, 1}.
        n_inputs: the device's width.
        device: torch device the simulation runs on.

    Returns:
        float32, shape (batch, n_inputs); may share memory with x.

    Raises:
        TypeError: x is no tensor or array, or is complex.
        ValueError: wrong shape, a tensor that requires a gradient, or an entry that is not ternary.
    """
    checks.instance((torch.Tensor, np.ndarray), x=x)
    checks.shape(
        (None, n_inputs),
        x=x,
        remedy="a device takes one row for each vector; use reshape, or open another window",
    )
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "iufb":
            raise TypeError(f"x has dtype {x.dtype}: must be real; use astype(numpy.float32)")
        tensor = torch.from_numpy(x if x.flags.writeable else x.copy())
    else:
        tensor = x
    if tensor.requires_grad:
        raise ValueError("x requires a gradient, and a device has none; pass x.detach()")
    if tensor.is_complex():
        raise TypeError(f"x has dtype {tensor.dtype}: must be real; project real and imaginary part apart")
    check_ternary(tensor)
    return tensor.to(device=device, dtype=torch.float32)


def binary_batch(
    x: torch.Tensor | np.ndarray, n_inputs: int, device: torch.device, *, ternary: bool
) -> torch.Tensor:
    """`ternary_batch`, and unless `ternary` no entry may be -1: a mirror is on or off in a frame.

    Raises:
        TypeError, ValueError: as `ternary_batch`, or x holds -1.
    """
    batch = ternary_batch(x, n_inputs, device)
    if not ternary and bool((batch < 0).any()):
        raise ValueError("x holds -1: a frame shows 0 or 1; split it by encodings.split_frames(x)")
    return batch


def like_input(y: torch.Tensor, x: Array) -> Array:
    """Return the result in the caller's library and on the caller's torch device."""
    return y.cpu().numpy() if isinstance(x, np.ndarray) else y.to(x.device)


def drawn_shape(shape: Sequence[int], n_outputs: int, *, uniform: bool) -> tuple[int, ...]:
    """Return a checked shape of drawn noise.

    Args:
        shape: lengths of at least 0; the last one n_outputs unless the law is the same at every output.
        n_outputs: the device's outputs.
        uniform: whether the law is the same at every output.

    Raises:
        TypeError, ValueError: another shape.
    """
    for length in shape:
        checks.integer(length=length, minimum=0)
    if not uniform and (len(shape) == 0 or shape[-1] != n_outputs):
        raise ValueError(
            f"shape = {tuple(shape)}: the noise differs from output to output, so the last length must be "
            f"n_outputs = {n_outputs}; draw that, and take the outputs you need"
        )
    return tuple(int(length) for length in shape)


def check_reading(y: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuse what no reading can be.

    Args:
        y: what the device's class returned.
        shape: what it was asked for.
        name: the device's name.

    Raises:
        DeviceFault: no float32 tensor, another shape, or an entry that is not finite.
    """
    if not isinstance(y, torch.Tensor) or y.dtype != torch.float32:
        found = f"a tensor of {y.dtype}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise DeviceFault(f"device {name!r} returned {found}, not a float32 tensor; correct its class")
    if tuple(y.shape) != shape:
        raise DeviceFault(
            f"device {name!r} returned shape {tuple(y.shape)} instead of {shape}; reset the device"
        )
    # one bad entry spoils the sum, which is cheap to compute; if it overflows, entries are checked one by one
    if y.numel() and not math.isfinite(float(y.sum())) and not bool(torch.isfinite(y).all()):
        raise DeviceFault(f"device {name!r} returned NaN or infinity; reset the device")
