"""Expose the outputs' pixels, and recover a linear projection from their intensities.

`Exposure` turns fields into digital numbers, `Recovery` turns these into projections, `saturated_shares` predicts how
many outputs are full, and `CountLaw` is the law of the counts at any temperature, exposure, laser and bias light.

**Recovery.** With the anchor a (every mirror of the window on), u = R z and I = |u|^2 in any units,
    (I_a + I_x - I_(a-x)) / (2 sqrt I_a) = Re(conj(u_a) u_x) / |u_a|,
exactly, for every binary x: a real linear projection from intensities only. Source:
"Linear Optical Random Projections Without Holography" (arXiv 2305.12988). A ternary x = p - n takes four frames,
    y = (I_p - I_(a-p) - I_n + I_(a-n)) / (2 sqrt I_a) - s sqrt I_a,   s = sum(x) / mirrors,
in which the anchor's own intensity and the black level cancel. The last term takes away the mean |u_a| / mirrors that
every entry of a row has. Multiplied by c = sqrt(2 mirrors / (K N_a)) sqrt(mirrors / (mirrors - 1)), with N_a the mean
photo-electrons of the anchor and K the gain, entries of B are N(0, 1): the phase of u_a and the part of a row that is
orthogonal to the anchor are independent of |u_a|, so masking dark or bright pixels changes no law. (PRNU, at 1 %,
scales a row by 0.5 %.)

**Holography** (`ReferenceBeam`, `HologramRecovery`): the linear product from frames in which a reference beam meets the
field. A reference of amplitude r and phase phi_k falls on every pixel together with the field u of a frame,
    I_k = |u + r e^(i phi_k)|^2,      phi_k = phi_0 + 2 pi k / K,   K = 3 or 4 steps,
so that sum over k of cos(phi_k) I_k = K r Re u exactly: |u|^2, r^2, dark charge and black level drop out. A ternary
x = p - n takes 2 K frames, first those of p, and reads
    y = Re(u_p) - Re(u_n),
of which the entries are those of P, the real part of the medium, N(0, 1) at every pixel; no pixel is masked. The
imaginary part, which the same frames tell, is left: an output is one real number.
Sources: Yamaguchi and Zhang, Opt. Lett. 22, 1268 (1997); Creath, Progress in Optics 26, 349 (1988) for the errors.

Given the phases, counts are independent Poisson counts of rate g |u + r e^(i phi)|^2 + d. With weights
w_f = cos(phi_f), and -cos(phi_f) for the frames of n,
    Var[y] = scale^2 sum over frames f of w_f^2 Var[DN_f],    Cov[y_i, y_j] = 0 for outputs i != j,
which depends on x. At a strong reference it tends to 1 / (K g), for every x: p and n add 1 / (2 K g) each.

Steps that are too long by a share e, phi_k' = phi_0 + 2 pi k (1 + e) / K, change B and nothing else:
    y = Re(conj(c) (u_p - u_n)),    c = 2/K sum over k of cos(phi_k) e^(i phi_k').
A path that vibrates adds a phase psi_f to every frame, stationary, N(0, s^2), common to its pixels and correlated from
frame to frame: B shrinks by e^(-s^2 / 2), and each reading gets noise that all outputs share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import chndtr
from typing_extensions import override

from opusim import checks
from opusim.camera.stages import Sensor, expose_fields, frame_normals, recover_rows
from opusim.description.camera import LightSettings
from opusim.noise import LightPower
from opusim.processes import pause
from opusim.randomness.kernels import run_split
from opusim.randomness.streams import NoiseStream
from opusim.temperature import DarkCurrent

FRAME_SIGNS = np.array([1.0, -1.0, -1.0, 1.0])
"""Signs of the frames p, a - p, n and a - n in a reading, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """How digital numbers become projections.

    Attributes:
        mirrors: mirrors of the anchor, at least 2.
        anchor_dn: measured intensity of the anchor at each output, without black level and dark charge, DN, shape
            (n_outputs,), above 0.
        unit_dn: K N_a, the anchor's mean intensity over pixels, DN, above 0.
        modes: M, independent speckles that a pixel averages; entries of B would have the variance 1 / M without c's
            factor sqrt(M).
    """

    mirrors: int
    anchor_dn: np.ndarray
    unit_dn: float
    modes: int = 1

    def __post_init__(self) -> None:
        checks.integer(mirrors=self.mirrors, minimum=2)
        checks.positive(unit_dn=self.unit_dn)
        checks.positive(anchor_dn=self.anchor_dn)

    @property
    def column_norm(self) -> float:
        """c: projection units for each square root of a DN."""
        unit = math.sqrt(2 * self.mirrors / self.unit_dn * self.mirrors / (self.mirrors - 1))
        return unit * math.sqrt(self.modes)

    @property
    def weights(self) -> np.ndarray:
        """Weight of each frame in a reading, float64, shape (frames,)."""
        return FRAME_SIGNS

    def decode(self) -> np.ndarray:
        """Return the scale [projection units per DN] and offset of each output, float64, shape (2, n_outputs)."""
        root = np.sqrt(np.asarray(self.anchor_dn, dtype=np.float64))
        return np.stack([0.5 * self.column_norm / root, self.column_norm * root])

    def shift(self, sums: np.ndarray) -> np.ndarray:
        """Return the share s of vectors with these sums, float64."""
        return np.asarray(sums, dtype=np.float64) / self.mirrors

    def variance(self, frame_variances_dn2: np.ndarray) -> np.ndarray:
        """Var[y] = scale^2 times the sum of the frames' variances times their squared weights.

        The anchor counts as known: its error is the same for every reading, so it is a bias and no noise.
        """
        total = np.tensordot(np.square(self.weights), frame_variances_dn2, axes=1)
        return np.asarray(np.square(self.decode()[0]) * total)


_NUMBERS_PER_THREAD = 2**14  # pixel-frames below which a second thread is not worth its start
_FRAMES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Exposure:
    """The stages of a camera at its outputs' pixels.

    Attributes:
        light: mean light and exposure.
        sensor: from electrons to digital numbers.
        mirrors: mirrors of the anchor, whose mean photo-electrons the light tells.
        dark_current_e: dark charge of a frame, electrons.
        response: relative sensitivity of each pixel (1 + PRNU), shape (n_outputs,).
        offset_e: fixed offset of each pixel, electrons, shape (n_outputs,).
        dark_scale: dark current of each output's pixel as a multiple of the sensor's, shape (n_outputs,), or of all.
        nonlinearity: q of the read-out (`opusim.camera.from_description`), in [0, 0.25].
        credited_dark_e: the part of the dark charge that a law may credit (`opusim.temperature.DarkCurrent.credited`),
            electrons, or None for all of it.
    """

    light: LightSettings
    sensor: Sensor
    mirrors: int
    dark_current_e: float
    response: np.ndarray
    offset_e: np.ndarray
    dark_scale: np.ndarray | float = 1.0
    nonlinearity: float = 0.0
    credited_dark_e: float | None = None

    @cached_property
    def gain_e(self) -> np.ndarray:
        """Electrons of a field of |u|^2 = 1 in mirror units, at each pixel: N_a / (2 mirrors) (1 + PRNU)."""
        return self.light.anchor_e / (2.0 * self.mirrors) * self.response

    @cached_property
    def floor_e(self) -> np.ndarray:
        """Electrons that a law may credit, at each pixel: bias light (1 + PRNU) + credited dark charge."""
        credited = self.dark_current_e if self.credited_dark_e is None else self.credited_dark_e
        return np.asarray(self.light.bias_e * self.response + credited * self.dark_scale)

    @cached_property
    def dark_e(self) -> np.ndarray:
        """Electrons of a frame without coherent light: bias and ambient light (1 + PRNU) + dark charge."""
        bias_and_dark = np.asarray(self.light.bias_e * self.response + self.dark_current_e * self.dark_scale)
        return bias_and_dark + self.light.ambient_e * self.response

    @property
    def gain_dn(self) -> np.ndarray | float:
        """K: DN per electron, of each pixel if they differ."""
        return self.sensor.gain_dn_per_e

    @property
    def mean_power(self) -> float:
        """Mean power of a frame now, relative to the described light."""
        return 1.0

    def parts(self) -> Iterator[tuple[float, np.ndarray | slice, np.ndarray]]:
        """Yield the parts of an output's light: share, the pixels that it comes from, and those pixels' gain_e.

        Pixels are places on the last axis of fields.
        """
        yield 1.0, slice(None), self.gain_e

    def light_of(self, intensity: np.ndarray) -> np.ndarray:
        """Return electrons of light at the described power, from |u|^2 in mirror units: shape (..., n_outputs)."""
        return np.asarray(
            sum(share * (gain * intensity[..., pixels]) for share, pixels, gain in self.parts())
        )

    def rates(self, field: np.ndarray) -> np.ndarray:
        """Return the expected electrons of fields of shape (2, ..., pixels): mean_power gain_e |u|^2 + dark_e."""
        return np.asarray(self.mean_power * self.light_of(np.sum(np.square(field), axis=0)) + self.dark_e)

    def moments(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of numbers with rates in electrons, at constant power: DN, DN^2, elementwise."""
        return self.sensor.moments(rates, self.offset_e)

    def power_covariance(self, frames: int) -> np.ndarray | None:
        """Covariance of the powers of a reading's frames, or None if the power is constant."""
        return None

    def shared_variance_dn2(self, weights: np.ndarray) -> np.ndarray | float:
        """Return the variance of a weighted sum of a pixel's frames beyond that of independent frames, DN squared."""
        return 0.0

    def expose(self, field: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
        """Return digital numbers (frames, n_outputs) of fields (2, frames, n_outputs); takes one reading."""
        return self._expose(field, self._pixel, stream)

    def expose_uniform(self, photons: float, frames: int, stream: NoiseStream) -> np.ndarray:
        """Return frames under uniform light: rate = (quantum_efficiency photons + bias) (1 + PRNU) + dark charge."""
        pixel = self._pixel.copy()
        pixel[1] += self.light.quantum_efficiency * photons * self.response
        dark = torch.zeros((1, 1, 1)).expand(2, frames, self.response.size)
        return self._expose(dark, pixel, stream).numpy()

    def mean_of(
        self, field: torch.Tensor | Callable[[int], torch.Tensor], frames: int, stream: NoiseStream
    ) -> np.ndarray:
        """Return the mean numbers of many exposures of a field, or of fields that a function returns by number."""
        total = np.zeros(self.response.size)
        for start in range(0, frames, _FRAMES_AT_ONCE):
            pause()
            rows = min(_FRAMES_AT_ONCE, frames - start)
            shown = field.expand(-1, rows, -1) if isinstance(field, torch.Tensor) else field(rows)
            total += self.expose(shown, stream).double().sum(0).numpy()
        return total / frames

    def recover(
        self,
        y: torch.Tensor,
        field: torch.Tensor,
        total: np.ndarray,
        decode: np.ndarray,
        shift: np.ndarray,
        stream: NoiseStream,
    ) -> None:
        """Expose the four frames of each row, and write the projection recovered from them into y; see `recover_rows`.

        `field` has the positive frames' fields, then the negative ones'; `total` those of a frame and its complement
        together, the anchor's if mirrors are sound. Takes one reading of the stream.
        """
        rows = y.shape[0]
        parts = field.view(2, 2, rows, -1).transpose(0, 1).reshape(4, rows, -1).numpy()
        noise, pixel, sensor = self._normal(8, rows, stream), self._pixel, self.sensor.numbers
        out = y.numpy()

        def work(start: int, stop: int) -> None:
            some = slice(start, stop)
            recover_rows(out[some], parts[:, some], total, pixel, decode, shift[some], noise[:, some], sensor)

        run_split(work, rows, grain=self._rows_per_thread)

    def _expose(self, field: torch.Tensor, pixel: np.ndarray, stream: NoiseStream) -> torch.Tensor:
        frames = field.shape[1]
        numbers = torch.empty((frames, self.response.size), dtype=torch.float32)
        noise, sensor = self._normal(2, frames, stream), self.sensor.numbers
        out, source = numbers.numpy(), field.numpy()

        def work(start: int, stop: int) -> None:
            expose_fields(out[start:stop], source[:, start:stop], pixel, noise[:, start:stop], sensor)

        run_split(work, frames, grain=self._rows_per_thread)
        return numbers

    @cached_property
    def _rows_per_thread(self) -> int:
        return max(1, _NUMBERS_PER_THREAD // self.response.size)

    def _normal(self, planes: int, rows: int, stream: NoiseStream) -> np.ndarray:
        """Return N(0, 1) numbers, float32, shape (planes, rows, n_outputs); empty if no stage needs them."""
        is_noisy = self.sensor.shot_noise or self.sensor.read_noise_e > 0
        pixels = self.response.size if is_noisy else 0
        return stream.normal((planes, rows, pixels)).numpy()

    @cached_property
    def _pixel(self) -> np.ndarray:
        """gain_e, dark_e and offset_e, float64, shape (3, n_outputs)."""
        return np.stack([self.gain_e, self.dark_e, self.offset_e])


FRAME_SHARES = (0.25, 0.5, 0.75)
"""Shares of the mirrors that are on in the frames looked at, besides the anchor: a vector's frames lie between."""
MOST_SATURATED = 0.01
"""Share of the outputs that may be full in a frame: beyond, entries of B are not N(0, 1)."""
_OUTPUTS_LOOKED_AT = 1024


def saturated_shares(
    exposure: Exposure, anchor: np.ndarray, reference: np.ndarray | None = None
) -> dict[float, float]:
    """Return the expected share of outputs whose mean light fills them, for frames with a share f of the mirrors on.

    The anchor's field u_a is known; given it, a frame's field is f u_a plus a circular Gaussian of variance
    2 mirrors f (1 - f), so |u|^2 has a noncentral chi-squared law with two degrees of freedom, or 2 M with M modes. No
    field is computed. Of a reference beam the fullest step counts. f = 1 is the anchor without a reference, over all
    outputs; `FRAME_SHARES` are over the first 1,024.
    """
    room_e = exposure.sensor.saturation_e - exposure.dark_e - exposure.offset_e
    with np.errstate(divide="ignore"):
        full = np.where(exposure.gain_e > 0, room_e / exposure.gain_e, np.inf)  # |u|^2 that fills the pixel
    intensity = np.sum(np.square(anchor), axis=0)
    shares = {1.0: float(np.mean(intensity >= full))}
    some, limit = anchor[:, None, :_OUTPUTS_LOOKED_AT], np.maximum(full[:_OUTPUTS_LOOKED_AT], 0.0)
    components = len(anchor)
    beam = np.zeros((components, 1)) if reference is None else reference
    for f in FRAME_SHARES:
        scale = exposure.mirrors * f * (1 - f) * 2 / components
        middle = np.sum(np.square(f * some + beam[:, :, None]), axis=0)  # (steps, outputs)
        shares[f] = float(np.max(np.mean(1 - chndtr(limit / scale, components, middle / scale), axis=1)))
    return shares


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """How a camera is run, relative to its description.

    Attributes:
        temperature_c: of the sensor, degrees Celsius, or None for the description's.
        light: laser light as a multiple of the description's, above 0.
        exposure: exposure as a multiple of the description's, above 0.
        bias_e: bias light in a frame of the described exposure beyond the description's, electrons, at least 0.
    """

    temperature_c: float | None = None
    light: float = 1.0
    exposure: float = 1.0
    bias_e: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(light=self.light, exposure=self.exposure)
        checks.non_negative(bias_e=self.bias_e)


@dataclass(frozen=True, kw_only=True, eq=False)
class CountLaw:
    """Poisson counts with rates exposure (light L + bias + ambient + dark(T)) in every frame of every vector.

    A guarantee rests on `credited_rates`, without the ambient light, which may be gone tomorrow, and with the dark
    charge that is credited (`opusim.temperature.DarkCurrent.credited`).

    Var[y] = Var of the recovery / (light exposure)^2, since the recovery divides by the anchor's intensity.

    Attributes:
        light_e: L, electrons of laser light, shape (4, vectors, n_outputs).
        bias_e: bias light of the description at each output, electrons, shape (n_outputs,).
        response: relative sensitivity of each output's pixel, shape (n_outputs,).
        offset_e: fixed offset of each output's pixel, electrons, shape (n_outputs,).
        exposure_us: the description's exposure, microseconds.
        temperature_c: the description's, or None if dark current is off.
        dark: the law of the dark current, or None if it is off.
        sensor: the stages after the light.
        recovery: with the anchor known exactly.
        dark_scale: dark current of each output's pixel as a multiple of that, shape (n_outputs,) or one number.
        ambient_e: described ambient light at each output, electrons, shape (n_outputs,) or one number.
        nonlinearity: q of the read-out, as for `Exposure`.
        power: law of the laser's power in a frame, relative to that of `light_e`, or None if it is constant. Rates and
            the noise of a reading are then those at mean power.
        averages: whether that law holds at the described exposure only, because frames average the power.
        shortest_us: shortest exposure that the camera takes, microseconds; 0: any.
    """

    light_e: np.ndarray
    bias_e: np.ndarray
    response: np.ndarray
    offset_e: np.ndarray
    exposure_us: float
    temperature_c: float | None
    dark: DarkCurrent | None
    sensor: Sensor
    recovery: Recovery
    dark_scale: np.ndarray | float = 1.0
    ambient_e: np.ndarray | float = 0.0
    nonlinearity: float = 0.0
    power: LightPower | None = None
    averages: bool = False
    shortest_us: float = 0.0

    def dark_e(self, point: OperatingPoint) -> float:
        """Return the dark charge of a frame, electrons; ValueError if the sensor does not work at this temperature."""
        return self._dark_e(self.dark, point)

    def credited_dark_e(self, point: OperatingPoint) -> float:
        """Return the dark charge of a frame that a guarantee may rest on, electrons: at most `dark_e`."""
        return self._dark_e(None if self.dark is None else self.dark.credited(), point)

    def _dark_e(self, dark: DarkCurrent | None, point: OperatingPoint) -> float:
        wanted = self.temperature_c if point.temperature_c is None else point.temperature_c
        if dark is None or wanted is None:
            return 0.0
        return float(dark.current_e_per_s(wanted) * self.exposure_us * point.exposure * 1e-6)

    def rates(self, point: OperatingPoint) -> np.ndarray:
        """Return the expected electrons, ambient light included, shape (4, vectors, n_outputs)."""
        return np.asarray(self.rates_with(point, self.dark_e(point)) + point.exposure * self.ambient_e)

    def credited_rates(self, point: OperatingPoint) -> np.ndarray:
        """Return the electrons that a guarantee may rest on: no ambient light, and the credited dark charge."""
        return self.rates_with(point, self.credited_dark_e(point))

    def rates_with(self, point: OperatingPoint, dark_e: float) -> np.ndarray:
        """Return the expected electrons without ambient light, at a dark charge of a frame in electrons."""
        if self.averages and point.exposure != 1:
            raise ValueError(
                f"exposure = {point.exposure:g}: frames average the laser's power (camera.light.power.averages), whose "
                "law is that of the described exposure; change camera.light.exposure_us instead"
            )
        light = point.light * self.light_e + self.bias_e + point.bias_e * self.response
        return np.asarray(point.exposure * light + dark_e * self.dark_scale)

    def std(self, point: OperatingPoint) -> float:
        """Return the root mean square over vectors and outputs of a reading's noise, projection units."""
        variance = self.recovery.variance(self.sensor.moments(self.rates(point), self.offset_e)[1])
        return float(np.sqrt(variance.mean()) / (point.light * point.exposure))


_FIRST_PHASE = {3: 0.0, 4: 0.25 * math.pi}
"""phi_0: with four steps an eighth of a turn, so that all four frames read the real part."""


@dataclass(frozen=True, kw_only=True)
class ReferenceBeam:
    """The reference on the sensor.

    Attributes:
        amplitude: r in mirror units, in which |u|^2 of one mirror has mean 2; above 0.
        steps: K, 3 or 4.
        step_error: e, relative error of the steps, in [-0.5, 0.5].
        phase_rms: s, standard deviation of a frame's phase, rad, at least 0.
        correlation: of the phases of successive frames, in [0, 1).
    """

    amplitude: float
    steps: int
    step_error: float = 0.0
    phase_rms: float = 0.0
    correlation: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(amplitude=self.amplitude)
        checks.integer(steps=self.steps, minimum=3, maximum=4)
        checks.in_range(-0.5, 0.5, step_error=self.step_error)
        checks.non_negative(phase_rms=self.phase_rms)

    @cached_property
    def weights(self) -> np.ndarray:
        """w: weight of each frame in a reading, float64, shape (2 steps,)."""
        cosines = np.cos(self._phases(0.0))
        return np.concatenate([cosines, -cosines])

    @property
    def carrier(self) -> np.ndarray:
        """K r c / 2 and e^(-s^2 / 2): what B takes of the real and the imaginary field, float64, shape (2,)."""
        shown = np.exp(1j * self._phases(self.step_error))
        total = (
            self.amplitude * math.exp(-0.5 * self.phase_rms**2) * np.sum(self.weights[: self.steps] * shown)
        )
        return np.array([total.real, total.imag])

    def _phases(self, step_error: float) -> np.ndarray:
        turn = 2 * math.pi * np.arange(self.steps) / self.steps
        return np.asarray(_FIRST_PHASE[self.steps] + turn * (1 + step_error))

    def fields(self) -> np.ndarray:
        """Return the reference's field in each step, float64, shape (2, steps)."""
        phases = self._phases(self.step_error)
        return self.amplitude * np.stack([np.cos(phases), np.sin(phases)])

    def shown(self, field: torch.Tensor, stream: NoiseStream | None = None) -> torch.Tensor:
        """Return the fields (2, 2 steps, rows, pixels) of all frames, from the positive and then the negative frames'.

        Rows are shown in turn, each by its frames in order. The stream makes the path vibrate; a path at rest has none.
        """
        rows = field.shape[1] // 2
        beam = torch.from_numpy(self.in_turn(rows, stream)).to(field.dtype)
        signs = field.view(2, 2, 1, rows, -1).expand(-1, -1, self.steps, -1, -1)
        shown = signs + beam.transpose(1, 2).reshape(2, 2, self.steps, rows, 1)
        return shown.reshape(2, 2 * self.steps, rows, -1)

    def in_turn(self, rows: int, stream: NoiseStream | None = None) -> np.ndarray:
        """Return the reference's field in the frames of vectors, float64, shape (2, rows, 2 steps); see `shown`."""
        phases = np.tile(self._phases(self.step_error), 2)
        turned = np.broadcast_to(phases, (rows, phases.size))
        if stream is not None and self.phase_rms > 0:
            psi = frame_normals(turned.size, self.correlation, stream)
            turned = turned + self.phase_rms * psi.reshape(turned.shape)
        return self.amplitude * np.stack([np.cos(turned), np.sin(turned)])


@dataclass(frozen=True, kw_only=True, eq=False)
class HologramRecovery(Recovery):
    """How digital numbers of holograms become projections: y = scale sum over frames of w_f DN_f.

    `anchor_dn` is the reference's measured intensity K_dn g_j r^2, and the scale 1 / (K r g_j K_dn) follows with the
    nominal g, so that a pixel's response is part of B, as with the anchor.

    Attributes:
        beam: the reference.
    """

    beam: ReferenceBeam

    @property
    @override
    def weights(self) -> np.ndarray:
        return self.beam.weights

    def decode(self) -> np.ndarray:
        """Return the scale [projection units per DN] and no offset, float64, shape (2, n_outputs)."""
        root = np.sqrt(np.asarray(self.anchor_dn, dtype=np.float64))
        scale = math.sqrt(2 * self.mirrors / self.unit_dn) / (self.beam.steps * root)
        return np.stack([scale, np.zeros_like(scale)])
