"""Units of keys: every number's name ends in its unit."""

from __future__ import annotations

_UNITS = {
    "us": "µs",
    "w": "W",
    "mib": "MiB",
    "c": "°C",
    "k": "K",
    "e_per_s": "e⁻/s",
    "variance_per_e": "projection units²/e⁻",
    "sigma": "projection units",
    "sigma_0": "projection units",
    "per_s": "1/s",
    "e": "e⁻",
    "e_low": "e⁻",
    "e_high": "e⁻",
    "std": "projection units",
    "dn": "DN",
    "gain_dn_per_e": "DN/e⁻",
    "adc_bits": "bits",
    "prnu": "of the response",
    "light_noise": "of the light",
    "s": "s",
    "temperatures_c": "°C",
    "quantum_efficiency": "e⁻/photon",
    "anchor_flux_per_s": "photons/s",
    "bias_flux_per_s": "photons/s",
    "lowest": "of the mean",
    "highest": "of the mean",
}
"""Unit of a key by its whole last word or its suffix; the longest match counts."""


def unit_of(key: str) -> str:
    """The unit that a key's name ends in, or nothing for a count.

    >>> unit_of("camera.light.exposure_us")
    'µs'
    """
    last = key.rsplit(".", 1)[-1]
    matches = [suffix for suffix in _UNITS if last == suffix or last.endswith(f"_{suffix}")]
    return _UNITS[max(matches, key=len)] if matches else ""
