"""What a protection does in a step: turns a batch's signals into gradients that may be released."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from opusim.randomness import NoiseStream
from training.networks.network import FullyConnected


class Protection(ABC):
    """Writes noised gradients into a network.

    Args:
        noise: Source of independent N(0, 1), apart from every other stream of the run.
    """

    reference: Tensor | None = None
    """Features of public records, shape (n, n_0), whose layer inputs `set_gradients` needs at every step; None for
    a protection without them."""

    def __init__(self, noise: NoiseStream) -> None:
        self._noise = noise

    def seek(self, step: int) -> None:
        """Position the noise at the start of a step."""
        self._noise.seek(step)

    @property
    def state(self) -> dict[str, Tensor]:
        """What a resumed run must have back, by name; restored by copying into these tensors."""
        return {}

    @abstractmethod
    def set_gradients(
        self,
        network: FullyConnected,
        deltas: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Write the private gradient of every parameter.

        Args:
            network: Whose gradients are written.
            deltas: delta_l of each layer, shapes (batch, n_l).
            inputs: What each layer's update takes for h_(l-1), shapes (batch, n_(l-1)).
            records: Numbers of the batch's records in the training set, shape (batch,).
            public_inputs: h_(l-1) of the reference records, shapes (n, n_(l-1)).
        """


def bounded_factors(norms: Tensor, bound: float) -> Tensor:
    """min(1, bound / norm) for each record, and 0 where the norm is not finite, shape (batch,)."""
    factors = (bound / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factors, 0.0)


def finite_rows(rows: Tensor, keep: Tensor) -> Tensor:
    """The rows (batch, ...) that `keep` marks; zero elsewhere, so that a factor of 0 meets no NaN."""
    return torch.where(by_record(keep, rows), rows, 0.0)


def by_record(values: Tensor, rows: Tensor) -> Tensor:
    """One value for each record, shape (batch,), with the axes that broadcast it over rows (batch, ...)."""
    return values.view(-1, *[1] * (rows.ndim - 1))


def with_constant(h: Tensor, *, bias: bool) -> Tensor:
    """Layer inputs with the constant 1 that the bias multiplies, shape (batch, n + 1); h itself without a bias."""
    return torch.cat([h, h.new_ones(len(h), 1)], dim=1) if bias else h


def write_gradient(network: FullyConnected, layer: int, gradient: Tensor) -> None:
    """Hand a layer its gradient, shape (n_l, n_(l-1) + 1) with a bias and (n_l, n_(l-1)) without."""
    linear = network.linears[layer]
    if linear.bias is None:
        linear.weight.grad = gradient
        return
    linear.weight.grad = gradient[:, :-1].contiguous()
    linear.bias.grad = gradient[:, -1].contiguous()
