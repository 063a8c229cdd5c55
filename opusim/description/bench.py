"""The section ``[bench]`` of a device description: how opusim uses your own mirror array and camera."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from opusim.description.camera import FRAMES_PER_TERNARY
from opusim.description.section import StrictSection

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

    @field_validator("patterns", "grabber")
    @classmethod
    def _names_a_factory(cls, value: str) -> str:
        if value and not _FACTORY.fullmatch(value):
            raise ValueError(f"{value!r} names no factory; write module:name, such as my_bench:Camera")
        return value

    @model_validator(mode="after")
    def _both_are_named(self) -> Self:
        if bool(self.patterns) != bool(self.grabber):
            raise ValueError("patterns and grabber belong together; name both, or neither")
        return self
