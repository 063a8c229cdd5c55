"""Which law does a device's noise have, and what do readings say of it? All that privacy accounting sees of a device.

Needs numpy only, and scipy where a limit is computed.
"""

from __future__ import annotations

from opusim.noise.gaussian_readings import smallest_variance, variance_lower_limit
from opusim.noise.laws import DiscreteNoise, GaussianNoise, JsonObject, NoiseModel, PhotonCountNoise

__all__ = [
    "DiscreteNoise",
    "GaussianNoise",
    "JsonObject",
    "NoiseModel",
    "PhotonCountNoise",
    "smallest_variance",
    "variance_lower_limit",
]
