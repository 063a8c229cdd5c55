"""The noiseless device: the baseline of every imperfection."""

from __future__ import annotations

from typing import Any

import torch

from opusim.description_schema import DeviceDescription
from opusim.devices.simulated import SimulatedDevice
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise


class IdealDevice(SimulatedDevice):
    """y = B x, exact; `draw` gives zeros.

    Its noise is the Gaussian law of standard deviation 0, from which accounting concludes that nothing is
    protected.

    Args:
        description: one without a section ``[noise]``.
        **window: as for `opusim.devices.base.NoisyDevice`.

    Raises:
        ConfigError: the description has noise.
    """

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.noise is not None:
            raise ConfigError(
                description.name, "noise", "the kind 'ideal' has none; remove it, or use 'gaussian'"
            )
        self._noise = GaussianNoise(std=0.0, n_outputs=self.n_outputs)

    @property
    def described_noise(self) -> GaussianNoise:
        """Standard deviation 0."""
        return self._noise

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._medium.project(x)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._torch_device)

    def _seek(self, step: int) -> None:
        """Nothing to position."""
