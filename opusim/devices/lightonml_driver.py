"""lightonml, imported late and quietly, with its failures as those of this project.

lightonml 1.4.3 needs `pkg_resources`, which newer setuptools leave out, only to look at versions; a stand-in serves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opusim.errors import ConfigError, DeviceBusy, DeviceError, DeviceFault, DeviceTimeout, DeviceUnavailable
from opusim.presence import INSTALL_LIGHTONML

_BUSY = ("OpuAlreadyUsedException", "ProcessRunningException")
"""Names of classes that stand in a closed package, in other places from version to version."""


def import_lightonml() -> types.ModuleType:
    """Lightonml.

    Raises:
        DeviceUnavailable: it is not installed, or does not import.
    """
    if importlib.util.find_spec("pkg_resources") is None and "pkg_resources" not in sys.modules:
        sys.modules["pkg_resources"] = _pkg_resources()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lightonml
            import lightonml.opu  # its class must be there
    except ImportError as error:
        raise DeviceUnavailable(f"lightonml does not import ({error}); {INSTALL_LIGHTONML}") from error
    return lightonml


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps lightonml's prints and deprecation warnings off the terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Turns whatever lightonml raises into an error of this project; Ctrl-C passes.

    Args:
        name: the device's name, for messages.
    """
    try:
        yield
    except (DeviceError, ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # ProcessRunningException is no Exception
        raise _translation(name, error) from error


def _translation(name: str, error: BaseException) -> Exception:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split()) or type(error).__name__
    if kinds.intersection(_BUSY):
        return DeviceBusy(f"device {name!r} is used by another program ({text}); end it")
    if isinstance(error, ImportError):
        return DeviceUnavailable(
            f"device {name!r} needs LightOn's driver, which comes with the appliance ({text}); "
            "run on the appliance, or take the device lightonml_simulated"
        )
    if isinstance(error, TimeoutError):
        return DeviceTimeout(f"device {name!r} did not answer in time ({text}); check its cables and power")
    if isinstance(error, OSError | ConnectionError):
        return DeviceUnavailable(f"device {name!r} cannot be reached ({text}); check its cables and power")
    if "No configuration files" in text:
        return DeviceUnavailable(
            f"device {name!r}: no OPU is configured on this machine; set lighton.config_file, or take the device "
            "lightonml_simulated"
        )
    if isinstance(error, IndexError | ValueError | KeyError | TypeError | AttributeError):
        return ConfigError(
            name, "lighton", f"lightonml refuses this use of the OPU ({text}); open a smaller window"
        )
    return DeviceFault(f"device {name!r} reports: {text}; reset it")


def _pkg_resources() -> types.ModuleType:
    """The few names of pkg_resources that lightonml uses."""
    module: Any = types.ModuleType("pkg_resources")

    class ResolutionError(Exception):
        """A requirement that is not met."""

    def get_distribution(name: str) -> types.SimpleNamespace:
        try:
            return types.SimpleNamespace(version=version(name), project_name=name)
        except PackageNotFoundError as error:
            raise ResolutionError(name) from error

    def require(requirement: str) -> list[types.SimpleNamespace]:
        return [get_distribution(requirement.partition(">")[0])]

    module.ResolutionError = module.DistributionNotFound = ResolutionError
    module.get_distribution, module.require = get_distribution, require
    result: types.ModuleType = module
    return result
