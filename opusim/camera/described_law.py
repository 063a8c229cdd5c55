"""What a description says of a camera's readings: boxes of the counts' rates, and why some cameras have no law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from opusim.camera.exposure import MOST_SATURATED, Exposure, Recovery
from opusim.camera.imperfect import ImperfectExposure
from opusim.description.camera import CameraSettings
from opusim.errors import ConfigError, NoiseUnknown
from opusim.noise import FluctuatingCountNoise, LightPower, PhotonCountNoise


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
    rest, most_of_rest = _rest_of_a_frame(exposure)
    counts = np.square(slope * exposure.sensor.gain_dn_per_e) * exposure.floor_e
    hidden = np.divide(-rest, counts, out=np.zeros_like(rest), where=(rest < 0) & (counts > 0))
    shown = np.maximum(
        1.0 - hidden, 0.0
    )  # share of the counts' variance that no rounding hides, at every rate
    most = frames * np.square(scale) * most_of_rest
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


def _rest_of_a_frame(exposure: Exposure) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest variance of a number beyond K^2 rate, DN squared, for every frame; see `rounding_limit_dn2`.

    Where dark frames reach the converter's lower end, their exact variance is the least. It is below 0 where steps are
    so coarse that rounding hides the counts' own noise.
    """
    sensor = exposure.sensor
    middle, limit = sensor.variance_dn2(0.0), sensor.rounding_limit_dn2(exposure.floor_e)
    exact = sensor.moments(exposure.floor_e, exposure.offset_e)[1]
    counts = sensor.gain_dn_per_e**2 * exposure.floor_e * float(sensor.shot_noise)
    least = np.minimum(middle - limit, exact - counts)
    return least, middle + limit


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
