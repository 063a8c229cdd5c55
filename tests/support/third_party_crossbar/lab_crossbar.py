"""A crossbar of another package: 33 levels, noise that grows with the input, and a drift of 1 % a decade of time."""

from __future__ import annotations

import math
from typing import Any

import torch

from opusim.crossbar import ProgrammableDevice
from opusim.description import DeviceDescription
from opusim.noise import SignalGaussianNoise
from opusim.randomness import noise_stream


class LabCrossbar(ProgrammableDevice):
    """y = W x + N(0, 0.02^2 + 0.05^2 sum_j x_j^2), W in steps of 1/16."""

    can = ProgrammableDevice.can | {"wait"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._stream = noise_stream(self.mode, self._seed, "lab crossbar")

    @property
    def described_noise(self) -> SignalGaussianNoise:
        """Largest if all inputs are 1 in magnitude."""
        high = math.sqrt(0.02**2 + 0.05**2 * self.n_inputs)
        scale = self.reading_scale
        return SignalGaussianNoise(std_low=0.02 * scale, std_high=high * scale, n_outputs=self.n_outputs)

    def _program(self, matrix: torch.Tensor) -> torch.Tensor:
        self._programmed = self._now = (matrix * 16).round() / 16
        return self._now

    def _wait(self, elapsed_s: float) -> torch.Tensor:
        self._now = self._programmed * (1 - 0.01 * math.log10(1 + elapsed_s))
        return self._now

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        std = (0.02**2 + 0.05**2 * x.square().sum(1, keepdim=True)).sqrt()
        return x @ self._now.T + std * self._stream.normal((len(x), self.n_outputs))

    def _seek(self, step: int) -> None:
        self._stream.seek(step)
