"""Kinds of devices: which classes run them, and what each of them can do.

A kind is the word that a description gives as ``kind``. Its class comes from the entry-point group ``opusim.devices``
(opusim's own kinds too) or from `register_device`. A class is imported when a device of its kind is needed, not before.

What a device can do is a set of capabilities. Every device can `project`; the rest is declared by its class
(`NoisyDevice.can`), printed by ``opusim device list`` and tested by `opusim.testing.contract`:

| capability | the law that it promises |
| --- | --- |
| project | B x + fresh noise for ternary x; B has entries of variance 1 and stays fixed |
| draw | fresh noise only, of the law that `project` adds |
| intensities | abs(R x)^2 + fresh noise for binary x; digital numbers of a device with a camera |
| matrix | the B that readings are noisy readings of, as numbers |
| program | a matrix, entries in [-1, 1], is written; the returned W is what the device realised |
| multiply | W x + fresh noise for real x in [-1, 1], through the converter that the device states |
| multiply_transposed | x W + fresh noise for real x in [-1, 1] |
| wait | time passes; W drifts as the device does, and `matrix` tells the drifted one |

A caller that needs more than `project` asks for it by name: ``device.require("matrix").matrix()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args

import torch

from opusim import plugins
from opusim.description.schema import DeviceDescription, load_description, packaged_names
from opusim.description.section import did_you_mean
from opusim.errors import ConfigError, DeviceUnavailable

ENTRY_POINT_GROUP = "opusim.devices"
Capability = Literal[
    "project", "draw", "intensities", "matrix", "program", "multiply", "multiply_transposed", "wait"
]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)

DeviceFactory = Callable[..., Any]
"""Called as factory(description, n_inputs=, n_outputs=, mode=, seed=, torch_device=) and returns a `NoisyDevice`; a
device class serves."""


class WorksWithMatrices(Protocol):
    """What a device offers with the capabilities `matrix`, `program`, `multiply`, `multiply_transposed` and `wait`.

    W is what the device realised: the matrix that was programmed last, with the device's rounding, limits, programming
    noise, which may take entries out of [-1, 1], and drift.
    """

    def matrix(self) -> torch.Tensor:
        """B, float32, shape (n_outputs, n_inputs); the present W once one is programmed."""

    def program(self, matrix: torch.Tensor) -> torch.Tensor:
        """Write a matrix, real, shape (n_outputs, n_inputs), entries in [-1, 1]; return W, float32."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """W x + fresh noise of the device's law for x, real, shape (batch, n_inputs), entries in [-1, 1]; float32."""

    def multiply_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W + fresh noise for x, real, shape (batch, n_outputs), entries in [-1, 1]; float32."""

    def wait(self, seconds: float) -> torch.Tensor:
        """Let time pass, at least 0, which adds up since the last programming; return W at its end."""


_registered: dict[str, DeviceFactory] = {}


def register_device(kind: str, factory: DeviceFactory) -> None:
    """Register a kind of device in this process.

    An installed package uses the entry-point group ``opusim.devices`` instead.

    Args:
        kind: the word that descriptions use; not one that opusim brings.
        factory: a subclass of `NoisyDevice`, or a function with its signature.

    Raises:
        ValueError: the kind is taken by another factory.
        TypeError: the factory cannot be called.
    """
    if not callable(factory):
        raise TypeError(f"factory = {factory!r}: must be callable; give a subclass of NoisyDevice")
    if plugins.is_ours(ENTRY_POINT_GROUP, kind) or _registered.get(kind, factory) is not factory:
        raise ValueError(f"kind = {kind!r}: is taken; choose another word")
    _registered[kind] = factory


def device_kinds() -> dict[str, str]:
    """Return every kind that can be opened, in order, and the package that brings it."""
    found = dict.fromkeys(_registered, "registered by this process")
    found |= {kind: plugins.package(ENTRY_POINT_GROUP, kind) for kind in plugins.names(ENTRY_POINT_GROUP)}
    return {kind: found[kind] for kind in sorted(found)}


def device_factory(file: str, kind: str) -> DeviceFactory:
    """Return the factory of a kind: first opusim's, then registered ones, then those of other packages.

    ConfigError if there is none; DeviceUnavailable if its package does not import, or two packages bring it.
    """
    if not plugins.is_ours(ENTRY_POINT_GROUP, kind) and kind in _registered:
        return _registered[kind]
    if kind not in plugins.names(ENTRY_POINT_GROUP):
        known = tuple(device_kinds())
        hint = did_you_mean(kind, known, otherwise="; call opusim.register_device, or install its package")
        raise ConfigError(file, "kind", f"unknown kind {kind!r}; known are {', '.join(known)}{hint}")
    try:
        factory: DeviceFactory = plugins.load(
            ENTRY_POINT_GROUP, kind, accept=lambda found: None if callable(found) else "cannot be called"
        )
    except plugins.PluginError as error:
        raise DeviceUnavailable(f"{file}: kind: {error}") from error
    return factory


def capabilities_of(description: DeviceDescription) -> tuple[Capability, ...]:
    """Return what a device of this description can do, in the order of `CAPABILITIES`; imports its class."""
    factory = device_factory(description.name, description.kind)
    declared = getattr(factory, "capabilities_of", None)
    found = {"project", "draw"} if declared is None else declared(description)
    return tuple(capability for capability in CAPABILITIES if capability in found)


def require_described(description: DeviceDescription) -> None:
    """Refuse (ConfigError) a description that its kind's class cannot run, if it can tell without being opened."""
    factory = device_factory(description.name, description.kind)
    getattr(factory, "require_described", lambda _: None)(description)


def devices_that(capability: Capability) -> tuple[str, ...]:
    """Return the names of the packaged devices that have a capability."""
    return tuple(name for name in packaged_names() if capability in capabilities_of(load_description(name)))
