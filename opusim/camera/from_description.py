"""Build the parts of a camera from its description, and say in text what a description holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opusim.camera.exposure import Exposure
from opusim.camera.holography import ReferenceBeam
from opusim.camera.imperfect import CrossTalk, ImperfectExposure, PixelFaults, Pointing, with_neighbours
from opusim.camera.laser import Laser, LaserLaw
from opusim.camera.mirrors import FaultyMirrors, MirrorFaults
from opusim.camera.speckle import Speckle, SpeckleLaw
from opusim.camera.stages import FixedPattern, Light, Sensor
from opusim.description.camera import CameraSettings, PixelSettings, TransferSettings
from opusim.description.schema import DeviceDescription, FrameSettings, MediumSettings
from opusim.errors import ConfigError
from opusim.randomness.streams import derive_seed
from opusim.tables import unit_of


def speckle_law_of(description: DeviceDescription, n_inputs: int) -> SpeckleLaw:
    """Return the law of the fields for a window of n_inputs mirrors.

    The reference mirrors are as many as give them their share of the window: share / (1 - share) n_inputs, rounded.
    With a reference beam no pixel is masked.

    Raises:
        ConfigError: the anchor would have fewer than two mirrors.
    """
    camera, medium = camera_sections(description)
    share, masks = camera.anchor.reference_share, camera.reference_beam is None
    law = SpeckleLaw(
        n_inputs=n_inputs,
        reference=round(n_inputs * share / (1 - share)),
        seed=medium.seed,
        lowest=camera.anchor.lowest if masks else 0.0,
        highest=math.inf if camera.anchor.highest is None or not masks else camera.anchor.highest,
        grain_correlation=camera.grain_correlation,
        grain_pixels=camera.grain_pixels or 1,
        dense_limit_mib=medium.dense_limit_mib,
    )
    if law.mirrors < 2:
        reason = (
            f"a window of {n_inputs} input has an anchor of one mirror; raise reference_share to 0.5 or more"
        )
        raise ConfigError(description.name, "camera.anchor.reference_share", reason)
    return law


def speckle_of(description: DeviceDescription, n_inputs: int, n_outputs: int) -> Speckle:
    """Return the medium as the camera sees it, with the faults of the mirrors.

    With cross-talk, or an image that vibrates, its pixels are those of the outputs and their neighbours
    (`with_neighbours`).
    """
    camera, medium = camera_sections(description)
    law, mirrors = speckle_law_of(description, n_inputs), camera.mirrors
    pixels, vibration = None, camera.vibration
    spreads = camera.pixels is not None and camera.pixels.crosstalk > 0
    if spreads or (vibration is not None and vibration.pointing_rms_pixels):
        pixels, _ = with_neighbours(Speckle(law, n_outputs, description.name).pixels)
        n_outputs = pixels.size
    if mirrors is None:
        return Speckle(law, n_outputs, description.name, pixels)
    faults = MirrorFaults(
        stuck_on=mirrors.stuck_on,
        stuck_off=mirrors.stuck_off,
        leak=0.0 if mirrors.contrast is None else mirrors.contrast**-0.5,
        seed=derive_seed(medium.seed, "stuck mirrors"),
    )
    return FaultyMirrors(law, faults, n_outputs, description.name, pixels)


def reference_beam_of(description: DeviceDescription, mirrors: int, n_outputs: int) -> ReferenceBeam | None:
    """Return the reference beam of a description, or None without one.

    Its intensity over that of an anchor of so many mirrors, 2 mirrors in mirror units, is that of their fluxes.
    """
    camera, _ = camera_sections(description)
    beam, vibration = camera.reference_beam, camera.vibration
    if beam is None:
        return None
    return ReferenceBeam(
        amplitude=math.sqrt(2 * mirrors * beam.flux_per_s / camera.light.anchor_flux_per_s),
        steps=beam.steps,
        step_error=beam.step_error,
        phase_rms=0.0 if vibration is None else vibration.phase_rms_rad,
        correlation=_frame_correlation(
            description, n_outputs, None if vibration is None else vibration.correlation_us
        ),
    )


def _frame_correlation(description: DeviceDescription, n_outputs: int, time_us: float | None) -> float:
    """Return the correlation of successive frames of a process with a correlation time; None: they are independent."""
    return 0.0 if time_us is None else math.exp(-description.frames.period_us(n_outputs) / time_us)


def laser_of(description: DeviceDescription, n_outputs: int, seed: int | None) -> Laser | None:
    """Return the laser of a description, or None if its power is constant.

    Args:
        description: one with a camera.
        n_outputs: of the window, which sets the time from frame to frame.
        seed: of the slow drift; None draws one.
    """
    camera, _ = camera_sections(description)
    power = camera.light.power
    if power is None:
        return None
    drift_s = power.drift_s
    law = LaserLaw(
        law=power.law,
        rms=power.rms,
        correlation=_frame_correlation(description, n_outputs, power.correlation_us),
        drift_rms=power.drift_rms or 0.0,
        drift_per_step=0.0 if drift_s is None else (power.seconds_per_step or 0.0) / drift_s,
    )
    return Laser(law, seed)


def exposure_of(
    description: DeviceDescription,
    mirrors: int,
    pixels: np.ndarray,
    exposure_us: float | None = None,
    temperature_c: float | None = None,
    laser: Laser | None = None,
) -> Exposure:
    """Return the camera's stages at some pixels.

    Args:
        description: one with a camera.
        mirrors: mirrors of the anchor.
        pixels: numbers of the outputs' pixels, int64, increasing.
        exposure_us: another exposure than the description's, microseconds.
        temperature_c: another temperature, degrees Celsius.
        laser: the laser, if its power fluctuates.
    """
    camera, medium = camera_sections(description)
    light = light_of(camera, exposure_us)
    pattern = FixedPattern(
        prnu=camera.sensor.prnu, dsnu_e=camera.sensor.dsnu_e, seed=derive_seed(medium.seed, "fixed pattern")
    )
    window = int(pixels[0]), int(pixels[-1]) + 1
    stages: dict[str, Any] = {
        "light": light,
        "sensor": sensor_of(camera, description.frames),
        "mirrors": mirrors,
        "dark_current_e": dark_charge_e(camera, light.exposure_us, temperature_c),
        "response": pattern.response(*window)[pixels - window[0]],
        "offset_e": pattern.offset_e(*window)[pixels - window[0]],
    }
    pointing = _pointing(description, pixels)
    if laser is None and camera.pixels is None and camera.transfer is None and pointing is None:
        return Exposure(**stages)
    settings, transfer = camera.pixels or PixelSettings(), camera.transfer or TransferSettings()
    faults = PixelFaults(
        hot_share=settings.hot_share,
        hot_factor=settings.hot_factor or 1.0,
        dead_share=settings.dead_share,
        dcnu=settings.dcnu,
        seed=derive_seed(medium.seed, "pixel faults"),
    )
    stages["response"] = np.where(faults.dead(pixels), 0.0, stages["response"])
    return ImperfectExposure(
        **stages,
        laser=laser,
        dark_scale=faults.dark_scale(pixels),
        crosstalk=_crosstalk(settings.crosstalk, pixels, pattern, faults),
        nonlinearity=settings.nonlinearity,
        dropped=transfer.dropped,
        repeated=transfer.repeated,
        pointing=pointing,
    )


def _pointing(description: DeviceDescription, pixels: np.ndarray) -> Pointing | None:
    """Return how the image vibrates at the outputs' pixels, or None if it rests."""
    vibration = camera_sections(description)[0].vibration
    if vibration is None or vibration.pointing_rms_pixels == 0:
        return None
    correlation = _frame_correlation(description, pixels.size, vibration.correlation_us)
    places = with_neighbours(pixels)[1]
    return Pointing(rms=vibration.pointing_rms_pixels, correlation=correlation, places=places)


def _crosstalk(
    share: float, pixels: np.ndarray, pattern: FixedPattern, faults: PixelFaults
) -> CrossTalk | None:
    """Return the cross-talk of the outputs' pixels with their neighbours, or None if it is off.

    A dead pixel collects nothing and gives nothing away.
    """
    if share == 0:
        return None
    wide, places = with_neighbours(pixels)
    window = int(wide[0]), int(wide[-1]) + 1
    response = pattern.response(*window)[wide - window[0]]
    return CrossTalk(share=share, response=np.where(faults.dead(wide), 0.0, response), places=places)


def light_of(camera: CameraSettings, exposure_us: float | None = None) -> Light:
    """Return the light of a camera, at its exposure or another one, microseconds."""
    settings = camera.light
    return Light(
        anchor_flux_per_s=settings.anchor_flux_per_s,
        bias_flux_per_s=settings.bias_flux_per_s,
        ambient_flux_per_s=settings.ambient_flux_per_s or 0.0,
        quantum_efficiency=settings.quantum_efficiency,
        exposure_us=settings.exposure_us if exposure_us is None else exposure_us,
    )


def sensor_of(camera: CameraSettings, frames: FrameSettings) -> Sensor:
    """Return the stages behind the light, without the fixed pattern, in the numbers that the link sends."""
    sensor, bits = Sensor(**camera.sensor.model_dump(exclude={"prnu", "dsnu_e"})), frames.packed_bits
    return sensor if bits is None else sensor.sent_in(bits)


def dark_charge_e(camera: CameraSettings, exposure_us: float, temperature_c: float | None = None) -> float:
    """Return the dark charge of a frame, electrons: current times exposure; 0 if dark current is off.

    Raises:
        ValueError: the sensor does not work at this temperature.
    """
    law = camera.dark_law()
    if camera.dark is None or law is None:
        return 0.0
    wanted = camera.dark.temperature_c if temperature_c is None else temperature_c
    return law.current_e_per_s(wanted) * exposure_us * 1e-6


def camera_sections(description: DeviceDescription) -> tuple[CameraSettings, MediumSettings]:
    """Return the two sections that a twin needs.

    Raises:
        ConfigError: one is missing.
    """
    if description.camera is None or description.medium is None:
        key = "medium" if description.medium is None else "camera"
        raise ConfigError(description.name, key, "missing; a camera needs [medium] and [camera]")
    return description.camera, description.medium


def camera_lines(camera: CameraSettings, frames: FrameSettings) -> str:
    """Return where the light of a mean pixel goes, what share of its variance each stage makes, and what is sent."""
    light, sensor = light_of(camera), sensor_of(camera, frames)
    dark = dark_charge_e(camera, light.exposure_us)
    shot = sensor.variance_dn2(1.0) - sensor.variance_dn2(0.0)  # DN² per electron
    parts = {
        "photon shot noise": shot * light.anchor_e,
        "bias light": shot * light.bias_e,
        **({"ambient light": shot * light.ambient_e} if light.ambient_e else {}),
        "dark current": shot * dark,
        "read noise": (sensor.gain_dn_per_e * sensor.read_noise_e) ** 2,
        "rounding": 0.0 if sensor.adc_bits is None else 1 / 12,
    }
    total = sum(float(part) for part in parts.values())
    shares = (
        ", ".join(f"{name} {float(part) / total:.3%}" for name, part in parts.items()) if total else "none"
    )
    at = "" if camera.dark is None else f" at {camera.dark.temperature_c:g} °C"
    sent = (
        ""
        if frames.packing is None
        else f"\nsent as {frames.packing}: {sensor.adc_bits} of the converter's {camera.sensor.adc_bits} bits; DN are "
        "those that arrive"
    )
    return (
        f"a mean pixel of the anchor frame: {light.anchor_e:.4g} e⁻ of light, {light.bias_e:.4g} e⁻ of bias light, "
        f"{dark:.4g} e⁻ of dark charge{at}; {sensor.gain_dn_per_e * light.anchor_e:.4g} DN above black, saturated at "
        f"{sensor.saturation_e:.5g} e⁻\nvariance of a frame there: {total:.4g} DN²: {shares}\n"
        "noise: Poisson counts, whose rates depend on what is shown; a reading takes four frames"
        f"{sent}"
    )


def number_rows(description: DeviceDescription) -> list[tuple[str, ...]]:
    """Return key, value, unit, status and source of every number."""
    rows: list[tuple[str, ...]] = []
    for key, value in description.numbers().items():
        origin = description.provenance.get(key)
        status, source = (origin.status, origin.source) if origin else ("", "")
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        rows.append((key, shown, unit_of(key), status or ("off" if value == 0 else ""), source))
    return rows


def noise_line(description: DeviceDescription) -> str:
    """Return what the noise of a reading is, as text."""
    noise = description.noise
    if description.camera is not None:
        return camera_lines(description.camera, description.frames)
    if description.crossbar is not None:
        rounded = "" if description.crossbar.converter.adc_bits is None else ", then rounded by the converter"
        return f"noise: Gaussian, its standard deviation depends on input and weights{rounded}"
    if noise is None:
        return (
            "noise: none"
            if description.kind == "ideal"
            else f"noise: as the kind {description.kind!r} defines it"
        )
    line = f"noise: Gaussian, standard deviation {noise.value():.6g} projection units at each output"
    if noise.temperature_law is not None:
        temperature_c = noise.temperature_law.temperature_c
        share = noise.temperature_law.law().dark_share(temperature_c)
        line += f"; at {temperature_c:g} °C the dark current makes {share:.3%} of its variance"
    return line
