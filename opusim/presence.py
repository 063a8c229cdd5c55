"""Whether a device can be had at all, found out before anything heavy is imported."""

from __future__ import annotations

import importlib.util

from opusim.description_schema import DeviceDescription
from opusim.errors import DeviceUnavailable
from opusim.exclusive import ExclusiveUse
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
