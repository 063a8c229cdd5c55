"""Central noise from a device of Gaussian law.

What a protection does in a step: turns a batch's signals into gradients that may be released.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from opusim import checks
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise
from opusim.randomness.streams import NoiseStream
from training.networks.network import FullyConnected


class Protection(ABC):
    """Writes noised gradients into a network.

    Args:
        noise: Source of independent N(0, 1), apart from every other stream of the run.
    """

    reference: Tensor | None = None
    """Features of public records, shape (n, n_0), whose layer inputs `set_gradients` needs at every step; None for
    a protection without them."""

    def __init__(self, noise: NoiseStream) -> None:
        self._noise = noise

    def seek(self, step: int) -> None:
        """Position the noise at the start of a step."""
        self._noise.seek(step)

    @property
    def state(self) -> dict[str, Tensor]:
        """What a resumed run must have back, by name; restored by copying into these tensors."""
        return {}

    @abstractmethod
    def set_gradients(
        self,
        network: FullyConnected,
        deltas: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Write the private gradient of every parameter.

        Args:
            network: Whose gradients are written.
            deltas: delta_l of each layer, shapes (batch, n_l).
            inputs: What each layer's update takes for h_(l-1), shapes (batch, n_(l-1)).
            records: Numbers of the batch's records in the training set, shape (batch,).
            public_inputs: h_(l-1) of the reference records, shapes (n, n_(l-1)).
        """


CLIP_RANGE = (1e-12, 1e12)
"""What a clip norm and a divisor may be: within it, clipped float32 rows and their sums keep all their digits."""
NOISE_RANGE = (1e-30, 1e30)
"""What a standard deviation of noise may be: far from the numbers that float32 rounds to 0 or to infinity."""


def noise_std(*, clip_norm: float, noise_multiplier: float, divisor: float = 1.0) -> float:
    """Return z C, the standard deviation of the noise on a sum, once float32 can hold it.

    Args:
        clip_norm: C.
        noise_multiplier: z, at least 0; 0 for no noise.
        divisor: What the noisy sum is divided by.

    Raises:
        ValueError: C or the divisor lies outside `CLIP_RANGE`, or z C or z C / divisor outside `NOISE_RANGE`: the clip
            would not hold, or the noise would vanish.
    """
    remedy = "rescale the loss or the features instead"
    checks.in_range(*CLIP_RANGE, clip_norm=clip_norm, divisor=divisor, remedy=remedy)
    std = noise_multiplier * clip_norm
    if noise_multiplier:
        noises = {
            "clip_norm * noise_multiplier": std,
            "clip_norm * noise_multiplier / divisor": std / divisor,
        }
        for name, value in noises.items():
            if not NOISE_RANGE[0] <= value <= NOISE_RANGE[1]:
                low, high = NOISE_RANGE
                raise ValueError(
                    f"{name} = {value:g}: must lie in [{low:g}, {high:g}], as float32 cannot hold such noise; "
                    "change noise_multiplier, clip_norm or divisor"
                )
    return std


def with_constant(h: Tensor, *, bias: bool) -> Tensor:
    """Layer inputs with the constant 1 that the bias multiplies, shape (batch, n + 1); h itself without a bias."""
    return torch.cat([h, h.new_ones(len(h), 1)], dim=1) if bias else h


def write_gradient(network: FullyConnected, layer: int, gradient: Tensor) -> None:
    """Hand a layer its gradient, shape (n_l, n_(l-1) + 1) with a bias and (n_l, n_(l-1)) without."""
    linear = network.linears[layer]
    if linear.bias is None:
        linear.weight.grad = gradient
        return
    linear.weight.grad = gradient[:, :-1].contiguous()
    linear.bias.grad = gradient[:, -1].contiguous()


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
