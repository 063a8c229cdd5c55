"""Set a bench up: find exposure, region and outputs, and measure what readings are decoded with.

Each function is usable alone; `measure_setup` calls them in order, and `BenchSetup` keeps what they found.

**Recovery.** With the anchor a (every group of mirrors on), U the sum of its field and of the blank frame's, and the
frames p, a - p, n, a - n of x = p - n (arXiv 2305.12988, `opusim.camera.exposure`),
    I_p - I_(a-p) - I_n + I_(a-n) = 2 Re(conj(U) u_x)
exactly, also if mirrors that are off leak light. Given U, the mean of an input's field is U / M, with M the mirrors of
the anchor over those of an input, and its rest has the variance (1 - 1 / M) E|U|^2 / M. So
    y = c (sum of signed frames - 2 A sum(x) / M) / (2 sqrt(A E)),
with A the anchor's intensity at the output, E the mean intensity around it and one constant c for all outputs, has
entries of mean 0 and one variance; c is measured, so that this variance is 1.
"""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from scipy.ndimage import uniform_filter

from opusim.camera.exposure import FRAME_SIGNS
from opusim.description.camera import BenchSettings
from opusim.devices.bench.instruments import Roi, Sequencer
from opusim.devices.bench.mirrors import MirrorLayout
from opusim.devices.bench.probes import light_is_unswitched, look_at_light, require_bits, require_interference
from opusim.errors import ConfigError, DeviceFault
from opusim.files import read_bytes, write_file
from opusim.tables import Shown

_SEED = 20261129
"""Seed of the random patterns by which speckle is measured."""
_SEARCH_FRAMES = 4
_SEARCH_STEPS = 16
_NEAR = 1.1
"""The search ends within this factor of what it wants."""
_SPECKLES = 32
"""Random patterns by which grains and the mean light are measured."""
_PROBE = 256
"""Rows and columns in which grains are measured, at most."""
_LEAST_CORRELATION = 0.05
"""Intensity correlation at which pixels count as one grain apart; their fields then correlate by 0.22."""
_ANCHOR_FRAMES = 64
_GRAINS_AROUND = 10
"""Grains along each axis over which the mean light around a pixel is taken."""
_USABLE = 0.7
"""Share of usable grains assumed for the first region, which grows if there are fewer."""
_UNIT_VECTORS = 256
_LEAST_DN = 2.0
_FULL = 0.95
"""Share of the camera's range from which a blank frame counts as full."""
_MOST_BYTES = 2**31
_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchSetup(Shown):
    """What the opening of a bench found, and how readings are decoded with it.

    Attributes:
        layout: of the mirrors.
        exposure_us: of a frame, microseconds.
        roi: region of the camera.
        binning: of the camera.
        outputs: flat numbers of the outputs' pixels in a frame of the region, int64, rising, shape (n_outputs,).
        anchor_dn: anchor less blank at each output, DN, float64.
        scale: projection units per DN of the signed sum of frames, at each output, float64.
        levels_dn: mean of the region in blank frames and in anchor frames, DN.
        grain: rows and columns from output to output: the least distances at which speckle is independent.
        date: when it was measured, ISO 8601.
        bits: of the camera's numbers; 0 in files of earlier versions.
    """

    layout: MirrorLayout
    exposure_us: float
    roi: Roi
    binning: int
    outputs: np.ndarray
    anchor_dn: np.ndarray
    scale: np.ndarray
    levels_dn: tuple[float, float]
    grain: tuple[int, int]
    date: str
    bits: int

    def _shown(self) -> dict[str, object]:
        return {
            "date": self.date,
            "inputs": self.layout.n_inputs,
            "outputs": len(self.outputs),
            "exposure": f"{self.exposure_us:.4g} us",
            "roi": self.roi,
            "binning": self.binning,
            "grain": self.grain,
            "levels": f"{self.levels_dn[0]:.1f} to {self.levels_dn[1]:.1f} DN",
        }

    def decode(self, signed: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return readings of ternary vectors.

        Args:
            signed: `signed_sum` of their frames, divided by the present light over the setup's.
            x: the vectors, shape (vectors, n).

        Returns:
            Projection units, float64, shape (vectors, n_outputs).
        """
        centre = (2 / self.layout.mirrors_of_anchor) * self.anchor_dn
        return np.asarray(self.scale * (signed - x.sum(axis=1, dtype=np.float64)[:, None] * centre))

    def save(self, path: Path) -> None:
        """Write the setup as an npz file.

        Raises:
            OSError: the file cannot be written.
        """
        layout, buffer = self.layout, io.BytesIO()
        np.savez_compressed(
            buffer,
            version=_VERSION,
            owner=layout.owner,
            mirrors=[layout.macro_pixel, *layout.corner, *layout.shape, layout.n_inputs],
            camera=[*self.roi, self.binning, *self.grain],
            exposure_us=self.exposure_us,
            outputs=self.outputs,
            anchor_dn=self.anchor_dn,
            scale=self.scale,
            levels_dn=self.levels_dn,
            date=self.date,
            bits=self.bits,
        )
        write_file(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path, name: str) -> BenchSetup:
        """Read what `save` wrote.

        Args:
            path: the file.
            name: the device's name, for errors.

        Raises:
            ConfigError: the file cannot be read, or is no setup.
        """
        try:
            with np.load(io.BytesIO(read_bytes(path, at_most=_MOST_BYTES)), allow_pickle=False) as found:
                if int(found["version"]) != _VERSION:
                    raise ValueError(f"version {int(found['version'])}")
                mirrors, camera = (
                    [int(number) for number in found["mirrors"]],
                    [int(number) for number in found["camera"]],
                )
                return cls(
                    layout=MirrorLayout(
                        owner=found["owner"],
                        macro_pixel=mirrors[0],
                        corner=(mirrors[1], mirrors[2]),
                        shape=(mirrors[3], mirrors[4]),
                        n_inputs=mirrors[5],
                    ),
                    exposure_us=float(found["exposure_us"]),
                    roi=(camera[0], camera[1], camera[2], camera[3]),
                    binning=camera[4],
                    grain=(camera[5], camera[6]),
                    outputs=found["outputs"],
                    anchor_dn=found["anchor_dn"],
                    scale=found["scale"],
                    levels_dn=(float(found["levels_dn"][0]), float(found["levels_dn"][1])),
                    date=str(found["date"]),
                    bits=int(found["bits"]) if "bits" in found else 0,
                )
        except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
            told = " ".join(str(error).split())
            raise ConfigError(
                name, "bench.setup", f"{path} is no setup of this version ({told}); remove it to measure anew"
            ) from error


def signed_sum(frames: np.ndarray) -> np.ndarray:
    """Return I_p - I_(a-p) - I_n + I_(a-n) of each vector, DN, float64.

    Args:
        frames: four for each vector, as `MirrorLayout.ternary` orders them, shape (4 vectors, n_outputs).
    """
    turns = frames.reshape(-1, len(FRAME_SIGNS), frames.shape[-1])
    return np.einsum("f,vfj->vj", FRAME_SIGNS, turns)


def measure_setup(
    source: Sequencer, settings: BenchSettings, *, n_outputs: int, name: str, longest_us: float, sensor: Roi
) -> BenchSetup:
    """Find exposure, region and outputs of a bench, and the scale of its readings.

    Args:
        source: shows patterns and takes frames.
        settings: of the bench.
        n_outputs: outputs to find.
        name: the device's name, for errors.
        longest_us: longest exposure that the frame period allows, microseconds.
        sensor: the whole sensor.

    Raises:
        DeviceFault: no light, too much light, no speckle, or too few usable pixels; the message says which.
        DeviceError: an instrument failed.
    """
    search = partial(search_exposure, source, settings=settings, name=name, longest_us=longest_us)
    # 1. The largest region whose sides are multiples of the camera's step and of the binning.
    step = math.lcm(settings.region_step, settings.binning)
    if min(sensor[2:]) < step:
        raise ConfigError(
            name,
            "bench.region_step",
            f"and bench.binning ask for multiples of {step} pixels, and the sensor has {sensor[2]} x {sensor[3]}; "
            "lower them",
        )
    whole: Roi = (0, 0, sensor[2] // step * step, sensor[3] // step * step)
    # 2. The exposure, the place of the most light, in binned pixels, and the grains there.
    exposure_us, lit = search(whole, start_us=longest_us)
    row, column = np.unravel_index(int(np.argmax(lit)), lit.shape)
    centre = int(row), int(column)
    probe = _around(centre, (_PROBE, _PROBE), whole, settings)
    source.configure(exposure_us=exposure_us, roi=probe, binning=settings.binning)
    look = look_at_light(source)
    require_interference(look, name)
    source.expect(
        look.blank_dn, look.blank_dn + float(look.anchor_dn.mean())
    )  # also if frames are a little late
    twice = source.show(np.repeat(random_switches(source.layout), 2, axis=0))
    grain = grain_spacing(twice[0::2], twice[1::2], name=name)
    # 3. A square region of so many grains that enough of them are usable outputs.
    share = _USABLE
    while True:
        side = math.sqrt(n_outputs / share * grain[0] * grain[1])
        sides = math.ceil(side) + grain[0], math.ceil(side) + grain[1]
        roi = _around(centre, sides, whole, settings)
        exposure_us, _ = search(roi, start_us=exposure_us)
        setup, found = _choose_outputs(source, roi, settings, exposure_us, grain, n_outputs)
        if found >= n_outputs:
            break
        if roi == whole:
            raise DeviceFault(
                f"device {name!r}: {found} usable outputs of {n_outputs}: speckle is independent every {grain[0]} rows "
                f"and {grain[1]} columns, and the sensor has {whole[2]} x {whole[3]} pixels; open a smaller window, "
                "make grains smaller on the sensor, or light more of it"
            )
        share *= 0.7 * max(found / n_outputs, 0.3)
    # 4. The factor that brings the entries of the matrix to variance 1: from two readings of unit vectors.
    n = setup.layout.n_inputs
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(_SEED)).numpy()[:_UNIT_VECTORS]
    x = np.repeat(np.eye(n, dtype=np.int8)[chosen], 2, axis=0)
    readings = setup.decode(signed_sum(source.show(setup.layout.ternary(x), setup.outputs)), x)
    products = readings[0::2] * readings[1::2]
    power, error = float(products.mean()), float(products.std()) / products.size**0.5
    if not power > 5 * error:
        raise DeviceFault(
            f"device {name!r}: two readings of single inputs do not agree: the light of an input is below the noise; "
            "lengthen the exposure, brighten the laser, raise bench.macro_pixel or open fewer inputs"
        )
    return replace(setup, scale=setup.scale * power**-0.5)


def search_exposure(
    source: Sequencer, roi: Roi, *, settings: BenchSettings, name: str, longest_us: float, start_us: float
) -> tuple[float, np.ndarray]:
    """Find the exposure at which the anchor's brighter half has the mean ``range_share`` of the converter's range.

    Args:
        source: shows anchor and blank.
        roi: region of the camera.
        settings: of the bench; a given ``exposure_us`` is taken as it is.
        name: the device's name, for errors.
        longest_us: longest exposure, microseconds.
        start_us: where to begin.

    Returns:
        The exposure, microseconds, and the mean light of the anchor around each pixel, DN; the camera is left at that
        exposure and region.

    Raises:
        DeviceFault: the mirrors change nothing that the camera sees, there is too much light, or numbers end below
            the camera's bits.
    """
    wanted_us = start_us if settings.exposure_us is None else settings.exposure_us
    top = source.top_dn
    for _ in range(_SEARCH_STEPS):
        exposure_us = source.configure(exposure_us=wanted_us, roi=roi, binning=settings.binning)
        anchors, blanks = _anchor_and_blank(source, _SEARCH_FRAMES)
        light = anchors.mean(axis=0) - blanks.mean(axis=0)
        black, full = float(np.median(blanks)), float(np.mean(anchors >= top))
        lit = uniform_filter(light, max(3, min(light.shape) // 2), mode="constant")
        bright = light[lit >= 0.5 * max(float(lit.max()), 0.0)]
        level, wanted = float(bright.mean()) if bright.size else 0.0, settings.range_share * (top - black)
        too_full = full > 2 * math.exp(-1 / settings.range_share) + 0.02
        unswitched = (
            "" if black > _FULL * top else light_is_unswitched(float(light.mean()), float(blanks.mean()), top)
        )
        if settings.exposure_us is not None or (unswitched and not too_full):
            break
        ratio = 0.25 if too_full else wanted / max(level, 1e-9)
        if 1 / _NEAR <= ratio <= _NEAR:
            break
        wanted_us = min(max(exposure_us * ratio, settings.shortest_exposure_us), longest_us)
        if abs(wanted_us / exposure_us - 1) < 0.01:
            break
    told = f"device {name!r}: at an exposure of {exposure_us:g} us"
    is_given = settings.exposure_us is not None
    noise = float(np.std(blanks[0].astype(np.float64) - blanks[1])) / light.size**0.5
    if float(light.mean()) < -max(_LEAST_DN, 10 * noise):
        raise DeviceFault(
            f"{told} the blank frame is brighter than the anchor: 1 must send a mirror's light to the medium; invert "
            "the bits in Patterns.load"
        )
    if unswitched:
        raise DeviceFault(f"{told} {unswitched}")
    if black > 0.5 * top:
        raise DeviceFault(
            f"{told} the blank frame shows {black:.0f} of {top} DN: light reaches the camera that no mirror switches; "
            "cover the bench, or lower the camera's black level"
        )
    if level < _LEAST_DN:
        raise DeviceFault(
            f"{told} anchor and blank frames differ by {level:.2g} of {top} DN: no light of the mirrors reaches the "
            "camera; check laser, shutter and alignment, and lengthen "
            f"{'bench.exposure_us' if is_given else 'frames.frame_period_us'} if the exposure is short"
        )
    if level > 2 * wanted:
        raise DeviceFault(
            f"{told} the anchor shows {level:.0f} of {top} DN, and {wanted:.0f} are wanted (bench.range_share): "
            f"saturation; dim the laser, or lower bench.{'' if is_given else 'shortest_'}exposure_us"
        )
    require_bits(source, name)
    return exposure_us, lit


def grain_spacing(first: np.ndarray, second: np.ndarray, *, name: str) -> tuple[int, int]:
    """Return the rows and columns at which speckle intensities are independent.

    Found in the two-dimensional correlation of what changes from pattern to pattern, |mu(d)|^2 with mu the fields'
    correlation at the distance d. Frames are divided by their means, to take out how many mirrors are on; two exposures
    of each pattern are correlated with each other, to take out noise.

    Args:
        first: frames of some patterns, shape (patterns, rows, columns), DN.
        second: other frames of the same patterns.
        name: the device's name, for errors.

    Returns:
        The least distance along rows, and along columns, at which the correlation is at most 0.05.

    Raises:
        DeviceFault: nothing changes from pattern to pattern, or grains are too large.
    """
    rows, columns = first.shape[1:]
    changes = []
    for frames in (first.astype(np.float64), second.astype(np.float64)):
        even = frames / np.maximum(frames.mean(axis=(1, 2), keepdims=True), 1e-9)
        changes.append(even - even.mean(axis=0))
    shape = (2 * rows, 2 * columns)
    one, other = (np.fft.rfft2(change, shape) for change in changes)
    summed = np.fft.irfft2(np.sum(one * other.conj(), axis=0), shape)
    overlap = np.fft.irfft2(np.abs(np.fft.rfft2(np.ones((rows, columns)), shape)) ** 2, shape)
    largest = (max(2, rows // 4), max(2, columns // 4))
    part = summed[: largest[0], : largest[1]] / overlap[: largest[0], : largest[1]]
    own = float(
        np.sum(changes[0] * changes[1]) / max(np.linalg.norm(changes[0]) * np.linalg.norm(changes[1]), 1e-30)
    )
    if not own > _LEAST_CORRELATION:
        raise DeviceFault(
            f"device {name!r}: frames do not depend on the patterns: frames of one pattern correlate by {own:.2f}; "
            "check that the mirrors switch, and that the camera waits for their pulses"
        )
    correlation = part / part[0, 0]
    found = []
    for along, what in ((correlation[:, 0], "rows"), (correlation[0], "columns")):
        below = np.flatnonzero(along <= _LEAST_CORRELATION)
        if not len(below):
            raise DeviceFault(
                f"device {name!r}: speckle still correlates by {min(along[-1], 1.0):.2f} over {len(along)} {what}: "
                "grains are too large, or the light does not pass a scattering medium; bring the camera nearer, or set "
                "bench.binning"
            )
        found.append(int(below[0]))
    return found[0], found[1]


def random_switches(layout: MirrorLayout) -> np.ndarray:
    """Return switches of random patterns with half of all groups on, the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, 2, (_SPECKLES, layout.groups), generator=generator).numpy().astype(bool)


def _anchor_and_blank(source: Sequencer, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frames of the anchor and of the blank pattern."""
    anchor = source.layout.anchor()
    frames = source.show(np.concatenate([anchor, ~anchor]).repeat(count, axis=0))
    return frames[:count], frames[count:]


def _choose_outputs(
    source: Sequencer,
    roi: Roi,
    settings: BenchSettings,
    exposure_us: float,
    grain: tuple[int, int],
    n_outputs: int,
) -> tuple[BenchSetup, int]:
    """Return the setup of a region, in units that are not scaled yet, and how many usable outputs the region has.

    One pixel of each cell of the size of a grain is an output, unless it is dark, too bright, full in a frame, bright
    without light, or does not change with the patterns.
    """
    switches = random_switches(source.layout)
    speckles = source.show(switches).astype(np.float64)
    anchors, blanks = _anchor_and_blank(source, _ANCHOR_FRAMES)
    top = source.top_dn
    blank = blanks.mean(axis=0)
    anchor = anchors.mean(axis=0) - blank
    size = [max(3, _GRAINS_AROUND * length) for length in grain]
    light = (speckles.mean(axis=0) - blank) / source.layout.share_on(
        switches
    )  # of an anchor, mean over patterns
    around = uniform_filter(light, size, mode="nearest")
    around = np.maximum(around, 1e-3)
    black, spread = np.median(blank), 1.4826 * np.median(np.abs(blank - np.median(blank)))
    changes = speckles.std(axis=0, ddof=1)
    usable = (anchor >= settings.lowest * around) & (anchor <= settings.highest * around)
    usable &= np.abs(blank - black) <= max(10 * spread, 0.05 * top)
    usable &= (speckles < top).all(axis=0) & (np.mean(anchors >= top, axis=0) < settings.most_saturated)
    usable &= changes > 0.1 * around
    usable &= around > 0.2 * around.max()
    cells = usable[grain[0] // 2 :: grain[0], grain[1] // 2 :: grain[1]]
    rows, columns = np.nonzero(cells)
    flat = (rows * grain[0] + grain[0] // 2) * usable.shape[1] + columns * grain[1] + grain[1] // 2
    outputs = flat[:n_outputs]
    own, mean = anchor.ravel()[outputs], around.ravel()[outputs]
    levels = float(blanks.mean()), float(anchors.mean())
    source.expect(*levels)
    setup = BenchSetup(
        layout=source.layout,
        exposure_us=exposure_us,
        roi=roi,
        binning=settings.binning,
        outputs=outputs,
        anchor_dn=own,
        scale=1 / (2 * np.sqrt(own * mean)),
        levels_dn=levels,
        grain=grain,
        date=time.strftime("%Y-%m-%d"),
        bits=source.bits,
    )
    return setup, len(flat)


def _around(centre: tuple[int, int], sides: tuple[int, int], whole: Roi, settings: BenchSettings) -> Roi:
    """Return a region around a place, within the sensor; a side that does not fit makes the other one longer."""
    step, binning = math.lcm(settings.region_step, settings.binning), settings.binning
    lengths = [min(-(-side * binning // step) * step, whole[2 + axis]) for axis, side in enumerate(sides)]
    for axis in (0, 1):
        missing = sides[0] * sides[1] * binning**2 / lengths[1 - axis]
        lengths[axis] = min(max(lengths[axis], -(-math.ceil(missing) // step) * step), whole[2 + axis])
    starts = [
        min(max(centre[axis] * binning - lengths[axis] // 2, 0), whole[2 + axis] - lengths[axis])
        // step
        * step
        for axis in (0, 1)
    ]
    return starts[0], starts[1], lengths[0], lengths[1]
