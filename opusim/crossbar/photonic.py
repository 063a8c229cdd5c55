"""The base of programmable chips of light: photodiodes with converters read the matrix that a chip realised."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from opusim.crossbar.device import ConvertedDevice, TiledProduct
from opusim.crossbar.programmable import Converter
from opusim.description.crossbar import PhotonicSettings, ProductSettings
from opusim.description.schema import DeviceDescription
from opusim.devices.inputs import real_batch
from opusim.errors import ConfigError
from opusim.randomness.seeds import derive_seed
from opusim.temperature import TemperatureTable

_OTHER_CHIPS = 3
"""Chips that `PhotonicDevice.programming_std` simulates."""


class Light(NamedTuple):
    """The matrix that a chip realised, and the variance of a reading of x, squared units of w x.

    Attributes:
        weights: w, shape (outputs, inputs).
        dark: variance of a reading of nothing.
        by_input: variance for sum_j |x_j| = 1.
        by_output: variance for an output of 1, in both quadratures.
        quadrature: matrix from inputs to light in the other quadrature, of the weights' shape; 0 for none.
    """

    weights: np.ndarray
    dark: float
    by_input: float = 0.0
    by_output: float = 0.0
    quadrature: np.ndarray | float = 0.0


class LightProduct(TiledProduct):
    """The product of a chip, with the noise of its detectors.

    Args:
        weights: w, float32.
        converter: bits and bounds.
        light: the noise, and the other quadrature.
    """

    def __init__(self, weights: torch.Tensor, converter: Converter, light: Light) -> None:
        super().__init__(weights, converter, ProductSettings())
        self._light, self._factor = light, light.by_output
        other = torch.as_tensor(np.asarray(light.quadrature, dtype=np.float32), device=weights.device)
        self._other = other if other.ndim else None

    def _tiles(self, shown: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Mean, the part of the variance of a row, and the light of every output."""
        mean = shown @ self._weights.T
        constant = shown.abs().sum(1).mul_(self._light.by_input).add_(self._light.dark)
        power = mean
        if self._factor:
            power = mean.square()
            if self._other is not None:
                power = power.add_((shown @ self._other.T).square_())
        yield mean, constant, power

    def std_limits(self) -> tuple[float, float]:
        """Return limits of the standard deviation over all inputs in [-1, 1]; the upper one may not be reached."""
        most = self._light.dark + self._light.by_input * self._weights.shape[1]
        largest = self._weights.abs().sum(1).square()
        if self._other is not None:
            largest = largest + self._other.abs().sum(1).square()
        return self._light.dark**0.5, (most + self._factor * float(largest.max())) ** 0.5


class PhotonicDevice(ConvertedDevice):
    """A chip that holds a matrix in the settings of heaters.

    A subclass names its section of the description and gives `_light`. A setting is held as long as the heaters are
    on, so that nothing drifts. Light goes one way.

    Args:
        description: one with the subclass's section and ``[medium]``.
        **window: as for `ProgrammableDevice`.

    Raises:
        ConfigError: a section is missing.
    """

    section: ClassVar[str]
    _settings: PhotonicSettings

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        settings = getattr(description, self.section)
        if settings is None:
            raise ConfigError(description.name, self.section, "missing; give laser_w and detector at least")
        self._settings = settings
        self._require_fitting()
        given = settings.converter
        self._converter = Converter(
            input_bits=given.dac_bits, output_bits=given.adc_bits, output_bound=given.adc_bound
        )
        self._held_light: Light | None = None
        self._wanted: torch.Tensor | None = None

    def _require_fitting(self) -> None:
        """Refuse a description whose numbers of inputs or outputs the chip does not have."""

    @abstractmethod
    def _light(self, matrix: torch.Tensor, settings: Any, chip: int, number: int) -> Light:
        """Return the matrix that a chip realises, and its noise.

        Args:
            matrix: entries in [-1, 1].
            settings: the section, at some temperature.
            chip: its seed.
            number: which programming of the chip this is.
        """

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the root mean square error of other chips of this description, the same for every entry.

        An error of one heater or splitter spreads over a whole mesh, so that single entries have no law of their own.
        """
        squares = []
        for number in range(_OTHER_CHIPS):
            chip = derive_seed(self._chip, "other chip", number)
            realised = torch.from_numpy(self._light(matrix, self._settings, chip, number).weights)
            squares.append((realised - matrix.cpu()).square().mean())
        return torch.full_like(matrix, float(torch.stack(squares).mean()) ** 0.5)

    def spread_error(self) -> float:
        """Return `programming_std` relative to the entries' root mean square, for a matrix of Gaussian entries."""
        generator = torch.Generator().manual_seed(1)
        matrix = torch.randn((self.n_outputs, self.n_inputs), generator=generator).clamp_(-4, 4) / 4
        return float(self.programming_std(matrix)[0, 0] / matrix.square().mean().sqrt())

    def programming_cost(self) -> tuple[float, float]:
        """Return the seconds in which the heaters settle; their power is that of the frames."""
        return self._settings.programming_us * 1e-6, 0.0

    def temperature_law(self, x: torch.Tensor) -> TemperatureTable:  # (vectors, n_inputs)
        """Return noise and size of readings at 21 temperatures, for the matrix that is held."""
        self._held()
        batch = real_batch(x, self.n_inputs, self._torch_device)

        def at(temperature_c: float) -> tuple[TiledProduct, torch.Tensor]:
            there = self._settings.model_copy(update={"temperature_c": temperature_c})
            if self._wanted is None:
                raise RuntimeError("a matrix is held that was never programmed")
            light = self._light(self._wanted, there, self._chip, self._number - 1)
            weights = self._as_weights(light)
            return LightProduct(weights, self._converter, light), weights

        return self._temperature_table((-40.0, 85.0), at, batch)

    def _program(self, matrix: torch.Tensor) -> torch.Tensor:
        self._number += 1
        return self._restored(matrix, {})

    def _restored(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._wanted, self._product = matrix, None
        self._held_light = self._light(matrix, self._settings, self._chip, self._number - 1)
        return self._as_weights(self._held_light)

    def _as_weights(self, light: Light) -> torch.Tensor:
        return torch.from_numpy(light.weights.astype(np.float32)).to(self._torch_device)

    def _product_of(self, weights: torch.Tensor) -> TiledProduct:
        if self._held_light is None:
            raise RuntimeError("a product before any programming")
        return LightProduct(weights, self._converter, self._held_light)
