"""Reading a device description from a TOML file, with overrides, and refusing what it cannot mean."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from opusim.description.schema import EXEMPT_FROM_PROVENANCE, DeviceDescription
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text

__all__ = ["DeviceDescription", "load_description", "packaged_names", "parse_description"]

_ALTERNATIVES = {"noise": ("sigma", "temperature_law"), "camera.dark": ("doubling", "table")}
"""Keys of a section that exclude each other: an override by one takes the other away."""


def load_description(
    name_or_path: str | Path, overrides: Mapping[str, Any] | None = None
) -> DeviceDescription:
    """Reads and checks a device description.

    Args:
        name_or_path: the name of a description shipped with opusim, such as ``gaussian``, or a path that ends
            in ``.toml``.
        overrides: nested mapping laid over the file's keys, such as ``{"noise": {"sigma": 0.1}}``; the
            provenance of an overridden number becomes ``override``. A value of None removes a key.

    Returns:
        The frozen description.

    Raises:
        ConfigError: names file, key and reason: no such file, not TOML, an unknown key (with a close match),
            a value out of range, a number without provenance.
    """
    file = str(name_or_path)
    content = _read(file)
    if overrides:
        content = copy.deepcopy(content)
        changed = list(_lay_over(file, content, overrides, ""))
        _note_overrides(content, changed)
    return parse_description(file, content)


def parse_description(file: str, content: Mapping[str, Any]) -> DeviceDescription:
    """Checks plain values, as `DeviceDescription.dump` gives them.

    Args:
        file: what to call the source in errors.
        content: nested mapping under the files' keys.

    Raises:
        ConfigError: as for `load_description`.
    """
    try:
        return DeviceDescription.model_validate(dict(content))
    except ValidationError as error:
        raise _config_error(file, error) from None


def packaged_names() -> tuple[str, ...]:
    """The names of the descriptions that come with opusim, in order."""
    files = resources.files("hw_configs").iterdir()
    return tuple(sorted(file.name[: -len(".toml")] for file in files if file.name.endswith(".toml")))


def _read(file: str) -> dict[str, Any]:
    """The raw content of a packaged description or of a path."""
    try:
        if file.endswith(".toml"):
            return parse_toml(read_text(file))
        names = packaged_names()
        if file not in names:
            reason = f"no such device; known are {', '.join(names)}, or give a path ending in .toml"
            raise ConfigError(file, "name", reason + _suggestion(file, names))
        return parse_toml(resources.files("hw_configs").joinpath(f"{file}.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(file, "path", f"cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(file, "syntax", f"not a TOML file: {error}") from None


def _lay_over(file: str, content: dict[str, Any], overrides: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Lays overrides over content in place and yields the dotted key of every leaf."""
    for key, value in overrides.items():
        dotted = f"{prefix}{key}"
        for other in _ALTERNATIVES.get(prefix.rstrip("."), ()):
            if key in _ALTERNATIVES[prefix.rstrip(".")] and other != key:
                content.pop(other, None)
        if isinstance(value, Mapping):
            section = content.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigError(file, dotted, "is one value, not a section; override it with a value")
            yield from _lay_over(file, section, value, f"{dotted}.")
        elif value is None:
            content.pop(key, None)
        else:
            content[key] = value
            yield dotted


def _note_overrides(content: dict[str, Any], changed: list[str]) -> None:
    """Marks overridden numbers in the provenance, and drops the provenance of numbers that are gone."""
    provenance = content.get("provenance", {})
    for dotted in changed:
        value = _at(content, dotted)
        is_number = isinstance(value, (int, float, list)) and not isinstance(value, bool)
        if is_number and dotted.split(".")[0] not in (*EXEMPT_FROM_PROVENANCE, "provenance"):
            provenance[dotted] = {"status": "override", "source": "given by the caller"}
    content["provenance"] = {key: entry for key, entry in provenance.items() if _at(content, key) is not None}


def _at(content: Mapping[str, Any], dotted: str) -> Any:
    """The value under a dotted key, or None."""
    value: Any = content
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _config_error(file: str, error: ValidationError) -> ConfigError:
    """The most telling of pydantic's errors as one line: an unknown key before what it left missing."""
    found = error.errors(include_url=False)
    first = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0])
    key = ".".join(str(part) for part in first["loc"]) or "description"
    if first["type"] == "extra_forbidden":
        reason = "unknown key" + _suggestion(str(first["loc"][-1]), _keys_at(first["loc"][:-1]))
    elif first["type"] == "missing":
        reason = "missing; add it"
    else:
        message = first["msg"].removeprefix("Value error, ")
        value = first.get("input")
        reason = message if isinstance(value, (Mapping, BaseModel)) else f"{message}, got {value!r}"
    return ConfigError(file, key, reason)


def _keys_at(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys that a section knows."""
    section: type[BaseModel] = DeviceDescription
    for part in location:
        field = section.model_fields.get(str(part))
        if field is None:
            return ()
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        models = [kind for kind in kinds if issubclass(kind, BaseModel)]
        if not models:
            return ()
        section = models[0]
    return tuple(field.alias or name for name, field in section.model_fields.items())


def _suggestion(word: str, known: tuple[str, ...]) -> str:
    """``; did you mean X?``, or nothing."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
