"""From a batch's losses to the gradients that the optimizer takes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from opusim.randomness import NoiseStream
from training.networks.norms import finite_rows
from training.protections.record import RecordProtection
from training.ulr.estimator import Estimator, Losses
from training.ulr.network import ModuleSequence, Outputs


class Update(ABC):
    """Writes the gradients of one step."""

    @abstractmethod
    def seek(self, step: int) -> None:
        """Position every noise at the start of a step."""

    @abstractmethod
    def set_gradients(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """Write the gradient of every parameter.

        Args:
            outputs: The forward pass without noise.
            losses: The losses of the batch's records.
            clean: Losses without noise, shape (batch,).

        Returns:
            Which records were used, bool, shape (batch,): not those with a loss that is NaN or infinite.
        """


class PlainUpdate(Update):
    """The mean of the records' estimates; or their clipped and noised sum.

    Args:
        network: The modules.
        estimator: How the signals are estimated.
        sigma: Standard deviation of the noise on every output.
        noise: Where that noise comes from.
        protection: Clips and noises the records' contributions; None averages over the batch.
    """

    def __init__(
        self,
        network: ModuleSequence,
        estimator: Estimator,
        *,
        sigma: float,
        noise: NoiseStream,
        protection: RecordProtection | None = None,
    ) -> None:
        self._network = network
        self._estimator = estimator
        self._sigmas = [sigma] * network.depth
        self._noise = noise
        self._protection = protection

    def seek(self, step: int) -> None:
        """See Update."""
        self._noise.seek(step)
        if self._protection is not None:
            self._protection.seek(step)

    def set_gradients(self, outputs: Outputs, losses: Losses, clean: Tensor) -> Tensor:
        """See Update."""
        network, inputs = self._network, outputs.inputs
        signals = self._estimator.signals(network, outputs, losses, clean, self._noise, self._sigmas)
        used = used_records(signals, clean)
        if not bool(used.all()):  # a factor of 0 would meet the NaN
            signals = [finite_rows(delta, used) for delta in signals]
            inputs = [finite_rows(h, used) for h in inputs]
        if self._protection is not None:
            self._protection.set_gradients(network, signals, inputs)
            return used
        for layer, (delta, h) in enumerate(zip(signals, inputs, strict=True)):
            network.set_gradient(layer, delta, h, max(len(clean), 1))
        return used


def used_records(signals: list[Tensor], clean: Tensor) -> Tensor:
    """Records all of whose losses are finite, bool, shape (batch,)."""
    used = torch.isfinite(clean)
    for delta in signals:
        used = used & torch.isfinite(delta).flatten(1).all(dim=1)
    return used
