"""An optical bench in software: laser, mirror array, scattering medium and camera, and what goes wrong with them.

It shares no code with opusim's camera. `ALP4` and `pylablib.devices.DCAM` in this folder are doubles of the vendors'
libraries with the published calls, which drive the bench that `current` returns.

Field at pixel j of a pattern b: E_j = h_j sum over mirrors i of g_i b'_i T_ji, with T the medium (for each mirror a
circular complex Gaussian speckle field whose spectrum fills an elliptic pupil), g the laser's Gaussian beam, h the
halo of the speckle and b' = 1 or, for a mirror that is off, `leak`. A frame has Poisson electrons of mean
power exposure |E|^2 + dark, cut at the full well, Gaussian read noise, a gain and a converter of `bits`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_KEPT = 1024
"""Patterns whose light is kept, since many are shown again."""


@dataclass
class OpticalBench:
    """The bench and its faults; faults are changed while it runs."""

    mirrors: tuple[int, int] = (24, 32)
    sensor: tuple[int, int] = (120, 120)
    seed: int = 1
    electrons_per_us: float = 12.0
    """Of the anchor of all mirrors at the middle of the halo."""
    full_well_e: float = 12_000.0
    range_e: float = 12_000.0
    """Electrons that the converter's largest number stands for."""
    read_noise_e: float = 3.0
    dark_e: float = 2.0
    black_dn: float = 20.0
    bits: int = 12
    prnu: float = 0.01
    leak: float = 0.03
    pupil: tuple[float, float] = (0.30, 0.22)
    """Half axes of the pupil, cycles per pixel along rows and columns."""
    readout_us: float = 40.0
    shortest_us: float = 1.0

    # Faults
    power: float = 1.0
    gamma: float = 1.0
    coherent: bool = True
    inverted: bool = False
    ambient_e_per_us: float = 0.0
    drift_per_frame: float = 0.0
    dead_columns: tuple[int, ...] = ()
    hot_pixels: tuple[tuple[int, int], ...] = ()
    missed_pulses: set[int] = field(default_factory=set)
    extra_pulses: set[int] = field(default_factory=set)
    dropped_frames: set[int] = field(default_factory=set)
    doubled_frames: set[int] = field(default_factory=set)
    stale_frames: set[int] = field(default_factory=set)
    cable: bool = True
    camera_opens: bool = True
    hang_s: float = 0.0

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self._noise = np.random.default_rng(self.seed + 1000)
        rows, columns = self.sensor
        count = self.mirrors[0] * self.mirrors[1]
        y, x = (
            np.abs(np.fft.fftfreq(length))[shape]
            for length, shape in ((rows, np.s_[:, None]), (columns, np.s_[None]))
        )
        pupil = (y / self.pupil[0]) ** 2 + (x / self.pupil[1]) ** 2 <= 1
        beam = np.exp(
            -sum(
                (np.linspace(-1, 1, length)[shape] ** 2) * 0.5
                for length, shape in ((self.mirrors[0], np.s_[:, None]), (self.mirrors[1], np.s_[None]))
            )
        )
        self._beam = (beam / np.sqrt(np.sum(beam**2))).ravel()
        halo = np.exp(
            -0.3
            * sum(
                np.linspace(-1, 1, length)[shape] ** 2
                for length, shape in ((rows, np.s_[:, None]), (columns, np.s_[None]))
            )
        )
        self._response = 1 + self.prnu * draw.standard_normal(self.sensor)

        def medium() -> np.ndarray:  # (mirrors, pixels)
            found = np.empty((count, rows * columns), dtype=np.complex64)
            for start in range(0, count, 256):
                beam = self._beam[start : start + 256, None, None]
                parts = draw.standard_normal((2, len(beam), rows, columns), dtype=np.float32) * pupil
                speckle = np.fft.ifft2(parts[0] + 1j * parts[1]) * (rows * columns / np.sqrt(2 * pupil.sum()))
                found[start : start + 256] = (speckle * halo * beam).reshape(len(beam), -1)
            return found

        self._media = [medium()]
        self._another = medium
        self._kept: dict[tuple[Any, bytes], np.ndarray] = {}
        self._roi: tuple[int, int, int, int] | None = None
        self._local: list[np.ndarray] = []
        self.angle = 0.0
        self.pulses = 0
        self.pending: deque[tuple[np.ndarray, float]] = deque()
        self.opened: set[str] = set()

    # Light

    def forget(self) -> None:
        """Compute fields anew: the medium, or what switches mirrors, has changed."""
        self._kept = {}

    def _medium_at(self, roi: tuple[int, int, int, int]) -> np.ndarray:
        row, column, rows, columns = roi
        if self._roi != roi:
            where = np.arange(self.sensor[0] * self.sensor[1]).reshape(self.sensor)
            pixels = where[row : row + rows, column : column + columns].ravel()
            self._local = [np.ascontiguousarray(medium[:, pixels]) for medium in self._media]
            self._roi = roi
            self._kept = {}
        if self.angle == 0:
            return self._local[0]
        if len(self._media) == 1:
            self._media.append(self._another())
            self._roi = None
            return self._medium_at(roi)
        return np.cos(self.angle) * self._local[0] + np.sin(self.angle) * self._local[1]

    def light(self, patterns: np.ndarray, roi: tuple[int, int, int, int]) -> np.ndarray:
        """|E|^2 of patterns, shape (patterns, rows, columns) of the region; 1 is the anchor's mean at the middle."""
        medium = self._medium_at(roi)
        flat = patterns.reshape(len(patterns), -1).astype(bool)
        if self.inverted:
            flat = ~flat
        keys = [(roi, np.packbits(row).tobytes()) for row in flat]
        if len(self._kept) > _KEPT:
            self._kept = {}
        kept = self._kept  # a thread that was given up may forget meanwhile
        new = {key: row for key, row in zip(keys, flat, strict=True) if key not in kept}
        if new:
            on = np.where(np.stack(list(new.values())), 1.0, self.leak).astype(np.float32)
            if self.coherent:
                found = (on @ medium.real) ** 2 + (on @ medium.imag) ** 2
            else:
                found = on**2 @ (medium.real**2 + medium.imag**2)
            kept |= dict(zip(new, found, strict=True))
        found = np.stack([kept[key] for key in keys])
        if self.drift_per_frame:
            self.angle += self.drift_per_frame * len(patterns)
            self._kept = {}
        return found.reshape(len(patterns), roi[2], roi[3])

    def expose(self, patterns: np.ndarray, roi: tuple[int, int, int, int], exposure_us: float) -> np.ndarray:
        """Numbers of the region for patterns, uint16."""
        row, column, rows, columns = roi
        window = np.s_[row : row + rows, column : column + columns]
        rate = self.power * self.electrons_per_us * exposure_us * self.light(patterns, roi)
        rate = rate * self._response[window] + self.dark_e + self.ambient_e_per_us * exposure_us
        electrons = self._noise.poisson(rate).astype(np.float64)
        for r, c in self.hot_pixels:
            if row <= r < row + rows and column <= c < column + columns:
                electrons[:, r - row, c - column] += 0.6 * self.full_well_e
        electrons = np.minimum(electrons, self.full_well_e)
        if self.gamma != 1:
            electrons = self.range_e * (electrons / self.range_e) ** self.gamma
        electrons += self.read_noise_e * self._noise.standard_normal(electrons.shape)
        for dead in self.dead_columns:
            if column <= dead < column + columns:
                electrons[:, :, dead - column] = 0
        top = 2**self.bits - 1
        numbers = np.rint(self.black_dn + electrons * ((top - self.black_dn) / self.range_e))
        return np.clip(numbers, 0, top).astype(np.uint16)


@dataclass
class CameraLink:
    """The camera's side of the trigger line: pulses in, frames with their numbers out."""

    bench: OpticalBench
    roi: tuple[int, int, int, int] = (0, 0, 0, 0)
    exposure_us: float = 100.0
    binning: int = 1
    external: bool = True

    def __post_init__(self) -> None:
        self.frames: deque[tuple[int, np.ndarray]] = deque()
        self.counter = 0
        self.is_armed = False

    def arm(self) -> None:
        self.frames.clear()
        self.bench.pending.clear()
        self.counter, self.is_armed = 0, True

    def pump(self, wanted: int) -> None:
        """Take a frame at every pulse that has come."""
        bench = self.bench
        if bench.hang_s:
            time.sleep(bench.hang_s)
        if not self.external:
            dark = np.zeros((wanted, *bench.mirrors))
            for numbers in bench.expose(dark, self.roi, self.exposure_us):
                self._take(numbers, -1)
            return
        if not bench.cable or not self.is_armed:
            bench.pending.clear()
            return
        seen, events, ready_us = [], [], 0.0
        while bench.pending:
            pattern, period_us = bench.pending.popleft()
            number, bench.pulses = bench.pulses, bench.pulses + 1
            ready_us -= period_us
            if number in bench.missed_pulses or ready_us > 0:
                continue
            ready_us = self.exposure_us + bench.readout_us
            for _ in range(2 if number in bench.extra_pulses else 1):
                seen.append(pattern)
                events.append(number)
        for start in range(0, len(seen), 64):
            shown = bench.expose(np.stack(seen[start : start + 64]), self.roi, self.exposure_us)
            for numbers, number in zip(shown, events[start : start + 64], strict=True):
                self._take(numbers, number)

    def _take(self, numbers: np.ndarray, number: int) -> None:
        bench, side = self.bench, self.binning
        rows, columns = numbers.shape
        if side > 1:
            numbers = (
                numbers.reshape(rows // side, side, columns // side, side).mean(axis=(1, 3)).astype(np.uint16)
            )
        if number in bench.stale_frames and self.frames:
            numbers = self.frames[-1][1]
        if number not in bench.dropped_frames:
            for _ in range(2 if number in bench.doubled_frames else 1):
                self.frames.append((self.counter, numbers))
        self.counter += 1


_current: list[OpticalBench] = []


def current() -> OpticalBench:
    """The bench that the doubles drive, made when it is first needed."""
    return _current[-1] if _current else use(OpticalBench())


def use(bench: OpticalBench) -> OpticalBench:
    """Let the doubles drive this bench from now on."""
    _current[:] = [bench]
    return bench
