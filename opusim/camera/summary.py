"""A camera in three lines for people."""

from __future__ import annotations

from opusim.camera.stages import Light
from opusim.camera.twin import dark_charge_e, sensor_of
from opusim.camera_schema import CameraSettings


def camera_lines(camera: CameraSettings) -> str:
    """Where the light of a mean pixel goes, and what share of its variance each stage makes."""
    light, sensor = Light(**camera.light.model_dump()), sensor_of(camera)
    dark = dark_charge_e(camera, light.exposure_us)
    shot = sensor.variance_dn2(1.0) - sensor.variance_dn2(0.0)  # DN² per electron
    parts = {
        "photon shot noise": shot * light.anchor_e,
        "bias light": shot * light.bias_e,
        "dark current": shot * dark,
        "read noise": (sensor.gain_dn_per_e * sensor.read_noise_e) ** 2,
        "rounding": 0.0 if sensor.adc_bits is None else 1 / 12,
    }
    total = sum(float(part) for part in parts.values())
    shares = (
        ", ".join(f"{name} {float(part) / total:.3%}" for name, part in parts.items()) if total else "none"
    )
    at = "" if camera.dark is None else f" at {camera.dark.temperature_c:g} °C"
    return (
        f"a mean pixel of the anchor frame: {light.anchor_e:.4g} e⁻ of light, {light.bias_e:.4g} e⁻ of bias light, "
        f"{dark:.4g} e⁻ of dark charge{at}; {sensor.gain_dn_per_e * light.anchor_e:.4g} DN above black, saturated at "
        f"{sensor.saturation_e:.5g} e⁻\nvariance of a frame there: {total:.4g} DN²: {shares}\n"
        "noise: Poisson counts, whose rates depend on what is shown; a reading takes four frames"
    )
