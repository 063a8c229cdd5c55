"""The Gaussian device: equation 10 of the photonic DFA paper (arXiv 2106.03645)."""

from __future__ import annotations

from typing import Any

import torch

from opusim.description_schema import DeviceDescription
from opusim.devices.simulated import SimulatedDevice
from opusim.errors import ConfigError
from opusim.noise import GaussianNoise
from opusim.randomness import noise_stream


class GaussianDevice(SimulatedDevice):
    """y = B x + N(0, sigma^2 I), sigma given directly or through the temperature law.

    The product is exact before the noise is added (see `opusim.medium.Medium`), so results do not depend on
    tiling or thread count. `project` and `draw` take consecutive readings of one stream: no two share noise.

    Args:
        description: one with a section ``[noise]``.
        **window: as for `opusim.devices.base.NoisyDevice`.

    Raises:
        ConfigError: the description has no noise.
    """

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.noise is None:
            raise ConfigError(description.name, "noise", "missing; give noise.sigma, or use the kind 'ideal'")
        self._std = description.noise.value()
        self._noise = GaussianNoise(std=self._std, n_outputs=self.n_outputs)
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")

    @property
    def described_noise(self) -> GaussianNoise:
        """One standard deviation for all outputs."""
        return self._noise

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return self._stream.add_to(self._medium.project(x), self._std)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._stream.normal(shape, device=self._torch_device).mul_(self._std)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)
