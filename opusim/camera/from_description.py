"""Build the parts of a camera from its description, and say in text and as laws of readings what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from opusim import checks
from opusim.camera.exposure import MOST_SATURATED, Exposure, Recovery, ReferenceBeam
from opusim.camera.from_description import ImperfectExposure, Laser, dark_scale, dead_pixels, with_neighbours
from opusim.camera.imperfect import CrossTalk, LaserLaw, Pointing
from opusim.camera.speckle import FaultyMirrors, Speckle, SpeckleLaw
from opusim.camera.stages import Sensor, pixel_normals
from opusim.description.camera import CameraSettings, PixelSettings, TransferSettings
from opusim.description.schema import DeviceDescription, FrameSettings, MediumSettings
from opusim.errors import ConfigError, NoiseUnknown
from opusim.noise import FluctuatingCountNoise, LightPower, PhotonCountNoise
from opusim.randomness.streams import derive_seed
from opusim.tables import unit_of

_PRNU_PLANE, _DSNU_PLANE = 16, 17  # counter words that no medium uses


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
    seed = derive_seed(medium.seed, "stuck mirrors")
    return FaultyMirrors(law, mirrors, seed, n_outputs, description.name, pixels)


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
    light = camera.light
    if exposure_us is not None:
        checks.positive(exposure_us=exposure_us)
        light = light.model_copy(update={"exposure_us": exposure_us})
    seed = derive_seed(medium.seed, "fixed pattern")

    def response(places: np.ndarray) -> np.ndarray:
        return 1.0 + camera.sensor.prnu * pixel_normals(seed, _PRNU_PLANE, places)

    stages: dict[str, Any] = {
        "light": light,
        "sensor": sensor_of(camera, description.frames),
        "mirrors": mirrors,
        "dark_current_e": dark_charge_e(camera, light.exposure_us, temperature_c),
        "response": response(pixels),
        "offset_e": camera.sensor.dsnu_e * pixel_normals(seed, _DSNU_PLANE, pixels),
    }
    vibration, pointing, crosstalk = camera.vibration, None, None
    if vibration is not None and vibration.pointing_rms_pixels:
        correlation = _frame_correlation(description, pixels.size, vibration.correlation_us)
        places = with_neighbours(pixels)[1]
        pointing = Pointing(rms=vibration.pointing_rms_pixels, correlation=correlation, places=places)
    if laser is None and camera.pixels is None and camera.transfer is None and pointing is None:
        return Exposure(**stages)
    faults, transfer = camera.pixels or PixelSettings(), camera.transfer or TransferSettings()
    seed_of_faults = derive_seed(medium.seed, "pixel faults")
    if faults.crosstalk:
        # with the neighbours; a dead pixel collects nothing and gives nothing away
        wide, places = with_neighbours(pixels)
        sensitive = np.where(dead_pixels(faults, seed_of_faults, wide), 0.0, response(wide))
        crosstalk = CrossTalk(share=faults.crosstalk, response=sensitive, places=places)
    stages["response"] = np.where(dead_pixels(faults, seed_of_faults, pixels), 0.0, stages["response"])
    return ImperfectExposure(
        **stages,
        laser=laser,
        dark_scale=dark_scale(faults, seed_of_faults, pixels),
        crosstalk=crosstalk,
        nonlinearity=faults.nonlinearity,
        dropped=transfer.dropped,
        repeated=transfer.repeated,
        pointing=pointing,
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
    noise, camera, frames = description.noise, description.camera, description.frames
    if camera is not None:
        # where the light of a mean pixel goes, what share of its variance each stage makes, and what is sent
        light, sensor = camera.light, sensor_of(camera, frames)
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
            ", ".join(f"{name} {float(part) / total:.3%}" for name, part in parts.items())
            if total
            else "none"
        )
        at = "" if camera.dark is None else f" at {camera.dark.temperature_c:g} °C"
        sent = (
            ""
            if frames.packing is None
            else f"\nsent as {frames.packing}: {sensor.adc_bits} of the converter's {camera.sensor.adc_bits} bits; DN "
            "are those that arrive"
        )
        return (
            f"a mean pixel of the anchor frame: {light.anchor_e:.4g} e⁻ of light, {light.bias_e:.4g} e⁻ of bias light, "
            f"{dark:.4g} e⁻ of dark charge{at}; {sensor.gain_dn_per_e * light.anchor_e:.4g} DN above black, saturated "
            f"at {sensor.saturation_e:.5g} e⁻\nvariance of a frame there: {total:.4g} DN²: {shares}\n"
            "noise: Poisson counts, whose rates depend on what is shown; a reading takes four frames"
            f"{sent}"
        )
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


# Laws of readings


def count_boxes(exposure: Exposure, recovery: Recovery, largest_fields: np.ndarray) -> PhotonCountNoise:
    """Return the counts of a reading's frames at each output, with boxes of rates.

    Rates lie between bias light with dark current, and those of the largest fields with ambient light.

    Args:
        exposure: the camera's stages.
        recovery: how readings are decoded, with the exact anchor.
        largest_fields: upper limits of the fields of a reading's frames, shape (frames, pixels), with the neighbours
            that cross-talk needs.
    """
    high = exposure.dark_e + exposure.light_of(np.square(largest_fields))
    low = np.broadcast_to(exposure.floor_e, high.shape)
    scale, weight = recovery.decode()[0], count_weights(exposure, recovery)
    slope = exposure.least_slope if isinstance(exposure, ImperfectExposure) else 1.0
    frames = float(np.sum(np.square(recovery.weights)))
    # Least and largest variance of a number beyond K^2 rate, DN squared (`Sensor.rounding_limit_dn2`). Where dark
    # frames reach the converter's lower end, their exact variance is the least. It is below 0 where steps are so coarse
    # that rounding hides the counts' own noise.
    sensor = exposure.sensor
    middle, limit = sensor.variance_dn2(0.0), sensor.rounding_limit_dn2(exposure.floor_e)
    exact = sensor.moments(exposure.floor_e, exposure.offset_e)[1]
    shot = sensor.gain_dn_per_e**2 * exposure.floor_e * float(sensor.shot_noise)
    rest = np.minimum(middle - limit, exact - shot)
    counts = np.square(slope * sensor.gain_dn_per_e) * exposure.floor_e
    hidden = np.divide(-rest, counts, out=np.zeros_like(rest), where=(rest < 0) & (counts > 0))
    shown = np.maximum(1.0 - hidden, 0.0)  # share of the counts' variance that rounding never hides
    most = frames * np.square(scale) * (middle + limit)
    most = most + (1 - slope**2 * shown) * np.sum(np.square(weight) * high, axis=0)
    return PhotonCountNoise(
        rate_low=low,
        rate_high=high,
        weight=slope * np.sqrt(shown) * weight,
        added_variance=frames * np.square(scale) * np.maximum(rest, 0.0),
        added_variance_high=most,
    )


def count_weights(exposure: Exposure, recovery: Recovery) -> np.ndarray:
    """Return what an electron more in each frame adds to a reading, without nonlinearity: (frames, n_outputs)."""
    return np.asarray(exposure.sensor.gain_dn_per_e * recovery.decode()[0] * recovery.weights[:, None])


def under_power(boxes: PhotonCountNoise, power: LightPower, weight: np.ndarray) -> FluctuatingCountNoise:
    """Return the law whose counts at mean power have these boxes.

    Args:
        boxes: the steady law.
        power: law of the power.
        weight: `count_weights`; above those of the boxes if the read-out bends or rounding hides noise.
    """
    light = np.asarray(boxes.rate_high) - np.asarray(boxes.rate_low)
    totals = [np.sum(np.abs(each) * light, axis=0) for each in (weight, np.asarray(boxes.weight))]
    beyond = power.rms**2 * np.maximum(np.square(totals[0]) - np.square(totals[1]), 0.0)
    return FluctuatingCountNoise(
        rate_low=boxes.rate_low,
        rate_high=boxes.rate_high,
        power_law=power.law,
        power_rms=power.rms,
        weight=boxes.weight,
        added_variance=boxes.added_variance,
        added_variance_high=np.asarray(boxes.added_variance_high) + beyond,
    )


def rescaled(
    law: PhotonCountNoise | FluctuatingCountNoise, factor: np.ndarray
) -> PhotonCountNoise | FluctuatingCountNoise:
    """Return the law of readings that are `factor` times as large at each output: the same counts in other units.

    Args:
        law: of readings that are weighted sums of counts.
        factor: above 0, shape (n_outputs,).
    """
    square, most = np.square(factor), law.added_variance_high
    return replace(
        law,
        weight=None if law.weight is None else law.weight * factor,
        added_variance=law.added_variance * square,
        added_variance_high=None if most is None else most * square,
    )


def require_fixed_rates(name: str, settings: CameraSettings) -> None:
    """Refuse to state a law for a whole run of a medium that moves, or of frames that may be lost.

    Raises:
        NoiseUnknown: the medium drifts, frames are dropped or repeated, or the bench vibrates.
    """
    require_lawful_readings(name, settings)
    if settings.drift is not None:
        raise NoiseUnknown(
            f"device {name!r}: its medium drifts, so no box holds its rates for a whole run; switch "
            "camera.drift off to state a law"
        )


def require_lawful_readings(name: str, settings: CameraSettings) -> None:
    """Refuse to state moments or a law of readings that may lack a frame, or whose frames vibrate.

    Raises:
        NoiseUnknown: frames are dropped or repeated, or the bench vibrates.
    """
    transfer, vibration = settings.transfer, settings.vibration
    if vibration is not None and (vibration.pointing_rms_pixels or vibration.phase_rms_rad):
        raise NoiseUnknown(
            f"device {name!r}: camera.vibration moves the light of all outputs together from frame to frame, "
            "and its noise has no law here; still the bench, or set pointing_rms_pixels and phase_rms_rad to 0"
        )
    if transfer is not None and (transfer.dropped or transfer.repeated):
        raise NoiseUnknown(
            f"device {name!r}: camera.transfer drops or repeats frames, so a reading may hold another's frame "
            "and has no law; mend the transfer, or set dropped and repeated to 0"
        )


def require_unsaturated(
    name: str, settings: CameraSettings, exposure: Exposure, shares: Mapping[float, float]
) -> None:
    """Refuse a configuration whose frames are full at too many outputs.

    Args:
        name: of the device.
        settings: its camera.
        exposure: the camera's stages.
        shares: share of full outputs by the share of mirrors that are on (`saturated_shares`).

    Raises:
        ConfigError: more outputs are full than the description allows.
    """
    allowed = settings.anchor.most_saturated or MOST_SATURATED
    worst = max(shares, key=shares.__getitem__)
    if shares[worst] <= allowed:
        return
    frame = "the anchor" if worst == 1 else f"a frame with {worst:.0%} of the mirrors on"
    sensor, light = exposure.sensor, exposure.light
    raise ConfigError(
        name,
        "camera.sensor",
        f"{100 * shares[worst]:.1f} % of the outputs are full in {frame}, at most {100 * allowed:g} % may be: a "
        f"pixel ends at {sensor.saturation_e:.4g} electrons, the anchor has {light.anchor_e:.4g} on average; lower "
        "sensor.gain_dn_per_e, light.exposure_us or light.anchor_flux_per_s, or raise sensor.adc_bits "
        "(anchor.most_saturated lets more pass, but entries of B are then not N(0, 1))",
    )
