"""Per-record clipping in closed form with central Gaussian noise: DP-SGD on feedback-alignment updates.

Every record's contribution to layer l is the outer product delta_i h_i^T (and delta_i for the bias), so its norm over
all layers is known without forming it:

    ||g_i||^2 = sum_l ||delta_(l,i)||^2 (||h_(l-1,i)||^2 + 1),

the 1 for the bias where there is one. One factor min(1, C / ||g_i||) scales all of a record's deltas, one matrix
product per layer sums the records, N(0, (z C)^2) is added to every entry of the sum, and a constant divides it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opusim.randomness import NoiseStream
from training.networks.network import FullyConnected
from training.protections.base import Protection, bounded_factors, finite_rows


def record_norms(deltas: Sequence[Tensor], inputs: Sequence[Tensor], *, biases: Sequence[bool]) -> Tensor:
    """||g_i|| of each record over all layers, shape (batch,).

    Args:
        deltas: delta_l of each layer, shapes (batch, n_l).
        inputs: What each layer's update takes for h_(l-1), shapes (batch, n_(l-1)).
        biases: Whether each layer has a bias.
    """
    squares = [
        delta.square().sum(dim=1) * (h.square().sum(dim=1) + float(bias))
        for delta, h, bias in zip(deltas, inputs, biases, strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()


class RecordProtection(Protection):
    """Writes clipped, noised gradients into a network.

    Guarantees, for every batch whatever it holds:
        - adding or removing one record changes the sum of contributions by at most C in Euclidean norm, up to float32
          rounding (relative 1e-6);
        - a record whose contribution is not finite counts as zero, and nothing about it is reported;
        - an empty batch takes the same noisy step.

    Args:
        clip_norm: C > 0.
        noise_multiplier: z >= 0; the noise has standard deviation z C in every entry of the sum.
        divisor: The constant that the noisy sum is divided by, > 0; never the realised batch size.
        noise: Source of independent N(0, 1), apart from every other stream of the run.
    """

    def __init__(
        self, *, clip_norm: float, noise_multiplier: float, divisor: float, noise: NoiseStream
    ) -> None:
        super().__init__(noise)
        self._clip_norm = clip_norm
        self._noise_std = noise_multiplier * clip_norm
        self._divisor = divisor

    def set_gradients(
        self,
        network: FullyConnected,
        deltas: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        records: Tensor | None = None,
        public_inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """See Protection.set_gradients."""
        biases = [linear.bias is not None for linear in network.linears]
        norms = record_norms(deltas, inputs, biases=biases)
        finite = torch.isfinite(norms)
        factors = bounded_factors(norms, self._clip_norm)
        if not bool(finite.all()):
            deltas = [finite_rows(delta, finite) for delta in deltas]
            inputs = [finite_rows(h, finite) for h in inputs]
        for layer, (delta, h) in enumerate(zip(deltas, inputs, strict=True)):
            linear = network.linears[layer]
            network.set_gradient(layer, delta * factors[:, None], h, self._divisor)
            for parameter in linear.parameters():
                if self._noise_std and parameter.grad is not None:
                    self._noise.add_to(parameter.grad, self._noise_std / self._divisor)
