"""The section ``[camera]`` of a device description: every number of the physical twin, with units in the names."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from opusim.description.section import StrictSection
from opusim.temperature import DarkCurrent, DoublingDarkCurrent, TableDarkCurrent


class LightSettings(StrictSection):
    """Light on the sensor; see `opusim.camera.stages.Light`, whose attributes the keys are."""

    anchor_flux_per_s: float = Field(gt=0)
    bias_flux_per_s: float = Field(default=0.0, ge=0)
    quantum_efficiency: float = Field(gt=0, le=1)
    exposure_us: float = Field(gt=0)


class SensorSettings(StrictSection):
    """The sensor; see `opusim.camera.stages.Sensor` and `FixedPattern`, whose attributes the keys are.

    What is not given is off.
    """

    gain_dn_per_e: float = Field(gt=0)
    shot_noise: bool = False
    full_well_e: float | None = Field(default=None, gt=0)
    read_noise_e: float = Field(default=0.0, ge=0)
    black_level_dn: float = Field(default=0.0, ge=0)
    adc_bits: int | None = Field(default=None, ge=1, le=24)
    prnu: float = Field(default=0.0, ge=0, le=0.2)
    dsnu_e: float = Field(default=0.0, ge=0)


class DoublingSettings(StrictSection):
    """Keys of `opusim.temperature.DoublingDarkCurrent`."""

    dark_current_ref_e_per_s: float = Field(ge=0)
    temperature_ref_c: float
    doubling_k: float = Field(gt=0)
    temperature_min_c: float = Field(ge=-273.15)
    temperature_max_c: float

    def dark_current(self) -> DoublingDarkCurrent:
        """Return the law.

        Raises:
            ValueError: its numbers contradict each other.
        """
        return DoublingDarkCurrent(**{key: getattr(self, key) for key in DoublingSettings.model_fields})


class TableSettings(StrictSection):
    """Keys of `opusim.temperature.TableDarkCurrent`."""

    temperatures_c: list[float] = Field(min_length=2)
    dark_currents_e_per_s: list[float] = Field(min_length=2)


class DarkSettings(StrictSection):
    """Dark current: one of two laws, and the temperature the sensor is at.

    Attributes:
        temperature_c: operating temperature, degrees Celsius.
        doubling: the doubling law.
        table: measured points.
    """

    temperature_c: float
    doubling: DoublingSettings | None = None
    table: TableSettings | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.doubling is None) == (self.table is None):
            raise ValueError("give exactly one of doubling and table")
        return self


class AnchorSettings(StrictSection):
    """The anchor frame, in which every mirror of the window is on, and what follows from it.

    Attributes:
        reference_share: share of the mirrors that carry no data: off in the frames of a vector, on in the anchor and
            in every complement; in [0, 1). 0: all carry data, and rows of B then sum to zero.
        frames: anchor frames, and as many blank ones, averaged when the device opens; 0: the anchor is known exactly.
        lowest: pixels whose anchor intensity is below this multiple of the mean are masked (dark speckle), above 0.
        highest: pixels above this multiple are masked (their frames would saturate), or None for no mask.
        most_saturated: share of the outputs that may be full in the anchor or another frame of a projection; the
            device does not open beyond, because entries of B are not N(0, 1) then. None: 0.01.
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


class DriftSettings(StrictSection):
    """Drift of the medium: entries are stationary Ornstein-Uhlenbeck processes (`opusim.camera.speckle`).

    Attributes:
        decorrelation_s: tau: media at any two times t and s have the correlation exp(-|t - s| / tau), seconds.
        seconds_per_step: time that passes from training step to training step, seconds.
    """

    decorrelation_s: float = Field(gt=0)
    seconds_per_step: float = Field(gt=0)


class CameraSettings(StrictSection):
    """The physical twin; stages in the order in which light meets them.

    Attributes:
        light: mean light, exposure and quantum efficiency.
        sensor: counts, wells, noise, gain and converter.
        anchor: how the linear projection is recovered.
        dark: dark current, or None if it is off.
        drift: drift of the medium, or None if there is none.
        grain_pixels: pixels that a speckle grain spans, at least 1: the field of a pixel is the sum of so many
            independent ones over the root of their number, so that fields k pixels apart correlate by
            1 - k / grain_pixels.
        grain_correlation: correlation of the fields of neighbouring pixels, in [0, 0.5]; above 0 if speckle grains are
            larger than a pixel.
    """

    light: LightSettings
    sensor: SensorSettings
    anchor: AnchorSettings
    dark: DarkSettings | None = None
    drift: DriftSettings | None = None
    grain_correlation: float = Field(default=0.0, ge=0, le=0.5)
    grain_pixels: int | None = Field(default=None, ge=1, le=64)

    def dark_law(self) -> DarkCurrent | None:
        """Return the law of the dark current, or None if it is off.

        Raises:
            ValueError: its numbers contradict each other.
        """
        if self.dark is None:
            return None
        if self.dark.doubling is not None:
            return self.dark.doubling.dark_current()
        points = self.dark.table.model_dump() if self.dark.table is not None else {}
        return TableDarkCurrent(**{key: tuple(value) for key, value in points.items()})

    @model_validator(mode="after")
    def _one_grain(self) -> Self:
        if self.grain_pixels is not None and self.grain_correlation:
            raise ValueError(
                "grain_pixels and grain_correlation both say how large grains are; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _dark_law_holds(self) -> Self:
        law = self.dark_law()
        if self.dark is not None and law is not None:
            law.current_e_per_s(self.dark.temperature_c)
        return self
