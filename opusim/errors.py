"""Errors that callers of opusim may want to catch; everything else is a plain ValueError or TypeError.

Raise `ValueError` or `TypeError` for a bad argument, `ConfigError` for a bad file, and a `DeviceError` for a device
that cannot do its work. A class belongs here only if callers catch it by name.
"""

from __future__ import annotations


class OpusimError(Exception):
    """Base of every error of this project that is not a bad argument."""


class ConfigError(OpusimError, ValueError):
    """A configuration file, or a value given instead of one, that cannot be used.

    A long key or reason is cut in the middle, so that a hostile file cannot flood the message.

    Attributes:
        file: the file, or the name by which the configuration was requested.
        key: the dotted key at fault, such as ``noise.sigma``.
        reason: what is wrong and what to do, in one line.
    """

    def __init__(self, file: str, key: str, reason: str) -> None:
        key, reason = _cut(key), _cut(reason)
        super().__init__(f"{file}: {key}: {reason}")
        self.file, self.key, self.reason = file, key, reason

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str, str]]:
        """Pickle by the three parts, so that the error crosses process borders."""
        return type(self), (self.file, self.key, self.reason)


def _cut(text: str) -> str:
    return text if len(text) <= 1200 else f"{text[:600]} ... {text[-600:]}"


class DeviceError(OpusimError):
    """Base of every failure of a device.

    Attributes:
        alarm: whether a check of the device's monitor raised it.
        covered: whether that check found the noise of every output as strong as certified.
    """

    alarm = False
    covered = False


class DeviceUnavailable(DeviceError):
    """The device is closed, missing, or its driver is not installed."""


class DeviceBusy(DeviceError):
    """Another process or session holds the device."""


class DeviceTimeout(DeviceError, TimeoutError):
    """The device did not answer in time."""


class DeviceFault(DeviceError, RuntimeError):
    """The device returned an impossible reading or reported a fault."""


class CapabilityMissing(DeviceError):
    """A device cannot do what was asked of it; the message names devices that can."""


class NoiseBelowCertificate(DeviceError):
    """The measured noise is weaker than the certificate that a privacy statement rests on."""


class ProcessLost(OpusimError, RuntimeError):
    """Another process of the run ended, or did not answer in time."""


class NoiseUnknown(OpusimError, ValueError):
    """A device states no law for its noise: it was not measured, and its description assumes none."""
