"""The kind ``crossbar``: tiles of memory devices in differential pairs, simulated from published constants.

`Pairs`: a weight w in [-1, 1] is held by two devices with the targets g+ = max(w, 0) and g- = max(-w, 0), relative to
g_max. For each device, in the order in which the effects act:

1. programming: g_p = max(g + sigma_p(g) z_1 / g_max, 0); or relaxation, the same with a sigma_p(g, t) that is linear in
   ln t between the times of the description and constant outside;
2. drift: g_d = g_p ((t0 + t) / t0)^-nu with nu = |mean(g) + std(g) z_2|;
3. 1/f noise accumulated since programming: g_f = max(g_d (1 + q(g_p) sqrt(ln((t0 + t + t_read) / (2 t_read))) z_3), 0).

With a section ``[crossbar.temperature]`` the conductances are then multiplied by exp(-(E(g) / k) (1 / T - 1 / T_ref)),
E at the target: the Arrhenius law of a semiconductor's conduction (`opusim.temperature.arrhenius_exponent`). For the
temperature dependence of drift, 1/f noise and programming noise no law is published that fits these constants
(measurements below room temperature: Lombardo et al., arXiv 2509.22511); they stay as described.

t is the time since programming. z_1 and z_2 are drawn once for each programmed device, z_3 at each time that is looked
at: two looks share no 1/f noise, although close ones would. q is taken at the programmed conductance,
as in aihwkit's code (its documentation takes the target; aihwkit issue 436).

Sources: Nandakumar et al., ICECS 2019 (PCM); Le Gallo et al., Nature Electronics 2023 (HERMES); Wan et al., Nature 2022
(ReRAM); forms and constants as in aihwkit, src/aihwkit/inference/noise.

`TiledProduct`: for the inputs x of a tile, at most 512, and its realised weights w, in the order in which the effects
act:

1. DAC: x_j is shown as a multiple of the input step (`Converter.shown`);
2. wires: m_i = sum_j w_ij x_j - r c_i sum_j w_ij x_j (1 - (1 - j/n)^2), with c = a (a (a/20 - 1/5) + 1/2),
   a_i = n / ratio * sum_j |w_ij| |x_j|, n the tile's inputs and r the scale `ir_drop`: the form of aihwkit
   (rpu_forward_backward_pass.cpp, applyIrDrop), a fit to the steady state of the wires;
3. noise: z_i ~ N(0, s_i^2), s_i^2 = output_std^2 + weight_std^2 sum_j x_j^2 + current_std^2 sum_j |w_ij| x_j^2, the
   noise of aihwkit's additive and PCM-like weight noise referred to the output; thermal noise adds
   4 k T bandwidth / (g_max read_v^2) sum_j |w_ij| (`CrossbarTemperatureSettings`);
4. ADC: step * round((m + z) / step), limited to the bound.

The codes of the tiles are added in digital electronics. Each tile takes one reading of the noise stream, so the numbers
depend on the call and on the element, not on threads. Sums over ternary inputs are exact; those over other inputs are
float32 sums of the matrix library, whose last bit occasionally decides a code.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
import torch
from typing_extensions import override

from opusim.crossbar.programmable import Converter, ProgrammableDevice, levels
from opusim.description.crossbar import (
    CrossbarSettings,
    CrossbarTemperatureSettings,
    LowFrequencySettings,
    PhotonicSettings,
    PiecewiseSettings,
    ProductSettings,
)
from opusim.description.schema import DeviceDescription
from opusim.devices.inputs import real_batch
from opusim.noise import ConverterLatticeNoise, NoiseModel, SignalGaussianNoise
from opusim.processes import pause
from opusim.randomness.kernels import run_split
from opusim.randomness.seeds import derive_seed
from opusim.randomness.streams import NoiseStream, SeededStream, noise_stream
from opusim.temperature import TemperatureTable, arrhenius_exponent

_LEAST_G = 1e-7
"""Relative conductance below which logarithms and powers are held constant."""
_WEIGHTS_AT_ONCE = 2**20
_EXACT = 2.0**14
"""Realised weights are multiples of 1 / _EXACT, so that sums over ternary inputs of a tile are exact in float32."""


class Pairs:
    """The devices of a chip's `number`-th programming of the matrix W; `weights` tells what they hold at a time."""

    def __init__(self, wanted: torch.Tensor, settings: CrossbarSettings, *, chip: int, number: int) -> None:
        self._wanted, self._settings, self._chip, self._number = wanted, settings, chip, number

    def weights(self, seconds: float, look: int, settings: CrossbarSettings | None = None) -> torch.Tensor:
        """Return w = g+ - g- at a time since programming, float32, of the wanted matrix's shape.

        Each `look` since programming has 1/f noise of its own; `settings` are laws at another temperature.
        """
        laws = self._settings if settings is None else settings
        fixed = SeededStream(self._chip, "crossbar programming")
        fixed.seek(self._number)
        passing = SeededStream(self._chip, f"crossbar 1/f noise of programming {self._number}")
        passing.seek(look)
        found = torch.empty_like(self._wanted)
        rows = max(1, _WEIGHTS_AT_ONCE // self._wanted.shape[1])
        for wanted, part in zip(self._wanted.split(rows), found.split(rows), strict=True):
            plus, minus = (self._at(side, seconds, fixed, passing) for side in (wanted, -wanted))
            for side, conductance in ((wanted, plus), (-wanted, minus)):
                if (factor := thermal_factor(side.clamp(min=0), laws)) is not None:
                    conductance.mul_(factor)
            part.copy_(plus.sub_(minus).mul_(_EXACT).round_().div_(_EXACT))
        return found

    def _at(
        self, side: torch.Tensor, seconds: float, fixed: SeededStream, passing: SeededStream
    ) -> torch.Tensor:
        """Return the relative conductances of one side of the pairs."""
        settings, target = self._settings, side.clamp(min=0)
        g = target
        if settings.spreads_us():
            g = target.addcmul(spread(target, seconds, settings), _normal(fixed, target)).clamp_(min=0)
        if settings.drift is None:
            return g.clone()
        nu = piecewise(target, settings.drift.mean)
        nu.addcmul_(piecewise(target, settings.drift.std), _normal(fixed, target)).abs_()
        t0 = settings.drift.t0_s
        drifted = g * torch.exp(nu * -math.log((t0 + seconds) / t0))
        law = settings.low_frequency
        if law is None:
            return drifted
        relative = low_frequency(g, law).mul_(accumulated(t0 + seconds, law.t_read_s))
        return drifted.mul_(relative.mul_(_normal(passing, target)).add_(1)).clamp_(min=0)


def thermal_factor(g: torch.Tensor, settings: CrossbarSettings) -> torch.Tensor | None:
    """Return exp(-(E(g) / k) (1 / T - 1 / T_ref)), a new tensor of the targets' shape, or None if it is off."""
    law = settings.temperature
    if law is None or law.activation_ev is None:
        return None
    exponent = arrhenius_exponent(law.temperature_c, law.reference_c)
    return evaluate(law.activation_ev, g).mul_(exponent).exp_()


def spread(g: torch.Tensor, seconds: float, settings: CrossbarSettings) -> torch.Tensor:
    """Return the standard deviation of programmed conductances with targets g in [0, 1], relative to g_max."""
    polynomials = settings.spreads_us()
    if not polynomials:
        return torch.zeros_like(g)
    if settings.relaxation is None:
        return evaluate(polynomials[0], g).div_(settings.g_max_us)
    times = settings.relaxation.times_s
    late = next((index for index, time in enumerate(times) if time >= seconds), len(times) - 1)
    early = max(0, late - 1)
    share = 1.0
    if late > early and seconds > times[early]:
        share = min(1.0, math.log(seconds / times[early]) / math.log(times[late] / times[early]))
    before, after = evaluate(polynomials[early], g), evaluate(polynomials[late], g)
    return before.lerp_(after, share).div_(settings.g_max_us)


def moments(g: torch.Tensor, seconds: float, settings: CrossbarSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of a conductance, relative to g_max, float32, of the targets' shape.

    With s = sigma_p(g, t), u = g / s, L = ln((t0 + t) / t0), nu ~ N(m, tau^2), q = q(g), a the accumulated 1/f noise,
    mean = E[g_p] E[k] and second moment = E[g_p^2] E[k^2] (1 + q^2 a^2), where

        E[g_p] = g Phi(u) + s phi(u),        E[g_p^2] = (g^2 + s^2) Phi(u) + g s phi(u),
        E[k] = exp(-m L + tau^2 L^2 / 2),    E[k^2] = exp(-2 m L + 2 tau^2 L^2).

    Mean and root of the variance are multiplied by `thermal_factor`. Left out: that nu and the conductance with 1/f
    noise are not negative, and that q is taken at g_p.
    """
    std = spread(g, seconds, settings)
    ratio = g / std.clamp(min=_LEAST_G)
    density = ratio.square().mul_(-0.5).exp_().mul_(std / math.sqrt(2 * math.pi))
    below = torch.special.ndtr(ratio)
    mean, second = g * below + density, (g.square() + std.square()) * below + g * density
    factor = thermal_factor(g, settings)
    if factor is not None:
        mean, second = mean * factor, second * factor.square()
    if settings.drift is None:
        return mean, second.sub_(mean.square()).clamp_(min=0)
    decay = math.log((settings.drift.t0_s + seconds) / settings.drift.t0_s)
    nu, tau = piecewise(g, settings.drift.mean).mul_(decay), piecewise(g, settings.drift.std).mul_(decay)
    variance = tau.square_()
    second *= torch.exp(2 * (variance - nu))
    mean *= torch.exp(variance / 2 - nu)
    law = settings.low_frequency
    if law is not None:
        passing = low_frequency(g, law).mul_(accumulated(settings.drift.t0_s + seconds, law.t_read_s))
        second *= passing.square_().add_(1)
    return mean, second.sub_(mean.square()).clamp_(min=0)


def piecewise(g: torch.Tensor, law: PiecewiseSettings) -> torch.Tensor:
    """Return `PiecewiseSettings` at relative conductances, a new tensor."""
    below = g.clamp(min=_LEAST_G).log_().mul_(law.slope).add_(law.offset).clamp_(law.lowest, law.highest)
    if law.branch is None or law.polynomial is None:
        return below
    return torch.where(g < law.branch, below, evaluate(law.polynomial, g))


def low_frequency(g: torch.Tensor, law: LowFrequencySettings) -> torch.Tensor:
    """Return q(g) of the accumulated 1/f noise, a new tensor."""
    if law.power is not None:
        powers = g.clamp(min=_LEAST_G).pow_(law.power.exponent)
        return powers.mul_(law.power.coefficient).clamp_(max=law.power.highest)
    return torch.zeros_like(g) if law.pieces is None else piecewise(g, law.pieces)


def accumulated(seconds: float, t_read_s: float) -> float:
    """Return sqrt(ln((t + t_read) / (2 t_read))), 0 for times below t_read."""
    return math.sqrt(max(0.0, math.log((seconds + t_read_s) / (2 * t_read_s))))


def evaluate(coefficients: list[float], g: torch.Tensor) -> torch.Tensor:
    """Return sum_k coefficients[k] g^k by Horner's rule, a new tensor."""
    value = torch.full_like(g, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(g).add_(coefficient)
    return value


def _normal(stream: SeededStream, like: torch.Tensor) -> torch.Tensor:
    return stream.normal(like.shape).to(like.device)


_ELEMENTS_PER_THREAD = 2**18


class TiledProduct:
    """The product with a realised matrix.

    Args:
        weights: w, float32, shape (outputs, inputs).
        converter: bits, bounds and inputs of a tile.
        settings: the noise of a product.
        thermal: variance of thermal noise for sum_j |w_ij| = 1 (`CrossbarSettings.thermal_variance`).

    Attributes:
        saturated: which rows of the last `read` met the bound of an ADC, shape (batch,); None before.
    """

    def __init__(
        self, weights: torch.Tensor, converter: Converter, settings: ProductSettings, thermal: float = 0.0
    ) -> None:
        self._weights, self._converter, self._settings = weights, converter, settings
        self._thermal = thermal
        # The variance that depends on weights is factor * current: current holds all of it with thermal noise.
        self._factor = 1.0 if thermal else settings.current_std**2
        self.saturated: torch.Tensor | None = None
        needed = settings.current_std or settings.ir_drop or thermal
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
        saturated = self.saturated = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        step, bits = self._converter.output_step, self._converter.output_bits
        most = 0 if bits is None else levels(bits)
        for mean, constant, current in self._tiles(self._converter.shown(x)):
            normal = stream.normal(mean.shape, device=x.device)
            if x.device.type == "cpu":
                parts = total, saturated, mean, constant, current, normal
                numbers = np.float32(self._factor), np.float32(step), np.float32(most)
                add_rows = partial(_add_rows, [part.numpy() for part in parts], numbers)
                run_split(add_rows, len(total), grain=max(1, _ELEMENTS_PER_THREAD // total.shape[1]))
                continue
            read = mean.addcmul((constant[:, None] + self._factor * current).sqrt_(), normal)
            if step:
                codes = (read / step).round_().clamp_(-most, most)
                saturated |= (codes.abs() == most).any(dim=1)
                read = codes.mul_(step)
            total += read
        return total

    def variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs) -> (batch, outputs)
        """Return the exact variance of `read`, float64, from the masses of every code."""
        total = torch.zeros((len(x), len(self._weights)), dtype=torch.float64, device=x.device)
        step, bits = self._converter.output_step, self._converter.output_bits
        for tile, constant, current in self._tiles(self._converter.shown(x)):
            mean, std = tile.double(), (constant[:, None].double() + self._factor * current.double()).sqrt()
            if bits is None:
                total += std.square()
                continue
            # the variance of what the ADC shows of N(mean, std^2)
            most, scaled = levels(bits), mean / step
            nearest = scaled.round().clamp(-most, most)
            below, first, second = torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
            for code in range(-most, most + 1):
                edge = torch.ones_like(mean)
                if code < most:
                    edge = torch.special.ndtr((code + 0.5 - scaled) * step / std)
                mass, offset = edge - below, code - nearest
                first += mass * offset
                second += mass * offset**2
                below = edge
            total += (second - first.square()) * step**2
        return total

    def std_limits(self) -> tuple[float, float]:
        """Return the smallest and the largest standard deviation of a tile's noise over all inputs in [-1, 1].

        Thermal noise does not count in the smallest one: it may be less at another temperature.
        """
        settings, most = self._settings, 0.0
        by_weight = settings.current_std**2 + self._thermal
        for part in self._split(self._magnitudes):
            most = max(most, float(by_weight * part.sum(1).max()) + settings.weight_std**2 * part.shape[1])
        return settings.output_std, (settings.output_std**2 + most) ** 0.5

    def largest_output(self) -> float:
        """Return the largest |w x| of a tile over all inputs in [-1, 1]."""
        return max(float(part.abs().sum(1).max()) for part in self._split(self._weights))

    def _split(self, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return matrix.split(self._converter.tile_inputs or matrix.shape[1], dim=1)

    def _tiles(self, shown: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield for each tile mean m, constant part of the variance by row, and sum_j |w| x^2 (m if not needed).

        With thermal noise the last is the whole part of the variance that depends on weights.
        """
        settings = self._settings
        parts = zip(
            self._split(shown), self._split(self._weights), self._split(self._magnitudes), strict=True
        )
        for x, w, magnitudes in parts:
            pause()
            mean, squares = x @ w.T, x.square()
            if settings.ir_drop and settings.ir_drop_conductance_ratio is not None:
                # what the wires take off the outputs; see step 2 above
                n = x.shape[1]
                a = (x.abs() @ magnitudes.T).mul_(n / settings.ir_drop_conductance_ratio)
                c = a.mul(0.05).sub_(0.2).mul_(a).add_(0.5).mul_(a)
                position = torch.arange(n, dtype=torch.float32, device=x.device).div_(n)
                nearness = 1 - (1 - position).square_()
                mean = mean.sub_(c.mul_(settings.ir_drop).mul_((x * nearness) @ w.T))
            constant = squares.sum(1).mul_(settings.weight_std**2).add_(settings.output_std**2)
            current = squares @ magnitudes.T if settings.current_std else mean
            if self._thermal:
                warm = magnitudes.sum(1).mul_(self._thermal)
                current = warm.expand_as(mean) + (
                    settings.current_std**2 * current if settings.current_std else 0.0
                )
            yield mean, constant, current


def _add_rows(arrays: list[Any], numbers: tuple[np.float32, ...], start: int, stop: int) -> None:
    parts: Any = [array[start:stop] for array in arrays]
    add_codes(*parts, *numbers)


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

    `saturated` rows have a code -most or most. A row's constant variance is the same for all outputs, `current` is
    sum_j |w| x^2 (unused if the factor, current_std^2, is 0), and `step` that of the ADC, or 0 without one.
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


_TEMPERATURES = 21
"""Temperatures in the table of `temperature_law`."""
_FAR = 8.0
"""Standard deviations of a tile's noise between its largest output and the converter's limit that make clipping
negligible: a probability below 1e-15 for each conversion."""


class ConvertedDevice(ProgrammableDevice):
    """A simulated chip whose readings are a `TiledProduct`: the base of crossbars and of chips of light.

    The seed of ``[medium]`` says which chip this is; the noise of products comes from the stream of the mode. A
    subclass sets `_converter` and gives `_product_of`, `_program` and `_restored`.
    """

    _converter: Converter

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._chip = self._medium_settings.seed
        self._number = 0
        self._product: TiledProduct | None = None
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")

    @property
    def converter(self) -> Converter:
        """The bits and bounds of the description."""
        return self._converter

    @property
    def described_noise(self) -> NoiseModel:
        """The law for the matrix that is held: a lattice law with an ADC, else signal-dependent Gaussian."""
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
    @override
    def saturated(self) -> torch.Tensor | None:
        return None if self._product is None else self._product.saturated

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Return the variance of readings of x in [-1, 1], squared units of the reading, float64."""
        batch = real_batch(x, self.n_inputs, self._torch_device)
        return self._forward().variance(batch).mul_(self.reading_scale**2)

    def held_state(self) -> dict[str, torch.Tensor]:
        """See `ProgrammableDevice.held_state`: also which programming this is, and the noise's position."""
        state = super().held_state() | {"programming": torch.tensor([self._number])}
        if isinstance(self._stream, SeededStream):
            position = np.array(self._stream.position, dtype=np.uint64)
            state["position"] = torch.from_numpy(position.view(np.int64))
        return state

    def restore(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """See `ProgrammableDevice.restore`; the chip holds what it held before, and nothing is counted.

        In ``experiment`` the noise of products continues as it would have done.
        """
        checked = self._checked_matrix(matrix).contiguous()
        self._number, self._product = int(state["programming"][0]), None
        elapsed_s = float(state["elapsed_s"])
        self._weights, self._scale, self._elapsed_s = self._restored(checked, state), 1.0, elapsed_s
        self._begin_monitor(None)
        if "position" in state and isinstance(self._stream, SeededStream):
            self._stream.seek(*state["position"].numpy().view(np.uint64).tolist())
        return True

    @abstractmethod
    def _product_of(self, weights: torch.Tensor) -> TiledProduct:
        """Return the product with realised weights."""

    @abstractmethod
    def _restored(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the matrix that the chip held when `held_state` was called; `_number` is restored already."""

    def _temperature_table(
        self,
        working_c: tuple[float, float],
        at: Callable[[float], tuple[TiledProduct, torch.Tensor]],
        batch: torch.Tensor,
    ) -> TemperatureTable:
        """Return noise and size of readings of a batch at 21 temperatures, each with a product and its weights."""
        temperatures = np.linspace(*working_c, _TEMPERATURES).tolist()
        stds, sizes = [], []
        for product, weights in map(at, temperatures):
            stds.append(float(product.variance(batch).mean()) ** 0.5 * self.reading_scale)
            sizes.append(float(weights.square().mean()) ** 0.5 * self.reading_scale)
        return TemperatureTable(temperatures=tuple(temperatures), stds=tuple(stds), sizes=tuple(sizes))

    def _forward(self) -> TiledProduct:
        weights = self._held()
        if self._product is None:
            self._product = self._product_of(weights)
        return self._product

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward().read(x, self._stream)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)


class CrossbarDevice(ConvertedDevice):
    """Conductances of differential pairs (`Pairs`), read by tiles (`TiledProduct`): ``[crossbar]`` and ``[medium]``.

    The seed of ``[medium]`` says which chip this is: the random matrix, and what differs from device to device and from
    programming to programming of this object, are drawn from it in both modes, so that a chip that is opened again
    holds the same matrix. The noise of products comes from the stream of the mode, as on every device.
    """

    can = ProgrammableDevice.can | {"multiply_transposed", "wait"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._settings: CrossbarSettings = description.needed("crossbar", "give g_max_us at least")
        given = self._settings.converter
        self._converter = Converter(
            input_bits=given.dac_bits,
            output_bits=given.adc_bits,
            output_bound=given.adc_bound,
            tile_inputs=self._settings.tile_inputs,
        )
        self._looks = 0
        self._pairs: Pairs | None = None
        self._transposed: TiledProduct | None = None

    def temperature_law(self, x: torch.Tensor) -> TemperatureTable:  # (vectors, n_inputs)
        """Return noise and size of readings at 21 temperatures for the current matrix, its 1/f noise included."""
        law = self._settings.temperature
        if law is None:
            law = CrossbarTemperatureSettings.thermal(25.0, self.description.frames.frame_period_us)
        self._held()
        if self._pairs is None:
            raise RuntimeError("a matrix is held that was never programmed")
        pairs, looks = self._pairs, self._looks

        def at(temperature_c: float) -> tuple[TiledProduct, torch.Tensor]:
            there = self._settings.model_copy(
                update={"temperature": law.model_copy(update={"temperature_c": temperature_c})}
            )
            weights = pairs.weights(self._elapsed_s, looks - 1, there)
            return TiledProduct(weights, self._converter, there.product, there.thermal_variance), weights

        return self._temperature_table(law.working_c, at, real_batch(x, self.n_inputs, self._torch_device))

    def programming_std(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the spread of both devices of a pair just after programming: programming and 1/f noise."""
        return self.weight_moments(matrix, 0.0)[1]

    def weight_moments(self, matrix: torch.Tensor, seconds: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the moments of w = g+ - g- from those of the two conductances; see `moments`."""
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
        """See `ConvertedDevice.held_state`: also which look this is."""
        return super().held_state() | {"programming": torch.tensor([self._number, self._looks])}

    def _restored(self, matrix: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._pairs = Pairs(matrix, self._settings, chip=self._chip, number=self._number - 1)
        self._looks = int(state["programming"][1]) - 1
        return self._look(float(state["elapsed_s"]))

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

    def _multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        if self._transposed is None:
            self._transposed = self._product_of(self._held().T)
        return self._transposed.read(x, self._stream)

    def _product_of(self, weights: torch.Tensor) -> TiledProduct:
        settings = self._settings
        return TiledProduct(weights, self._converter, settings.product, settings.thermal_variance)


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
    """The product of a chip, with the noise of its detectors and the light in the other quadrature."""

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
    """

    section: ClassVar[str]
    _settings: PhotonicSettings

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._settings = description.needed(self.section, "give laser_w and detector at least")
        self._require_fitting()
        given = self._settings.converter
        self._converter = Converter(
            input_bits=given.dac_bits, output_bits=given.adc_bits, output_bound=given.adc_bound
        )
        self._held_light: Light | None = None
        self._wanted: torch.Tensor | None = None

    def _require_fitting(self) -> None:
        """Refuse a description whose numbers of inputs or outputs the chip does not have."""

    @abstractmethod
    def _light(self, matrix: torch.Tensor, settings: Any, chip: int, number: int) -> Light:
        """Return the matrix that a chip, by its seed, realises at its `number`-th programming, and its noise."""

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
