"""A sweep as a person writes it: series of runs, each over axes of configuration keys (TOML)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text
from training.config.sections import Section
from training.sweeps.lines import line_of


class SeriesSpec(Section):
    """One line of a figure: runs that differ in the axes alone."""

    name: str = Field(min_length=1)
    """What the figure calls it."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys of its runs, over those of the sweep."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """Dotted configuration key to the list of its values, over those of the sweep; runs take all combinations."""
    reference: bool = False
    """Drawn as a level line across the figures, such as the accuracy without privacy."""


class SweepSpec(Section):
    """A whole sweep."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    title: str = Field(min_length=1)
    """Heading of the report."""
    noise: str | None = None
    """The axis that figures take for the noise; None takes the first axis that is one."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys of every run."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """Axes of every series."""
    series: tuple[SeriesSpec, ...] = ()
    """At least one; or none, and the axes of the sweep make the only one."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [series.name for series in self.series]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two series are called {min(twice)!r}; give each a name of its own")
        return self


class SpecText:
    """A spec's text, by which errors name lines.

    Args:
        text: The TOML document.
        origin: What errors call it.

    Attributes:
        text: The TOML document.
    """

    def __init__(self, text: str, origin: str) -> None:
        self.text, self._origin = text, origin

    def error(self, reason: str, *paths: Sequence[str]) -> ConfigError:
        """An error at the first of these paths that the text holds most of.

        Args:
            reason: What is wrong, and what to do.
            paths: Where it may stand, the likeliest first; the error is named after it.
        """
        found = [(line_of(self.text, path), path) for path in paths]
        line = next((number for number, path in found if number is not None), None)
        place = self._origin if line is None else f"{self._origin}, line {line}"
        return ConfigError(place, ".".join(part for part in paths[0] if not part.isdigit()), reason)

    def holds(self, path: Sequence[str]) -> bool:
        """Whether the text sets this very key."""
        return line_of(self.text, path) != line_of(self.text, path[:-1])


def read_spec(path: str | Path) -> tuple[SweepSpec, SpecText]:
    """Read a spec file.

    Raises:
        ConfigError: It cannot be read, is no TOML, or holds a key that a spec has not; with the line.
    """
    origin = str(path)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error}); check the path"
        raise ConfigError(origin, "path", reason) from error
    try:
        values = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(origin, "syntax", f"is not valid TOML: {error}") from error
    return parse_spec(values, SpecText(text, origin))


def parse_spec(values: Mapping[str, Any], text: SpecText) -> tuple[SweepSpec, SpecText]:
    """A spec from its values; see `read_spec`."""
    try:
        return SweepSpec.model_validate(dict(values)), text
    except ValidationError as error:
        problem = error.errors()[0]
        location = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            section = SeriesSpec if location[0] == "series" else SweepSpec
            reason = f"is not a key of a sweep; the keys here are {', '.join(section.model_fields)}"
        else:
            reason = problem["msg"].removeprefix("Value error, ")
        raise text.error(reason, location or ["sweep"]) from error
