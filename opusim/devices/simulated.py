"""Simulated devices with a medium computed from its seed: noiseless, or with Gaussian noise.

`GaussianDevice` is equation 10 of the photonic DFA paper (arXiv 2106.03645). `IdealDevice` is the baseline of every
imperfection.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from opusim.description.schema import DeviceDescription, MediumSettings, NoiseSettings
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE, Medium
from opusim.noise import GaussianNoise
from opusim.randomness.streams import NoiseStream, noise_stream
from opusim.temperature import TemperatureLaw


class SimulatedDevice(NoisyDevice):
    """A device whose B is a `opusim.medium.transmission.Medium` with the description's seed.

    Its `intensities` are |R x|^2 of a complex medium R = (P + iQ) / sqrt 2 of the same seed, independent of B: P and Q
    are the real media that a `camera` device has. `medium` is that of the open window.
    """

    can = NoisyDevice.can | {"matrix", "intensities"}

    reads_noise = True

    _std = 0.0
    """Standard deviation of the noise at every output, of projections and of intensities."""
    _stream: NoiseStream | None = None
    """Source of the noise; None without noise."""

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        medium = self.require_described(description)
        self._new_medium = partial(Medium, self.n_inputs, self.n_outputs, medium.seed)
        self._dense_limit_mib = medium.dense_limit_mib
        self.medium = self._new_medium(dense_limit_mib=self._dense_limit_mib)

    @classmethod
    def require_described(cls, description: DeviceDescription) -> MediumSettings:
        """Return the settings of ``[medium]``; ConfigError if there is none, or there are options."""
        medium: MediumSettings = description.needed("medium", "a simulated device needs [medium] with a seed")
        description.refuse_options()
        return medium

    @cached_property
    def _complex_medium(self) -> tuple[Medium, Medium]:
        """P and Q, which share the limit of memory."""
        limit = self._dense_limit_mib / 2
        return (
            self._new_medium(plane=REAL_PLANE, dense_limit_mib=limit),
            self._new_medium(plane=IMAGINARY_PLANE, dense_limit_mib=limit),
        )

    @cached_property
    def described_noise(self) -> GaussianNoise:
        """One standard deviation for all outputs; 0 without noise, from which no privacy is earned."""
        return GaussianNoise(std=self._std, n_outputs=self.n_outputs)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        y = self.medium.project(x)
        return y if self._stream is None else self._stream.add_to(y, self._std)

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        """|P x|^2 / 2 + |Q x|^2 / 2."""
        p, q = self._complex_medium
        y = p.project(x).square_().add_(q.project(x).square_()).mul_(0.5)
        return y if self._stream is None else self._stream.add_to(y, self._std)

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._stream is None:
            return torch.zeros(shape, dtype=torch.float32, device=self._torch_device)
        return self._stream.normal(shape, device=self._torch_device).mul_(self._std)

    def _seek(self, step: int) -> None:
        if self._stream is not None:
            self._stream.seek(step)

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """B itself, a view, float32, (n_outputs, n_inputs), on the device's torch device; ValueError if too large."""
        return self.medium.dense(self._torch_device).T

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the variance of readings of x, squared projection units, float64; the same for every x."""
        variance = torch.as_tensor(np.array(self.noise.variance_bounds()[1]))
        return variance.expand(x.shape[0], self.n_outputs)


class IdealDevice(SimulatedDevice):
    """y = B x, exact, of a description without ``[noise]``; `draw` gives zeros."""

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.noise is not None:
            raise ConfigError(
                description.name, "noise", "the kind 'ideal' has none; remove it, or use 'gaussian'"
            )


class GaussianDevice(SimulatedDevice):
    """y = B x + N(0, sigma^2 I), sigma of ``[noise]`` directly or by temperature; the same noise on intensities.

    The product is exact before the noise is added (see `Medium`), so results do not depend on
    tiling or thread count. `project` and `draw` take consecutive readings of one stream: no two share noise.
    """

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._noise_settings: NoiseSettings = description.needed(
            "noise", "give noise.sigma, or use the kind 'ideal'"
        )
        self._std = self._noise_settings.value()
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")

    def temperature_law(self, x: torch.Tensor) -> TemperatureLaw:  # (vectors, n_inputs)
        """Return how temperature sets the noise of every x's readings; ConfigError if sigma is given directly."""
        law = self._noise_settings.temperature_law
        if law is None:
            raise ConfigError(
                self.name,
                "noise.sigma",
                "is given directly, so temperature sets no noise; give noise.temperature_law, as "
                "'gaussian_temperature' does",
            )
        return law.law()
