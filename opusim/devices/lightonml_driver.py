"""lightonml, imported late and quietly, with its failures as those of this project.

lightonml 1.4.3 needs `pkg_resources`, which newer setuptools leave out, only to look at versions; a stand-in serves.

Whether a device can be had at all, found out before anything heavy is imported.
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

from opusim.description.schema import DeviceDescription
from opusim.devices.access import ExclusiveUse
from opusim.errors import ConfigError, DeviceBusy, DeviceError, DeviceFault, DeviceTimeout, DeviceUnavailable
from opusim.files import parse_json, read_bytes

INSTALL_LIGHTONML = "pip install 'opusim[lighton]', and then pip install --no-deps lightonml==1.4.3"


def require_present(description: DeviceDescription) -> None:
    """Refuses a device that is missing or taken; the device itself is not touched.

    Raises:
        DeviceUnavailable: its driver is not installed.
        DeviceBusy: another process holds it.
    """
    if description.lighton is not None:
        require_configuration(description.name, description.lighton.config_file)
        require_lightonml(description.name, simulated=description.lighton.simulated)
    if description.access is not None and description.access.exclusive:
        use = ExclusiveUse(description.name)
        use.acquire()
        use.release()


def require_lightonml(name: str, *, simulated: bool) -> None:
    """Refuses a device behind lightonml where lightonml, or the appliance's driver, is not installed.

    Args:
        name: the device's name.
        simulated: whether lightonml's own simulated device is meant, which needs no driver.

    Raises:
        DeviceUnavailable: the message says what to install, or where to run.
    """
    if importlib.util.find_spec("lightonml") is None:
        raise DeviceUnavailable(
            f"device {name!r} needs lightonml, which is not installed: {INSTALL_LIGHTONML}"
        )
    if not simulated and importlib.util.find_spec("lightonopu") is None:
        raise DeviceUnavailable(
            f"device {name!r} needs LightOn's driver lightonopu, which comes with the appliance and is not "
            "here; run on the appliance, or take the device lightonml_simulated"
        )


def require_configuration(name: str, file: str) -> None:
    """Refuses an appliance whose own configuration (of lightonml, not of this project) cannot be used.

    Args:
        name: the device's name.
        file: the configuration: empty for the machine's own, an http address (left to lightonml), or a path from /.

    Raises:
        DeviceUnavailable: it is no JSON table.
    """
    if not file or file.startswith("http"):
        return
    try:
        content = parse_json(read_bytes(file))
    except OSError as error:
        raise DeviceUnavailable(
            f"device {name!r}: lighton.config_file = {file!r} cannot be read ({error.strerror}); check the path"
        ) from error
    except ValueError as error:
        raise DeviceUnavailable(
            f"device {name!r}: lighton.config_file = {file!r} is not JSON ({error}); mend it"
        ) from error
    if not isinstance(content, dict) or not file.startswith("/"):
        raise DeviceUnavailable(
            f"device {name!r}: lighton.config_file = {file!r} must be a JSON table at a path from /; mend it"
        )


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
