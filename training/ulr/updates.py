"""From a batch's losses to the gradients that the optimizer takes.

Likelihood ratios with the noise on a module's parameters: every record and copy has parameters of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from opusim.randomness.streams import NoiseStream
from training.networks.clipping import finite_rows
from training.protections.base import PrivateGradients
from training.ulr.estimator import Estimator, Losses
from training.ulr.network import ModuleSequence, Outputs

_HELD = 2**24
"""Noisy parameters that are held at once."""


def parameter_estimates(
    network: ModuleSequence,
    layer: int,
    h: Tensor,
    losses: Losses,
    noise: NoiseStream,
    sigma: float,
    copies: int,
) -> Iterator[tuple[Tensor, slice]]:
    """(1 / (K sigma^2)) sum_k Z_k L_k with Z_k ~ N(0, sigma^2 I) on the parameters, record by record.

    A virtual linear module whose input is the identity and whose weight is the parameters (section 3.2 of the paper):
    its Jacobian is I. It draws as many numbers for a record and copy as the module has parameters.

    Args:
        network: The modules.
        layer: Whose parameters.
        h: Its input, shape (batch, ...).
        losses: The loss of the batch's records.
        noise: Where Z comes from.
        sigma: Its standard deviation.
        copies: K.

    Yields:
        Estimates as rows, shape (some records, parameters), and which records they are of.
    """
    size = sum(parameter.numel() for parameter in network.layer_parameters(layer))
    records = max(1, _HELD // (2 * size))
    for start in range(0, len(h), records):
        part = slice(start, min(start + records, len(h)))
        total = h.new_zeros(part.stop - part.start, size)
        for _ in range(copies):
            z = noise.normal(total.shape).to(h.device).mul_(sigma)
            with torch.no_grad():
                value = _with_own_parameters(network, layer, h[part], z)
                loss = losses(_onward(network, layer, value), part)[0]
            total.add_(z.mul_(loss[:, None]))
        yield total.mul_(1 / (copies * sigma**2)), part


def _with_own_parameters(network: ModuleSequence, layer: int, h: Tensor, z: Tensor) -> Tensor:
    """The layer's outputs, each record through parameters moved by its own row of z."""
    module = network.jacobians[layer].module
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def of_record(moves: Tensor, x: Tensor) -> Tensor:
        parts = moves.split([value.numel() for value in named.values()])
        moved = {
            name: value + part.view_as(value)
            for (name, value), part in zip(named.items(), parts, strict=True)
        }
        result: Tensor = torch.func.functional_call(module, moved, (x[None],))[0]
        return result

    return torch.func.vmap(of_record)(z, h)


def _onward(network: ModuleSequence, layer: int, value: Tensor) -> Tensor:
    """The model's output from a layer's output on."""
    rows = network.after(layer, value)
    for later in range(layer + 1, network.depth):
        rows = network.after(later, network.layer(later, rows))
    return rows


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
        protection: PrivateGradients | None = None,
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
