"""A driver: opens an instrument through its library, shows frames and returns readings in projection units."""

from __future__ import annotations

import math
from typing import Any

import torch
from lab_sdk import DN_PER_UNIT, READ_NOISE_DN, Instrument

from opusim import NoisyDevice
from opusim.description import DeviceDescription
from opusim.noise import GaussianNoise


class InstrumentDevice(NoisyDevice):
    """y = (reading of the positive frame - reading of the negative frame) / (DN per unit)."""

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._instrument = Instrument()

    @property
    def described_noise(self) -> GaussianNoise:
        """Read noise of two frames; raise `NoiseUnknown` here if it was never measured."""
        return GaussianNoise(std=math.sqrt(2) * READ_NOISE_DN / DN_PER_UNIT, n_outputs=self.n_outputs)

    def _open(self) -> None:
        self._instrument.connect(self.n_inputs, self.n_outputs)

    def _close(self) -> None:
        self._instrument.disconnect()

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        positive, negative = (self._instrument.show((x == sign).cpu().numpy()) for sign in (1, -1))
        return torch.from_numpy((positive - negative) / DN_PER_UNIT).to(self._torch_device, torch.float32)

    def _seek(self, step: int) -> None:
        """Nothing: hardware does not repeat its noise."""
