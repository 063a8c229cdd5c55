"""What simulated devices share: a medium computed from its seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opusim.description_schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.medium import Medium


class SimulatedDevice(NoisyDevice):
    """A device whose B is a `opusim.medium.Medium` with the description's seed.

    Args:
        description: a description with a section ``[medium]`` and no ``[options]``.
        **window: as for `NoisyDevice`.

    Raises:
        ConfigError: a section is missing, or one too many is there.
    """

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        if description.medium is None:
            raise ConfigError(
                description.name, "medium", "missing; a simulated device needs [medium] with a seed"
            )
        if description.options:
            key = f"options.{next(iter(description.options))}"
            raise ConfigError(
                description.name, key, f"the kind {description.kind!r} takes no options; remove it"
            )
        self._medium = Medium(
            self.n_inputs,
            self.n_outputs,
            description.medium.seed,
            dense_limit_mib=description.medium.dense_limit_mib,
        )

    @property
    def medium(self) -> Medium:
        """The medium of the open window."""
        return self._medium

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """B itself, float32, shape (n_outputs, n_inputs), on the device's torch device.

        A view of what the device computes with; hardware cannot tell its matrix.

        Raises:
            ValueError: it exceeds the description's dense_limit_mib.
        """
        return self._medium.dense(self._torch_device).T

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Variance of readings of x, squared projection units, float64; the same for every x.

        Hardware cannot tell it; a calibration estimates it.
        """
        variance = torch.as_tensor(np.array(self.noise.variance_bounds()[1]))
        return variance.expand(x.shape[0], self.n_outputs)
