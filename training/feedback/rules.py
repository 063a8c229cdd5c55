"""Send the error at the output to the hidden layers: backpropagation and direct feedback alignment.

Symbols: e = dL/dz_L, the error (batch, n_L); delta_l = dL/dz_l or its replacement (batch, n_l);
W_l weights (n_l, n_(l-1)); B feedback matrix (sum of hidden widths, n_L); g noise; m batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from training.feedback.projection import Projection
from training.networks.network import ForwardPass, FullyConnected

Draw = Callable[[tuple[int, int]], Tensor]
"""Returns fresh noise of shape (batch, width)."""


class Scale(Protocol):
    """Computes the factors that scale the rows of gain v, v of shape (batch, width), to a norm."""

    def __call__(self, v: Tensor, *, gain: float = 1.0) -> Tensor:
        """Return the factor of each row of v, shape (batch, 1)."""


@dataclass(frozen=True, kw_only=True)
class Deltas:
    """delta_l of every layer, and norms for diagnostics.

    Attributes:
        layers: delta_1 / gain_1 .. delta_L / gain_L, shapes (batch, n_l).
        gains: gain_1 .. gain_L, public constants that multiply the sums over records.
        signal_norms: Mean norm over records of each hidden layer's signal before signal_gain. It excludes noise that is
            added after the reading and includes the device's own noise. Empty unless observed.
        noise_norms: Mean norm of the noise in it; for the noise of a reading, its expected norm.
    """

    layers: list[Tensor]
    gains: list[float]
    signal_norms: list[float] = field(default_factory=list)
    noise_norms: list[float] = field(default_factory=list)

    def with_gains(self) -> list[Tensor]:
        """Return delta_1 .. delta_L."""
        return [
            delta if gain == 1.0 else delta * gain
            for delta, gain in zip(self.layers, self.gains, strict=True)
        ]


class Feedback(ABC):
    """Turns the error at the output into delta_l for every layer."""

    @abstractmethod
    def deltas(
        self, network: FullyConnected, forward: ForwardPass, error: Tensor, *, observe: bool
    ) -> Deltas:
        """Return delta_1 .. delta_L for a batch.

        Args:
            network: The network that ran forward.
            forward: Values of its forward pass.
            error: e, shape (batch, n_L).
            observe: Whether to measure norms as well.
        """


class Backpropagation(Feedback):
    """delta_l = (delta_(l+1) W_(l+1)) * phi'_l(z_l), eq. 3 of the PDFA paper.

    With noise, the error at the output is scaled into the ball and noise is added to it once, as in the private
    baseline of the paper's section 4; all layers backpropagate that noisy error.

    Args:
        scale: Factors that bring the error to tau_B, or None.
        draw: Source of the noise, or None.
        signal_gain: Public constant that multiplies the noisy error.
    """

    def __init__(
        self, *, scale: Scale | None = None, draw: Draw | None = None, signal_gain: float = 1.0
    ) -> None:
        self._scale = scale
        self._draw = draw
        self._signal_gain = signal_gain

    def deltas(
        self, network: FullyConnected, forward: ForwardPass, error: Tensor, *, observe: bool
    ) -> Deltas:
        """See Feedback.deltas."""
        delta = error if self._scale is None else (error * self._scale(error)).to(error.dtype)
        signal_norms = [_mean_norm(delta)] if observe else []
        noise_norms = [0.0] if observe else []
        if self._draw is not None:
            noise = self._draw((delta.shape[0], delta.shape[1]))
            noise_norms = [_mean_norm(noise)] if observe else []
            delta = delta + noise
        layers = [delta]
        for layer in range(network.depth - 2, -1, -1):
            delta = delta @ network.linears[layer + 1].weight.detach()
            delta = network.multiply_by_derivative(delta, forward, layer, through_clip=True)
            layers.append(delta)
        gains = [self._signal_gain] * network.depth
        return Deltas(layers=layers[::-1], gains=gains, signal_norms=signal_norms, noise_norms=noise_norms)


class Alignment(Feedback):
    """delta_l = s_l * phi'_l(z_l) with s_l from a random projection of the error (eqs. 4 and 8 of the PDFA paper).

    With r_l the slice of the reading for layer l and the public constants gain_l = gain / sqrt(n_l), c = signal_gain:
        hardware order:   s_l = c gain_l r_l                        (the noise is that of the reading)
        published order:  s_l = c (scale_tau_B(gain_l r_l) + g_l)   (eq. 8 at c = 1; g_l from `draw`)

    Args:
        projection: Source of the readings.
        gain: See above.
        signal_gain: See above.
        scale: Factors that bring a record's signal to tau_B, or None to keep its norm. Published order only.
        draw: Source of g_l, or None if there is none. Published order only.
        through_clip: Whether clipped neurons have slope 0 (see FullyConnected.derivative).
    """

    def __init__(
        self,
        projection: Projection,
        *,
        gain: float,
        signal_gain: float = 1.0,
        scale: Scale | None = None,
        draw: Draw | None = None,
        through_clip: bool = False,
    ) -> None:
        self._projection = projection
        self._gain = gain
        self._signal_gain = signal_gain
        self._scale = scale
        self._draw = draw
        self._through_clip = through_clip

    def deltas(
        self, network: FullyConnected, forward: ForwardPass, error: Tensor, *, observe: bool
    ) -> Deltas:
        """See Feedback.deltas."""
        widths = network.widths[:-1]
        if not widths:
            return Deltas(layers=[error], gains=[1.0])
        readings = self._projection.read(error).split(widths, dim=1)
        noises: Sequence[Tensor | None] = [None] * len(widths)
        if self._draw is not None:
            noises = self._draw((error.shape[0], sum(widths))).split(widths, dim=1)
        layers, gains = [], []
        signal_norms: list[float] = []
        noise_norms = self._noise_norms(error, widths, noises) if observe else []
        for layer, (reading, noise) in enumerate(zip(readings, noises, strict=True)):
            gain = self._gain / widths[layer] ** 0.5
            factors = None if self._scale is None else self._scale(reading, gain=gain)
            if observe:
                signal_norms.append(_mean_norm(reading * (gain if factors is None else factors)))
            signal, left = _sum(reading, factors, noise, gain)
            layers.append(
                network.multiply_by_derivative(signal, forward, layer, through_clip=self._through_clip)
            )
            gains.append(left * self._signal_gain)
        return Deltas(
            layers=[*layers, error],
            gains=[*gains, 1.0],
            signal_norms=signal_norms,
            noise_norms=noise_norms,
        )

    def output_weights(self, network: FullyConnected) -> Tensor:
        """Return gain / sqrt(n) B of the last hidden layer, transposed, shape (n_L, n_(L-1)).

        With these weights in the output layer, backpropagation would send the last hidden layer the same signal.
        """
        widths = network.widths[:-1]
        last = self._projection.columns(network.widths[-1])[:, -widths[-1] :]
        return last * (self._gain / widths[-1] ** 0.5)

    def _noise_norms(self, error: Tensor, widths: list[int], noises: Sequence[Tensor | None]) -> list[float]:
        """Return the norm of each layer's noise: as drawn, or as expected of the reading if none is drawn."""
        drawn = [_mean_norm(noise) for noise in noises if noise is not None]
        if drawn:
            return drawn
        std = self._projection.noise_std(error).expand(sum(widths))
        return [
            self._gain / width**0.5 * float(torch.linalg.vector_norm(part))
            for width, part in zip(widths, std.split(widths), strict=True)
        ]


def _sum(reading: Tensor, factors: Tensor | None, noise: Tensor | None, gain: float) -> tuple[Tensor, float]:
    """Return (factors or gain) * reading + noise, computed in place, and a constant that still multiplies it."""
    if noise is None:
        return (reading, gain) if factors is None else (reading.mul_(factors), 1.0)
    return (noise.add_(reading, alpha=gain) if factors is None else _add_scaled(noise, reading, factors)), 1.0


def _add_scaled(noise: Tensor, reading: Tensor, factors: Tensor) -> Tensor:
    """Add factors * reading to the noise, in place; a factor that float32 cannot hold changes only its own row."""
    if factors.dtype == noise.dtype:
        return noise.addcmul_(reading, factors)
    single = factors.float()
    apart = (single != factors).squeeze(1)
    own = noise[apart].double() + reading[apart] * factors[apart]
    noise.addcmul_(reading, single)
    noise[apart] = own.to(noise.dtype)
    return noise


def _mean_norm(v: Tensor) -> float:
    """Return the mean Euclidean norm of the rows, or 0 if there are none."""
    return float(torch.linalg.vector_norm(v, dim=1).mean()) if len(v) else 0.0
