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

**Tests of a bench at its opening** name what is wrong.

| test | refuses |
| --- | --- |
| outputs that are full in frames of the anchor | saturation |
| the anchor's frame now and at the setup, and before and after the other tests | another medium, one that moves, |
| | light that changed |
| data and reference mirrors interfere: I(a) - I(data) - I(reference) + I(0) | light that is not coherent, a reference |
| | that no light reaches: not an anchor |
| B (v + w) = B v + B w for vectors that share no entry | anything else that makes readings nonlinear |
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from scipy.ndimage import uniform_filter

from opusim.camera.exposure import FRAME_SIGNS
from opusim.description.camera import BenchSettings
from opusim.devices.bench.instruments import MOST_FLICKER, STABILISE, MirrorLayout, Roi, Sequencer
from opusim.errors import ConfigError, DeviceFault
from opusim.files import read_bytes, write_file
from opusim.processes import pause
from opusim.tables import Shown

_FRAMES = 8
"""Frames of each pattern in a look at the light."""
_MOST_LIGHT = 1.5
"""Factor by which the light may have changed since the setup."""
_NEAR_POWER = 0.05
"""Relative distance from a power of two within which a change of the light looks like a change of bits."""
_MOST_LIGHT_NOW = 1.1
"""Factor by which it may change during the tests."""
_LEAST_LIGHT = 0.2
"""Share of the light below which frames of the anchor tell nothing of the medium."""
LEAST_KNOWN = 0.05
"""Share of the light below which it counts as gone."""
_BRIGHT = 0.06
"""Share of the camera's range above which a blank frame is bright; light that is below this share of it is no light."""
_LEAST_INTERFERENCE = 0.03
"""Least mean square of the interference of data and reference, as for fringes of 25 %; coherent light has 1/2."""
_PAIRS = 16
"""Pairs of vectors that the linearity test adds up."""
_PAIRS_SEED = 20261130
_SURE = 5.0  # standard errors


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LightLook(Shown):
    """Frames of the anchor, of its parts and of the blank pattern, at the outputs.

    Attributes:
        anchor_dn: anchor less blank at each output, DN.
        full: share of the outputs that are full in a frame of the anchor, mean over frames.
        interference: mean square of cos(phase) between the fields of data and reference.
        bits: of the camera's numbers.
        blank_dn: mean of the blank frames, DN.
        flicker: standard deviation of the anchor's light from frame to frame, over its mean.
    """

    anchor_dn: np.ndarray
    full: float
    interference: float
    bits: int
    blank_dn: float
    flicker: float

    def _shown(self) -> dict[str, object]:
        return {
            "outputs": self.anchor_dn.size,
            "anchor": f"{self.anchor_dn.mean():.1f} DN",
            "full": f"{self.full:.2%}",
            "interference": f"{self.interference:.2f}",
        }

    def correlation(self, anchor_dn: np.ndarray) -> float:
        """Return the correlation over outputs with another frame of the anchor."""
        one, other = (values - values.mean() for values in (self.anchor_dn, anchor_dn))
        return float(np.sum(one * other) / max(np.sqrt(np.sum(one**2) * np.sum(other**2)), 1e-30))

    def light(self, anchor_dn: np.ndarray) -> float:
        """Return the light over that of another frame of the anchor."""
        return float(self.anchor_dn.sum() / anchor_dn.sum())


def look_at_light(source: Sequencer, outputs: np.ndarray | None = None) -> LightLook:
    """Show anchor, data mirrors, reference mirrors and nothing, and look at the outputs.

    Args:
        source: shows patterns and takes frames.
        outputs: flat numbers of the outputs' pixels, or None for all pixels of the region.
    """
    anchor, reference = source.layout.anchor(), source.layout.reference()
    shown = np.concatenate([anchor, ~reference, reference, ~anchor])
    frames = source.show(shown.repeat(_FRAMES, axis=0), outputs)
    means = frames.reshape(len(shown), _FRAMES, -1).mean(axis=1)
    whole, data, other = means[:3] - means[3]
    anchors = frames[:_FRAMES].reshape(_FRAMES, -1).mean(axis=1) - means[3].mean()
    mixed = np.sum(np.square(whole - data - other))
    return LightLook(
        anchor_dn=whole,
        full=float(np.mean(frames[:_FRAMES] >= source.top_dn)),
        interference=float(mixed / max(np.sum(4 * data.clip(0) * other.clip(0)), 1e-30)),
        bits=source.bits,
        blank_dn=float(means[3].mean()),
        flicker=float(anchors.std(ddof=1) / max(anchors.mean(), 1e-9)),
    )


def nonlinearity(read: Callable[[torch.Tensor], torch.Tensor], n_inputs: int) -> tuple[float, float]:
    """Return how far readings are from adding up, relative to them, and five standard errors of that.

    With v and w of disjoint entries, r = y(v + w) - y(v) - y(w) is noise on a linear device. Each vector is read twice,
    and r r' of the two readings over y(v + w) y'(v + w) has no part in noise.

    Args:
        read: returns readings of ternary vectors, a row each.
        n_inputs: width of a vector, at least 2.

    Returns:
        The root mean square of r over that of y, without noise, and the value that noise alone exceeds once in 10^6.
    """
    generator = torch.Generator().manual_seed(_PAIRS_SEED)
    signs = torch.randint(0, 2, (_PAIRS, n_inputs), generator=generator).mul_(2).sub_(1).float()
    first = torch.rand((_PAIRS, n_inputs), generator=generator).argsort(dim=1) < n_inputs // 2
    vectors = torch.stack([signs, signs * first, signs * ~first])
    taken = read(vectors.repeat(2, 1, 1).flatten(0, 1)).cpu().double().numpy().reshape(2, 3, _PAIRS, -1)
    left = taken[:, 0] - taken[:, 1] - taken[:, 2]
    power = max(float(np.mean(taken[0, 0] * taken[1, 0])), 1e-30)
    products = left[0] * left[1]
    error = float(products.std()) / products.size**0.5
    found = max(float(products.mean()), 0.0) / power
    return found**0.5, (_SURE * error / power) ** 0.5


def require_light(
    look: LightLook, before_dn: np.ndarray, settings: BenchSettings, name: str, *, setup_of: str | None
) -> None:
    """Refuse a bench whose light is not that of its setup, or changed since an earlier look of this opening.

    `before_dn` is the anchor's frame before, of the setup of a date, or of this opening if `setup_of` is None.
    """
    told = f"device {name!r}:"
    again = ", or measure the setup anew (remove its file)" if settings.setup is not None else ""
    if look.full > settings.most_saturated:
        raise DeviceFault(
            f"{told} saturation: {look.full:.1%} of the outputs are full in frames of the anchor, and "
            f"bench.most_saturated is {settings.most_saturated:.1%}; shorten the exposure or dim the laser{again}"
        )
    correlation, light = look.correlation(before_dn), look.light(before_dn)
    when = "during the opening" if setup_of is None else f"since the setup of {setup_of}"
    if correlation < settings.least_correlation and light > _LEAST_LIGHT:
        what = "drift: the medium moves" if setup_of is None else "the medium is another"
        settle = "let it settle, and keep air and vibration away"
        remedy = settle if setup_of is None else f"put plate, camera and mirrors back{again}"
        raise DeviceFault(
            f"{told} {what}: frames of the anchor correlate by {correlation:.2f} {when}, and bench.least_correlation "
            f"is {settings.least_correlation:g}; {remedy}"
        )
    most = _MOST_LIGHT_NOW if setup_of is None else _MOST_LIGHT
    if not 1 / most <= light <= most:
        raise DeviceFault(f"{told} {_other_light(look, light, when, again, within=setup_of is None)}")
    require_interference(look, name)


def light_is_unswitched(light: float, blank: float, top: int) -> str:
    """Return cause and remedy if the blank frame is bright and the anchor adds little light; empty otherwise."""
    if blank < _BRIGHT * top or light > _BRIGHT * blank:
        return ""
    return (
        f"the blank frame shows {blank:.0f} of {top} DN, and the anchor as much: light arrives, but does not follow "
        "the patterns; switch the camera's automatic gain and exposure off, keep ambient light away, and check "
        "that the mirrors switch and that the laser lights them"
    )


def _other_light(look: LightLook, light: float, when: str, again: str, *, within: bool) -> str:
    """Return the likeliest cause of a change of the light, by the factor `light`, `when` it was, and the remedy."""
    changed = f"the light changed to {max(light, 0.0):.2g} times {when}"
    if light < LEAST_KNOWN:
        unswitched = light_is_unswitched(float(look.anchor_dn.mean()), look.blank_dn, 2**look.bits - 1)
        return unswitched or (
            f"{changed}, it is gone: check laser and shutter, that the mirrors switch, and that the camera "
            "waits for their pulses"
        )
    if abs(np.log(light)) < _SURE * look.flicker * (2 / _FRAMES) ** 0.5:
        return f"the light fluctuates by {look.flicker:.0%} from frame to frame ({changed}); {STABILISE}"
    if within:
        return f"{changed}: bring the laser to its power and let it warm up"
    shift = round(np.log2(light))
    if 2 <= abs(shift) < look.bits and abs(light / 2.0**shift - 1) < _NEAR_POWER:
        was, now = look.bits - max(shift, 0), look.bits + min(shift, 0)
        return (
            f"{changed}, about 2^{shift}, as if the camera's numbers had {now} bits instead of {was}: set its bit "
            f"depth and bit shift as they were, or the laser's power{again}"
        )
    return (
        f"{changed}: bring the laser to its power and let it warm up, set the camera's gain and bit depth as they "
        f"were{again}"
    )


def require_interference(look: LightLook, name: str) -> None:
    """Refuse a bench on which data and reference do not interfere: mean cos^2(phase) is far below 1/2."""
    if look.interference < _LEAST_INTERFERENCE:
        raise DeviceFault(
            f"device {name!r}: not an anchor: light of data and reference mirrors does not interfere (mean square of "
            f"the interference {look.interference:.2f}, coherent light has 0.5); use a laser whose coherence length "
            "exceeds the medium's spread of paths, and light all mirrors of the window"
        )


def require_bits(source: Sequencer, name: str) -> None:
    """Refuse a camera whose numbers end at 2^k - 1 with k below its bits."""
    largest, bits = source.largest_dn, source.largest_dn.bit_length()
    if source.is_cut and largest < source.top_dn and largest == 2**bits - 1:
        raise DeviceFault(
            f"device {name!r}: the camera's numbers end at {largest} = 2^{bits} - 1, and bits = {source.bits}; set "
            f"bits = {bits}, or let the camera deliver {source.bits} bits"
        )


def require_linear(
    found: tuple[float, float], look: LightLook, source: Sequencer, settings: BenchSettings, name: str
) -> None:
    """Refuse a bench whose readings, by `nonlinearity`, do not add up, after `require_light` excluded other causes."""
    require_bits(source, name)
    nonlinear, noise = found
    if nonlinear > (settings.most_nonlinear**2 + noise**2) ** 0.5:
        cause = (
            "numbers are not proportional to light: switch gamma, automatic exposure, automatic gain and defect "
            "correction of the camera off, and lower bench.range_share if its pixels are full below its largest number"
        )
        if look.flicker > max(MOST_FLICKER, nonlinear / _SURE):
            cause = f"the light fluctuates by {look.flicker:.0%} from frame to frame: {STABILISE}"
        raise DeviceFault(
            f"device {name!r}: readings do not add up: B (v + w) differs from B v + B w by {nonlinear:.1%} rms, and "
            f"bench.most_nonlinear is {settings.most_nonlinear:.1%}; {cause}"
        )


_ROUNDS, _STARTS = 300, 8
"""Rounds of alternating projections, and most random starts of an output that does not come near its light."""
_EXPLAINED = 3.0
"""An output's start is kept if its unexplained light is at most this multiple of the median."""


def retrieved(
    shown: np.ndarray, light: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Find T with abs(T x)^2 nearest to the light of patterns x, up to a phase and a conjugation at each output.

    Alternating projections (Gerchberg and Saxton, Optik 35, 237, 1972): fields take the measured amplitudes, then the T
    of least squares. Each output starts at random; one whose unexplained light shows a local minimum starts again.
    Patterns (frames, inputs) have the rank inputs, light is that above a blank frame's. The second value is
    sum (abs(T x) - a)^2 / sum a^2 of each output, with the measured amplitudes a.
    """
    rows, amplitudes = shown.astype(np.float64), np.sqrt(np.maximum(light, 0.0))
    solve, power = np.linalg.pinv(rows), np.maximum(np.square(amplitudes).sum(axis=0), 1e-300)
    found = np.zeros((rows.shape[1], light.shape[1]), dtype=np.complex128)
    left = np.full(light.shape[1], np.inf)
    again = np.arange(light.shape[1])
    for _ in range(_STARTS):
        wanted, shape = amplitudes[:, again], (rows.shape[1], len(again))
        columns = rng.normal(size=shape) + 1j * rng.normal(size=shape)
        for _ in range(_ROUNDS):
            pause()
            columns = solve @ (wanted * np.exp(1j * np.angle(rows @ columns)))
        error = np.square(np.abs(rows @ columns) - wanted).sum(axis=0) / power[again]
        better = error < left[again]
        found[:, again[better]], left[again[better]] = columns[:, better], error[better]
        again = np.flatnonzero(left > _EXPLAINED * np.median(left))
        if not len(again):
            break
    return found.T, left


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
        """Write the setup as an npz file."""
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
    """Return I_p - I_(a-p) - I_n + I_(a-n) of each vector, DN, float64, from frames of `MirrorLayout.ternary`."""
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
