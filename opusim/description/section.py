"""Sections of a configuration: their base classes, and how their errors become one line.

Descriptions of devices, certificates, runs and sweeps are all pydantic models read from TOML or JSON. They share this
module: `Section`, `first_problem`, which turns pydantic's list of errors into one `ConfigError`, and the functions on
nested mappings (`merged`, `flat`, `nested`, `parse_setting`).
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from opusim.errors import ConfigError
from opusim.files import DEPTH_LIMIT, parse_toml

_NAMED_KEY = re.compile(r"(?P<key>[a-z][a-z_0-9]*(?:\.[a-z_0-9]+)*)(?: = |: )")


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class StrictSection(Section):
    """A section that converts no types: a string is no number, and 2.0 is no integer."""

    model_config = ConfigDict(strict=True, populate_by_name=True)


def together(*names: str) -> Any:
    """Return a validator of a section: all or none of these keys are given; "" counts as not given."""

    def check(section: BaseModel) -> BaseModel:
        given = [getattr(section, name) not in (None, "") for name in names]
        if any(given) and not all(given):
            listed, which = ", ".join(names[:-1]), "both or neither" if len(names) == 2 else "all or none"
            raise ValueError(f"{listed} and {names[-1]} belong together; give {which}")
        return section

    return model_validator(mode="after")(check)


def exactly_one(*names: str) -> Any:
    """Return a validator of a section: exactly one of these keys is given."""

    def check(section: BaseModel) -> BaseModel:
        if sum(getattr(section, name) is not None for name in names) != 1:
            raise ValueError(f"give exactly one of {', '.join(names[:-1])} and {names[-1]}")
        return section

    return model_validator(mode="after")(check)


@contextmanager
def readable(
    file: str,
    model: type[BaseModel] | None = None,
    *,
    whole: str = "",
    what: str = "a TOML file",
    remedy: str = "check the path",
) -> Iterator[None]:
    """Raise a ConfigError if a file cannot be read within the block, is no TOML, or does not fit a model."""
    try:
        yield
    except OSError as error:
        raise ConfigError(file, "path", f"cannot be read ({error.strerror or error}); {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(file, "syntax", f"not {what}: {error}") from None
    except ValidationError as error:
        raise first_problem(error, model or BaseModel, file, whole=whole) from None


class BadKey(ValueError):
    """An error of a validator that names the key at fault itself; `first_problem` puts that key into the message.

    Attributes:
        key: the dotted key, counted from the top of the configuration.
        reason: what is wrong and what to do, in one line.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} = {reason}")
        self.key, self.reason = key, reason


_ELSEWHERE = {
    **dict.fromkeys(("backprop", "backpropagation", "sgd", "adam"), "bp"),
    **dict.fromkeys(("dpsgd", "dp_sgd", "dp", "gaussian"), "record"),
    **dict.fromkeys(("learning_rate", "eta"), "lr"),
    **dict.fromkeys(("batchsize", "batch", "bs", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("n_epochs", "num_epochs", "num_train_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("hidden_sizes", "hidden_layer_sizes", "layers", "width", "widths"), "hidden"),
    **dict.fromkeys(("std", "noise_std", "scale", "sd"), "sigma"),
    **dict.fromkeys(("dataset", "datasets"), "data"),
    **dict.fromkeys(("gpu", "cuda", "accelerator", "gpus"), "torch_device"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("output", "output_dir", "outdir", "logdir"), "out"),
    **dict.fromkeys(("sweep", "grid"), "curve"),
    **dict.fromkeys(("search", "hpo", "optimize"), "tune"),
    **dict.fromkeys(("fit", "learn"), "train"),
    **dict.fromkeys(("test", "score", "predict"), "evaluate"),
    **dict.fromkeys(("list", "ls", "ps", "history"), "runs"),
    **dict.fromkeys(("devices", "opu", "hardware"), "device"),
    **dict.fromkeys(("privacy", "epsilon", "accountant"), "account"),
    "eps": "epsilon",
    "noise": "device.noise",
}
"""Words of other tools, each with opusim's word for it: commands, kinds, options and keys."""


def meant_by(word: str, known: Collection[str]) -> str | None:
    """Return the known word (or first part of a key) that is meant: of similar letters, or another tool's word."""
    plain = {each.lower().replace("-", "_"): each for each in known}
    written = word.lower().replace("-", "_")
    elsewhere = _ELSEWHERE.get(written, "")
    if written not in plain and elsewhere.split(".")[0] in plain:
        return elsewhere
    close = difflib.get_close_matches(written, list(plain), n=1)
    return plain[close[0]] if close else None


def did_you_mean(word: str, known: Collection[str], *, otherwise: str = "") -> str:
    """``; did you mean 'sigma'?``, or `otherwise` if no known word is meant (`meant_by`)."""
    meant = meant_by(word, known)
    return f"; did you mean {meant!r}?" if meant else otherwise


def first_problem(
    error: ValidationError,
    model: type[BaseModel],
    origin: str,
    *,
    whole: str = "configuration",
    sections: Mapping[str, type[BaseModel]] | None = None,
) -> ConfigError:
    """Turn pydantic's errors into one line that names origin, key and reason.

    An unknown key comes first, because it often is the cause of the others, such as a missing key. `whole` names what
    has an error without a key, `sections` hold dotted keys that the annotations do not name (of other packages).
    """
    problems = error.errors(include_url=False)
    problem: Any = next((entry for entry in problems if entry["type"] == "extra_forbidden"), problems[0])
    section, keys = _walk(model, problem["loc"], sections or {})
    key, kind = ".".join(keys), problem["type"]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, BadKey):
        return ConfigError(origin, cause.key, cause.reason)
    if kind == "extra_forbidden":
        known = keys_of(section) if section is not None else ()
        hint = f"; the keys here are {', '.join(known)}" if known else ""
        inner = [] if section is None else _inner_keys(section, keys, sections or {})
        if 0 < len(inner) <= _MOST_MEANT:
            return ConfigError(origin, key, f"unknown key; did you mean {' or '.join(map(repr, inner))}?")
        return ConfigError(origin, key, "unknown key" + did_you_mean(keys[-1], known, otherwise=hint))
    if kind == "missing":
        missing = [
            ".".join(_walk(model, each["loc"], sections or {})[1])
            for each in problems
            if each["type"] == kind
        ]
        if len(missing) > 1:
            return ConfigError(origin, ", ".join(missing), "missing; add them")
        field = None if section is None else _field(section, keys[-1])
        words = (
            () if field is None or get_origin(field.annotation) is not Literal else get_args(field.annotation)
        )
        return ConfigError(
            origin, key, "missing; add it" + (": " + " or ".join(map(str, words)) if words else "")
        )
    if kind == "union_tag_invalid":
        tag, expected = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
        return ConfigError(origin, f"{key}.kind", f"{tag!r} is no {keys[-1]}; take one of {expected}")
    reason = _reason(problem, None if section is None or not keys else _field(section, keys[-1]))
    if not key and (named := _NAMED_KEY.match(reason)) and named["key"].split(".")[0] in keys_of(model):
        key, reason = named["key"], reason[named.end() :]
    return ConfigError(origin, key or whole, reason)


@functools.cache
def described_fields(section: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a section, each with the docstring below it as its description.

    pydantic's `use_attribute_docstrings` would do this for every class at its definition, which costs each command a
    tenth of a second; only help pages need it.
    """
    fields = section.model_fields
    for cls in section.__mro__:
        for name, text in _attribute_docstrings(cls.__module__).get(cls.__qualname__, {}).items():
            if name in fields and fields[name].description is None:
                fields[name].description = text
    return fields


@functools.cache
def _attribute_docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings below annotated names, by class and name; empty without the module's source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return {
        node.name: {
            first.target.id: inspect.cleandoc(second.value.value)
            for first, second in pairwise(node.body)
            if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
            if isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
            if isinstance(second.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def keys_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of a section, as files name them."""
    return tuple(field.alias or name for name, field in section.model_fields.items())


def variants_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the sections that an annotation allows, `None` left out; empty for a plain value."""
    parts = get_args(annotation) or (annotation,)
    kinds = tuple(part for part in parts if part is not type(None))
    return kinds if all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds) else ()


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, mappings merged key by key."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def nested(key: str, value: Any) -> dict[str, Any]:
    """Turn "a.b" and a value into {"a": {"b": value}}; ConfigError if the key has too many parts."""
    parts = key.split(".")
    if len(parts) > DEPTH_LIMIT:
        reason = f"has more than {DEPTH_LIMIT} parts; check the key"
        raise ConfigError("configuration", f"{key[:40]}...", reason)
    for part in reversed(parts):
        value = {part: value}
    return value


_NUMBERS = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?(\s*,\s*[+-]?\d+(\.\d+)?(e[+-]?\d+)?)+,?")


def parse_setting(setting: str) -> dict[str, Any]:
    """Turn "a.b=1.5" into {"a": {"b": 1.5}}; numbers with commas between them are a list."""
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise ConfigError("--set", setting, "is not of the form key=value, as in trainer.threshold=0.1")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
        if _NUMBERS.fullmatch(value):
            value = parse_toml(f"value = [{value}]")["value"]
    return nested(key.strip(), value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"a": {"b": 1.5}} into {"a.b": 1.5}, whether keys were written dotted, quoted or as tables."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


_MOST_MEANT = 4
"""Keys of inner sections that are named for an unknown key."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
"""The names that pydantic gives to a number's limits, in words."""


def default_of(field: FieldInfo) -> Any:
    """Return a field's default; no factory here takes the validated data (pydantic 2.7 cannot pass them)."""
    return field.get_default(call_default_factory=True)


def nested_keys(section: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of a section and of its inner sections."""
    for name in keys_of(section):
        field = _field(section, name)
        parts = () if field is None else variants_of(field.annotation)
        yield from (f"{name}.{key}" for part in parts for key in nested_keys(part)) if parts else (name,)


def _inner_keys(
    section: type[BaseModel], keys: Sequence[str], sections: Mapping[str, type[BaseModel]]
) -> list[str]:
    """Return the dotted keys of inner sections, at any depth, whose last name is that of the unknown key."""
    found: dict[str, None] = {}
    for name in keys_of(section):
        path, field = ".".join([*keys[:-1], name]), _field(section, name)
        parts = (
            [sections[path]] if path in sections else [] if field is None else variants_of(field.annotation)
        )
        inner = (key for part in parts for key in nested_keys(part))
        found |= dict.fromkeys(f"{path}.{key}" for key in inner if key.rpartition(".")[2] == keys[-1])
    return list(found)


def _reason(problem: Mapping[str, Any], field: FieldInfo | None) -> str:
    """Return what a key takes, the value that was given, and the key's default."""
    message, value = str(problem["msg"]).removeprefix("Value error, "), problem.get("input")
    if problem["type"] == "value_error" or isinstance(value, BaseModel):
        return message
    if isinstance(value, Mapping):
        return "is one value, not a section; give a value"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        given = (
            repr(value)
            if isinstance(value, str | int | float | list | tuple)
            else f"a {type(value).__name__}"
        )
        sections, example = () if field is None else variants_of(field.annotation), ""
        if len(sections) == 1 and sections[0].model_fields:
            fields = {each.alias or name: each for name, each in sections[0].model_fields.items()}
            fitting = [key for key, each in fields.items() if _takes(each.annotation, value)]
            example = f", such as {{{next(iter(fields))!r}: ...}}"
            example = f", such as {fitting[0]} = {value!r}" if fitting else example
        return f"is a section, not one value; give its keys instead of {given}{example}"
    if problem["type"] == "tuple_type" and not isinstance(value, str):
        return f"must be a list, such as [{value!r}], got {value!r}"
    rule = (
        message.replace("Input should be a valid tuple", "must be a list, such as [1, 2]")
        .replace("Input should be", "must be")
        .split(", unable to parse")[0]
        .split(", got a number with")[0]
    )
    if field is not None and problem["type"].startswith(("greater_than", "less_than")):
        limits = [
            (words, getattr(each, name, None)) for name, words in _BOUNDS.items() for each in field.metadata
        ]
        rule = "must be " + " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=False)
    usual = f"; the default is {default}" if isinstance(default, str | int | float) else ""
    return f"{rule}, got {value!r}{usual}"


def _takes(annotation: Any, value: Any) -> bool:
    """Return whether an annotation allows a value: one of its words, or a value of its type."""
    parts = get_args(annotation) or (annotation,)
    kinds = (int, float) if type(value) is int else (type(value),)
    return any(kind in parts for kind in kinds) or (isinstance(value, str) and value in parts)


def _walk(
    model: type[BaseModel], location: Sequence[str | int], sections: Mapping[str, type[BaseModel]]
) -> tuple[type[BaseModel] | None, list[str]]:
    """Return the section that holds the last key of an error's location (None if no section does), and the keys.

    pydantic puts the kind of a discriminated union between the keys; it is left out.
    """
    keys: list[str] = []
    holder: type[BaseModel] | None = model
    below: type[BaseModel] | None = model
    choices: dict[str, type[BaseModel]] = {}
    for part in map(str, location):
        if part in choices:
            below = choices[part]
            choices = {}
            continue
        holder, choices = below, {}
        keys.append(part)
        field = None if holder is None else _field(holder, part)
        found = () if field is None else variants_of(field.annotation)
        below = sections.get(".".join(keys)) or (found[0] if len(found) == 1 else None)
        if field is not None and len(found) > 1 and below is None:
            # a discriminated union tells its variants apart by the words of one field
            name = field.discriminator if isinstance(field.discriminator, str) else "kind"
            tagged = ((kind, kind.model_fields.get(name)) for kind in found)
            choices = {
                str(tag): kind for kind, by in tagged if by is not None for tag in get_args(by.annotation)
            }
    return holder, keys


def _field(section: type[BaseModel], key: str) -> Any:
    """Return the field under a key, by its alias or its name."""
    by_alias = (field for field in section.model_fields.values() if field.alias == key)
    return next(by_alias, section.model_fields.get(key))
