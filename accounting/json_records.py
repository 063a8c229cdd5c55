"""Frozen records as plain JSON values, through pydantic; numbers survive the round trip to the last bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import lazy_loader

pydantic = lazy_loader.load("pydantic")  # a tenth of a second, which no command needs for its help

R = TypeVar("R")

_adapters: dict[type[Any], Any] = {}


def to_json(record: Any) -> dict[str, Any]:
    """Return a dataclass as plain JSON values, its fields in their order; infinity becomes the string "inf"."""
    values = _adapter_of(type(record)).dump_python(record, mode="json")
    return {key: "inf" if value == math.inf else value for key, value in values.items()}


def from_json(kind: type[R], content: Mapping[str, Any]) -> R:
    """Build a dataclass from what `to_json` returned.

    Args:
        kind: The dataclass.
        content: One value for each field without a default; others are ignored.

    Raises:
        ValueError: A value is missing, has the wrong type or breaks a rule of the dataclass; one line.
    """
    try:
        return cast(R, _adapter_of(kind).validate_python(dict(content)))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        place = ".".join(str(part) for part in problem["loc"])
        raise ValueError(
            str(cause) if cause else f"{place} = {problem['input']!r}: {problem['msg']}"
        ) from error


def _adapter_of(kind: type[Any]) -> Any:
    if kind not in _adapters:
        _adapters[kind] = pydantic.TypeAdapter(kind)
    return _adapters[kind]
