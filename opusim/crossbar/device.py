"""The kind ``crossbar``: tiles of memory devices in differential pairs, simulated from published constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from opusim.crossbar.device import Pairs, TiledProduct, moments
from opusim.crossbar.programmable import Converter, ProgrammableDevice
from opusim.description.schema import DeviceDescription
from opusim.devices.inputs import real_batch
from opusim.errors import ConfigError
from opusim.noise import ConverterLatticeNoise, NoiseModel, SignalGaussianNoise
from opusim.randomness.streams import SeededStream, noise_stream

_FAR = 8.0
"""Standard deviations of a tile's noise between its largest output and the converter's limit that make clipping
negligible: a probability below 1e-15 for each conversion."""


class CrossbarDevice(ProgrammableDevice):
    """Conductances of differential pairs (`opusim.crossbar.conductances`), read by tiles (`opusim.crossbar.products`).

    The seed of ``[medium]`` says which chip this is: the random matrix, and what differs from device to device and from
    programming to programming of this object, are drawn from it in both modes, so that a chip that is opened again
    holds the same matrix. The noise of products comes from the stream of the mode, as on every device.

    Args:
        description: one with the sections ``[crossbar]`` and ``[medium]``.
        **window: as for `NoisyDevice`.

    Raises:
        ConfigError: a section is missing, or one too many is there.
    """

    can = ProgrammableDevice.can | {"multiply_transposed", "wait"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.crossbar is None:
            raise ConfigError(description.name, "crossbar", "missing; give g_max_us at least")
        self._settings = description.crossbar
        given = self._settings.converter
        self._converter = Converter(
            input_bits=given.dac_bits,
            output_bits=given.adc_bits,
            output_bound=given.adc_bound,
            tile_inputs=self._settings.tile_inputs,
        )
        self._chip = self._medium_settings.seed
        self._number = 0
        self._looks = 0
        self._pairs: Pairs | None = None
        self._product: TiledProduct | None = None
        self._transposed: TiledProduct | None = None
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")

    @property
    def converter(self) -> Converter:
        """The bits and bounds of the description."""
        return self._converter

    @property
    def described_noise(self) -> NoiseModel:
        """The law for the matrix that is held: of a lattice behind an ADC, else signal-dependent Gaussian."""
        product, scale = self._forward(), self.reading_scale
        low, high = product.std_limits()
        step, bound = self._converter.output_step, self._converter.output_bound
        if bound is None:
            tiles = product.tiles**0.5 * scale
            return SignalGaussianNoise(std_low=low * tiles, std_high=high * tiles, n_outputs=self.n_outputs)
        return ConverterLatticeNoise(
            step=step * scale,
            std_low=low * scale,
            std_high=high * scale,
            conversions=product.tiles,
            clips=product.largest_output() + _FAR * high > bound - step,
            n_outputs=self.n_outputs,
        )

    @property
    def saturated(self) -> torch.Tensor | None:
        """See `ProgrammableDevice.saturated`."""
        return None if self._product is None else self._product.saturated

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the variance of readings of x in [-1, 1], squared units of the reading, float64.

        Hardware cannot tell it; a calibration estimates it.
        """
        batch = real_batch(x, self.n_inputs, self._torch_device)
        return self._forward().variance(batch).mul_(self.reading_scale**2)

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the spread of both devices of a pair just after programming: programming and 1/f noise."""
        return self.weight_moments(matrix, 0.0)[1]

    def weight_moments(self, matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the moments of w = g+ - g- from those of the two conductances; see `conductances.moments`."""
        mean, variance = moments(matrix.abs(), seconds, self._settings)
        other, its_variance = moments(matrix.new_zeros(1), seconds, self._settings)  # its target is 0
        return (mean - other).mul_(matrix.sign()), (variance + its_variance).sqrt_()

    def programming_cost(self) -> tuple[float, float]:
        """Return seconds and joules of writing two devices for each weight."""
        work = self._settings.work
        if work is None:
            return 0.0, 0.0
        devices = 2 * self.n_inputs * self.n_outputs
        return (
            self.n_inputs * work.programming_us_per_row * 1e-6,
            devices * work.programming_nj_per_device * 1e-9,
        )

    def held_state(self) -> dict[str, torch.Tensor]:
        """See `ProgrammableDevice.held_state`: also which programming and look this is, and the noise's position."""
        state = super().held_state() | {"programming": torch.tensor([self._number, self._looks])}
        if isinstance(self._stream, SeededStream):
            position = np.array(self._stream.position, dtype=np.uint64)
            state["position"] = torch.from_numpy(position.view(np.int64))
        return state

    def restore(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """See `ProgrammableDevice.restore`; the conductances are those of before, and nothing is counted.

        In ``experiment`` the noise of products continues as it would have done.
        """
        checked = self._checked_matrix(matrix).contiguous()
        self._number, looks = (int(number) for number in state["programming"])
        elapsed_s = float(state["elapsed_s"])
        self._pairs = Pairs(checked, self._settings, chip=self._chip, number=self._number - 1)
        self._looks = looks - 1
        self._weights, self._scale, self._elapsed_s = self._look(elapsed_s), 1.0, elapsed_s
        self._begin_monitor(None)
        if "position" in state and isinstance(self._stream, SeededStream):
            self._stream.seek(*state["position"].numpy().view(np.uint64).tolist())
        return True

    def _program(self, matrix: torch.Tensor) -> torch.Tensor:
        self._pairs = Pairs(matrix, self._settings, chip=self._chip, number=self._number)
        self._number += 1
        self._looks = 0
        return self._look(0.0)

    def _wait(self, elapsed_s: float) -> torch.Tensor:
        return self._look(elapsed_s)

    def _look(self, elapsed_s: float) -> torch.Tensor:
        """Return the weights at a time and prepare their products."""
        if self._pairs is None:
            raise RuntimeError("a look before any programming")
        weights = self._pairs.weights(elapsed_s, self._looks)
        self._looks += 1
        self._product = self._transposed = None
        return weights

    def _forward(self) -> TiledProduct:
        weights = self._held()
        if self._product is None:
            self._product = TiledProduct(weights, self._converter, self._settings.product)
        return self._product

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward().read(x, self._stream)

    def _multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        if self._transposed is None:
            self._transposed = TiledProduct(self._held().T, self._converter, self._settings.product)
        return self._transposed.read(x, self._stream)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)
