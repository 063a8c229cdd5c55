"""A sweep's spec (TOML): series of runs over axes of configuration keys, and the runs that it asks for.

Every error that can be found before a run starts is raised here, with the file, the series and the key.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from opusim.description.schema import load_description
from opusim.description.section import flat, merged, nested
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text
from opusim.training.config.run import RunConfig, load_config
from opusim.training.config.sections import Section
from opusim.training.data.catalogue import CATALOGUE

RUNS_LIMIT = 10_000
"""Runs of a sweep, at most."""


class SeriesSpec(Section):
    """One curve of a figure: runs that differ only in the axes."""

    name: str = Field(min_length=1)
    """Its name in figures."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys of its runs, over those of the sweep."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys with lists of values, over those of the sweep; the runs take all combinations."""
    reference: bool = False
    """Draw it as a level line across the figures, such as the accuracy without privacy."""


class PublishedSpec(Section):
    """Accuracies that others published, drawn as crosses beside the sweep's own."""

    name: str = Field(min_length=1)
    """Method and source, such as "CNN on pixels (Fu et al. 2024)"."""
    epsilon: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    """Budgets."""
    accuracy: tuple[Annotated[float, Field(ge=0, le=100)], ...]
    """Test accuracy at each budget, per cent."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.epsilon) != len(self.accuracy):
            raise ValueError(
                f"{self.name!r} has {len(self.epsilon)} values of epsilon and {len(self.accuracy)} of accuracy; "
                "give one accuracy for each epsilon"
            )
        return self


class SweepSpec(Section):
    """A whole sweep."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    title: str = Field(min_length=1)
    """Heading of the report."""
    noise: str | None = None
    """The axis that figures use for the noise; None takes the first axis that sets a noise level."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys of every run."""
    axes: dict[str, Any] = Field(default_factory=dict)
    """Axes of every series."""
    series: tuple[SeriesSpec, ...] = ()
    """The series; without any, the axes of the sweep make the only one."""
    published: tuple[PublishedSpec, ...] = ()
    """Accuracies of others, for the figure of accuracy against epsilon."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [series.name for series in self.series]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two series are called {min(twice)!r}; give each its own name")
        return self


@dataclass(frozen=True)
class SpecText:
    """A spec's text and its file.

    Attributes:
        text: The TOML document.
        origin: What error messages call it.
    """

    text: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        series: Name of its series.
        values: Its value on each axis, by dotted configuration key.
        config: Its resolved configuration.
    """

    series: str
    values: dict[str, Any]
    config: RunConfig

    @property
    def identity(self) -> str:
        """Name of its run folder: points with the same configuration share one run.

        Release runs have no seed. An axis `seed` counts their repetitions, which share a configuration.
        """
        name = f"{self.config.trainer.kind}-{self.config.digest()[:16]}"
        is_repetition = self.config.mode == "release" and "seed" in self.values
        return f"{name}-{self.values['seed']}" if is_repetition else name


def read_spec(path: str | Path) -> tuple[SweepSpec, SpecText]:
    """Read a spec file.

    Raises:
        ConfigError: It cannot be read, is not TOML, or holds a key that a spec does not have.
    """
    origin = str(path)
    try:
        text = read_text(path)
        values = parse_toml(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error}); check the path"
        raise ConfigError(origin, "path", reason) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(origin, "syntax", f"is not valid TOML: {error}") from error
    return parse_spec(values, SpecText(text, origin))


def parse_spec(values: Mapping[str, Any], text: SpecText) -> tuple[SweepSpec, SpecText]:
    """Turn the values of a TOML document into a spec; see `read_spec`."""
    try:
        return SweepSpec.model_validate(dict(values)), text
    except ValidationError as error:
        problems = error.errors()  # an unknown key first: it often is the cause of a missing one
        problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
        location = [str(part) for part in problem["loc"]] or ["sweep"]
        if problem["type"] == "extra_forbidden":
            sections: dict[str, type[Section]] = {"series": SeriesSpec, "published": PublishedSpec}
            keys = sections.get(location[0], SweepSpec).model_fields
            reason = f"is not a key of a sweep; the keys here are {', '.join(keys)}"
        elif problem["type"] == "missing":
            reason = "missing; add it"
        else:
            reason = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(text.origin, ".".join(location), reason) from error


def points_of(spec: SweepSpec, text: SpecText) -> list[Point]:
    """Return all points of a sweep, series by series.

    Raises:
        ConfigError: An axis has no values or one value twice, two axes set the same key, a configuration does not
            take a key or a value, or a trainer, device or data set is not known.
    """
    wanted = spec.series or (SeriesSpec(name="runs"),)
    runs = 0
    for series in wanted:  # a table of more runs than a sweep can be meant to have is never made
        axes = (*flat(spec.axes).values(), *flat(series.axes).values())
        runs += math.prod(len(values) for values in axes if isinstance(values, list))
    if runs > RUNS_LIMIT:
        raise ConfigError(
            text.origin, "axes", f"make {runs:,} runs, more than {RUNS_LIMIT:,}; divide the table"
        )
    points: list[Point] = []
    for series in wanted:
        place = f"{text.origin}, series {series.name!r}" if spec.series else text.origin
        pairs = [*flat(spec.axes).items(), *flat(series.axes).items()]
        fixed = merged(spec.config, series.config)
        for number, (key, values) in enumerate(pairs):
            problem = _problem_of_values(values) or _problem_of_clash(key, pairs[:number], fixed)
            if problem:
                raise ConfigError(place, f"axes.{key}", problem)
        keys = [key for key, _ in pairs]
        for values in itertools.product(*(values for _, values in pairs)):
            changes = dict(zip(keys, values, strict=True))
            points.append(Point(series=series.name, values=changes, config=_resolved(fixed, changes, place)))
    known = dict.fromkeys(key for point in points for key in point.values)
    if spec.noise is not None and spec.noise not in known:  # figures would lack their axis
        hint = f"take one of {', '.join(known)}, or leave it out" if known else "leave it out"
        raise ConfigError(text.origin, "noise", f"{spec.noise!r} is not an axis of this sweep; {hint}")
    return points


def one_at_a_time(points: Sequence[Point]) -> bool:
    """Whether some runs use a device that only one process can hold."""
    for point in points:
        if point.config.uses_device:
            access = load_description(point.config.device.name, point.config.device.overrides).access
            if access is not None and access.exclusive:
                return True
    return False


def _problem_of_values(values: Any) -> str | None:
    """Say what is wrong with the values of an axis, or None."""
    if not isinstance(values, list):
        return f"{values!r} is not a list; give the axis its values as in [0.0, 1.0]"
    if not values:
        return "is empty; give it at least one value, or leave the axis out"
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    return f"holds {twice[0]!r} twice; each value makes one run" if twice else None


def _problem_of_clash(key: str, others: Sequence[tuple[str, Any]], fixed: Mapping[str, Any]) -> str | None:
    """Say which other axis or fixed key sets the same thing, or None."""
    for other, _ in others:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            return f"clashes with the axis {other}: both set it; leave one out"
    value: Any = fixed
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else f"is set to {value!r} in config and is an axis; leave one out"


def _resolved(fixed: Mapping[str, Any], changes: Mapping[str, Any], place: str) -> RunConfig:
    """Resolve the configuration of one run, with one thread by default, since runs share the machine."""
    values = merged({"threads": 1}, fixed)
    for key, value in changes.items():
        values = merged(values, nested(key, value))
    if values.get("mode") == "release" and "seed" in changes:
        del values["seed"]
    try:
        config = load_config(values)
        load_description(config.device.name, config.device.overrides)
    except ConfigError as error:
        if error.file == "configuration":
            raise ConfigError(place, error.key, error.reason) from error
        # the keys of a device description stand under `device` in a configuration
        raise ConfigError(place, f"device.{error.key}", f"{error.file}: {error.reason}") from error
    if config.data.name not in CATALOGUE and config.data.file_kind is None:
        known = ", ".join(CATALOGUE)
        raise ConfigError(place, "data.name", f"{config.data.name!r} is not known; take {known}")
    return config
