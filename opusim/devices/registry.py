"""Open devices by the name or the path of their description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opusim import checks
from opusim.description.schema import DeviceDescription, load_description, packaged_names
from opusim.devices.base import NoisyDevice
from opusim.devices.certificate import Certificate, load_certificate
from opusim.devices.kinds import device_factory
from opusim.errors import ConfigError


def list_devices() -> tuple[DeviceDescription, ...]:
    """Return the descriptions that come with opusim, ordered by name."""
    return tuple(load_description(name) for name in packaged_names())


def open_device(
    name_or_path: str | Path,
    *,
    mode: str = "experiment",
    seed: int = 0,
    torch_device: torch.device | str = "cpu",
    n_inputs: int | None = None,
    n_outputs: int | None = None,
    certificate: str | Path | None = None,
    **overrides: Any,
) -> NoisyDevice:
    """Open a device; use the result as a context manager.

        >>> with open_device("gaussian", n_inputs=4, n_outputs=6, noise={"sigma": 0.2}) as device:
        ...     device.noise.describe()
        'Gaussian, standard deviation 0.2 at each of 6 outputs'

    Args:
        name_or_path: name of a packaged description, a path ending in ``.toml``, or the address of a served device,
            ``remote://HOST:PORT`` (`opusim device serve`).
        mode: ``experiment`` or ``release`` (see `opusim.randomness.streams`).
        seed: seed of the noise in ``experiment``, in [0, 2^64). The medium's seed is part of the
            description.
        torch_device: on which a simulation computes.
        n_inputs: width of the window, None for the whole device.
        n_outputs: outputs of the window, or None for all.
        certificate: path of a certificate (`opusim device calibrate`) whose limits `noise` is to state; None for the
            description's numbers.
        **overrides: sections laid over the description's, such as ``noise={"sigma": 0.2}``.

    Returns:
        The device, open.

    Raises:
        ConfigError: a description that cannot be used, an unknown kind, a window larger than the device, or a
            certificate of another one.
        TypeError, ValueError: an argument out of range.
        DeviceError: the device cannot be had.
    """
    checks.instance((str, Path), name_or_path=name_or_path)
    return open_described(
        load_description(name_or_path, overrides),
        mode=mode,
        seed=seed,
        torch_device=torch_device,
        n_inputs=n_inputs,
        n_outputs=n_outputs,
        certificate=certificate,
    )


def open_described(
    description: DeviceDescription,
    *,
    mode: str = "experiment",
    seed: int = 0,
    torch_device: torch.device | str = "cpu",
    n_inputs: int | None = None,
    n_outputs: int | None = None,
    certificate: str | Path | Certificate | None = None,
) -> NoisyDevice:
    """Open a device from a description that was read before; arguments and errors as for `open_device`.

    The certificate may have been read before, too.
    """
    factory = device_factory(description.name, description.kind)
    try:
        device: NoisyDevice = factory(
            description,
            n_inputs=n_inputs,
            n_outputs=n_outputs,
            mode=mode,
            seed=seed,
            torch_device=torch_device,
        )
    except KeyError as error:  # of a class that looks a key of its options up
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or key in description.options:
            raise
        reason = f"is missing; the kind {description.kind!r} needs it"
        raise ConfigError(description.name, f"options.{key}", reason) from error
    if certificate is not None:
        read = certificate if isinstance(certificate, Certificate) else load_certificate(certificate)
        device.attach_certificate(read)
    return device.open()


def open_window(name: str, inputs: int, outputs: int, seed: int) -> NoisyDevice:
    """Open a window of a device, no larger than the device is."""
    description = load_description(name)
    return open_described(
        description,
        n_inputs=min(inputs, description.n_inputs),
        n_outputs=min(outputs, description.n_outputs),
        seed=seed,
    )
