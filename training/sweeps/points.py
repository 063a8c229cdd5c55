"""The runs that a sweep asks for, each with its resolved configuration; what can be refused is refused here."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opusim.description.loading import load_description
from opusim.errors import ConfigError
from training.config.reading import flat, load_config, merged, nested
from training.config.run import RunConfig
from training.sweeps.spec import SeriesSpec, SpecText, SweepSpec


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
        """Name of its run folder: points of one configuration share one run.

        Release runs have no seed: an axis `seed` counts their repetitions, which share a configuration.
        """
        name = f"{self.config.trainer.kind}-{self.config.digest()[:16]}"
        is_repetition = self.config.mode == "release" and "seed" in self.values
        return f"{name}-{self.values['seed']}" if is_repetition else name


@dataclass(frozen=True, kw_only=True)
class _Axis:
    key: str
    values: Sequence[Any]
    path: tuple[str, ...]


def points_of(spec: SweepSpec, text: SpecText) -> list[Point]:
    """All points of a sweep, series by series.

    Raises:
        ConfigError: An axis without values or with one twice, two axes that set one key, a key or a value that no
            configuration takes, an unknown trainer or device; with the line of the spec.
    """
    series = spec.series or (SeriesSpec(name="runs"),)
    points: list[Point] = []
    for number, one in enumerate(series):
        points += _series_points(spec, one, text, number)
    _check_noise(spec.noise, points, text)
    return points


def _check_noise(noise: str | None, points: Sequence[Point], text: SpecText) -> None:
    """Refuse a noise key that no series has as an axis: figures would lack their axis."""
    axes = dict.fromkeys(key for point in points for key in point.values)
    if noise is None or noise in axes:
        return
    close = difflib.get_close_matches(noise, axes, n=1)
    hint = (
        f"did you mean {close[0]!r}?"
        if close
        else f"take one of {', '.join(axes) or 'none'}, or leave it out"
    )
    raise text.error(f"{noise!r} is no axis of this sweep; {hint}", ("noise",))


def _series_points(spec: SweepSpec, series: SeriesSpec, text: SpecText, number: int) -> list[Point]:
    place = ("series", str(number))
    axes = [_Axis(key=k, values=v, path=("axes", k)) for k, v in flat(spec.axes).items()]
    axes += [_Axis(key=k, values=v, path=(*place, "axes", k)) for k, v in flat(series.axes).items()]
    fixed = merged(spec.config, series.config)
    for axis in axes:
        _check_values(axis, text)
    _check_clashes(axes, fixed, text)
    points = []
    for values in itertools.product(*(axis.values for axis in axes)):
        changes = dict(zip((axis.key for axis in axes), values, strict=True))
        config = _resolved(fixed, changes, text, place)
        points.append(Point(series=series.name, values=changes, config=config))
    return points


def _check_values(axis: _Axis, text: SpecText) -> None:
    if not isinstance(axis.values, list):
        raise text.error(f"{axis.values!r} is no list; give an axis its values as in [0.0, 1.0]", axis.path)
    if not axis.values:
        raise text.error("is empty; give it at least one value, or leave the axis out", axis.path)
    for place, value in enumerate(axis.values):
        if value in axis.values[:place]:
            raise text.error(f"holds {value!r} twice; a run is made once", axis.path)


def _check_clashes(axes: Sequence[_Axis], fixed: Mapping[str, Any], text: SpecText) -> None:
    """Refuse two axes, or an axis and a fixed key, that set the same thing."""
    for place, axis in enumerate(axes):
        for other in axes[:place]:
            if _overlap(axis.key, other.key):
                raise text.error(f"clashes with the axis {other.key}: both set it; leave one out", axis.path)
        fixed_value: Any = fixed
        for part in axis.key.split("."):
            fixed_value = fixed_value.get(part) if isinstance(fixed_value, Mapping) else None
        if fixed_value is not None:
            raise text.error(f"is set to {fixed_value!r} in config and is an axis; leave one out", axis.path)


def _overlap(left: str, right: str) -> bool:
    return f"{left}.".startswith(f"{right}.") or f"{right}.".startswith(f"{left}.")


def _resolved(
    fixed: Mapping[str, Any], changes: Mapping[str, Any], text: SpecText, place: tuple[str, str]
) -> RunConfig:
    """One run's configuration, on one thread unless the sweep says otherwise: sweeps run side by side."""
    values = merged({"threads": 1}, fixed)
    for key, value in changes.items():
        values = merged(values, nested(key, value))
    if values.get("mode") == "release" and "seed" in changes:
        del values["seed"]
    try:
        config = load_config(values)
        load_description(config.device.name, config.device.overrides)
        _check_data(config.data.name)
    except ConfigError as error:
        raise _at_line(error, text, place) from error
    return config


def _check_data(name: str) -> None:
    """Refuse a data set that no run of a sweep could load."""
    from training.data.catalogue import CATALOGUE

    if name not in CATALOGUE:
        raise ConfigError("configuration", "data.name", f"{name!r} is not known; take {', '.join(CATALOGUE)}")


def _at_line(error: ConfigError, text: SpecText, place: tuple[str, str]) -> ConfigError:
    """The same error at the line of the spec that causes it."""
    keys, reason = error.key.split("."), error.reason
    if error.file != "configuration":  # a device description's: its keys stand under device here
        keys, reason = ["device", *keys], f"{error.file}: {reason}"
    homes = [(*place, "axes"), ("axes",), (*place, "config"), ("config",)]
    paths = [(*home, *keys) for home in homes]
    exact = [path for path in paths if text.holds(path)]
    return text.error(reason, *(exact or [(*place, "config", *keys), ("config", *keys)]))


def one_at_a_time(points: Sequence[Point]) -> bool:
    """Whether some runs use a device that one process alone may have."""
    for point in points:
        if point.config.uses_device:
            access = load_description(point.config.device.name, point.config.device.overrides).access
            if access is not None and access.exclusive:
                return True
    return False
