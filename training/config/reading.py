"""Reading a configuration from a file, a mapping and lines key=value; errors name file, key and reason."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from opusim.errors import ConfigError
from opusim.files import DEPTH_LIMIT, parse_json, parse_toml, read_text
from training.config.kinds import KINDS, completed
from training.config.run import RunConfig, require_used
from training.config.sections import KindSection, RefusedKey

_NAMED_KEY = re.compile(r"(?P<key>[a-z][a-z_.]*) = ")


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig | None = None,
    settings: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Resolve a configuration: the file or mapping, then `changes`, then `key=value` settings.

    Args:
        source: A TOML file (or the config.json of a run), a mapping, a RunConfig, or None for the defaults.
        settings: Lines "dotted.key=value"; the value is read as TOML, a bare word as a string.
        changes: A nested mapping merged over the source.

    Raises:
        ConfigError: Missing file, malformed TOML, an unknown key, a value out of range, or a key that does nothing in
            this configuration; one line that names file, key and reason.
    """
    base, is_resolved = _read(source)
    changed: dict[str, Any] = dict(changes or {})
    for setting in settings:
        changed = merged(changed, parse_setting(setting))
    given = changed if is_resolved else merged(base, changed)
    values = merged(_for_kinds(base, changed) if is_resolved else base, changed)
    origin = str(source) if isinstance(source, str | Path) else "configuration"
    return _validated(values, origin, given=[key for key, value in flat(given).items() if value is not None])


def stored_config(values: Mapping[str, Any]) -> RunConfig:
    """The resolved configuration in a run's `config.json`, which names every key, also those that do nothing.

    Raises:
        ConfigError: It is not a valid configuration.
    """
    return _validated(values, "configuration", given=())


def named_trainer(source: str | Path) -> str | None:
    """The trainer.kind that a file gives, or None.

    Raises:
        ConfigError: The file cannot be read.
    """
    trainer = _read(source)[0].get("trainer")
    kind = trainer.get("kind") if isinstance(trainer, Mapping) else None
    return None if kind is None else str(kind)


def _for_kinds(resolved: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without the keys that a changed kind does not have."""
    values = dict(resolved)
    for name, kinds in KINDS.items():
        section, change = values.get(name), changed.get(name)
        kind = change.get("kind") if isinstance(change, Mapping) else None
        if isinstance(section, Mapping) and kind in kinds.names():
            known = kinds.find(kind).model_fields
            values[name] = {key: value for key, value in section.items() if key in known}
    return values


def _validated(values: Mapping[str, Any], origin: str, *, given: Sequence[str]) -> RunConfig:
    try:
        config = RunConfig.model_validate(values)
        require_used(config, given)
    except ValidationError as error:
        raise _first_problem(error, origin, values) from error
    except RefusedKey as error:
        raise ConfigError(origin, error.key, error.reason) from error
    return config


def parse_setting(setting: str) -> dict[str, Any]:
    """Turn "a.b=1.5" into {"a": {"b": 1.5}}.

    Raises:
        ConfigError: There is no "=" or no key.
    """
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError("--set", setting, "is not of the form key=value, as in trainer.threshold=0.1")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return nested(key.strip(), value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """Turn "a.b" and a value into {"a": {"b": value}}."""
    parts = key.split(".")
    if len(parts) > DEPTH_LIMIT:
        raise ConfigError(
            "configuration", f"{key[:40]}...", f"has more than {DEPTH_LIMIT} parts; check the key"
        )
    for part in reversed(parts):
        value = {part: value}
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"a": {"b": 1.5}} into {"a.b": 1.5}, whether keys were written dotted, quoted or as tables."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, mappings merged key by key."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _read(source: str | Path | Mapping[str, Any] | RunConfig | None) -> tuple[dict[str, Any], bool]:
    """The keys, and whether they are those of a resolved configuration, which names all of them."""
    if source is None:
        return {}, False
    if isinstance(source, RunConfig):
        return source.model_dump(), True
    if isinstance(source, Mapping):
        return dict(source), False
    path = Path(source)
    try:
        text = read_text(path)
        if path.suffix != ".json":
            return parse_toml(text), False
        values = parse_json(text)
        if not isinstance(values, dict):
            raise ConfigError(str(path), "syntax", f"holds a {type(values).__name__}, not a table of keys")
        is_stored = "config" in values  # the config.json of a run holds more than the configuration
        config = values["config"] if is_stored else values
        if not isinstance(config, dict):
            raise ConfigError(str(path), "config", f"holds a {type(config).__name__}, not a table of keys")
        return dict(config), is_stored
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check the path"
        raise ConfigError(str(path), "path", reason) from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "syntax", f"is not valid {path.suffix or 'TOML'}: {error}") from error


def _first_problem(error: ValidationError, origin: str, values: Mapping[str, Any]) -> ConfigError:
    problem = error.errors()[0]
    keys = [str(part) for part in problem["loc"]]
    key = ".".join(keys)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, RefusedKey):
        return ConfigError(origin, cause.key, cause.reason)
    if problem["type"] == "extra_forbidden":
        known = list(_section(keys[:-1], values).model_fields)
        return ConfigError(origin, key, f"is not a key of the configuration{_suggestion(keys[-1], known)}")
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] != "value_error":
        reason = f"{reason}, got {problem['input']!r}"
    if not key and (named := _NAMED_KEY.match(reason)):  # a rule about several sections names the key itself
        key, reason = named["key"], reason[named.end() :]
    return ConfigError(origin, key or "configuration", reason)


def _section(path: Sequence[str], values: Mapping[str, Any]) -> type[BaseModel]:
    """The section at a path of keys."""
    section: type[BaseModel] = RunConfig
    for part in path:
        annotation = section.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, KindSection):
            section = KINDS[part].find(completed(values)[part]["kind"])
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return section


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the keys here are {', '.join(known)}"
