"""A device of another package: a random matrix in front of a detector row whose noise rises over the outputs."""

from __future__ import annotations

from typing import Any

import torch

from opusim import NoisyDevice
from opusim.description import DeviceDescription
from opusim.noise import GaussianNoise
from opusim.randomness import noise_stream


class BenchDevice(NoisyDevice):
    """y = B x + N(0, diag(std^2)), std from sigma to twice sigma; options ``matrix_seed`` and ``sigma``."""

    can = NoisyDevice.can | {"matrix"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        generator = torch.Generator().manual_seed(int(description.options["matrix_seed"]))
        self._matrix = torch.randn(self.n_outputs, self.n_inputs, generator=generator)
        self._std = torch.linspace(1.0, 2.0, self.n_outputs) * float(description.options["sigma"])
        self._stream = noise_stream(self.mode, self._seed, "lab bench")

    @property
    def described_noise(self) -> GaussianNoise:
        """Gaussian, another standard deviation at each output."""
        return GaussianNoise(std=self._std.double().numpy(), n_outputs=self.n_outputs)

    def matrix(self) -> torch.Tensor:
        """B."""
        return self._matrix

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._matrix.T + self._draw((len(x), self.n_outputs))

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._stream.normal(shape) * self._std

    def _seek(self, step: int) -> None:
        self._stream.seek(step)
