"""The complex field behind the medium: which pixels serve as outputs, and the field of a frame at them.

**Drift.** The medium at any time is a stationary Ornstein-Uhlenbeck process of every entry, computed without its past.
Time t is taken in units of tau and rounded to the grid t_m = m / 4096. On the grid every entry is a Gaussian process
with mean 0, variance 1 and correlation exp(-|t - s|) between any two times: a sum of independent media Z_k, one for
each grid point k (its epoch), whose weights are fixed numbers. Every eighth tau is a node of a chain,
    X_0 = Z_0,   X_n = sqrt(1 - r^2) Z_n + r Z_(n-1),   r = exp(-8),
and between two nodes the midpoint m of an interval (a, b) of length 2 d is drawn from its law given the ends,
    X_m = (X_a + X_b) / (2 cosh d) + sqrt(tanh d) Z_m,
down to the point sought: at most 18 media at any time. Deviations from exp(-|t - s| / tau): at most 2.5e-4 by
the grid, which moves each of the two times by at most tau / 8192, and 1.2e-7 by the chain, which forgets after two
nodes. A medium that moves within a call has a finer grid, of 1/4096 of these steps: the
halving continues, with 12 more media, and media of points between grid points have planes of their own. Entries keep
the tail cut and the rounding to 2^-12 of `opusim.medium`. Source for the midpoint: the Gaussian law of an
Ornstein-Uhlenbeck bridge, Gillespie, Phys. Rev. E 54, 2084 (1996), exact for any step.

**Modes.** A pixel that sees M speckles which do not interfere (two polarisations, modes of the light, speckles that
change within an exposure) averages their intensities, I = (1/M) sum_m |R_m x|^2, and the contrast of its speckle is
1 / sqrt(M) (Goodman, Speckle Phenomena in Optics, 2007: sums of speckle patterns on an intensity basis). Each mode has
real media of its own. Fields have 2 M components, real and imaginary parts divided by sqrt(M), whose squares add up to
I. Readings stay linear: B_ji = sum_m Re(conj(u_a,m) R_m,ji) / sqrt(sum_m |u_a,m|^2), less its mean, is N(0, 1).

**Grains.** A grain of g pixels averages g independent fields of a row of pixels. With `row_pixels` pixel j stands in
row j // row_pixels and column j % row_pixels, and a grain averages g rows as well: fields that lie r rows and c columns
apart correlate by (1 - |r| / g)(1 - |c| / g).

**Faulty mirrors.** A mirror that is off leaks the amplitude e = 1 / sqrt(contrast) of one that is on; a stuck one keeps
its state in every frame. The field of a frame x is then affine in x,
    u_x = v + (1 - e) sum over free mirrors of R_i x_i,      v = u_0, the field of the blank frame,
and a frame and its complement add up to the same field t = u_a + v for every x. So the recovery stays linear:
    |u_x|^2 - |u_(a-x)|^2 = |v|^2 - |u_a|^2 + 2 (1 - e) sum_i Re(conj(t) R_i) x_i.
Which mirrors are stuck is computed from the medium's seed and the mirror's number. With `leak_speckle` the light that a
mirror leaks while it is off takes another way than the light that it reflects, through a medium L of its own: e L_i
stands for e R_i, R_i - e L_i for (1 - e) R_i, and the recovery is as linear as before.

**Motion within a call** (`Motion`). Frame k of a call is exposed k frame periods T after the call began, and sees the
medium of that time; the medium rests during an exposure. No matrix is formed for a frame, only one for the end of each
block of 128 to 1,024 frames, whose beginning is the end of the block before.
Between the times 0 and D of a block's ends, in units of tau, a process x given its ends is Gaussian
(Ornstein-Uhlenbeck bridge),
    E x(t) = x(0) sinh(D - t) / sinh(D) + x(D) sinh(t) / sinh(D),
    Cov[x(s), x(t)] = 2 sinh(s) sinh(D - t) / sinh(D),   s <= t,
and entries are independent, so that the fields u_k = sum_i R_i(t_k) a_ki of frames with mirror amplitudes a_k, given
the fields at both ends, are Gaussian with the mean above and the covariances
    <a_k, a_l> Cov[x(t_k), x(t_l)]
of their real parts and of their imaginary parts, at every output (over M for a field of M modes). They are drawn by a
Cholesky factor of this matrix.
Different blocks are independent given the ends (Markov property). So all frames of a call, of successive calls and of
training steps follow one Ornstein-Uhlenbeck process, up to the rounding of the ends' times to 2^-24 tau.

The motion adds noise to readings, which depends on what is shown and on tau. No law of a device credits it.

**Mode hops** (`Hops`). At the times of a Poisson process the laser hops to another of its modes, and the medium of the
new wavelength correlates with that of the old one by
    rho = (1 + (hop / width)^2)^(-1/2),
so that intensities correlate by rho^2: a Lorentzian, whose half width is `spectral_width_pm`, as a medium has whose
light takes paths of exponentially distributed lengths. Successive hops are taken to decorrelate independently, rho^n
after n of them; to first order in (hop / width)^2 that is the mean over hops up and down. An Ornstein-Uhlenbeck process
loses the factor rho within the time log(1 / rho), so a hop is a jump of the medium's own time,
    time of the medium = t / tau + log(1 / rho) (hops until t),
and two media correlate by rho^n exp(-|t - s| / tau), with n hops between t and s. The phase that a hop gives to all
fields alike is left out; intensities do not tell it.

Sources: for the bridge Gillespie, Phys. Rev. E 54, 2084 (1996), conditioned on both ends; for hops Heumier and
Carlsten, Mode Hopping in Semiconductor Lasers, ILX Lightwave application note 8 (jumps of 0.3 nm at erratic times); for
the correlation Goodman, Speckle Phenomena in Optics (2007): the Fourier transform of the path lengths' distribution.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import product
from typing import ClassVar, Self

import numpy as np
import torch
from scipy.special import ndtr
from typing_extensions import override

from opusim.camera.stages import pixel_normals
from opusim.description.camera import DriftSettings, MirrorSettings
from opusim.errors import ConfigError
from opusim.medium.transmission import (
    IMAGINARY_PLANE,
    INPUTS_PER_EXACT_SUM,
    REAL_PLANE,
    TABLE_STEP,
    Medium,
    blocked_product,
    blocks,
    exact_product,
)
from opusim.processes import pause
from opusim.randomness.streams import NoiseStream, SeededStream, derive_seed

_STUCK_PLANE = 20  # a counter word that no medium uses
_MODE_PLANES = 24  # counter words of the second mode and of those after it
_MIRRORS_AT_ONCE = 2048
STEPS_PER_TAU = 4096
PARTS_OF_A_STEP = 4096
"""Points of the finer grid in a step of the grid."""
_PLANES_PER_PART = 64  # counter words of a point between grid points
_NODE = 8 * STEPS_PER_TAU
MOST_TAU = (2**32 - 2 * _NODE) // STEPS_PER_TAU
"""Latest time, in units of tau: grid points are 32-bit epochs of the medium."""


def grid_point(time: float, parts: int = 1) -> float:
    """Return the grid point nearest a time in units of tau, in steps; with `PARTS_OF_A_STEP` that of the finer grid."""
    if not 0 <= time <= MOST_TAU:
        raise ValueError(
            f"time = {time:g} decorrelation times: must lie in [0, {MOST_TAU}]; begin a new medium"
        )
    return round(time * STEPS_PER_TAU * parts) / parts


@lru_cache(maxsize=64)
def medium_weights(point: float) -> tuple[tuple[float, float], ...]:
    """Return the epochs of the media that make up the medium at a grid point, and their weights: coarse ones first.

    An epoch is the grid point of its medium; points and epochs of the finer grid are no whole numbers. The squares of
    the weights sum to 1, up to 1e-10. At point 0 it is the medium of epoch 0 itself.
    """
    low = point - point % _NODE
    left = _node_weights(low)
    if low == point:
        return tuple(left.items())
    right, high = _node_weights(low + _NODE), low + _NODE
    while True:
        middle, half = (low + high) / 2, (high - low) / 2 / STEPS_PER_TAU
        share = 0.5 / math.cosh(half)
        mixed = {epoch: share * (left.get(epoch, 0.0) + right.get(epoch, 0.0)) for epoch in {**left, **right}}
        mixed[middle] = math.sqrt(math.tanh(half))
        if middle == point:
            return tuple(mixed.items())
        if point < middle:
            high, right = middle, mixed
        else:
            low, left = middle, mixed


def _node_weights(point: float) -> dict[float, float]:
    """Return the weights of the chain at a node."""
    if point == 0:
        return {0: 1.0}
    r = math.exp(-_NODE / STEPS_PER_TAU)
    return {point - _NODE: r, point: math.sqrt(1 - r * r)}


_PIXELS_PER_BLOCK = 2048
_INPUTS_PER_TILE = 2048
_MOST_PIXELS_PER_OUTPUT = 64
_SUM_SLACK = 1e-5  # above the rounding of a float32 sum


@dataclass(frozen=True, kw_only=True)
class SpeckleLaw:
    """The constants that determine the field of a frame.

    The field of pixel j is u_j = sum_i R_ji x_i over the mirrors that are on, R = P + iQ, with entries of the two real
    media P and Q that are N(0, 1): |u|^2 of one mirror has mean 2. Drift and grain mix entries and round them to
    multiples of 2^-12, so that sums over mirrors stay exact in float32, in any order.

    Attributes:
        n_inputs: mirrors that carry data.
        reference: mirrors that are on in the anchor and its complements only; their entries follow the data's.
        seed: of the medium.
        lowest: least anchor intensity of a pixel that is used, as a multiple of the mean.
        highest: largest one; infinite is off.
        grain_correlation: correlation of neighbouring pixels' fields, in [0, 0.5], if a grain spans one pixel.
        grain_pixels: pixels that a grain spans.
        row_pixels: pixels of a row of the sensor, whose grains then span several rows; None: a grain lies in one row.
        modes: M, independent speckles whose intensities are averaged, 1 to 16.
        dense_limit_mib: largest matrix (of P and Q together) kept in memory.
    """

    n_inputs: int
    reference: int
    seed: int
    lowest: float
    highest: float
    grain_correlation: float
    grain_pixels: int
    dense_limit_mib: float
    row_pixels: int | None = None
    modes: int = 1

    @cached_property
    def planes(self) -> tuple[int, ...]:
        """Counter words of the real media: real and imaginary part of each mode, shape (2 modes,)."""
        return REAL_PLANE, IMAGINARY_PLANE, *range(_MODE_PLANES, _MODE_PLANES + 2 * self.modes - 2)

    @cached_property
    def mirrors(self) -> int:
        """Mirrors of the anchor."""
        return self.n_inputs + self.reference

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Return a_0, a_1, ..., with squares that sum to 1: the field of pixel j is sum_k a_k u_(j+k)."""
        if self.grain_pixels > 1:
            return (self.grain_pixels**-0.5,) * self.grain_pixels
        if self.grain_correlation == 0:
            return (1.0,)
        angle = 0.5 * math.asin(2.0 * self.grain_correlation)
        return math.cos(angle), math.sin(angle)

    def grained(self, pixels: range, raw: Callable[[range], torch.Tensor]) -> torch.Tensor:
        """Return numbers of contiguous pixels that correlate as grains do, from independent `raw` ones of places."""
        shares = self.weights
        if self.row_pixels is None:
            wide = raw(range(pixels.start, pixels.stop + len(shares) - 1))
            return reduce(torch.add, (wide[..., k : k + len(pixels)] * a for k, a in enumerate(shares)))
        # rows of raw numbers, longer than those of pixels; first along them, then across
        width, beyond = self.row_pixels, len(shares) - 1
        first, last = pixels.start // width, (pixels.stop - 1) // width
        begin, end = pixels.start - first * width, pixels.stop - last * width
        left, right = (begin, end) if first == last else (0, width)
        along = []
        for row in range(first, last + 1 + beyond):
            place = row * (width + beyond)
            wide = raw(range(place + left, place + right + beyond))
            parts = (wide[..., k : k + right - left] * share for k, share in enumerate(shares))
            along.append(reduce(torch.add, parts))
        rows = [
            reduce(torch.add, (along[row + k] * share for k, share in enumerate(shares)))
            for row in range(last + 1 - first)
        ]
        found = torch.cat(rows, dim=-1)
        return found[..., begin - left :][..., : len(pixels)]


class Speckle:
    """The medium as the camera sees it: pixels with a usable anchor, and fields of frames there.

    Pixels are taken in order of their number, those whose anchor intensity at time 0 lies within the law's limits; so
    a smaller window of outputs has the first outputs of a larger one. The choice is part of the device, like a
    factory's map of pixels: it does not depend on noise. `point` is the grid point of the present time.
    """

    _OF_A_TIME: ClassVar = ("anchor",)
    """Attributes that are computed once for a time."""

    def __init__(self, law: SpeckleLaw, n_outputs: int, file: str, pixels: np.ndarray | None = None) -> None:
        self.law = law
        self.n_outputs = n_outputs
        if pixels is not None:
            self.__dict__["pixels"] = pixels
        self._file = file
        self.point: float = 0
        self._dense: dict[tuple[int, torch.device], torch.Tensor] = {}

    def drift_to(self, time: float) -> None:
        """Move the medium to a time in units of its decorrelation time; see `opusim.camera.speckle`."""
        self.move_to(grid_point(time))

    def move_to(self, point: float) -> None:
        """Move the medium to a grid point."""
        if point != self.point:
            self.become(self.at(point))

    def at(self, point: float) -> Self:
        """Return the same pixels at another grid point; at the present one, the medium itself."""
        if point == self.point:
            return self
        other = copy.copy(self)
        other.point, other._dense = point, {}
        for name in self._OF_A_TIME:
            other.__dict__.pop(name, None)
        return other

    def become(self, other: Self) -> None:
        """Move to the time of another speckle, and take over its computed matrix."""
        self.point, self._dense = other.point, other._dense
        for name in self._OF_A_TIME:
            self.__dict__.pop(name, None)
            if name in other.__dict__:
                self.__dict__[name] = other.__dict__[name]

    @property
    def ends(self) -> np.ndarray:
        """Amplitudes in the blank frame and in the anchor, the data mirrors' first: float64, shape (2, amplitudes).

        Each belongs to an independent entry of the medium.
        """
        return np.stack([np.zeros(self.law.mirrors), np.ones(self.law.mirrors)])

    def swings(self, frames: torch.Tensor) -> torch.Tensor:
        """Return by how much frames change the blank frame's first amplitudes, float64, shape (frames, changed)."""
        return frames.double()

    def normals(self, rows: int, stream: NoiseStream) -> torch.Tensor:
        """Return normals (2 modes, rows, n_outputs) of variance 1 / modes that correlate over outputs as entries do.

        Takes one reading of the stream, or one for each row of pixels that grains meet.
        """
        components, pixels = len(self.law.planes), self.pixels
        if len(self.law.weights) == 1:
            found = stream.normal((components, rows, self.n_outputs))
        else:
            window = range(int(pixels[0]), int(pixels[-1]) + 1)
            wide = self.law.grained(window, lambda places: stream.normal((components, rows, len(places))))
            found = wide[..., torch.from_numpy(pixels - window.start)]
        return found if self.law.modes == 1 else found.mul_(self.law.modes**-0.5)

    @cached_property
    def pixels(self) -> np.ndarray:
        """Numbers of the pixels that are the outputs, int64, shape (n_outputs,), increasing."""
        chosen: list[np.ndarray] = []
        found = start = 0
        while found < self.n_outputs:
            if start >= _MOST_PIXELS_PER_OUTPUT * (self.n_outputs + _PIXELS_PER_BLOCK):
                raise ConfigError(
                    self._file,
                    "camera.anchor",
                    f"only {found} of {start} pixels fit; widen lowest and highest",
                )
            sums = self._sums(range(start, start + _PIXELS_PER_BLOCK), point=0)
            share = np.sum(np.square(sums[:, :2]), axis=(0, 1)) / (2.0 * self.law.mirrors * self.law.modes)
            good = start + np.flatnonzero((share >= self.law.lowest) & (share <= self.law.highest))
            chosen.append(good)
            found += good.size
            start += _PIXELS_PER_BLOCK
        return np.concatenate(chosen)[: self.n_outputs]

    @cached_property
    def anchor(self) -> np.ndarray:
        """The anchor's field at the outputs, now: float64, shape (2 modes, n_outputs), real and imaginary parts."""
        return self._at_outputs()[:, :2].reshape(-1, self.n_outputs) * self.law.modes**-0.5

    @property
    def blank(self) -> np.ndarray:
        """The field of the frame in which every mirror is off: 0, of the anchor's shape."""
        return np.zeros_like(self.anchor)

    @property
    def total(self) -> np.ndarray:
        """Fields of a frame and of its complement add up to this: float64, shape (2 modes, n_outputs)."""
        return self.anchor + self.blank

    def largest_fields(self) -> np.ndarray:
        """Upper limits of |u_x| over every binary x on the data mirrors, and of |u_a - u_x|: shape (2, n_outputs).

        |u_x| = max over phases of Re(e^(-i theta) u_x) <= (|u_1| + max over theta of sum_i |Re e^(-i theta) R_i|) / 2,
        and the sum at any theta is at most 1 / cos(pi/8) times the largest at the four angles 0, 45, 90 and 135
        degrees, since it is a norm of the direction (the octagon around the unit circle). Data-independent; with many
        mirrors at most some 9 % above the largest value. Limits of several modes are the root mean square of those of
        each.
        """
        limits = []
        for sums in self._at_outputs():
            reach = np.max(sums[4:], axis=0) * (1 + _SUM_SLACK) / math.cos(math.pi / 8)
            data = 0.5 * (np.hypot(sums[2], sums[3]) + reach)
            limits.append(np.stack([data, data + np.hypot(sums[0] - sums[2], sums[1] - sums[3])]))
        return np.asarray(reduce(np.hypot, limits) * self.law.modes**-0.5)

    def fields(self, frames: torch.Tensor) -> torch.Tensor:
        """Return fields (2 modes, frames, n_outputs) of binary frames, real and imaginary parts; exact in one mode."""
        planes = self.law.planes
        out = torch.empty((len(planes), frames.shape[0], self.n_outputs), dtype=torch.float32)
        for part, plane in enumerate(planes):
            dense = self.dense(plane, frames.device) if self.fits_dense else None
            if dense is not None and self.law.n_inputs <= INPUTS_PER_EXACT_SUM:
                if frames.device.type == "cpu":
                    blocked_product(frames, dense, out[part])
                else:
                    out[part] = blocked_product(frames, dense)
                continue
            for outputs in blocks(self.n_outputs, _PIXELS_PER_BLOCK):

                def tile(
                    inputs: range,
                    dense: torch.Tensor | None = dense,
                    plane: int = plane,
                    outputs: range = outputs,
                ) -> torch.Tensor:
                    if dense is not None:
                        return dense[inputs.start : inputs.stop, outputs.start : outputs.stop]
                    return self._tile(plane, outputs, inputs).to(frames.device)

                out[part, :, outputs.start : outputs.stop] = exact_product(frames, tile, len(outputs))
        return out if self.law.modes == 1 else out.mul_(self.law.modes**-0.5)

    def fields_of(self, patterns: torch.Tensor, rows: np.ndarray, complement: np.ndarray) -> torch.Tensor:
        """Return fields (2 modes, frames, n_outputs) of frames of patterns[rows], or of complements in the anchor."""
        field = self.fields(patterns)[:, torch.from_numpy(rows)]
        if complement.any():
            total = torch.from_numpy(self.total.astype(np.float32))[:, None, :]
            field = torch.where(torch.from_numpy(complement)[:, None], total - field, field)
        return field

    @property
    def fits_dense(self) -> bool:
        """Whether all real media at the outputs are within the limit."""
        return 8 * self.law.modes * self.law.n_inputs * self.n_outputs <= self.law.dense_limit_mib * 2**20

    def dense(self, plane: int, device: torch.device | str = "cpu") -> torch.Tensor:  # (n_inputs, n_outputs)
        """P or Q at the outputs, transposed, kept until the medium drifts; ValueError beyond dense_limit_mib."""
        if not self.fits_dense:
            raise ValueError(
                f"dense_limit_mib = {self.law.dense_limit_mib:g}: the dense medium takes "
                f"{8 * self.law.modes * self.law.n_inputs * self.n_outputs / 2**20:.0f} MiB; raise the limit"
            )
        where = torch.device(device)
        matrix = self._dense.get((plane, where))
        if matrix is None:
            matrix = torch.empty((self.law.n_inputs, self.n_outputs), dtype=torch.float32)
            for outputs in blocks(self.n_outputs, _PIXELS_PER_BLOCK):
                matrix[:, outputs.start : outputs.stop] = self._tile(plane, outputs, range(self.law.n_inputs))
            matrix = self._dense[plane, where] = matrix.to(where)
        return matrix

    def responses(self, plane: int) -> torch.Tensor:
        """Return the change of a component of the field that each input makes, times the root of the modes."""
        return self.dense(plane)

    def _tile(self, plane: int, outputs: range, inputs: range) -> torch.Tensor:
        """Return transposed entries at some outputs: float32, shape (inputs, outputs)."""
        pixels = self.pixels[outputs.start : outputs.stop]
        window = range(int(pixels[0]), int(pixels[-1]) + 1)
        index = torch.from_numpy(pixels - window.start)
        return self._pixel_tile(plane, window, inputs, self.point).index_select(1, index)

    def _pixel_tile(self, plane: int, pixels: range, inputs: range, point: float) -> torch.Tensor:
        """Return transposed entries at contiguous pixels, at a point of time, with grain, on the grid of 2^-12."""
        if len(self.law.weights) > 1:
            tile = self.law.grained(pixels, lambda places: self._mixed_tile(plane, places, inputs, point))
        else:
            tile = self._mixed_tile(plane, pixels, inputs, point)
            if point == 0:
                return tile
        return tile.div_(TABLE_STEP).round_().mul_(TABLE_STEP)

    def _mixed_tile(self, plane: int, places: range, inputs: range, point: float) -> torch.Tensor:
        """Return transposed entries at contiguous places at a point of time, before grains: a sum of media."""
        mixed = medium_weights(point)
        tile = torch.empty(0)
        for number, (epoch, weight) in enumerate(mixed):
            part = int(epoch % 1 * PARTS_OF_A_STEP)  # 0 at a grid point
            medium = Medium(
                self.law.mirrors,
                places.stop,
                self.law.seed,
                plane=plane + _PLANES_PER_PART * part,
                epoch=int(epoch),
            )
            own = medium.tile(places, inputs)
            if number == 0:
                tile = own if len(mixed) == 1 else own.mul_(weight)
            else:
                tile.add_(own, alpha=weight)
        return tile

    def _at_outputs(self) -> np.ndarray:
        """Return `_sums` at the outputs, at the present time."""
        parts = []
        for outputs in blocks(self.n_outputs, _PIXELS_PER_BLOCK):
            pixels = self.pixels[outputs.start : outputs.stop]
            window = range(int(pixels[0]), int(pixels[-1]) + 1)
            parts.append(self._sums(window, self.point)[:, :, pixels - window.start])
        return np.concatenate(parts, axis=2)

    def _sums(self, pixels: range, point: float) -> np.ndarray:
        """Return the sums over mirrors at contiguous pixels, float64, shape (modes, 8, pixels).

        Rows of a mode: real and imaginary part over all mirrors; the same over data mirrors; over data mirrors the sums
        of |P|, |P + Q| / sqrt 2, |Q| and |P - Q| / sqrt 2.
        """
        total = np.zeros((self.law.modes, 8, len(pixels)))
        n, planes = self.law.n_inputs, self.law.planes
        for rows, mode in product(blocks(self.law.mirrors, _INPUTS_PER_TILE), range(self.law.modes)):
            p, q = (self._pixel_tile(plane, pixels, rows, point) for plane in planes[2 * mode : 2 * mode + 2])
            data_p, data_q = p[: max(0, n - rows.start)], q[: max(0, n - rows.start)]
            half = math.sqrt(0.5)
            parts = [p, q, data_p, data_q, data_p.abs(), data_q.abs()]
            sums = [part.sum(0, dtype=torch.float64) for part in parts]
            slanted = [((data_p + data_q).abs().sum(0)) * half, ((data_p - data_q).abs().sum(0)) * half]
            total[mode] += np.stack(
                [term.double().numpy() for term in (*sums[:5], slanted[0], sums[5], slanted[1])]
            )
        return total


class FaultyMirrors(Speckle):
    """The medium as a camera sees it behind a faulty mirror array, by its seed; see `opusim.camera.speckle`.

    The map of usable pixels is that of the sound array: faults came later.
    """

    _OF_A_TIME: ClassVar = ("_ends",)

    def __init__(
        self,
        law: SpeckleLaw,
        faults: MirrorSettings,
        seed: int,
        n_outputs: int,
        file: str,
        pixels: np.ndarray | None = None,
    ) -> None:
        super().__init__(law, n_outputs, file, pixels)
        place = ndtr(pixel_normals(seed, _STUCK_PLANE, np.arange(law.mirrors)))
        leak = 0.0 if faults.contrast is None else faults.contrast**-0.5
        # the amplitude of every mirror in the blank frame and in the anchor
        self._blank = np.where(place < faults.stuck_on, 1.0, leak)
        self._lit = np.where(place > 1 - faults.stuck_off, leak, 1.0)
        self._free = torch.from_numpy(self._blank != self._lit)[: law.n_inputs].float()
        self._swing = 1.0 - leak
        self._leak, self._leaks = leak, None
        if faults.leak_speckle:
            # amplitudes of the reflected light only; those of leaks are e where these are 0
            self._blank, self._lit = (1.0 * (ends == 1.0) for ends in (self._blank, self._lit))
            self._swing = 1.0
            other = replace(law, seed=derive_seed(law.seed, "leaks of mirrors"))
            self._leaks = Speckle(other, n_outputs, file, self.pixels)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Fields of the blank frame, the anchor, and all free data mirrors: float64, shape (3, 2 modes, n_outputs)."""
        free = np.zeros(self.law.mirrors)
        free[: self.law.n_inputs] = self._swing * self._free.numpy()
        table = torch.from_numpy(np.stack([self._blank, self._lit, free]))  # (3, mirrors)
        leaks = torch.from_numpy(np.stack([1 - self._blank, 1 - self._lit, -free])) * self._leak
        found = np.zeros((len(table), len(self.law.planes), self.n_outputs))
        for outputs in blocks(self.n_outputs, _PIXELS_PER_BLOCK):
            for rows in blocks(self.law.mirrors, _MIRRORS_AT_ONCE):
                for part, plane in enumerate(self.law.planes):
                    sums = table[:, rows.start : rows.stop] @ super()._tile(plane, outputs, rows).double()
                    if self._leaks is not None:
                        other = self._leaks.at(self.point)._tile(plane, outputs, rows).double()
                        sums += leaks[:, rows.start : rows.stop] @ other
                    found[:, part, outputs.start : outputs.stop] += sums.numpy()
        return found * self.law.modes**-0.5

    @property
    @override
    def blank(self) -> np.ndarray:
        return self._ends[0]

    @property
    @override
    def anchor(self) -> np.ndarray:
        return self._ends[1]

    @property
    @override
    def ends(self) -> np.ndarray:
        ends, n = np.stack([self._blank, self._lit]), self.law.n_inputs
        if self._leaks is None:
            return ends
        leaks = (1 - ends) * self._leak
        return np.concatenate([ends[:, :n], leaks[:, :n], ends[:, n:], leaks[:, n:]], axis=1)

    @override
    def swings(self, frames: torch.Tensor) -> torch.Tensor:
        shown = frames.double() * (self._swing * self._free.to(frames.device))
        return shown if self._leaks is None else torch.cat([shown, -self._leak * shown], dim=1)

    @override
    def _tile(self, plane: int, outputs: range, inputs: range) -> torch.Tensor:
        """Return what mirrors change of the field, over the swing: R_i, or R_i - e L_i."""
        tile = super()._tile(plane, outputs, inputs)
        if self._leaks is None:
            return tile
        other = self._leaks.at(self.point)._tile(plane, outputs, inputs)
        return tile.add_(other, alpha=-self._leak).div_(TABLE_STEP).round_().mul_(TABLE_STEP)

    @override
    def fields(self, frames: torch.Tensor) -> torch.Tensor:
        """Return fields exactly, except for the rounding of the blank frame's field."""
        shown = super().fields(frames * self._free.to(frames.device))
        return shown.mul_(self._swing).add_(torch.from_numpy(self.blank).float()[:, None, :])

    @override
    def responses(self, plane: int) -> torch.Tensor:
        """(1 - e) R_i, 0 for a stuck mirror."""
        return super().responses(plane) * (self._swing * self._free)[:, None]

    def largest_fields(self) -> np.ndarray:
        """Upper limits as `Speckle.largest_fields`: by the triangle inequality from the sound array's.

        |u_x| <= |v| + (1 - e) L and |u_(a-x)| <= |u_a - z_1| + (1 - e) L, with L the sound array's limit over data
        mirrors and z_1 the field of all free data mirrors, since frames of free mirrors are frames of all mirrors. If
        leaks have a speckle of their own, D_i = R_i - e L_i and z is the sum of all D_i, the limits are |v + z / 2| and
        |u_a - z / 2|, and half of the octagon's limit in `Speckle.largest_fields` over D_i.
        """
        blank, anchor, data = self._ends
        if self._leaks is None:
            limit = np.broadcast_to(self._swing * super().largest_fields()[0], (2, self.n_outputs))
            sizes = (reduce(np.hypot, field) for field in (blank, anchor - data))
            return np.stack([size + own for size, own in zip(sizes, limit, strict=True)])
        planes, free = self.law.planes, self._free[:, None]
        reach = np.zeros((self.law.modes, 4, self.n_outputs))
        for outputs in blocks(self.n_outputs, _PIXELS_PER_BLOCK):
            for rows in blocks(self.law.n_inputs, _MIRRORS_AT_ONCE):
                for mode in range(self.law.modes):
                    pair = planes[2 * mode : 2 * mode + 2]
                    p, q = (self._tile(each, outputs, rows) * free[rows.start : rows.stop] for each in pair)
                    slanted = (p + q) * math.sqrt(0.5), (p - q) * math.sqrt(0.5)
                    sums = [part.abs().sum(0, dtype=torch.float64).numpy() for part in (p, q, *slanted)]
                    reach[mode, :, outputs.start : outputs.stop] += np.stack(sums)
        half = 0.5 * np.max(reach, axis=1) * (1 + _SUM_SLACK) / math.cos(math.pi / 8) * self.law.modes**-0.5
        limits = []
        for middle in (blank + data / 2, anchor - data / 2):
            own = np.hypot(middle[0::2], middle[1::2]) + half  # of each mode
            limits.append(reduce(np.hypot, own))
        return np.stack(limits)


_LEAST_FRAMES, _MOST_FRAMES, _FRAMES_PER_ROOT = 128, 1024, 50
"""Frames of a block, in proportion to the root of the mirrors: its end then costs about as much as its frames."""
_HOPS_AT_ONCE, _MOST_HOPS = 1024, 2**24  # the latter take 128 MiB
_JITTER = 1e-12
"""Added variance, relative to the largest, with which frames without light and repeated ones have a factor."""


def bridge(times: np.ndarray, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of a stationary Ornstein-Uhlenbeck process of variance 1 and tau 1 given its values at 0 and end.

    That is the weights of the two values in the mean at times in [0, end], shape (2, n), and the covariance (n, n).
    """
    if end == 0:
        return np.stack([np.ones(times.size), np.zeros(times.size)]), np.zeros((times.size, times.size))
    whole, passed, left = (
        -np.expm1(-2 * span) for span in (end, times, end - times)
    )  # 1 - e^-2t: no overflow
    weights = np.stack([np.exp(-times) * left, np.exp(times - end) * passed]) / whole
    early, late = np.minimum.outer(passed, passed), np.minimum.outer(left, left)
    return weights, np.exp(-np.abs(np.subtract.outer(times, times))) * early * late / whole


def motion(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of the process given its value at 0: that value's weights e^-t, and the covariance.

    Cov[x(s), x(t)] = e^-|s - t| - e^-(s + t).
    """
    apart, total = np.abs(np.subtract.outer(times, times)), np.add.outer(times, times)
    return np.exp(-times), np.exp(-apart) * -np.expm1(apart - total)


class Hops:
    """Mode hops of a laser, at times that are computed from a seed.

    `jump` is log(1 / rho), by which a hop moves the medium's own time, in units of the decorrelation time.
    """

    def __init__(self, drift: DriftSettings, seed: int) -> None:
        per_s, hop, width = drift.hops_per_s or 0.0, drift.hop_pm or 0.0, drift.spectral_width_pm or 1.0
        self.jump = 0.5 * math.log1p((hop / width) ** 2)
        self._rate = per_s * drift.decorrelation_s
        self._stream = SeededStream(seed, "mode hops")
        self._times = np.zeros(1)  # time 0, then those of the hops: in units of the decorrelation time

    def moved(self, times: np.ndarray) -> np.ndarray:
        """Return by how much hops have moved the medium's own time until these times, all in its units."""
        last = float(np.max(times))
        if self._rate * last > _MOST_HOPS:
            raise ValueError(
                f"time = {last:g} decorrelation times: some {self._rate * last:.3g} hops come before, and at most "
                f"{_MOST_HOPS} may; begin a new medium, or lower drift.hops_per_s"
            )
        blocks = [self._times]
        while blocks[-1][-1] <= last:
            normals = self._stream.normal((2, _HOPS_AT_ONCE)).double().numpy()
            waits = 0.5 * np.square(normals).sum(axis=0) / self._rate  # exponential: chi-squared of 2 degrees
            blocks.append(blocks[-1][-1] + np.cumsum(waits))
        self._times = np.concatenate(blocks)
        return np.asarray(self.jump * (np.searchsorted(self._times, times, side="right") - 1))

    def own_time(self, time: float) -> float:
        """Return the medium's own time."""
        return time + float(self.moved(np.array(time)))


class Motion:
    """The time of a medium that moves while frames are taken, in units of the decorrelation time, and jumps at hops."""

    def __init__(self, frame: float, hops: Hops | None = None) -> None:
        self.frame, self._hops = frame, hops
        self._time = 0.0

    def ahead(self, frames: int) -> np.ndarray:
        """Return how far the medium's own time moves until each of the next frames, shape (frames,), from 0 on."""
        steps = self.frame * np.arange(frames)
        if self._hops is None:
            return steps
        hopped = self._hops.moved(self._time + steps)
        return steps + (hopped - hopped[0])

    def move_to(self, speckle: Speckle, time: float) -> None:
        """Set the time of the next frame, in units of the decorrelation time, and move the medium there."""
        point = self._point(time)
        self._time = time
        speckle.move_to(point)

    def _point(self, time: float) -> float:
        """Return the grid point of the medium at a time."""
        return grid_point(time if self._hops is None else self._hops.own_time(time), PARTS_OF_A_STEP)

    def pass_frames(self, speckle: Speckle, frames: float) -> None:
        """Let some frame periods pass in which no frame shows the medium."""
        self.move_to(speckle, self._time + frames * self.frame)

    def fields(
        self,
        speckle: Speckle,
        patterns: torch.Tensor,
        rows: np.ndarray,
        complement: np.ndarray,
        stream: NoiseStream,
    ) -> torch.Tensor:
        """Return the fields (2 modes, frames, n_outputs) of frames in turn from the present time on; the time passes.

        Frame k shows pattern rows[k] of (patterns, n_inputs), or its complement in the anchor. The stream gives one
        reading for every block of frames. ValueError: the medium is too old; see `opusim.camera.speckle.grid_point`.
        """
        out = torch.empty((len(speckle.law.planes), rows.size, speckle.n_outputs), dtype=torch.float32)
        at_once = int(_FRAMES_PER_ROOT * speckle.law.mirrors**0.5)
        at_once = min(max(at_once, _LEAST_FRAMES), _MOST_FRAMES)
        for start in range(0, rows.size, at_once):
            pause()
            some = slice(start, start + at_once)
            wanted, place = np.unique(rows[some], return_inverse=True)
            shown = patterns[torch.from_numpy(wanted).to(patterns.device)]
            place, flip = place.reshape(-1), complement[some]
            after = self._time + place.size * self.frame
            end = speckle.at(self._point(after))
            span = (end.point - speckle.point) / STEPS_PER_TAU
            weights, covariance = bridge(np.minimum(self.ahead(place.size), span), span)
            part = torch.zeros((len(out), place.size, speckle.n_outputs))
            for state, weight in zip((speckle, end), weights, strict=True):
                if weight.any():
                    field = state.fields_of(shown, place, flip)
                    part.add_(field.mul_(torch.from_numpy(weight.astype(np.float32))[:, None]))
            covariance = covariance * overlaps(speckle, shown, place, flip)
            largest = float(covariance.diagonal().max())
            if largest > 0:
                root = np.linalg.cholesky(covariance + _JITTER * largest * np.eye(place.size))
                part.add_(torch.from_numpy(root.astype(np.float32)) @ speckle.normals(place.size, stream))
            out[:, some] = part
            self._time = after
            speckle.become(end)
        return out


def overlaps(
    speckle: Speckle, patterns: torch.Tensor, rows: np.ndarray, complement: np.ndarray
) -> np.ndarray:
    """Return the inner products of the mirrors' amplitudes in frames, float64, (frames, frames); see `Motion.fields`.

    A frame has the amplitudes v + S x, its complement l - S x, with v and l those of the blank frame and of the anchor.
    """
    swing = speckle.swings(patterns)  # (patterns, n_inputs)
    ends = torch.from_numpy(speckle.ends).to(swing.device)  # (2, mirrors)
    both = (swing @ swing.T).cpu().numpy()[rows][:, rows]
    beside = (swing @ ends[:, : swing.shape[1]].T).cpu().numpy()[rows]
    of_ends = (ends @ ends.T).cpu().numpy()
    sign, which = np.where(complement, -1.0, 1.0), complement.astype(np.int64)
    mixed = sign[:, None] * beside[:, which]
    return np.asarray(np.outer(sign, sign) * both + mixed + mixed.T + of_ends[which][:, which])
