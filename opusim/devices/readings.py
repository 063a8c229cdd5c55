"""The one check of what a device hands back."""

from __future__ import annotations

import math

import torch

from opusim.errors import DeviceFault


def check_reading(y: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuses what no reading can be.

    Args:
        y: what the device's class returned.
        shape: what it was asked for.
        name: the device's name.

    Raises:
        DeviceFault: no float32 tensor, another shape, or an entry that is not finite.
    """
    if not isinstance(y, torch.Tensor) or y.dtype != torch.float32:
        found = f"a tensor of {y.dtype}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise DeviceFault(f"device {name!r} returned {found}, not a float32 tensor; mend its class")
    if tuple(y.shape) != shape:
        raise DeviceFault(
            f"device {name!r} returned shape {tuple(y.shape)} where {shape} was asked for; reset the device"
        )
    # one bad entry spoils the sum, which is cheap; a sum that overflows is looked at entry by entry
    if y.numel() and not math.isfinite(float(y.sum())) and not bool(torch.isfinite(y).all()):
        raise DeviceFault(f"device {name!r} returned NaN or infinity; reset the device")
