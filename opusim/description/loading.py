"""Read a device description from a TOML file, lay overrides over it, and refuse what it cannot mean."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opusim import plugins
from opusim.description.schema import EXEMPT_FROM_PROVENANCE, NUMBERS, DeviceDescription
from opusim.description.section import did_you_mean, first_problem, flat, merged
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text

__all__ = ["DeviceDescription", "load_description", "packaged_names", "parse_description"]

SCHEME_GROUP = "opusim.description_schemes"
"""Entry points that read descriptions of names with a scheme: called with the name, they return what a file holds."""
_ALTERNATIVES = (
    {"noise.sigma", "noise.temperature_law"},
    {"camera.dark.doubling", "camera.dark.table"},
)
"""Keys that exclude each other: an override by one takes the others away."""


def load_description(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None
) -> DeviceDescription:
    """Read and check a device description.

    Args:
        name_or_path: the name of a description shipped with opusim, such as ``gaussian``, a path that ends in
            ``.toml``, or the address of a served device, ``remote://HOST:PORT``, whose server is asked.
        overrides: nested mapping laid over the file's keys, such as ``{"noise": {"sigma": 0.1}}``; the
            provenance of an overridden number becomes ``override``. A value of None removes a key.

    Returns:
        The frozen description.

    Raises:
        ConfigError: names file, key and reason: no such file, not TOML, an unknown key (with a close match),
            a value out of range, a number without provenance.
        DeviceUnavailable: a server does not answer.
    """
    file = str(name_or_path)
    content = _read(file)
    return parse_description(file, _overridden(content, overrides) if overrides else content)


def parse_description(file: str, content: Mapping[str, Any]) -> DeviceDescription:
    """Check plain values, as `DeviceDescription.dump` gives them.

    Args:
        file: what to call the source in errors.
        content: nested mapping under the files' keys.

    Raises:
        ConfigError: as for `load_description`.
    """
    try:
        return DeviceDescription.model_validate(dict(content))
    except ValidationError as error:
        raise first_problem(error, DeviceDescription, file, whole="description") from None


def packaged_names() -> tuple[str, ...]:
    """Return the names of the descriptions that come with opusim, in order."""
    files = resources.files("opusim.hw_configs").iterdir()
    return tuple(sorted(file.name[: -len(".toml")] for file in files if file.name.endswith(".toml")))


def _read(file: str) -> dict[str, Any]:
    """Return the raw content of a packaged description, of a path, or of a name with a scheme."""
    if "://" in file:
        return _described(file)
    try:
        if file.endswith(".toml"):
            return parse_toml(read_text(file))
        names = packaged_names()
        if file not in names:
            reason = f"no such device; known are {', '.join(names)}, or give a path ending in .toml"
            raise ConfigError(file, "name", reason + did_you_mean(file, names))
        return parse_toml(
            resources.files("opusim.hw_configs").joinpath(f"{file}.toml").read_text(encoding="utf-8")
        )
    except OSError as error:
        raise ConfigError(
            file, "path", f"cannot be read ({error.strerror or error}); check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(file, "syntax", f"not a TOML file: {error}") from None


def _described(name: str) -> dict[str, Any]:
    """Return the content that the entry point of a name's scheme gives."""
    try:
        found: dict[str, Any] = plugins.load(SCHEME_GROUP, name.partition("://")[0])(name)
    except plugins.PluginError as error:
        raise ConfigError(name, "name", f"cannot be read: {error}") from error
    return found


def _overridden(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with overrides laid over it, and with their provenance."""
    given = {*_sections(overrides), *flat(overrides)}
    removed = {other for group in _ALTERNATIVES if group & given for other in group - given}
    result = _pruned(merged(content, overrides), removed)
    provenance = dict(result.get("provenance", {}))
    for key, value in flat(overrides).items():
        is_number = isinstance(value, NUMBERS) and not isinstance(value, bool)
        if is_number and key.split(".")[0] not in (*EXEMPT_FROM_PROVENANCE, "provenance"):
            provenance[key] = {"status": "override", "source": "given by the caller"}
    present = flat(result)
    result["provenance"] = {key: entry for key, entry in provenance.items() if key in present}
    return result


def _sections(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all sections."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{prefix}{key}"
            yield from _sections(value, f"{prefix}{key}.")


def _pruned(values: Mapping[str, Any], removed: set[str], prefix: str = "") -> dict[str, Any]:
    """Return the values without the removed keys and without those that are None."""
    return {
        key: _pruned(value, removed, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None and f"{prefix}{key}" not in removed
    }
