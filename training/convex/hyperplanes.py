"""Where the hyperplanes of the gates come from: a generator, or a device's own scattering medium."""

from __future__ import annotations

import torch
from torch import Tensor

from opusim.devices.base import NoisyDevice

_ROWS = 256


def seeded_hyperplanes(count: int, n_inputs: int, generator: torch.Generator) -> Tensor:
    """Rows u_p ~ N(0, I), shape (count, n_inputs)."""
    return torch.randn(count, n_inputs, generator=generator)


def device_hyperplanes(device: NoisyDevice, *, readings: int) -> Tensor:
    """The device's matrix as it reads it: unit vector e_i is projected `readings` times, and the mean is column i of B.

    Exact up to noise of 1 / sqrt(readings) of a reading's; whatever it is, the result is the matrix that the gates use
    from then on, in training and at inference, so its noise costs nothing but a slightly different random matrix.

    Args:
        device: Open; its inputs are the features, its outputs the hyperplanes.
        readings: Readings of each unit vector, at least 1.

    Returns:
        B, shape (device.n_outputs, device.n_inputs), on the CPU.
    """
    units = torch.eye(device.n_inputs)
    columns = []
    for block in units.split(_ROWS):
        total = torch.zeros(len(block), device.n_outputs)
        for _ in range(readings):
            total += device.project(block).cpu()
        columns.append(total / readings)
    return torch.cat(columns).t().contiguous()
