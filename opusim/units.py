"""Units of keys, which every number's name ends in, and amounts in the unit that a reader would take."""

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


def duration(seconds: float) -> str:
    """Seconds in the unit that a reader would take: 7.4 s, 42 s, 3.5 min, 12.6 h, 3.2 days.

    >>> duration(45_402)
    '12.6 h'
    """
    if seconds < 100:
        digits = ".2g" if 0 < seconds < 0.95 else ".1f" if 0 < seconds < 9.95 else ".0f"
        return f"{seconds:{digits}} s"
    for limit, unit, size in ((6000, "min", 60.0), (172_800, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def energy(joules: float) -> str:
    """Joules in the unit that a reader would take: 0.39 J, 78 J, 1.36 MJ.

    >>> energy(1_362_060)
    '1.36 MJ'
    """
    for limit, size, unit in ((1e9, 1e9, "GJ"), (1e6, 1e6, "MJ"), (1e4, 1e3, "kJ")):
        if joules >= limit:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:,.0f} J" if joules >= 100 or joules == 0 else f"{joules:.3g} J"
