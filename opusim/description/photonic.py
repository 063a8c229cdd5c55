"""Sections of the kinds ``mzi_mesh`` and ``microring_bank``: photonic chips and their detectors.

`opusim.crossbar.mesh` and `opusim.crossbar.rings` have the laws.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opusim.description.crossbar import ConverterSettings
from opusim.description.section import StrictSection
from opusim.temperature import BOLTZMANN_J_PER_K, CHARGE_C, kelvin


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
