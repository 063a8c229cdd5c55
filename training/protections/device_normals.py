"""Central noise from a device of Gaussian law."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise
from opusim.randomness import NoiseStream


def creditable_law(device: NoisyDevice, *, key: str = "protection.noise") -> GaussianNoise:
    """The device's law, where a protection or a likelihood ratio may rest on it.

    Args:
        device: Open or not.
        key: What asked for the device's noise, for the message.

    Raises:
        ConfigError: It is not Gaussian, is 0 at some output, or rests on a certificate, whose own error no protection
            accounts for yet.
    """
    law = device.noise
    if isinstance(law, GaussianNoise) and law.min_std > 0 and law.beta == 0:
        return law
    raise ConfigError(
        "configuration",
        key,
        f"'device' credits the noise of device {device.name!r} ({law.describe()}), but that takes a Gaussian law above "
        "0, not one certified from frames; use 'digital'",
    )


class DeviceNormals(NoiseStream):
    """N(0, 1) numbers from a device's blank readings, each divided by its output's standard deviation.

    Sound for a Gaussian law alone: readings of another law, scaled up, prove nothing.

    Args:
        device: Open, with noise of a Gaussian law above 0 at every output. Its steps are set by the trainer.
        key: As for `creditable_law`.

    Raises:
        ConfigError: See `creditable_law`.
    """

    def __init__(self, device: NoisyDevice, *, key: str = "protection.noise") -> None:
        law = creditable_law(device, key=key)
        self._device = device
        self._std = torch.from_numpy(np.broadcast_to(law.std, device.n_outputs).astype(np.float32))

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """See NoiseStream.normal."""
        size = math.prod(shape)
        readings = self._device.draw((-(-size // len(self._std)), len(self._std)))
        readings.div_(self._std.to(readings.device))
        return readings.flatten()[:size].reshape(tuple(shape)).to(device)

    def seek(self, step: int) -> None:
        """Nothing: the trainer sets the device's step."""
