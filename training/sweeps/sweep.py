"""A sweep: its spec (TOML), the runs that it asks for, and their results in a folder, a row for each run.

A spec is series of runs over axes of configuration keys. Every error that can be found before a run starts is raised
here, with the file, the series and the key. Curves are means over seeds and their standard errors, against noise,
epsilon and cost.
"""

from __future__ import annotations

import itertools
import math
import reprlib
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from opusim.accounting.guarantee import Status
from opusim.description.schema import NoiseSettings, load_description
from opusim.description.section import flat, merged, nested
from opusim.errors import ConfigError
from opusim.files import parse_toml, read_text
from opusim.training.attacks.findings import read_audit
from opusim.training.config.run import RunConfig, load_config
from opusim.training.config.sections import Section
from opusim.training.data.catalogue import CATALOGUE
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import AUDIT_FILE, RunFolder
from opusim.training.runs.run import Run, evaluate_run
from opusim.training.runs.storage import StoredGuarantee, read_record, write_record

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


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        series: Name of its series.
        values: Its value on each axis, by dotted configuration key.
        config: Its resolved configuration.
        inputs: Digest of user-supplied data and model; "" without them.
    """

    series: str
    values: dict[str, Any]
    config: RunConfig
    inputs: str = ""

    @property
    def identity(self) -> str:
        """Name of its run folder: points with the same configuration and the same inputs share one run.

        Release runs have no seed. An axis `seed` counts their repetitions, which share a configuration.
        """
        name = f"{self.config.trainer.kind}-{self.config.digest()[:16]}{self.inputs and '-'}{self.inputs}"
        is_repetition = self.config.mode == "release" and "seed" in self.values
        return f"{name}-{self.values['seed']}" if is_repetition else name


def read_spec(path: str | Path) -> tuple[SweepSpec, str]:
    """Read a spec file; returns the spec and what error messages call the file; may raise ConfigError."""
    origin = str(path)
    try:
        values = parse_toml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error}); check the path"
        raise ConfigError(origin, "path", reason) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(origin, "syntax", f"is not valid TOML: {error}") from error
    return parse_spec(values, origin)


def parse_spec(values: Mapping[str, Any], origin: str) -> tuple[SweepSpec, str]:
    """Turn the values of a TOML document into a spec; see `read_spec`."""
    try:
        return SweepSpec.model_validate(dict(values)), origin
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
        raise ConfigError(origin, ".".join(location), reason) from error


def points_of(spec: SweepSpec, origin: str) -> list[Point]:
    """Return all points of a sweep, series by series; error messages name its origin.

    Raises ConfigError if an axis has no values or one value twice, two axes set the same key, a configuration does not
    take a key or a value, or a trainer, device or data set is not known.
    """
    wanted = spec.series or (SeriesSpec(name="runs"),)
    runs = 0
    for series in wanted:  # refuse a table of too many runs before it is made
        axes = (*flat(spec.axes).values(), *flat(series.axes).values())
        runs += math.prod(len(values) for values in axes if isinstance(values, list))
    if runs > RUNS_LIMIT:
        raise ConfigError(origin, "axes", f"make {runs:,} runs, more than {RUNS_LIMIT:,}; divide the table")
    points: list[Point] = []
    for series in wanted:
        place = f"{origin}, series {series.name!r}" if spec.series else origin
        pairs = [*flat(spec.axes).items(), *flat(series.axes).items()]
        fixed = merged(spec.config, series.config)
        for number, (key, values) in enumerate(pairs):
            problem = _problem_of_axis(key, values, [other for other, _ in pairs[:number]], fixed)
            if problem:
                raise ConfigError(place, f"axes.{key}", problem)
        keys = [key for key, _ in pairs]
        for values in itertools.product(*(values for _, values in pairs)):
            changes = dict(zip(keys, values, strict=True))
            try:
                config = _resolved(fixed, changes, place)
            except ConfigError as error:
                raise ConfigError(error.file, error.key, _moved(error, spec, series)) from error
            points.append(Point(series=series.name, values=changes, config=config))
    known = dict.fromkeys(key for point in points for key in point.values)
    if spec.noise is not None and spec.noise not in known:  # figures would lack their axis
        hint = f"take one of {', '.join(known)}, or leave it out" if known else "leave it out"
        raise ConfigError(origin, "noise", f"{spec.noise!r} is not an axis of this sweep; {hint}")
    return points


def one_at_a_time(points: Sequence[Point]) -> bool:
    """Whether some runs use a device that only one process can hold."""
    devices = (point.config.device for point in points if point.config.uses_device)
    accesses = (load_description(device.name, device.overrides).access for device in devices)
    return any(access is not None and access.exclusive for access in accesses)


def _problem_of_axis(key: str, values: Any, others: Sequence[str], fixed: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the values of an axis, or which other axis or fixed key sets the same thing, or None."""
    if not isinstance(values, list):
        return f"{values!r} is not a list; give the axis its values as in [0.0, 1.0]"
    if not values:
        return "is empty; give it at least one value, or leave the axis out"
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        return f"holds {twice[0]!r} twice; each value makes one run"
    for other in others:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            return f"clashes with the axis {other}: both set it; leave one out"
    value: Any = fixed
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else f"is set to {value!r} in config and is an axis; leave one out"


def _moved(error: ConfigError, spec: SweepSpec, series: SeriesSpec) -> str:
    """Return why a series refuses a key; one that all series share need not be left out of those that take it."""
    reason = error.reason.removesuffix("leave it out")
    for where, shared, own in (("config", spec.config, series.config), ("axes", spec.axes, series.axes)):
        if reason != error.reason and error.key in flat(shared).keys() - flat(own) and spec.series[1:]:
            return f"{reason}move it from the shared {where} to the {where} of the series that take it"
    return error.reason


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
    named = config.data.file_kind is not None or config.data.factory is not None
    if config.data.name not in CATALOGUE and not named:
        known = ", ".join(CATALOGUE)
        raise ConfigError(place, "data.name", f"{config.data.name!r} is not known; take {known}")
    return config


SCHEMA_VERSION = 1
_NOISE_KEYS = ("sigma", "temperature_c", "exposure_us", "noise_multiplier", "epsilon")
"""Last parts of the keys that set a noise level; the most direct ones come first."""
_LABELS = {
    "device.noise.sigma": "standard deviation of the device's noise [units of the projection]",
    "trainer.sigma": "standard deviation of the noise [units of the signal]",
    "temperature_c": "temperature of the sensor [°C]",
    "exposure_us": "exposure [µs]",
    "protection.noise_multiplier": "noise multiplier z (noise / clip norm)",
    "protection.epsilon": "privacy budget ε",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run's figures; the fields are the keys of its JSON file.

    Attributes:
        identity: Name of the run folder.
        status: "done", "stopped" (its privacy budget was spent before the end) or "failed".
        reason: Why it stopped or failed, in one line; None if the run finished.
        figures: The run's summary: accuracies and losses per split, frames, seconds, joules. A release run has only
            the figures of test records, a failed run none.
        noise_std: Standard deviation of the device's Gaussian noise, in projection units; None without one.
        guarantees: Its privacy guarantees.
        wall_s: Seconds that it took in all its processes; None in a release run, whose time reveals the sizes of its
            secret batches.
    """

    identity: str
    status: Literal["done", "stopped", "failed"]
    reason: str | None = None
    figures: Mapping[str, Any]
    noise_std: float | None = None
    guarantees: tuple[StoredGuarantee, ...] = ()
    wall_s: float | None = 0.0

    @property
    def accuracy(self) -> float | None:
        """Accuracy on test records, else on validation records, in [0, 1]; None if the run has neither."""
        found = next((self.figures[key] for key in _ACCURACIES if key in self.figures), None)
        return None if found is None else float(found)

    def epsilon(self, *statuses: Status) -> float | None:
        """The smallest epsilon of guarantees with these statuses (at one delta, in one unit), or None."""
        found = [g.epsilon for g in self.guarantees if g.status in statuses]
        return min(found) if found else None

    @property
    def proven_epsilon(self) -> float | None:
        """Proven epsilon, maybe under a device model; infinite if there is no finite guarantee."""
        return self.epsilon(Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL, Status.NONE)

    @property
    def claimed_epsilon(self) -> float | None:
        """Epsilon of a paper's formula if its hypotheses held; None if no paper claims one."""
        values = [g.formula_value for g in self.guarantees if g.formula_value is not None]
        return min(values) if values else self.epsilon(Status.CLAIMED)


_ACCURACIES = ("test_accuracy", "validation_accuracy")
"""Figures that `Row.accuracy` looks for, in this order."""


def row_of(run: Run, config: RunConfig, *, wall_s: float, test: Any = None) -> Row:
    """Return the row of a finished run, on user-supplied test records if given."""
    summary = dict(run.summary or {})
    stopped = summary.pop("stopped", None)
    # a release run's summary has no figures of data, but its model may be measured on public test records
    if config.mode == "release" and (test is not None or not config.data.is_own):
        found = evaluate_run(run.folder.path) if test is None else run.evaluate(*test)
        summary |= {"test_accuracy": found["accuracy"], "test_loss": found["loss"]}
    noise = (run.facts.get("device") or {}).get("noise")  # in its description, directly or by a temperature
    return Row(
        identity=run.folder.path.name,
        status="done" if stopped is None else "stopped",
        reason=stopped,
        figures=summary,
        noise_std=None if not noise else NoiseSettings.model_validate(noise).value(),
        guarantees=tuple(run.guarantees),
        wall_s=None if config.mode == "release" else wall_s,
    )


def failed_row(identity: str, error: BaseException | str) -> Row:
    """Return the row of a run that failed."""
    text = error if isinstance(error, str) else " ".join(str(error).split()) or type(error).__name__
    return Row(identity=identity, status="failed", reason=text, figures={})


def write_row(path: Path, row: Row) -> None:
    """Write a row, without figures that are not finite."""
    finite = {k: v for k, v in row.figures.items() if not isinstance(v, float) or math.isfinite(v)}
    write_record(path, replace(row, figures=finite), SCHEMA_VERSION)


def read_row(path: Path) -> Row | None:
    """Read a row, or return None if there is none; raise RunFolderError if the file is no row, or was changed."""
    if not path.exists():
        return None
    remedy = "delete it, and the same command writes it again"
    row = read_record(path, Row, SCHEMA_VERSION, what="a row of a sweep", remedy=remedy, named=path.parent)
    for key in _ACCURACIES:
        found = row.figures.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float | None):
            raise RunFolderError(f"{path}: figures.{key} = {reprlib.repr(found)} is no number; {remedy}")
    return row


def audited_epsilon(run_folder: Path) -> float | None:
    """Return the largest lower bound that an audit of this run found, at its delta; None without an audit."""
    file = run_folder / AUDIT_FILE
    if not file.exists():
        return None
    return read_audit(file).strongest.result.epsilon_lower


class SweepFolder:
    """Paths and files of a sweep.

    Files: `runs/` (ordinary run folders, named after their configuration's digest, so that points with the same
    configuration share one), `rows/` (a JSON file per run), `table.csv` and `sweep.json` (all rows), `figures/` (PNG
    and data), `report.html`, `lock`.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.figures = self.path / "figures"
        self.table_file = self.path / "table.csv"
        self.data_file = self.path / "sweep.json"
        self.report_file = self.path / "report.html"

    def run_path(self, point: Point) -> Path:
        """The run folder of a point."""
        return self.path / "runs" / point.identity

    def row_path(self, point: Point) -> Path:
        """The file of a point's row."""
        return self.path / "rows" / f"{point.identity}.json"

    def rows(self, points: Sequence[Point]) -> dict[str, Row]:
        """Read the rows that exist, by the run's identity."""
        found = {point.identity: read_row(self.row_path(point)) for point in points}
        return {identity: row for identity, row in found.items() if row is not None}


# Curves


@dataclass(frozen=True, kw_only=True)
class Level:
    """All seeds of one setting.

    Attributes:
        x: Its value on the axis.
        mean: Mean over seeds; infinite if any value is.
        error: Standard error of the mean; 0 for one seed.
        n: Number of seeds.
        std: Standard deviation of the device's noise at this setting; None without one.
    """

    x: float
    mean: float
    error: float
    n: int
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A series' line of a figure, by rising x: "accuracy", "claimed", "proven", "audited", "published" or a cost."""

    name: str
    kind: str
    levels: tuple[Level, ...]


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The points of a sweep's spec, and the rows that exist, by identity, in its folder."""

    spec: SweepSpec
    points: Sequence[Point]
    rows: Mapping[str, Row]
    folder: SweepFolder

    @property
    def series(self) -> list[str]:
        """Names of the series drawn as curves, in the spec's order."""
        references = {series.name for series in self.spec.series if series.reference}
        return [
            name for name in dict.fromkeys(point.series for point in self.points) if name not in references
        ]

    @property
    def references(self) -> list[str]:
        """Names of the series drawn as level lines."""
        return [series.name for series in self.spec.series if series.reference]

    @property
    def noise_key(self) -> str | None:
        """Configuration key of the noise axis, or None if no axis sets a noise level."""
        if self.spec.noise is not None:
            return self.spec.noise
        keys = dict.fromkeys(key for point in self.points for key in point.values)
        ranked = [key for last in _NOISE_KEYS for key in keys if key.split(".")[-1] == last]
        return ranked[0] if ranked else None

    def finished(self, series: str) -> list[tuple[Point, Row]]:
        """Return the points of a series whose runs have figures, with their rows."""
        return [
            (point, self.rows[point.identity])
            for point in self.points
            if point.series == series
            and point.identity in self.rows
            and self.rows[point.identity].status != "failed"
        ]


def axis_label(key: str) -> str:
    """Return the label of the axis of a configuration key, with its unit."""
    return _LABELS.get(key) or _LABELS.get(key.split(".")[-1]) or key


def accuracy_against_noise(result: SweepResult) -> list[Curve]:
    """Accuracy in percent against noise, a curve for each series with a noise axis."""
    return _on_noise_axis(result, "accuracy", _percent)


def references(result: SweepResult, drawn: Sequence[Curve] = ()) -> list[Curve]:
    """Accuracy in percent of the reference series, one level each, and of series of one setting that `drawn` lacks."""
    single = []
    for name in result.series if drawn else ():
        points = [point.values for point in result.points if point.series == name]
        settings = {tuple((k, str(v)) for k, v in values.items() if k != "seed") for values in points}
        if len(settings) == 1 and name not in {curve.name for curve in drawn}:
            single.append(name)
    return _one_level(result, [*single, *result.references], "accuracy", _percent)


def epsilon_against_noise(result: SweepResult) -> list[Curve]:
    """Claimed, proven and audited epsilon against noise, each a separate curve."""
    kinds: dict[str, Callable[[Row], float | None]] = {
        "claimed": lambda row: row.claimed_epsilon,
        "proven": lambda row: row.proven_epsilon,
        "audited": lambda row: audited_epsilon(result.folder.path / "runs" / row.identity),
    }
    return [curve for kind, value in kinds.items() for curve in _on_noise_axis(result, kind, value)]


def accuracy_against_epsilon(result: SweepResult) -> list[Curve]:
    """Accuracy in percent against proven and claimed epsilon, a curve for each series and kind.

    A setting without a finite guarantee is a separate level at infinite epsilon. A series without any finite epsilon,
    claimed or proven, has no curve.
    """
    kinds: dict[str, Callable[[Row], float | None]] = {
        "proven": lambda row: row.proven_epsilon,
        "claimed": lambda row: row.claimed_epsilon,
    }
    curves = []
    for name in result.series:
        found = []
        for kind, value in kinds.items():
            groups: dict[tuple[float, str], list[float]] = {}
            for point, row in result.finished(name):
                epsilon, accuracy = value(row), _percent(row)
                if epsilon is not None and accuracy is not None:
                    others = {key: each for key, each in point.values.items() if key != "seed"}
                    setting = "" if math.isfinite(epsilon) else str(others)
                    groups.setdefault((float(f"{epsilon:.3g}"), setting), []).append(accuracy)
            if groups:
                levels = tuple(_level(key[0], groups[key], None) for key in sorted(groups))
                found.append(Curve(name=name, kind=kind, levels=levels))
        if any(math.isfinite(level.x) for curve in found for level in curve.levels):
            curves += found
    return curves


def chance(result: SweepResult) -> float | None:
    """Accuracy in percent of guessing among the classes, from the folder of a run; None without a run or classes."""
    for name in [*result.series, *result.references]:
        for _, row in result.finished(name):
            folder = RunFolder(result.folder.path / "runs" / row.identity)
            if folder.started:
                data = folder.read_facts()["data"]
                return 100 / data["n_classes"] if data.get("target", "class") == "class" else None
    return None


def published(result: SweepResult) -> list[Curve]:
    """Accuracy in percent at each epsilon that others published, by the spec."""
    return [
        Curve(
            name=other.name,
            kind="published",
            levels=tuple(
                Level(x=epsilon, mean=accuracy, error=0.0, n=1)
                for epsilon, accuracy in zip(other.epsilon, other.accuracy, strict=True)
            ),
        )
        for other in result.spec.published
    ]


def costs(result: SweepResult) -> list[Curve]:
    """Device energy [J], device time [s] and wall time [s] of one run of each series, references included."""
    kinds: dict[str, Callable[[Row], float | None]] = {
        "device energy [J]": lambda row: row.figures.get("joules"),
        "device time [s]": lambda row: row.figures.get("seconds"),
        "wall time [s]": lambda row: row.wall_s,
    }
    names = [*result.series, *result.references]
    return [curve for kind, value in kinds.items() for curve in _one_level(result, names, kind, value)]


def _one_level(
    result: SweepResult, names: Sequence[str], kind: str, value: Callable[[Row], float | None]
) -> list[Curve]:
    """Return the mean over all runs of each series, on no axis."""
    curves = []
    for name in names:
        values = [v for _, row in result.finished(name) if (v := value(row)) is not None]
        if values:
            curves.append(Curve(name=name, kind=kind, levels=(_level(0.0, values, None),)))
    return curves


def _on_noise_axis(result: SweepResult, kind: str, value: Callable[[Row], float | None]) -> list[Curve]:
    key = result.noise_key
    curves = []
    for name in result.series:
        groups: dict[float, list[tuple[float, float | None]]] = {}
        for point, row in result.finished(name):
            found = value(row)
            if key is not None and key in point.values and found is not None:
                groups.setdefault(float(point.values[key]), []).append((found, row.noise_std))
        if groups:
            levels = tuple(
                _level(x, [found for found, _ in groups[x]], groups[x][0][1]) for x in sorted(groups)
            )
            curves.append(Curve(name=name, kind=kind, levels=levels))
    return curves


def _level(x: float, values: Sequence[float], std: float | None) -> Level:
    if not all(math.isfinite(value) for value in values):
        return Level(x=x, mean=math.inf, error=0.0, n=len(values), std=std)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Level(x=x, mean=statistics.fmean(values), error=error, n=len(values), std=std)


def _percent(row: Row) -> float | None:
    return None if row.accuracy is None else 100 * row.accuracy


def curve_rows(curves: Iterable[Curve]) -> list[dict[str, str | float]]:
    """Return the data of a figure, a row for each level."""
    return [
        {
            "series": curve.name,
            "kind": curve.kind,
            "x": level.x,
            "mean": level.mean,
            "standard_error": level.error,
            "runs": level.n,
        }
        for curve in curves
        for level in curve.levels
    ]
