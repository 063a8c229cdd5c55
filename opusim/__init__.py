"""What is an optical processing unit, and how do its frames and its noise behave? Devices, media and noise.

Names are imported when they are first used: `import opusim.noise` and `opusim --help` load neither torch nor
numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opusim.description.loading import load_description
    from opusim.description.schema import DeviceDescription
    from opusim.devices.base import NoisyDevice
    from opusim.devices.registry import list_devices, open_device, register_device
    from opusim.encodings import binarize, bit_planes, split_frames, ternarize
    from opusim.errors import (
        ConfigError,
        DeviceBusy,
        DeviceError,
        DeviceFault,
        DeviceTimeout,
        DeviceUnavailable,
        NoiseBelowCertificate,
        OpusimError,
    )
    from opusim.medium.transmission import Medium
    from opusim.noise import DiscreteNoise, GaussianNoise, NoiseModel, PhotonCountNoise
    from opusim.randomness.streams import NoiseStream, SeededStream, SystemStream, derive_seed, noise_stream
    from opusim.temperature.law import TemperatureLaw
    from opusim.usage import Usage

__all__ = [
    "ConfigError",
    "DeviceBusy",
    "DeviceDescription",
    "DeviceError",
    "DeviceFault",
    "DeviceTimeout",
    "DeviceUnavailable",
    "DiscreteNoise",
    "GaussianNoise",
    "Medium",
    "NoiseBelowCertificate",
    "NoiseModel",
    "NoiseStream",
    "NoisyDevice",
    "OpusimError",
    "PhotonCountNoise",
    "SeededStream",
    "SystemStream",
    "TemperatureLaw",
    "Usage",
    "binarize",
    "bit_planes",
    "derive_seed",
    "list_devices",
    "load_description",
    "noise_stream",
    "open_device",
    "register_device",
    "split_frames",
    "ternarize",
]

_HOME = {
    "ConfigError": "errors",
    "DeviceBusy": "errors",
    "DeviceDescription": "description.schema",
    "DeviceError": "errors",
    "DeviceFault": "errors",
    "DeviceTimeout": "errors",
    "DeviceUnavailable": "errors",
    "DiscreteNoise": "noise",
    "GaussianNoise": "noise",
    "Medium": "medium.transmission",
    "NoiseBelowCertificate": "errors",
    "NoiseModel": "noise",
    "NoiseStream": "randomness.streams",
    "NoisyDevice": "devices.base",
    "OpusimError": "errors",
    "PhotonCountNoise": "noise",
    "SeededStream": "randomness.streams",
    "SystemStream": "randomness.streams",
    "TemperatureLaw": "temperature.law",
    "Usage": "usage",
    "binarize": "encodings",
    "bit_planes": "encodings",
    "derive_seed": "randomness.streams",
    "list_devices": "devices.registry",
    "load_description": "description.loading",
    "noise_stream": "randomness.streams",
    "open_device": "devices.registry",
    "register_device": "devices.registry",
    "split_frames": "encodings",
    "ternarize": "encodings",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from its module (PEP 562) and keeps it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'opusim' has no attribute {name!r}")
    value = getattr(import_module(f"opusim.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
