"""Products on a crossbar: tiles of at most 512 inputs, each with a DAC, noise, a drop of voltage and an ADC.

For the inputs x of a tile and its realised weights w, in the order in which the effects act:

1. DAC: x_j is shown as a multiple of the input step (`Converter.shown`);
2. wires: m_i = sum_j w_ij x_j - r c_i sum_j w_ij x_j (1 - (1 - j/n)^2), with c = a (a (a/20 - 1/5) + 1/2),
   a_i = n / ratio * sum_j |w_ij| |x_j|, n the tile's inputs and r the scale `ir_drop`: the form of aihwkit
   (rpu_forward_backward_pass.cpp, applyIrDrop), a fit to the steady state of the wires;
3. noise: z_i ~ N(0, s_i^2), s_i^2 = output_std^2 + weight_std^2 sum_j x_j^2 + current_std^2 sum_j |w_ij| x_j^2, the
   noise of aihwkit's additive and PCM-like weight noise referred to the output;
4. ADC: step * round((m + z) / step), limited to the bound.

The codes of the tiles are added in digital electronics. Each tile takes one reading of the noise stream, so the numbers
depend on the call and on the element, not on threads. Sums over ternary inputs are exact
(`opusim.crossbar.conductances`); those over other inputs are float32 sums of the matrix library, whose last bit decides
a code once in a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numba
import numpy as np
import torch

from opusim.crossbar.programmable import Converter, levels
from opusim.description.crossbar import ProductSettings
from opusim.processes import pause
from opusim.randomness.kernels import run_split
from opusim.randomness.streams import NoiseStream

_ELEMENTS_PER_THREAD = 2**18


class TiledProduct:
    """The product with a realised matrix.

    Args:
        weights: w, float32, shape (outputs, inputs).
        converter: bits, bounds and inputs of a tile.
        settings: the noise of a product.

    Attributes:
        saturated: which rows of the last `read` met the bound of an ADC, shape (batch,); None before.
    """

    def __init__(self, weights: torch.Tensor, converter: Converter, settings: ProductSettings) -> None:
        self._weights, self._converter, self._settings = weights, converter, settings
        self.saturated: torch.Tensor | None = None
        needed = settings.current_std or settings.ir_drop
        self._magnitudes = weights.abs() if needed else weights

    @property
    def tiles(self) -> int:
        """Number of conversions that an output adds up."""
        return self._converter.tiles(self._weights.shape[1])

    def read(
        self, x: torch.Tensor, stream: NoiseStream
    ) -> torch.Tensor:  # (batch, inputs) -> (batch, outputs)
        """Return the sum of the tiles' codes, in units of w x, for checked float32 inputs in [-1, 1]."""
        total = torch.zeros((len(x), len(self._weights)), dtype=torch.float32, device=x.device)
        self.saturated = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for mean, constant, current in self._tiles(self._converter.shown(x)):
            normal = stream.normal(mean.shape, device=x.device)
            self._add_codes(total, self.saturated, mean, constant, current, normal)
        return total

    def variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs) -> (batch, outputs)
        """Return the exact variance of `read`, float64, from the masses of every code."""
        total = torch.zeros((len(x), len(self._weights)), dtype=torch.float64, device=x.device)
        for mean, constant, current in self._tiles(self._converter.shown(x)):
            noise = constant[:, None].double() + self._settings.current_std**2 * current.double()
            total += self._code_variance(mean.double(), noise.sqrt())
        return total

    def std_limits(self) -> tuple[float, float]:
        """Return the smallest and the largest standard deviation of a tile's noise over all inputs in [-1, 1]."""
        settings, most = self._settings, 0.0
        for part in self._split(self._magnitudes):
            most = max(
                most,
                float(self._settings.current_std**2 * part.sum(1).max())
                + settings.weight_std**2 * part.shape[1],
            )
        return settings.output_std, (settings.output_std**2 + most) ** 0.5

    def largest_output(self) -> float:
        """Return the largest |w x| of a tile over all inputs in [-1, 1]."""
        return max(float(part.abs().sum(1).max()) for part in self._split(self._weights))

    def _split(self, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return matrix.split(self._converter.tile_inputs or matrix.shape[1], dim=1)

    def _tiles(self, shown: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each tile: mean m, constant part of the variance by row, and sum_j |w| x^2 (m if not needed)."""
        settings = self._settings
        parts = zip(
            self._split(shown), self._split(self._weights), self._split(self._magnitudes), strict=True
        )
        for x, w, magnitudes in parts:
            pause()
            mean, squares = x @ w.T, x.square()
            if settings.ir_drop and settings.ir_drop_conductance_ratio is not None:
                mean = mean.sub_(
                    voltage_drop(x, w, magnitudes, settings.ir_drop_conductance_ratio, settings.ir_drop)
                )
            constant = squares.sum(1).mul_(settings.weight_std**2).add_(settings.output_std**2)
            yield mean, constant, squares @ magnitudes.T if settings.current_std else mean

    def _add_codes(
        self,
        total: torch.Tensor,
        saturated: torch.Tensor,
        mean: torch.Tensor,
        constant: torch.Tensor,
        current: torch.Tensor,
        normal: torch.Tensor,
    ) -> None:
        """Add what the ADC of a tile shows to the total, in place, and mark rows with a code at the ADC's bound.

        The compiled kernel serves the CPU.
        """
        step, factor = self._converter.output_step, self._settings.current_std**2
        most = levels(self._converter.output_bits) if self._converter.output_bits is not None else 0
        if total.device.type == "cpu":
            arrays = [part.numpy() for part in (total, saturated, mean, constant, current, normal)]
            kernel = partial(
                _add_codes_of_rows, arrays, (np.float32(factor), np.float32(step), np.float32(most))
            )
            run_split(kernel, len(total), grain=max(1, _ELEMENTS_PER_THREAD // total.shape[1]))
            return
        variance = constant[:, None] + factor * current
        read = mean.addcmul(variance.sqrt_(), normal)
        if not step:
            total += read
            return
        codes = (read / step).round_().clamp_(-most, most)
        saturated |= (codes.abs() == most).any(dim=1)
        total += codes.mul_(step)

    def _code_variance(self, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        """Variance of what an ADC shows of N(mean, std^2), float64."""
        step, bits = self._converter.output_step, self._converter.output_bits
        if bits is None:
            return std.square()
        most, scaled = levels(bits), mean / step
        nearest = scaled.round().clamp(-most, most)
        below, first, second = torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
        for code in range(-most, most + 1):
            edge = (
                torch.special.ndtr((code + 0.5 - scaled) * step / std)
                if code < most
                else torch.ones_like(mean)
            )
            mass, offset = edge - below, code - nearest
            first += mass * offset
            second += mass * offset**2
            below = edge
        return (second - first.square()) * step**2


def voltage_drop(
    x: torch.Tensor, w: torch.Tensor, magnitudes: torch.Tensor, ratio: float, scale: float
) -> torch.Tensor:
    """Return what the wires take off the outputs of a tile, shape (batch, outputs); see step 2 above."""
    n = x.shape[1]
    a = (x.abs() @ magnitudes.T).mul_(n / ratio)
    c = a.mul(0.05).sub_(0.2).mul_(a).add_(0.5).mul_(a)
    position = torch.arange(n, dtype=torch.float32, device=x.device).div_(n)
    nearness = 1 - (1 - position).square_()
    return c.mul_(scale).mul_((x * nearness) @ w.T)


def _add_codes_of_rows(
    arrays: list[np.ndarray], numbers: tuple[np.float32, np.float32, np.float32], start: int, stop: int
) -> None:
    total, saturated, mean, constant, current, normal = (array[start:stop] for array in arrays)
    add_codes(total, saturated, mean, constant, current, normal, *numbers)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_codes(
    total: np.ndarray,
    saturated: np.ndarray,
    mean: np.ndarray,
    constant: np.ndarray,
    current: np.ndarray,
    normal: np.ndarray,
    factor: np.float32,
    step: np.float32,
    most: np.float32,
) -> None:
    """Add step * clip(round((mean + sqrt(constant + factor current) normal) / step), -most, most) to total.

    Args:
        total: float32, shape (rows, outputs), is added to.
        saturated: bool, shape (rows,), set where a code is -most or most.
        mean: likewise, m.
        constant: float32, shape (rows,), the part of the variance that is the same for all outputs.
        current: float32, shape (rows, outputs), sum_j |w| x^2; not used if factor is 0.
        normal: likewise, N(0, 1).
        factor: current_std^2.
        step: of the ADC, or 0 without one.
        most: its largest code.
    """
    zero = np.float32(0)
    for i in range(total.shape[0]):
        base, largest = constant[i], zero
        if step > zero:
            for j in range(total.shape[1]):
                spread = np.sqrt(base + factor * current[i, j]) if factor > zero else np.sqrt(base)
                code = np.rint((mean[i, j] + spread * normal[i, j]) / step)
                largest = max(largest, abs(code))
                total[i, j] += step * min(max(code, -most), most)
            if largest >= most:
                saturated[i] = True
        else:
            for j in range(total.shape[1]):
                spread = np.sqrt(base + factor * current[i, j]) if factor > zero else np.sqrt(base)
                total[i, j] += mean[i, j] + spread * normal[i, j]
