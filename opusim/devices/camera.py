"""The physical twin of an OPU: a camera that looks at speckle, and a projection recovered from its frames."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from opusim import checks
from opusim.camera.exposure import CountLaw, Exposure, HologramRecovery, Recovery, saturated_shares
from opusim.camera.from_description import (
    camera_sections,
    count_boxes,
    count_weights,
    exposure_of,
    laser_of,
    reference_beam_of,
    require_fixed_rates,
    require_lawful_readings,
    require_unsaturated,
    rescaled,
    speckle_of,
    under_power,
)
from opusim.camera.speckle import Hops, Motion, Speckle, motion, overlaps
from opusim.description.schema import DeviceDescription
from opusim.devices.base import NoisyDevice
from opusim.devices.inputs import BinaryFrames, ternary_batch
from opusim.devices.usage import DeviceWork
from opusim.errors import ConfigError, NoiseBelowCertificate
from opusim.noise import FluctuatingCountNoise, NoiseModel, PhotonCountNoise
from opusim.processes import pause
from opusim.randomness.streams import NoiseStream, noise_stream
from opusim.temperature import TemperatureLaw

_ANCHORS_ERROR = 1.05
"""Factor by which the mean measured anchor may exceed the certified light, for the noise of few outputs and frames."""
_NUMBERS_AT_ONCE = 2**24  # standard normal numbers of one reading of the stream: 64 MiB


class CameraDevice(NoisyDevice):
    """Frames of light, as an OPU takes them; no product with B is ever computed.

    `project` shows four frames for each ternary vector and recovers B x from their intensities
    (`opusim.camera.exposure`), with the noise that the camera's stages make (`opusim.camera.stages`). `draw` does the
    same for the vector 0. `intensities` gives the digital numbers of binary frames: |R x|^2 through the stages. With a
    section ``[camera.reference_beam]`` readings come from phase-shifted holograms instead; `intensities`, frames of the
    anchor and flat frames are taken with that beam shut.

    The noise is Poisson counts, whose rates depend on what is shown; read noise is added. `noise` is the
    law of the counts with a box for each rate; `reading_variance` is the variance of a reading of a given x. Opening
    the device measures the anchor (``camera.anchor.frames`` frames and as many blank ones), whose error stays: it is
    part of B, and `matrix` tells that B.

    Attributes:
        speckle: the medium as the camera sees it.
        is_holographic: whether the linear product is read with a reference beam instead of the anchor's complements.
    """

    can = NoisyDevice.can | {"matrix", "intensities"}

    def __init__(self, description: DeviceDescription, **window: Any) -> None:
        super().__init__(description, **window)
        self._settings, _ = camera_sections(description)
        if type(self) is CameraDevice:
            description.refuse_options()
        self.speckle = speckle_of(description, self.n_inputs, self.n_outputs)
        self._law = self.speckle.law
        seed = self._seed if self.mode == "experiment" else None
        power, beam = self._settings.light.power, self._settings.reference_beam
        self._laser = None if power is None else laser_of(description, power, self.n_outputs, seed)
        self._beam = (
            None
            if beam is None
            else reference_beam_of(description, self._settings, beam, self._law.mirrors, self.n_outputs)
        )
        self.is_holographic = self._beam is not None
        drift = self._settings.drift
        self._hops: Hops | None = None
        if drift is not None and drift.hops_per_s:
            self._hops = Hops(drift, int.from_bytes(os.urandom(8)) if seed is None else seed)
        self._motion: Motion | None = None
        if drift is not None and drift.within_call:
            period_s = description.frames.period_us(self.n_outputs) * 1e-6
            self._motion = Motion(period_s / drift.decorrelation_s, self._hops)
        self._anchored_at = 0
        self._stream = noise_stream(self.mode, self._seed, f"device {description.kind}")
        self._recovery: Recovery | None = None

    # Properties

    @cached_property
    def exposure(self) -> Exposure:
        """The camera's stages at this device's outputs."""
        return self._exposure_at()

    @cached_property
    def pixels(self) -> np.ndarray:
        """Numbers of the pixels that are the outputs, int64, shape (n_outputs,), increasing."""
        if self.speckle.n_outputs == self.n_outputs:
            return self.speckle.pixels
        return Speckle(self._law, self.n_outputs, self.name).pixels

    def _exposure_at(self, exposure_us: float | None = None, temperature_c: float | None = None) -> Exposure:
        """The camera's stages at the outputs, at another exposure or temperature than the description's."""
        mirrors, laser = self._law.mirrors, self._laser
        return exposure_of(self.description, mirrors, self.pixels, exposure_us, temperature_c, laser)

    @property
    def recovery(self) -> Recovery:
        """How readings are decoded, with the anchor as it was measured when the device opened."""
        self._require_open()
        if self._recovery is None:
            raise RuntimeError("the anchor was not measured; open() does it")
        return self._recovery

    @cached_property
    def described_noise(self) -> PhotonCountNoise | FluctuatingCountNoise:
        """Counts of a reading's frames at each output, with boxes of rates that hold for every ternary x.

        Rates lie between bias light with dark current and the largest field of any binary frame, with ambient light and
        the reference beam, whose light earns nothing here (`count_law` counts it exactly). The boxes rest on the exact
        anchor, not on its measurement, so that every opening states the same law. If the laser's power fluctuates, they
        are those at mean power.

        Raises:
            NoiseUnknown: the medium drifts, so no box holds the rates, frames are dropped or repeated, or the bench
                vibrates.
        """
        require_fixed_rates(self.name, self._settings)
        largest = self.speckle.largest_fields()  # upper limits of the fields of a reading's frames
        if self._beam is None:
            fields = np.concatenate([largest, largest])
        else:
            shape = 2 * self._beam.steps, largest.shape[1]
            fields = np.broadcast_to(largest[0] + self._beam.amplitude, shape)
        boxes = count_boxes(self.exposure, self.ideal_recovery(), fields)
        if self._laser is None:
            return boxes
        weight = count_weights(self.exposure, self.ideal_recovery())
        return under_power(boxes, self._laser.power, weight)

    def _law_as_decoded(self) -> NoiseModel | None:
        """Return the law in the units of the readings: with each output's measured anchor in place of the exact one.

        A factor that all anchors share is no measurement error but other light, which is no part of the law: the mean
        anchor stays the described one. NoiseBelowCertificate: the anchors show more light than is certified.
        """
        law = super()._law_as_decoded()
        if not isinstance(law, PhotonCountNoise | FluctuatingCountNoise):
            return law
        measured, exact = self.recovery, self.ideal_recovery()
        light = float(np.sum(measured.anchor_dn) / np.sum(exact.anchor_dn))
        certified = self.certificate and self.certificate.noise
        limit = getattr(certified, "light_ratio_high", math.inf)
        if getattr(certified, "light_spread", None):  # some outputs of a window may have more than the mean
            limit = math.inf
        if light > _ANCHORS_ERROR * limit:
            raise NoiseBelowCertificate(
                f"device {self.name!r}: its anchor shows {light:.3g} times the described light, and its certificate "
                f"allows {limit:.3g}; bring the laser back, or calibrate the device again"
            )
        return rescaled(law, math.sqrt(light) * measured.decode()[0] / exact.decode()[0])

    def matrix(self) -> torch.Tensor:  # (n_outputs, n_inputs)
        """Return the matrix B of the readings B x + noise: float32, shape (n_outputs, n_inputs).

        From the medium, the measured anchor and the fixed pattern; hardware cannot tell it. Exact if no frame
        saturates and nothing is rounded. ValueError if it exceeds the description's dense_limit_mib.
        """
        scale, offset = self.recovery.decode()
        total, exposure = self.speckle.total, self.exposure
        if self._beam is not None:
            total = np.broadcast_to(self._beam.carrier[:, None], total.shape)
        responses = [self.speckle.responses(plane).T for plane in self._law.planes]
        rows = -torch.from_numpy(offset / self._law.mirrors)[:, None]
        for share, pixels, gain in exposure.parts():
            factor = 2 * scale * exposure.gain_dn * gain * (share * exposure.mean_power)
            parts = torch.from_numpy(total[:, pixels] * factor * self._law.modes**-0.5)[:, :, None]
            products = (part * each[pixels] for part, each in zip(parts, responses, strict=True))
            rows = reduce(torch.add, products) + rows
        return rows.float().to(self._torch_device)

    def reading_variance(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """Var[y] of readings of x, squared projection units, float64; exact, rounding and clipping included.

        A thousand outputs take some 0.2 s for each vector where pixels come near an end of the converter, else less.

        Far from the ends, and with noise above 0.4 DN, it is scale^2 times the sum over frames of w_f^2 times EMVA
        1288's eq. 9 (`opusim.camera.stages.Sensor.variance_dn2`). Fluctuating power with the covariance C between the
        frames adds (scale K)^2 sum over frames f, g of w_f w_g C_fg light_f light_g; rounding and the ends are then
        taken at mean power. A medium that moves within a call adds as much with the covariance of the frames' light in
        place of C_fg light_f light_g, given the present medium: the variance is that of the first reading of the next
        call. For fields of means m_f and covariances k_fg of each real part (`opusim.camera.speckle.motion`),
            Cov[|u_f|^2, |u_g|^2] = 4 k_fg m_f . m_g + 4 k_fg^2,      over M if M modes are averaged.

        Raises:
            NoiseUnknown: frames are dropped or repeated, the bench vibrates, or the medium moves behind cross-talk.
        """
        require_lawful_readings(self.name, self._settings)
        weights = self.recovery.weights
        variance = self.recovery.variance(self.exposure.moments(self.frame_rates(x))[1])
        variance += np.square(self.recovery.decode()[0]) * self.exposure.shared_variance_dn2(weights)
        covariance = self.exposure.power_covariance(weights.size)
        if covariance is not None:
            light = (self.frame_rates(x) - self.exposure.dark_e) / self.exposure.mean_power
            signed = weights[:, None, None] * light
            power = np.einsum("fbj,fg,gbj->bj", signed, covariance, signed)
            variance += np.square(self.recovery.decode()[0] * self.exposure.gain_dn) * power
        if self._motion is not None:
            fields, moved = self._expected_fields(x)
            inner = np.einsum("cfbj,cgbj->fgbj", fields, fields) + moved[..., None]
            powers = np.outer(weights, weights) * (
                self.exposure.mean_power**2 + (0.0 if covariance is None else covariance)
            )
            light = np.einsum("fg,fgb,fgbj->bj", powers, 4 / self._law.modes * moved, inner)
            light *= np.square(self.exposure.gain_e)
            variance += np.square(self.recovery.decode()[0] * self.exposure.gain_dn) * light
        return torch.from_numpy(variance)

    def reading_mean(self, x: torch.Tensor) -> torch.Tensor:  # (batch, n_inputs) -> (batch, n_outputs)
        """E[y] of readings of x, projection units, float64; exact, rounding and clipping included.

        It differs from B x by the biases of rounding and saturation: at most scale times half a step for each frame. Of
        a medium that moves within a call, e^-t of the present field remains; see `reading_variance`.
        """
        require_lawful_readings(self.name, self._settings)
        scale, offset = self.recovery.decode()
        shown = ternary_batch(x, self.n_inputs, self._torch_device)
        shift = self.recovery.shift(shown.sum(1, dtype=torch.float64).cpu().numpy())
        total = np.tensordot(self.recovery.weights, self.exposure.moments(self.frame_rates(x))[0], axes=1)
        return torch.from_numpy(scale * total - shift[:, None] * offset)

    def frame_rates(self, x: torch.Tensor) -> np.ndarray:  # (batch, n_inputs)
        """Return the expected electrons of all frames of each vector, float64, shape (frames, batch, n_outputs)."""
        fields, moved = self._expected_fields(x)
        rates = np.stack([self.exposure.rates(fields[:, frame]) for frame in range(fields.shape[1])])
        if self._motion is not None:  # the mean of |u|^2 is |E u|^2 and twice the variance of a real part
            added = 2 * np.einsum("ffb->fb", moved)[:, :, None]
            rates += self.exposure.mean_power * self.exposure.light_of(np.broadcast_to(added, rates.shape))
        return rates

    def _expected_fields(self, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return means of all frames' fields, (2, frames, batch, pixels), and covariances, (frames, frames, batch)."""
        shown = ternary_batch(x, self.n_inputs, self._torch_device)
        fields = self._frame_fields(self.speckle.fields(_binary_parts(shown)).double()).numpy()
        frames, rows = fields.shape[1], shown.shape[0]
        moved = np.zeros((frames, frames, rows))
        if self._motion is not None:
            kept, covariance = motion(self._motion.ahead(frames))
            kept = kept[:, None, None]
            fields = kept * fields
            if self._beam is not None:
                fields += (1 - kept) * np.tile(self._beam.fields(), 2)[:, :, None, None]
            parts = _binary_parts(shown)
            for row in range(rows):
                moved[..., row] = covariance * overlaps(self.speckle, parts[row::rows], *self._frames_shown)
        return fields, moved

    @cached_property
    def _frames_shown(self) -> tuple[np.ndarray, np.ndarray]:
        """The part of a vector that each frame of a reading shows (1: the negative one), and whether as complement."""
        half = 2 if self._beam is None else self._beam.steps
        frame = np.arange(2 * half)
        return frame // half, (frame % 2 > 0) & (self._beam is None)

    def _frame_fields(self, field: torch.Tensor, stream: NoiseStream | None = None) -> torch.Tensor:
        """Return fields of all frames of readings from those of `_binary_parts`: (2, frames, batch, pixels)."""
        if self._beam is not None:
            return self._beam.shown(field, stream)
        parts = field.view(field.shape[0], 2, 1, field.shape[1] // 2, -1)
        total = torch.from_numpy(self.speckle.total).to(field.dtype)[:, None, None, None, :]
        return torch.cat([parts, total - parts], dim=2).flatten(1, 2)

    @property
    def anchor_light_e(self) -> np.ndarray:
        """Described light of the anchor at each output, electrons, shape (n_outputs,)."""
        return self.exposure.light_of(np.sum(np.square(self.speckle.anchor), axis=0))

    def count_law(self, x: torch.Tensor, *, at_mean_power: bool = False) -> CountLaw:  # (vectors, n_inputs)
        """Return the law of the counts in readings of some ternary vectors, at any operating point.

        Light that fluctuates is refused unless the caller allows for it (`CountLaw.power`): rates are then those
        `at_mean_power`. ConfigError: shot noise is off. NoiseUnknown: the medium drifts, or frames may be lost.
        """
        self._require_open()
        require_fixed_rates(self.name, self._settings)
        exposure, settings = self.exposure, self._settings
        if self._laser is not None and not at_mean_power:
            raise ConfigError(
                self.name,
                "camera.light.power",
                "fluctuates, so counts have no fixed rates; device.noise states their law, or switch it off",
            )
        if not exposure.sensor.shot_noise:
            raise ConfigError(
                self.name, "camera.sensor.shot_noise", "is off, so counts have no law; switch it on"
            )
        return CountLaw(
            light_e=(self.frame_rates(x) - exposure.dark_e) / exposure.mean_power,
            bias_e=exposure.light.bias_e * exposure.response,
            ambient_e=exposure.light.ambient_e * exposure.response,
            dark_scale=exposure.dark_scale,
            nonlinearity=exposure.nonlinearity,
            response=exposure.response,
            offset_e=exposure.offset_e,
            exposure_us=exposure.light.exposure_us,
            temperature_c=None if settings.dark is None else settings.dark.temperature_c,
            dark=settings.dark_law(),
            sensor=exposure.sensor,
            recovery=self.ideal_recovery(),
            power=None if self._laser is None else self._laser.power,
            shortest_us=settings.light.shortest_exposure_us or 0.0,
            averages=settings.light.power is not None and bool(settings.light.power.averages),
        )

    def temperature_law(self, x: torch.Tensor) -> TemperatureLaw:  # (vectors, n_inputs)
        """Return how temperature sets the noise of readings, averaged over some ternary vectors and all outputs."""
        sensor, dark = self.exposure.sensor, self._settings.dark_law()
        if dark is None:
            raise ConfigError(
                self.name, "camera.dark", "is off, so temperature sets no noise; give dark current"
            )
        if not sensor.shot_noise:
            raise ConfigError(
                self.name, "camera.sensor.shot_noise", "is off, so dark current makes no noise; switch it on"
            )
        now = float(self.reading_variance(x).mean())
        squares = float(np.sum(np.square(self.recovery.weights)))
        per_e = float(squares * np.mean(np.square(self.recovery.decode()[0] * self.exposure.gain_dn)))
        return TemperatureLaw(
            floor_variance=max(now - per_e * self.exposure.dark_current_e, 0.0),
            variance_per_e=per_e,
            exposure_us=self.exposure.light.exposure_us,
            dark=dark,
        )

    def ideal_recovery(self) -> Recovery:
        """Return how readings would be decoded if the anchor were known exactly."""
        gain = self.exposure.gain_dn
        lit, blank = (np.sum(np.square(field), axis=0) for field in self._lit_and_blank())
        return self._decoder(gain * self.exposure.light_of(lit - blank))

    def _lit_and_blank(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the fields of the anchor or the reference, and of its blank frame; their intensities decode."""
        if self._beam is None:
            return self.speckle.anchor, self.speckle.blank
        blank = np.zeros_like(self.speckle.anchor)
        return blank + np.array([[self._beam.amplitude], [0.0]]), blank

    def _decoder(self, anchor_dn: np.ndarray) -> Recovery:
        """Return the decoding of readings for this intensity of the anchor, DN."""
        beam, mirrors = self._beam, self._law.mirrors
        gain, anchor_e = self.exposure.sensor.gain_dn_per_e, self.exposure.light.anchor_e
        # No smaller than a quarter of the map's least anchor: a pixel far below is a faulty one.
        lowest = self._law.lowest if beam is None else beam.amplitude**2 / (2 * mirrors)
        anchors = np.maximum(anchor_dn, lowest / 4 * gain * anchor_e)
        unit_dn = gain * anchor_e
        if beam is None:
            return Recovery(mirrors=mirrors, anchor_dn=anchors, unit_dn=unit_dn, modes=self._law.modes)
        return HologramRecovery(mirrors=mirrors, anchor_dn=anchors, unit_dn=unit_dn, beam=beam)

    # The camera itself

    def flat_frames(
        self,
        count: int,
        *,
        photons: float = 0.0,
        exposure_us: float | None = None,
        temperature_c: float | None = None,
    ) -> np.ndarray:
        """Return frames (count, n_outputs), DN, under uniform light instead of speckle, as EMVA 1288 wants them.

        `photons` is the mean on a pixel during the exposure, bias light comes on top; None: as described.
        """
        self._require_open()
        checks.integer(count=count, minimum=1)
        checks.non_negative(photons=photons)
        exposure = self._exposure_at(exposure_us, temperature_c)
        numbers = np.empty((count, self.n_outputs), dtype=np.float32)
        at_once = max(1, _NUMBERS_AT_ONCE // (2 * self.n_outputs))
        for start in range(0, count, at_once):
            pause()
            rows = min(at_once, count - start)
            numbers[start : start + rows] = exposure.expose_uniform(photons, rows, self._stream)
        if self._motion is not None:
            period_us = self.description.frames.period_us(self.n_outputs)
            periods = max(1.0, exposure.light.exposure_us / period_us)
            self._motion.pass_frames(self.speckle, count * periods)
        self._meter.count(count, exposure.light.exposure_us)
        return numbers

    def dimmed_frames(self, x: torch.Tensor, light: float) -> np.ndarray:  # (frames, n_inputs)
        """Return frames (frames, n_outputs), DN, of binary vectors, the laser at a multiple of the described light."""
        self._require_open()
        checks.positive(light=light)
        shown = BinaryFrames(x, self.n_inputs, packed=False).rows(0, len(x), self._torch_device)
        flux = light * self.exposure.light.anchor_flux_per_s
        dimmed_light = self.exposure.light.model_copy(update={"anchor_flux_per_s": flux})
        dimmed = replace(self.exposure, light=dimmed_light)
        self._meter.count(len(x))
        return dimmed.expose(self._fields(shown), self._stream).cpu().numpy()

    def anchor_frames(self, count: int) -> np.ndarray:
        """Return frames (count, n_outputs), DN, of the anchor, every mirror of the window on."""
        self._require_open()
        checks.integer(count=count, minimum=1)
        self._meter.count(count)
        return self.exposure.expose(self._anchors(count, self._stream), self._stream).numpy()

    def measure_anchor(self) -> None:
        """Measure the anchor again, at the medium's present state, and count the frames."""
        self._require_open()
        self._measure_anchor()

    def drift_to(self, time_s: float) -> None:
        """Move the medium to a time since time 0, seconds; the anchor stays as it was measured.

        Entries of the field's two real media are stationary Ornstein-Uhlenbeck processes with correlation
        exp(-|t - s| / decorrelation_s) between any two times (`opusim.camera.speckle`), times a factor for each hop
        of the laser (`opusim.camera.speckle`). With ``drift.within_call`` the next frame is exposed at that time, and
        the medium moves on with every frame. ConfigError: the description has no drift.
        """
        checks.non_negative(time_s=time_s)
        if self._settings.drift is None:
            raise ConfigError(self.name, "camera.drift", "missing; this medium does not drift")
        time = time_s / self._settings.drift.decorrelation_s
        if self._motion is None:
            self.speckle.drift_to(time if self._hops is None else self._hops.own_time(time))
        else:
            self._motion.move_to(self.speckle, time)

    # The interface of NoisyDevice

    def _open(self) -> None:
        anchor = self.speckle.anchor
        if anchor.shape[1] != self.n_outputs:  # the speckle also has the neighbours that cross-talk needs
            anchor = anchor[:, np.searchsorted(self.speckle.pixels, self.pixels)]
        shares = saturated_shares(self.exposure, anchor, None if self._beam is None else self._beam.fields())
        require_unsaturated(self.name, self._settings, self.exposure, shares)
        self._measure_anchor()

    @override
    def _saturated_share(self, vectors: torch.Tensor) -> float:
        """Show every frame of the projections, and the anchor."""
        sensor = self.exposure.sensor
        full_dn = sensor.black_level_dn + self.exposure.gain_dn * sensor.saturation_e
        end = torch.as_tensor(np.minimum(sensor.top_dn, full_dn))
        shown = vectors.to(self._torch_device)
        if self._motion is None:
            fields = self._frame_fields(self.speckle.fields(_binary_parts(shown))).flatten(1, 2)
        else:
            fields = self._fields_in_turn(shown)
        fields = torch.cat([fields, self._anchors(1, self._stream)], dim=1)
        frames = self.exposure.expose(fields, self._stream)
        self._meter.count(frames.shape[0])
        return float((frames >= end - 0.5).float().mean(dim=1).max())

    @override
    def _pattern_frames(self, patterns: torch.Tensor) -> np.ndarray:
        """Show the patterns with the reference beam shut."""
        patterns, frame = patterns.to(self._torch_device), np.arange(2 * len(patterns))
        rows, flip = frame // 2, frame % 2 > 0
        if self._motion is None:
            shown = self.speckle.fields_of(patterns, rows, flip)
        else:
            shown = self._motion.fields(self.speckle, patterns, rows, flip, self._stream)
        self._meter.count(shown.shape[1])
        return self.exposure.expose(shown, self._stream).numpy()

    @property
    def _saturation_work(self) -> DeviceWork:
        settings = self.description.monitor
        vectors = 0 if settings is None else settings.reference_vectors
        return DeviceWork(frames=vectors * self.description.frames.frames_per_projection + 1, calls=1)

    @override
    def upkeep(self, first: int, end: int, *, inspections: int = 0) -> DeviceWork:
        """Add the repeated measurements of the anchor of a medium that drifts."""
        checks_of_monitor = super().upkeep(first, end, inspections=inspections)
        drift = self._settings.drift
        if drift is None or drift.reanchor_steps is None or end <= first:
            return checks_of_monitor
        before, last = first // drift.reanchor_steps, (end - 1) // drift.reanchor_steps
        anchors = last - before + (before > 0)  # opening the device measured the first one
        return checks_of_monitor + DeviceWork(frames=2 * self._settings.anchor.frames, calls=1).times(anchors)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty((x.shape[0], self.n_outputs), dtype=torch.float32)
        at_once = max(1, _NUMBERS_AT_ONCE // (2 * self.recovery.weights.size * self.n_outputs))
        for start in range(0, x.shape[0], at_once):
            pause()
            part = x[start : start + at_once]
            self._read_rows(y[start : start + part.shape[0]], part)
        return y.to(self._torch_device)

    def _read_rows(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Read some vectors into y."""
        decode = self.recovery.decode()
        shift = self.recovery.shift(x.sum(1, dtype=torch.float64).cpu().numpy())
        if self._beam is None and self._motion is None:
            total = self.speckle.total.astype(np.float32)
            self.exposure.recover(
                y, self.speckle.fields(_binary_parts(x)), total, decode, shift, self._stream
            )
            return
        numbers = self.exposure.expose(self._fields_in_turn(x), self._stream).double().numpy()
        frames = numbers.reshape(x.shape[0], -1, self.n_outputs)
        signed = np.einsum("f,rfj->rj", self.recovery.weights, frames)
        y.copy_(torch.from_numpy(decode[0] * signed - shift[:, None] * decode[1]))

    def _fields_in_turn(self, x: torch.Tensor) -> torch.Tensor:
        """Return fields of the frames of vectors, a vector's frames one after the other: (2, frames, pixels)."""
        beam, rows = self._beam, x.shape[0]
        if self._motion is None:
            shown = self._frame_fields(self.speckle.fields(_binary_parts(x)), self._stream)
            return shown.transpose(1, 2).flatten(1, 2).contiguous()
        part, flip = self._frames_shown
        pattern = np.add.outer(np.arange(rows), rows * part).reshape(-1)
        parts, flips = _binary_parts(x), np.tile(flip, rows)
        fields = self._motion.fields(self.speckle, parts, pattern, flips, self._stream)
        if beam is not None:
            light = beam.in_turn(rows, self._stream).reshape(2, -1, 1)
            fields.add_(torch.from_numpy(light).to(fields.dtype))
        return fields

    def _fields(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the fields of binary frames that are exposed in turn."""
        if self._motion is None:
            return self.speckle.fields(frames)
        rows = np.arange(len(frames))
        return self._motion.fields(self.speckle, frames, rows, rows < 0, self._stream)

    def _anchors(self, count: int, stream: NoiseStream, *, is_blank: bool = False) -> torch.Tensor:
        """Return the fields of frames of the anchor, or of blank frames, that are exposed in turn."""
        if self._motion is None:
            field = self.speckle.blank if is_blank else self.speckle.anchor
            return torch.from_numpy(field.astype(np.float32))[:, None, :].expand(-1, count, -1)
        nothing, rows = torch.zeros(1, self.n_inputs), np.zeros(count, dtype=np.int64)
        return self._motion.fields(self.speckle, nothing, rows, np.full(count, not is_blank), stream)

    def _intensities(self, x: torch.Tensor) -> torch.Tensor:
        return self.exposure.expose(self._fields(x), self._stream).to(self._torch_device)

    def _seek(self, step: int) -> None:
        self._stream.seek(step)
        if self._laser is not None:
            self._laser.seek(step)
        drift = self._settings.drift
        if drift is None:
            return
        due = 0 if drift.reanchor_steps is None else step - step % drift.reanchor_steps
        if due != self._anchored_at:
            self.drift_to(due * drift.seconds_per_step)
            self._measure_anchor(due)
        self.drift_to(step * drift.seconds_per_step)
        if self._motion is not None and due == step:  # the step begins with the frames of its anchor
            self._motion.pass_frames(self.speckle, 2 * self._settings.anchor.frames)

    def _measure_anchor(self, step: int = 0) -> None:
        """Average anchor frames and blank frames, with noise of a separate stream at a training step."""
        self._anchored_at = step
        frames = self._settings.anchor.frames
        if frames == 0:
            self._recovery = self.ideal_recovery()
            return
        stream = noise_stream(self.mode, self._seed, f"anchor of device {self.kind}")
        stream.seek(step)
        if self._motion is None or self._beam is not None:
            lit, blank = (
                self.exposure.mean_of(torch.from_numpy(field.astype(np.float32))[:, None, :], frames, stream)
                for field in self._lit_and_blank()
            )
            if self._motion is not None:  # these frames do not show the medium
                self._motion.pass_frames(self.speckle, 2 * frames)
        else:
            lit, blank = (
                self.exposure.mean_of(partial(self._anchors, stream=stream, is_blank=blank), frames, stream)
                for blank in (False, True)
            )
        self._meter.count(2 * frames)
        self._recovery = self._decoder(lit - blank)


def _binary_parts(x: torch.Tensor) -> torch.Tensor:
    """Return the positive parts of vectors, then the negative ones: (2 batch, n_inputs), entries 0 and 1."""
    return torch.cat([x.clamp(min=0), x.neg().clamp_(min=0)])
