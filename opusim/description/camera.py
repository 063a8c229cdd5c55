"""The section ``[camera]`` of a device description: every number of the physical twin, with units in the names.

The section ``[bench]`` says how opusim uses your own mirror array and camera.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from opusim.description.section import StrictSection, exactly_one, together
from opusim.temperature import ArrheniusDarkCurrent, DarkCurrent, DoublingDarkCurrent, TableDarkCurrent

FRAMES_PER_TERNARY = 4
"""Frames of a ternary vector x = p - n: p, its complement in the anchor, n and its complement."""


class PowerSettings(StrictSection):
    """Laser power that fluctuates, common to all pixels of a frame; see `opusim.camera.from_description`.

    Attributes:
        law: the law of the power W of a frame relative to its mean, log_normal or gaussian. A guarantee rests on it.
        rms: relative standard deviation from frame to frame, at most 1 (log_normal) or 0.2 (gaussian), drift included.
        correlation_us: correlation time of successive frames' powers, microseconds, or None if they are independent.
        averages: whether rms and correlation_us describe the instantaneous power, which a frame averages over its
            exposure; None: rms describes the frames' powers. For a gaussian power only, whose means are gaussian.
        drift_rms: relative standard deviation of a slow drift of the power, or None if there is none.
        drift_s: correlation time of the drift, seconds; given with drift_rms.
        seconds_per_step: time that passes from training step to training step, seconds; given with drift_rms.
    """

    law: Literal["log_normal", "gaussian"]
    rms: float = Field(ge=0, le=1)
    correlation_us: float | None = Field(default=None, gt=0)
    averages: bool | None = None
    drift_rms: float | None = Field(default=None, gt=0, le=1)
    drift_s: float | None = Field(default=None, gt=0)
    seconds_per_step: float | None = Field(default=None, gt=0)

    _drift_is_complete = together("drift_rms", "drift_s", "seconds_per_step")

    @model_validator(mode="after")
    def _law_fits(self) -> Self:
        if self.averages and (self.law != "gaussian" or self.correlation_us is None):
            raise ValueError(
                "averages = true: an exposure averages a power with law = 'gaussian' and a correlation_us only; give "
                "both, or leave averages out"
            )
        if self.law == "gaussian" and self.rms**2 + (self.drift_rms or 0.0) ** 2 > 0.04:
            raise ValueError(
                "rms and drift_rms: exceed 0.2 together, where a Gaussian power is cut; take log_normal"
            )
        return self


class LightSettings(StrictSection):
    """Light on the sensor: photons on a pixel and the electrons they free, quantum_efficiency flux exposure.

    Attributes:
        anchor_flux_per_s: photons per second, averaged over pixels, while every mirror of the window is on.
        bias_flux_per_s: photons per second on every pixel of every frame, incoherent and uniform; 0 is off. Its shot
            noise does not depend on the data.
        quantum_efficiency: electrons per photon, in (0, 1].
        exposure_us: exposure of a frame, microseconds.
        shortest_exposure_us: least exposure that the camera takes, microseconds, or None if it has no limit.
        ambient_flux_per_s: photons per second on every pixel from light that no key switches (a lamp, leaks); None is
            off. It adds noise, but no law counts on that noise: the light may be gone tomorrow.
        power: how the laser's power fluctuates, or None if it is constant.
    """

    anchor_flux_per_s: float = Field(gt=0)
    bias_flux_per_s: float = Field(default=0.0, ge=0)
    quantum_efficiency: float = Field(gt=0, le=1)
    exposure_us: float = Field(gt=0)
    shortest_exposure_us: float | None = Field(default=None, gt=0)
    ambient_flux_per_s: float | None = Field(default=None, ge=0)
    power: PowerSettings | None = None

    @model_validator(mode="after")
    def _exposure_is_possible(self) -> Self:
        if self.shortest_exposure_us is not None:
            self.check_exposure(self.exposure_us)
        return self

    def check_exposure(self, exposure_us: float) -> None:
        """Refuse (ValueError) an exposure that is shorter than the camera's shortest one."""
        if exposure_us < (self.shortest_exposure_us or 0.0):
            raise ValueError(
                f"exposure_us = {exposure_us:g}: is shorter than shortest_exposure_us = {self.shortest_exposure_us:g}; "
                "expose longer, or dim the light"
            )

    @property
    def anchor_e(self) -> float:
        """Photo-electrons of the anchor frame, averaged over pixels."""
        return self.quantum_efficiency * self.anchor_flux_per_s * self.exposure_us * 1e-6

    @property
    def bias_e(self) -> float:
        """Electrons of the bias light in a frame."""
        return self.quantum_efficiency * self.bias_flux_per_s * self.exposure_us * 1e-6

    @property
    def ambient_e(self) -> float:
        """Electrons of the ambient light in a frame."""
        return self.quantum_efficiency * (self.ambient_flux_per_s or 0.0) * self.exposure_us * 1e-6


class SensorSettings(StrictSection):
    """The sensor; the keys are the attributes of `opusim.camera.stages.Sensor`.

    What is not given is off, and so is a converter of 0 bits.

    PRNU and DSNU differ from pixel to pixel but not from frame to frame, so they add no randomness to a reading. Both
    are normal numbers cut at 4.3 standard deviations, computed from the medium's seed and the pixel's number; above a
    PRNU of 0.2 the least sensitive pixels would have no sensitivity left. The offset (DSNU) is added after the full
    well, as EMVA 1288 measures it in dark frames; added to the Poisson rate, as some write it, it would make the rates
    of some pixels negative.

    Attributes:
        prnu: photo response non-uniformity, standard deviation relative to the mean, in [0, 0.2]; 0 is off.
        dsnu_e: dark signal non-uniformity, standard deviation, electrons, at least 0; 0 is off.
        row_pixels: pixels of a row of the sensor: pixel j stands in row j // row_pixels. None: all stand in one row.
    """

    gain_dn_per_e: float = Field(gt=0)
    shot_noise: bool = False
    full_well_e: float | None = Field(default=None, gt=0)
    read_noise_e: float = Field(default=0.0, ge=0)
    black_level_dn: float = Field(default=0.0, ge=0)
    adc_bits: int | None = Field(default=None, ge=1, le=24)
    prnu: float = Field(default=0.0, ge=0, le=0.2)
    dsnu_e: float = Field(default=0.0, ge=0)
    row_pixels: int | None = Field(default=None, ge=2, le=2**20)


_doubling = lru_cache(maxsize=64)(DoublingDarkCurrent)
"""Caches the law: opening a camera asks for the same one several times."""


class _FormulaSettings(StrictSection):
    _law: ClassVar[Callable[..., Any]]

    def dark_current(self) -> DarkCurrent:
        """Return the law; ValueError if its numbers contradict each other."""
        return type(self)._law(**{key: getattr(self, key) for key in type(self).model_fields})


class DoublingSettings(_FormulaSettings):
    """Keys of `opusim.temperature.DoublingDarkCurrent`."""

    _law = _doubling
    dark_current_ref_e_per_s: float = Field(ge=0)
    temperature_ref_c: float = Field(gt=-273.15)
    doubling_k: float = Field(gt=0)
    temperature_min_c: float = Field(gt=-273.15)
    temperature_max_c: float


class ArrheniusSettings(_FormulaSettings):
    """Keys of `opusim.temperature.ArrheniusDarkCurrent`."""

    _law = ArrheniusDarkCurrent
    dark_current_ref_e_per_s: float = Field(ge=0)
    temperature_ref_c: float = Field(gt=-273.15)
    activation_ev: float = Field(gt=0)
    temperature_min_c: float = Field(gt=-273.15)
    temperature_max_c: float


class TableSettings(StrictSection):
    """Keys of `opusim.temperature.TableDarkCurrent`."""

    temperatures_c: list[float] = Field(min_length=2)
    dark_currents_e_per_s: list[float] = Field(min_length=2)


class DarkSettings(StrictSection):
    """Dark current: one of three laws, and the sensor's temperature.

    Attributes:
        temperature_c: operating temperature, degrees Celsius.
        doubling: the doubling rule.
        arrhenius: the Arrhenius law.
        table: measured points.
    """

    temperature_c: float
    doubling: DoublingSettings | None = None
    arrhenius: ArrheniusSettings | None = None
    table: TableSettings | None = None

    _one_law = exactly_one("doubling", "arrhenius", "table")

    def law(self) -> DarkCurrent:
        """Return the law; ValueError if its numbers contradict each other."""
        formula = self.doubling or self.arrhenius
        if formula is not None:
            return formula.dark_current()
        points = self.table.model_dump() if self.table is not None else {}
        return TableDarkCurrent(**{key: tuple(value) for key, value in points.items()})


class MirrorSettings(StrictSection):
    """Faults of the mirror array; see `opusim.camera.speckle.FaultyMirrors`. What is not given is off.

    Attributes:
        stuck_on: share of the mirrors that are always on.
        stuck_off: share of the mirrors that are always off.
        contrast: intensity of a mirror that is on over that of one that is off, at least 2; None: infinite.
        leak_speckle: whether the light of a mirror that is off has a speckle of its own; None: it has the speckle of
            the mirror when on. Needs contrast.
    """

    stuck_on: float = Field(default=0.0, ge=0, le=0.5)
    stuck_off: float = Field(default=0.0, ge=0, le=0.5)
    contrast: float | None = Field(default=None, ge=2)
    leak_speckle: bool | None = None

    @model_validator(mode="after")
    def _leaks_are_light(self) -> Self:
        if self.leak_speckle and self.contrast is None:
            raise ValueError("leak_speckle = true: mirrors of infinite contrast leak no light; give contrast")
        return self


class PixelSettings(StrictSection):
    """Faults of the pixels; see `opusim.camera.from_description`. What is not given is off.

    Attributes:
        hot_share: share of the pixels whose dark current is `hot_factor` times that of the others.
        hot_factor: dark current of a hot pixel over that of the others; given with hot_share.
        dead_share: share of the pixels that see nothing.
        dcnu: dark-current non-uniformity, standard deviation over pixels relative to the mean (log-normal).
        crosstalk: share of a pixel's photo-electrons that each of its two neighbours collects.
        nonlinearity: relative deficit of the read-out at saturation: N electrons read as N (1 - nonlinearity N /
            saturation).
        read_noise_spread: standard deviation of the pixels' read noises (log-normal) relative to their root mean
            square, sensor.read_noise_e; None is off, here and below.
        gain_spread: standard deviation of the pixels' gains relative to sensor.gain_dn_per_e (normal, cut at 4.3).
            Unlike prnu it scales counts, offset and read noise alike, so the ratio of variance to mean differs from
            pixel to pixel.
        row_noise_e: standard deviation of a noise that all pixels of a row of the sensor share in a frame, electrons.
        column_noise_e: the same for a column; sensor.row_pixels gives the length of a row.
        telegraph_share: share of the pixels whose read-out jumps between two levels (random telegraph signal).
        telegraph_e: distance of the levels, electrons; given with telegraph_share.
        telegraph_us: correlation time of the level, microseconds, or None if it is drawn anew in every frame.
    """

    hot_share: float = Field(default=0.0, ge=0, le=0.2)
    hot_factor: float | None = Field(default=None, ge=1)
    dead_share: float = Field(default=0.0, ge=0, le=0.2)
    dcnu: float = Field(default=0.0, ge=0, le=2)
    crosstalk: float = Field(default=0.0, ge=0, le=0.25)
    nonlinearity: float = Field(default=0.0, ge=0, le=0.25)
    read_noise_spread: float | None = Field(default=None, gt=0, le=2)
    gain_spread: float | None = Field(default=None, gt=0, le=0.2)
    row_noise_e: float | None = Field(default=None, gt=0)
    column_noise_e: float | None = Field(default=None, gt=0)
    telegraph_share: float | None = Field(default=None, gt=0, le=0.2)
    telegraph_e: float | None = Field(default=None, gt=0)
    telegraph_us: float | None = Field(default=None, gt=0)

    @property
    def uneven_keys(self) -> tuple[str, ...]:
        """The given keys that make the read-out differ over pixels, or its noise shared by pixels or frames."""
        keys = "read_noise_spread", "gain_spread", "row_noise_e", "column_noise_e", "telegraph_share"
        return tuple(key for key in keys if getattr(self, key) is not None)

    _telegraph_is_complete = together("telegraph_share", "telegraph_e")

    @model_validator(mode="after")
    def _faults_are_complete(self) -> Self:
        if self.telegraph_us is not None and self.telegraph_share is None:
            raise ValueError("telegraph_us is given without telegraph_share; give both, or remove it")
        if (self.hot_share > 0) != (self.hot_factor is not None):
            raise ValueError("hot_share and hot_factor belong together; give both or neither")
        return self


class TransferSettings(StrictSection):
    """Faults of the frames' transfer; see `opusim.camera.from_description`. What is not given is off.

    Attributes:
        dropped: probability that a frame is lost and read as black.
        repeated: probability that a frame's numbers are those of the frame before.
    """

    dropped: float = Field(default=0.0, ge=0, le=0.5)
    repeated: float = Field(default=0.0, ge=0, le=0.5)


class AnchorSettings(StrictSection):
    """The anchor frame, in which every mirror of the window is on, and the masks and limits that rest on it.

    Attributes:
        reference_share: share of the mirrors that carry no data: off in the frames of a vector, on in the anchor and in
            every complement; in [0, 1). With 0 all carry data, and the rows of B sum to zero.
        frames: anchor frames, and as many blank ones, averaged when the device opens; 0: the anchor is known exactly.
        lowest: pixels whose anchor intensity is below this multiple of the mean are masked (dark speckle), above 0.
        highest: pixels above this multiple are masked (their frames would saturate), or None for no mask.
        most_saturated: share of the outputs that may be full in the anchor or another frame of a projection; with more,
            entries of B are not N(0, 1), and the device does not open. None: 0.01.
    """

    reference_share: float = Field(default=0.0, ge=0, lt=1)
    frames: int = Field(default=0, ge=0)
    lowest: float = Field(gt=0)
    highest: float | None = Field(default=None, gt=0)
    most_saturated: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _some_pixels_left(self) -> Self:
        if self.lowest > 3 or (self.highest is not None and self.highest < 1.5 * self.lowest):
            raise ValueError(
                f"lowest = {self.lowest:g}, highest = {self.highest}: lowest must be at most 3 and highest at least "
                "1.5 times lowest, or almost no pixel is left"
            )
        return self


class ReferenceBeamSettings(StrictSection):
    """A reference beam: readings come from phase-shifted holograms; see `opusim.camera.exposure`.

    Attributes:
        flux_per_s: photons per second of the reference alone on every pixel.
        steps: frames of a binary pattern, each with another phase of the reference; a ternary vector takes twice as
            many.
        step_error: relative error of the phase steps, in [-0.5, 0.5].
    """

    flux_per_s: float = Field(gt=0)
    steps: int = Field(ge=3, le=4)
    step_error: float = Field(default=0.0, ge=-0.5, le=0.5)


class VibrationSettings(StrictSection):
    """Vibration of the bench, the same for all pixels of a frame, stationary and Gaussian. What is not given is off.

    Attributes:
        pointing_rms_pixels: standard deviation of the image's displacement along the pixels' numbers, at most 0.2.
        phase_rms_rad: standard deviation of the phase between field and reference beam, 2 pi times the path difference
            over the wavelength; needs a reference beam.
        correlation_us: correlation time of successive frames' states, or None if they are independent.
    """

    pointing_rms_pixels: float = Field(default=0.0, ge=0, le=0.2)
    phase_rms_rad: float = Field(default=0.0, ge=0, le=3)
    correlation_us: float | None = Field(default=None, gt=0)


class DriftSettings(StrictSection):
    """Drift of the medium: entries are stationary Ornstein-Uhlenbeck processes (`opusim.camera.speckle`).

    Attributes:
        decorrelation_s: tau: media at any two times t and s have the correlation exp(-|t - s| / tau), seconds.
        seconds_per_step: time that passes from training step to training step, seconds.
        reanchor_steps: steps from one measurement of the anchor to the next, or None to measure it at opening only.
        within_call: whether the medium also moves between the frames of a step (`opusim.camera.speckle`), which are
            then exposed one frame period apart, from the step's time on; None: it rests until the next step. A step
            should last as long as its frames take: frames after seconds_per_step see the medium of later steps.
        hops_per_s: mean rate at which the laser hops to another mode, per second, or None if it keeps its wavelength;
            given with the next two keys (`opusim.camera.speckle`).
        hop_pm: change of the wavelength at a hop, picometres; some 300 for a bare laser diode.
        spectral_width_pm: change of the wavelength at which the correlation of the speckle's intensities falls to a
            half, picometres.
    """

    decorrelation_s: float = Field(gt=0)
    seconds_per_step: float = Field(gt=0)
    reanchor_steps: int | None = Field(default=None, ge=1)
    within_call: bool | None = None
    hops_per_s: float | None = Field(default=None, gt=0)
    hop_pm: float | None = Field(default=None, gt=0)
    spectral_width_pm: float | None = Field(default=None, gt=0)

    _hops_have_a_size = together("hops_per_s", "hop_pm", "spectral_width_pm")


class CameraSettings(StrictSection):
    """The physical twin; stages in the order in which light meets them.

    Attributes:
        light: mean light, exposure and quantum efficiency.
        sensor: counts, wells, noise, gain and converter.
        anchor: how the linear projection is recovered.
        dark: dark current, or None if it is off.
        drift: drift of the medium, or None if there is none.
        reference_beam: a reference beam for holography, or None: the anchor's complements read the linear product.
        vibration: vibration of the bench, or None if it rests.
        grain_pixels: pixels that a speckle grain spans, at least 1: the field of a pixel is the sum of grain_pixels
            independent fields over sqrt(grain_pixels), so fields k pixels apart correlate by 1 - k / grain_pixels. With
            sensor.row_pixels a grain spans as many rows as pixels of a row.
        grain_correlation: correlation of the fields of neighbouring pixels, in [0, 0.5]; above 0 if speckle grains are
            larger than a pixel.
        speckle_modes: M, the number of independent speckles whose intensities a pixel averages (2: both polarisations);
            the speckle's contrast is 1 / sqrt(M). None: 1. See `opusim.camera.speckle`.
        mirrors: faults of the mirror array, or None if it has none.
        pixels: faults of the pixels, or None if they have none.
        transfer: faults of the frames' transfer, or None if it has none.
    """

    light: LightSettings
    sensor: SensorSettings
    anchor: AnchorSettings
    mirrors: MirrorSettings | None = None
    pixels: PixelSettings | None = None
    transfer: TransferSettings | None = None
    dark: DarkSettings | None = None
    drift: DriftSettings | None = None
    reference_beam: ReferenceBeamSettings | None = None
    vibration: VibrationSettings | None = None
    grain_correlation: float = Field(default=0.0, ge=0, le=0.5)
    grain_pixels: int | None = Field(default=None, ge=1, le=64)
    speckle_modes: int | None = Field(default=None, ge=1, le=16)

    @property
    def frames_per_projection(self) -> int:
        """Frames that a ternary vector takes."""
        return FRAMES_PER_TERNARY if self.reference_beam is None else 2 * self.reference_beam.steps

    def dark_law(self) -> DarkCurrent | None:
        """Return the law of the dark current, or None if it is off; ValueError if its numbers contradict each other."""
        return None if self.dark is None else self.dark.law()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.vibration is not None and self.vibration.phase_rms_rad and self.reference_beam is None:
            raise ValueError(
                "vibration: phase_rms_rad is a phase to a reference beam, and there is none; give "
                "pointing_rms_pixels, or a section [camera.reference_beam]"
            )
        if self.reference_beam is not None and self.speckle_modes not in (None, 1):
            raise ValueError(
                f"speckle_modes = {self.speckle_modes}: a reference beam interferes with one mode only; set it to 1, "
                "or remove reference_beam"
            )
        if self.reference_beam is not None and self.drift is not None and self.drift.hops_per_s:
            raise ValueError(
                "drift.hops_per_s: a hop turns the phase between field and reference beam, which has no law here; "
                "remove hops_per_s, hop_pm and spectral_width_pm, or reference_beam"
            )
        crosstalk = 0.0 if self.pixels is None else self.pixels.crosstalk
        if self.vibration is not None and self.vibration.pointing_rms_pixels and crosstalk:
            raise ValueError(
                "vibration: pointing_rms_pixels and pixels.crosstalk both mix neighbouring pixels; give one of them"
            )
        pixels = self.pixels
        if pixels is not None and (pixels.hot_share or pixels.dcnu) and self.dark is None:
            raise ValueError("pixels: hot_share and dcnu need dark current; give a section [camera.dark]")
        if (
            pixels is not None
            and pixels.nonlinearity
            and not (self.sensor.full_well_e or self.sensor.adc_bits)
        ):
            raise ValueError("pixels: nonlinearity is relative to saturation; give full_well_e or adc_bits")
        if pixels is not None and pixels.read_noise_spread and not self.sensor.read_noise_e:
            raise ValueError("pixels: read_noise_spread spreads a read noise of 0; give sensor.read_noise_e")
        if self.grain_pixels is not None and self.grain_correlation:
            raise ValueError(
                "grain_pixels and grain_correlation both say how large grains are; give one of them"
            )
        law = self.dark_law()
        if self.dark is not None and law is not None:
            law.current_e_per_s(self.dark.temperature_c)
        return self


_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class BenchSettings(StrictSection):
    """How a bench is used (`opusim.devices.bench`). These are choices, not properties of the instruments.

    Attributes:
        patterns: factory of the mirror array, ``module:factory``, called without arguments; empty if the caller of
            `opusim.devices.open_bench` gives the array. The module is installed, or lies in the working folder.
        grabber: factory of the camera, likewise.
        setup: folder in which the setup of each window (exposure, region, outputs, scale) is kept, and read at the next
            opening; None measures it at every opening, each time with another matrix.
        macro_pixel: side of the square blocks of mirrors that are switched together, mirrors.
        window_rows: rows of mirrors that are used, in the middle of the array, or None for all.
        window_columns: columns of mirrors that are used, likewise.
        reference_share: share of the blocks that carry no data: off in the frame of a vector, on in the anchor and in
            every complement; in [0.05, 0.95].
        exposure_us: exposure of a frame, microseconds, or None to search for it.
        shortest_exposure_us: shortest exposure that the search tries, microseconds.
        readout_us: part of a frame's time in which the camera cannot expose, microseconds; the longest exposure is
            ``frames.frame_period_us`` minus it.
        range_share: share of the converter's range, above the blank frame, that the search gives to the mean of the
            anchor's brightest region; speckle is exponential, so a share e^(-1/range_share) of its pixels is full.
        binning: pixels of the camera that are read as one, along each axis (2: blocks of 2 x 2).
        region_step: rows and columns of the camera's region are multiples of it, pixels.
        lowest: pixels whose anchor is darker than this multiple of the local mean are no outputs.
        highest: pixels whose anchor is brighter than this multiple of it are no outputs.
        most_saturated: share of the outputs that may be full in a frame; with more the bench does not open.
        most_nonlinear: largest tolerated deviation of readings from linear ones, root mean square, relative to the
            readings.
        least_correlation: correlation of the anchor's frame with that of the setup; below it the medium counts as
            another one.
        frames_per_sequence: patterns that are loaded and shown at once, or None for as many as fit into 128 MiB, 64 to
            256; the camera's buffer holds their frames and some ten more.
        tries: how often a sequence with lost or doubled frames is shown before that is an error.
    """

    patterns: str = ""
    grabber: str = ""
    setup: str | None = None
    macro_pixel: int = Field(default=8, ge=1)
    window_rows: int | None = Field(default=None, ge=1)
    window_columns: int | None = Field(default=None, ge=1)
    reference_share: float = Field(default=0.5, ge=0.05, le=0.95)
    exposure_us: float | None = Field(default=None, gt=0)
    shortest_exposure_us: float = Field(default=1.0, gt=0)
    readout_us: float = Field(default=50.0, ge=0)
    range_share: float = Field(default=0.15, gt=0, lt=0.5)
    binning: int = Field(default=1, ge=1, le=16)
    region_step: int = Field(default=8, ge=1)
    lowest: float = Field(default=0.1, gt=0, le=1)
    highest: float = Field(default=3.5, ge=1.5)
    most_saturated: float = Field(default=0.01, gt=0, lt=1)
    most_nonlinear: float = Field(default=0.05, gt=0, lt=1)
    least_correlation: float = Field(default=0.9, gt=0, lt=1)
    frames_per_sequence: int | None = Field(default=None, ge=FRAMES_PER_TERNARY)
    tries: int = Field(default=3, ge=1, le=100)

    _both_are_named = together("patterns", "grabber")

    @field_validator("patterns", "grabber")
    @classmethod
    def _names_a_factory(cls, value: str) -> str:
        if value and not _FACTORY.fullmatch(value):
            raise ValueError(f"{value!r} names no factory; write module:name, such as my_bench:Camera")
        return value
