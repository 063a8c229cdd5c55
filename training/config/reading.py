"""Reading a configuration from a file, a mapping and lines key=value; errors name file, key and reason."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from opusim.description.section import BadKey, first_problem
from opusim.description.section import flat as flat
from opusim.description.section import merged as merged
from opusim.description.section import nested as nested
from opusim.description.section import parse_setting as parse_setting
from opusim.errors import ConfigError
from opusim.files import parse_json, parse_toml, read_text
from opusim.training.config.kinds import KINDS, completed, without_derived
from opusim.training.config.run import RunConfig, require_offered, require_used


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
            this configuration, or what only stored runs may have; one line that names file, key and reason.
    """
    if isinstance(source, RunConfig) and not settings and not changes:
        require_offered(source)
        return source  # which was validated when it was made
    base, is_resolved = _read(source)
    changed: dict[str, Any] = dict(changes or {})
    for setting in settings:
        changed = merged(changed, parse_setting(setting))
    given = changed if is_resolved else merged(base, changed)
    values = merged(_for_kinds(base, changed) if is_resolved else base, changed)
    origin = str(source) if isinstance(source, str | Path) else "configuration"
    config = _validated(
        values, origin, given=[key for key, value in flat(given).items() if value is not None]
    )
    require_offered(config, origin)
    return config


def stored_config(values: Mapping[str, Any]) -> RunConfig:
    """The resolved configuration in a run's `config.json`, which names every key, also those that do nothing.

    Raises:
        ConfigError: It is not a valid configuration.
    """
    if not isinstance(values, Mapping):
        raise ConfigError("configuration", "config", f"holds a {type(values).__name__}, not a table of keys")
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
    """A resolved configuration without the keys that a changed kind lacks, or that follow from what is changed.

    A key that means something else to the new kind, as its other type tells, counts as one that it lacks.
    """
    values = dict(resolved)
    for name, kinds in KINDS.items():
        section, change = values.get(name), changed.get(name)
        kind = change.get("kind") if isinstance(change, Mapping) else None
        if isinstance(section, Mapping) and kind in kinds.names():
            known = kinds.find(kind).model_fields
            before = kinds.find(section["kind"]).model_fields
            values[name] = {
                key: value
                for key, value in section.items()
                if key == "kind" or (key in known and known[key].annotation == before[key].annotation)
            }
    try:
        return without_derived(values, changed)
    except BadKey:  # an unknown kind, which validation reports
        return values


def _validated(values: Mapping[str, Any], origin: str, *, given: Sequence[str]) -> RunConfig:
    try:
        config = RunConfig.model_validate(values)
        require_used(config, given)
    except ValidationError as error:
        raise first_problem(error, RunConfig, origin, sections=_sections(values)) from error
    except BadKey as error:
        raise ConfigError(origin, error.key, error.reason) from error
    return config


def _sections(values: Mapping[str, Any]) -> dict[str, type[BaseModel]]:
    """The sections of the kinds that the values name."""
    try:
        whole = completed(values)
    except BadKey:
        return {}
    named = {name: section.get("kind") for name in KINDS if isinstance(section := whole.get(name), Mapping)}
    return {name: KINDS[name].find(kind) for name, kind in named.items() if kind in KINDS[name].names()}


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
