"""Sections of the kind ``crossbar``: conductances, their programming, drift and noise, and the converters.

g = G / g_max is a relative conductance in [0, 1]; a weight w = g+ - g- is held by a pair of devices. Quantities of a
product are in units of w x with weights and inputs in [-1, 1]. `opusim.crossbar` has the laws. Below are the sections
of the kinds ``mzi_mesh`` and ``microring_bank``, photonic chips and their detectors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from opusim.description.section import StrictSection, exactly_one, together
from opusim.temperature import BOLTZMANN_J_PER_K, CHARGE_C, kelvin


class PiecewiseSettings(StrictSection):
    """A fitted function of g: a clipped logarithm below `branch`, a polynomial from there on.

    f(g) = clip(slope ln g + offset, lowest, highest) for g < branch, else sum_k polynomial[k] g^k.

    Attributes:
        slope: slope of the logarithm.
        offset: value of the logarithmic part at g = 1.
        lowest: smallest value of the logarithmic part.
        highest: its largest value.
        branch: where the polynomial begins, or None if the logarithm holds for every g.
        polynomial: coefficients, lowest power first, or None without a branch.
    """

    slope: float
    offset: float
    lowest: float = Field(ge=0)
    highest: float = Field(ge=0)
    branch: float | None = Field(default=None, gt=0, le=1)
    polynomial: list[float] | None = Field(default=None, min_length=1)

    _branch_is_complete = together("branch", "polynomial")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest:g}: must not exceed highest = {self.highest:g}")
        return self


class PowerSettings(StrictSection):
    """A fitted function of g: min(coefficient g^exponent, highest).

    Attributes:
        coefficient: value at g = 1.
        exponent: usually negative.
        highest: largest value.
    """

    coefficient: float = Field(ge=0)
    exponent: float
    highest: float = Field(ge=0)


class ConverterSettings(StrictSection):
    """The converters before and after every tile.

    Attributes:
        dac_bits: of the inputs, sign included, or None for exact inputs; 0 in a file is None.
        adc_bits: of the outputs, sign included, or None for exact outputs; 0 in a file is None.
        adc_bound: largest output that the ADC can read, units of w x, or None without an ADC.
    """

    dac_bits: int | None = Field(default=None, ge=2, le=16)
    adc_bits: int | None = Field(default=None, ge=2, le=16)
    adc_bound: float | None = Field(default=None, gt=0)

    _bound_with_bits = together("adc_bits", "adc_bound")


class ProductSettings(StrictSection):
    """Noise drawn for every product and tile, and the drop of voltage along the wires.

    The noise of output i of a tile is N(0, output_std^2 + weight_std^2 sum_j x_j^2 + current_std^2 sum_j |w_ij| x_j^2).

    Attributes:
        output_std: of the output, units of w x.
        weight_std: of every weight, independent of it.
        current_std: of a weight of 1; the variance grows with the weight's magnitude.
        ir_drop: scale of the voltage drop; 0 switches it off.
        ir_drop_conductance_ratio: conductance of the wire from one cell to the next over a device's largest
            conductance.
    """

    output_std: float = Field(default=0.0, ge=0)
    weight_std: float = Field(default=0.0, ge=0)
    current_std: float = Field(default=0.0, ge=0)
    ir_drop: float = Field(default=0.0, ge=0)
    ir_drop_conductance_ratio: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ratio_with_drop(self) -> Self:
        if self.ir_drop and self.ir_drop_conductance_ratio is None:
            raise ValueError("ir_drop_conductance_ratio: missing; ir_drop needs it")
        return self


class RelaxationSettings(StrictSection):
    """Spread of the conductance about its target at several times after programming.

    Attributes:
        times_s: seconds after programming, increasing.
        polynomials_us: for each time the standard deviation in microsiemens, coefficients of g, lowest power first.
    """

    times_s: list[float] = Field(min_length=1)
    polynomials_us: list[list[float]] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.times_s[0] <= 0 or any(late <= early for early, late in pairwise(self.times_s)):
            raise ValueError("times_s: must be above 0 and increasing; sort them, with their polynomials")
        if len(self.times_s) != len(self.polynomials_us):
            raise ValueError(
                f"polynomials_us: {len(self.polynomials_us)} given for {len(self.times_s)} times; give one for each"
            )
        return self


class ConductanceDriftSettings(StrictSection):
    """Drift g(t) = g(0) ((t0 + t) / t0)^-nu with nu = |N(mean(g), std(g)^2)|, drawn once for each programmed device.

    Attributes:
        t0_s: time from programming to the first reading, seconds.
        mean: mean of nu.
        std: standard deviation of nu.
    """

    t0_s: float = Field(gt=0)
    mean: PiecewiseSettings
    std: PiecewiseSettings


class LowFrequencySettings(StrictSection):
    """1/f noise accumulated since programming: g (1 + N(0, q(g)^2 ln((t0 + t + t_read) / (2 t_read)))).

    Attributes:
        t_read_s: time of a reading, seconds.
        power: q as a power law, or None.
        pieces: q in pieces, or None; exactly one of the two is given.
    """

    t_read_s: float = Field(gt=0)
    power: PowerSettings | None = None
    pieces: PiecewiseSettings | None = None

    _one_law = exactly_one("power", "pieces")


class CrossbarTemperatureSettings(StrictSection):
    """What temperature does to conductances and products; each law is off unless its keys are given.

    Conductances: g(T) = g exp(-(E(g) / k) (1 / T - 1 / T_ref)), g and E at the target. Thermal noise: the variance of
    an output of a tile grows by 4 k T bandwidth sum_j |w_ij| / (g_max read_v^2).

    Attributes:
        temperature_c: operating temperature, degrees Celsius.
        temperature_ref_c: temperature at which the other sections' constants hold, degrees Celsius; None: 25.
        temperature_min_c: lowest working temperature, degrees Celsius; None: -40.
        temperature_max_c: highest working temperature; None: 85.
        activation_ev: activation energy E of the conduction, electronvolts, coefficients of g, lowest power first; None
            is off.
        read_v: voltage of an input of 1, volts; with bandwidth_hz it switches thermal noise on.
        bandwidth_hz: noise bandwidth of the read-out, hertz.
    """

    temperature_c: float
    temperature_ref_c: float | None = Field(default=None, gt=-273.15)
    temperature_min_c: float | None = Field(default=None, gt=-273.15)
    temperature_max_c: float | None = None
    activation_ev: list[float] | None = Field(default=None, min_length=1)
    read_v: float | None = Field(default=None, gt=0)
    bandwidth_hz: float | None = Field(default=None, gt=0)

    _read_out_is_complete = together("read_v", "bandwidth_hz")

    @model_validator(mode="after")
    def _some_law_in_range(self) -> Self:
        if self.read_v is None and self.activation_ev is None:
            raise ValueError("nothing depends on temperature; give read_v and bandwidth_hz, or activation_ev")
        low, high = self.working_c
        if not low <= self.temperature_c <= high:
            raise ValueError(
                f"temperature_c = {self.temperature_c:g}: must lie between temperature_min_c = {low:g} and "
                f"temperature_max_c = {high:g}"
            )
        return self

    @classmethod
    def thermal(cls, temperature_c: float, frame_period_us: float) -> Self:
        """Return the thermal noise of a read-out of unknown voltage and bandwidth: 0.2 V, integrated over a frame.

        0.2 V is the order of magnitude of a voltage that disturbs no device; an integration over t has the bandwidth
        1 / (2 t).
        """
        return cls(temperature_c=temperature_c, read_v=0.2, bandwidth_hz=5e5 / frame_period_us)

    @property
    def reference_c(self) -> float:
        """Temperature at which the other sections' constants hold, degrees Celsius."""
        return 25.0 if self.temperature_ref_c is None else self.temperature_ref_c

    @property
    def working_c(self) -> tuple[float, float]:
        """The lowest and the highest working temperature, degrees Celsius."""
        return (
            -40.0 if self.temperature_min_c is None else self.temperature_min_c,
            85.0 if self.temperature_max_c is None else self.temperature_max_c,
        )

    def thermal_variance(self, g_max_us: float) -> float:
        """Return the variance of thermal noise for sum_j |w_ij| = 1, squared units of w x; 0 if it is off.

        Johnson and Nyquist, Phys. Rev. 32, 97 and 110 (1928): a conductance G has the current noise 4 k T G bandwidth.
        The sum of a pair's conductances is at least |w| g_max; this least value is taken.

        Args:
            g_max_us: conductance of a weight of 1, microsiemens.
        """
        if self.read_v is None or self.bandwidth_hz is None:
            return 0.0
        current_a2 = 4 * BOLTZMANN_J_PER_K * kelvin(self.temperature_c) * self.bandwidth_hz
        return current_a2 / (g_max_us * 1e-6 * self.read_v**2)


class WorkSettings(StrictSection):
    """Time and energy of programming.

    Attributes:
        programming_us_per_row: time to write and verify the devices of one input, microseconds.
        programming_nj_per_device: energy to write and verify one device, nanojoules.
    """

    programming_us_per_row: float = Field(ge=0)
    programming_nj_per_device: float = Field(ge=0)


class CrossbarSettings(StrictSection):
    """A crossbar of differential pairs; what is left out is ideal.

    Attributes:
        g_max_us: conductance of a weight of 1, microsiemens.
        tile_inputs: inputs of a tile; each tile has converters of its own.
        converter: DAC and ADC.
        product: noise of every product.
        programming_us: standard deviation of the programmed conductance, microsiemens, coefficients of g, lowest power
            first; None for exact programming, or with `relaxation`.
        relaxation: the same standard deviation as a function of time, or None.
        drift: drift by a power law, or None.
        low_frequency: accumulated 1/f noise, or None; needs `drift`.
        work: time and energy of programming, or None if they are not counted.
        temperature: effects of temperature, or None if nothing depends on it.
    """

    g_max_us: float = Field(gt=0)
    tile_inputs: int = Field(default=512, ge=1, le=512)
    converter: ConverterSettings = ConverterSettings()
    product: ProductSettings = ProductSettings()
    programming_us: list[float] | None = Field(default=None, min_length=1)
    relaxation: RelaxationSettings | None = None
    drift: ConductanceDriftSettings | None = None
    low_frequency: LowFrequencySettings | None = None
    work: WorkSettings | None = None
    temperature: CrossbarTemperatureSettings | None = None

    @property
    def thermal_variance(self) -> float:
        """Variance that thermal noise adds for sum_j |w_ij| = 1, squared units of w x; 0 if it is off."""
        return 0.0 if self.temperature is None else self.temperature.thermal_variance(self.g_max_us)

    @model_validator(mode="after")
    def _laws_fit(self) -> Self:
        if self.programming_us is not None and self.relaxation is not None:
            raise ValueError(
                "programming_us and relaxation both give the spread after programming; give one of them"
            )
        if self.low_frequency is not None and self.drift is None:
            raise ValueError("low_frequency: needs drift, whose t0_s it counts from; add drift, or remove it")
        for polynomial in self.spreads_us():
            if min(sum(c * (k / 100) ** n for n, c in enumerate(polynomial)) for k in range(101)) < 0:
                raise ValueError(
                    f"programming polynomial {polynomial}: is below 0 for some g in [0, 1]; check its signs"
                )
        return self

    def spreads_us(self) -> list[list[float]]:
        """Return the polynomials of the programmed spread: one, one for each time of the relaxation, or none."""
        if self.relaxation is not None:
            return self.relaxation.polynomials_us
        return [] if self.programming_us is None else [self.programming_us]


class DetectorSettings(StrictSection):
    """A balanced pair of photodiodes at each output.

    Attributes:
        responsivity_a_per_w: current per watt of light, amperes per watt.
        bandwidth_hz: noise bandwidth, hertz.
        load_ohm: resistance whose thermal noise is added, ohm; None is off.
    """

    responsivity_a_per_w: float = Field(gt=0)
    bandwidth_hz: float = Field(gt=0)
    load_ohm: float | None = Field(default=None, gt=0)

    def shot_a2(self, power_w: float) -> float:
        """Return the variance of the current for this power P on both diodes, 2 q R P bandwidth (Schottky, 1918)."""
        return 2 * CHARGE_C * self.responsivity_a_per_w * power_w * self.bandwidth_hz

    def thermal_a2(self, temperature_c: float) -> float:
        """Return the variance of the load's current, 4 k T bandwidth / load (Johnson; Nyquist, 1928)."""
        if self.load_ohm is None:
            return 0.0
        return 4 * BOLTZMANN_J_PER_K * kelvin(temperature_c) * self.bandwidth_hz / self.load_ohm


class PhotonicSettings(StrictSection):
    """What both kinds of chips have; what is left out is ideal.

    Attributes:
        phase_bits: bits of the setting of each heater, or None for exact settings.
        heater_crosstalk: share of a heater's phase shift that each of its two neighbours also gets.
        loss_db: loss of light in each interferometer, or in a whole bank of rings, decibels.
        laser_w: power of the laser, watts: on all inputs of a mesh together, or on one channel of a bank.
        detector: the detector of every output.
        temperature_c: temperature of the chip and its detectors, degrees Celsius, -40 to 85; None: 25.
        converter: DAC and ADC, as a crossbar's.
        programming_us: time in which the heaters settle, microseconds.
    """

    phase_bits: int | None = Field(default=None, ge=1, le=24)
    heater_crosstalk: float = Field(default=0.0, ge=0, lt=1)
    loss_db: float = Field(default=0.0, ge=0)
    laser_w: float = Field(gt=0)
    detector: DetectorSettings
    temperature_c: float | None = Field(default=None, ge=-40, le=85)
    converter: ConverterSettings = ConverterSettings()
    programming_us: float = Field(default=0.0, ge=0)

    @property
    def celsius(self) -> float:
        """The temperature, degrees Celsius."""
        return 25.0 if self.temperature_c is None else self.temperature_c


class MeshSettings(PhotonicSettings):
    """Two meshes of Mach-Zehnder interferometers with attenuators between them, read by homodyne detection.

    Attributes:
        layout: ``rectangular`` (Clements et al.) or ``triangular`` (Reck et al.).
        ports: inputs, and outputs, of the chip.
        splitter_rad: standard deviation of a splitter's angle about pi / 4, radians.
        local_oscillator_w: power of the local oscillator at each output, watts.
    """

    layout: Literal["rectangular", "triangular"] = "rectangular"
    ports: int = Field(ge=2, le=512)
    splitter_rad: float = Field(default=0.0, ge=0)
    local_oscillator_w: float = Field(gt=0)


class RingSettings(PhotonicSettings):
    """Banks of microrings, a ring for each wavelength, whose drop and through ports are read by balanced detection.

    Attributes:
        channels: wavelengths, evenly spaced over a free spectral range.
        finesse: free spectral range over the width of a resonance at half its height.
        free_spectral_range_ghz: gigahertz.
        tuning_std: standard deviation of the weight that the control of a ring sets; weights lie in [-1, 1].
        shift_ghz_per_k: shift of all resonances with temperature, gigahertz per kelvin; 0 for stabilised banks.
        calibrated_c: temperature at which the rings were calibrated, degrees Celsius; None: 25.
    """

    channels: int = Field(ge=1, le=512)
    finesse: float = Field(gt=1)
    free_spectral_range_ghz: float = Field(gt=0)
    tuning_std: float = Field(default=0.0, ge=0)
    shift_ghz_per_k: float = Field(default=0.0, ge=0)
    calibrated_c: float | None = Field(default=None, gt=-273.15)
