"""Write a sweep's results: the table as CSV and JSON, figures as PNG with their data, one self-contained HTML page."""

from __future__ import annotations

import csv
import io
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from accounting.tables import guarantee_rows, number
from opusim.files import write_file
from opusim.tables import duration, energy
from training.reports import sweep_figures as figures
from training.reports.drawing import save_figure
from training.reports.run_report import data_url, distinct, render
from training.runs.folder import RunFolder
from training.runs.storage import record_json, write_json
from training.sweeps import curves
from training.sweeps.curves import Curve, SweepResult, curve_rows
from training.sweeps.rows import SCHEMA_VERSION, Row, audited_epsilon
from training.sweeps.spec import Point

_NOTHING = "–"
_FIGURES: dict[
    str, tuple[str, Callable[[SweepResult], Figure | None], Callable[[SweepResult], list[Curve]]]
] = {
    "accuracy-noise": (
        "Accuracy against noise: mean over seeds and its standard error",
        figures.accuracy_noise,
        curves.accuracy_against_noise,
    ),
    "epsilon-noise": (
        "Epsilon against noise: claimed by a paper's formula, proven, and found by an audit",
        figures.epsilon_noise,
        curves.epsilon_against_noise,
    ),
    "accuracy-epsilon": (
        "Accuracy against epsilon: mean over seeds and its standard error; infinite epsilons on the right",
        figures.accuracy_epsilon,
        lambda result: [*curves.accuracy_against_epsilon(result), *curves.published(result)],
    ),
    "cost": ("Mean cost of one run of each series", figures.cost, curves.costs),
}


def write_sweep(result: SweepResult, spec_text: str) -> Path:
    """Write table, figures and report into the sweep's folder, and return the HTML file.

    Raises:
        OSError: The folder is not writable.
    """
    records = [_record(result, point) for point in result.points]
    _write_csv(result.folder.table_file, records)
    document = {
        "schema_version": SCHEMA_VERSION,
        "title": result.spec.title,
        "runs": [
            {
                "series": point.series,
                "values": point.values,
                "row": record_json(row, SCHEMA_VERSION) if row else None,
            }
            for point in result.points
            for row in [result.rows.get(point.identity)]
        ],
    }
    write_json(result.folder.data_file, document)
    page = _render(result, _pictures(result), records, spec_text)
    write_file(result.folder.report_file, page.encode())
    return result.folder.report_file


def setting_rows(result: SweepResult) -> list[dict[str, str]]:
    """Return a row for each setting, over seeds: accuracy, three kinds of epsilon, cost; no empty column."""
    keys = [key for key in dict.fromkeys(k for p in result.points for k in p.values) if key != "seed"]
    groups: dict[tuple[str, ...], list[tuple[Point, Row | None]]] = {}
    for point in result.points:
        setting = (point.series, *(str(point.values.get(key, "")) for key in keys))
        groups.setdefault(setting, []).append((point, result.rows.get(point.identity)))
    rows = [
        {"series": setting[0], **dict(zip(keys, setting[1:], strict=True)), **_figures_of(result, found)}
        for setting, found in groups.items()
    ]
    told = [key for key in rows[0] if any(row[key] not in ("", _NOTHING) for row in rows)]
    return [{key: row[key] for key in told} for row in rows]


def _figures_of(result: SweepResult, found: Sequence[tuple[Point, Row | None]]) -> dict[str, str]:
    rows = [row for _, row in found if row is not None and row.status != "failed"]
    accuracies = [100 * row.accuracy for row in rows if row.accuracy is not None]
    return {
        "runs": f"{len(rows)}/{len(found)}",
        "accuracy [%]": _mean_and_error(accuracies),
        "ε proven": _epsilons([row.proven_epsilon for row in rows]),
        "ε claimed": _epsilons([row.claimed_epsilon for row in rows]),
        "ε audited": _epsilons([audited_epsilon(result.folder.path / "runs" / row.identity) for row in rows]),
        "frames": _mean([row.figures.get("frames") for row in rows], "{:,.0f}".format),
        "device energy": _mean([row.figures.get("joules") for row in rows], energy),
        "device time": _mean([row.figures.get("seconds") for row in rows], duration),
        "wall time": _mean([row.wall_s for row in rows], duration),
    }


def _record(result: SweepResult, point: Point) -> dict[str, Any]:
    """Return one run as plain values, for the CSV file and the page's long table."""
    row = result.rows.get(point.identity)
    run_path = result.folder.run_path(point)
    axes = dict.fromkeys(key for other in result.points for key in other.values)
    record: dict[str, Any] = {"series": point.series, **{key: str(point.values.get(key, "")) for key in axes}}
    if row is None:
        return record | {"status": "not run"}
    figures_of_run = {
        "accuracy": row.accuracy,
        "epsilon_proven": row.proven_epsilon,
        "epsilon_claimed": row.claimed_epsilon,
        "epsilon_audited": audited_epsilon(run_path),
        "device_frames": row.figures.get("frames"),
        "device_joules": row.figures.get("joules"),
        "device_seconds": row.figures.get("seconds"),
        "wall_seconds": row.wall_s,
    }
    record |= {name: "" if v is None else f"{v:.6g}" for name, v in figures_of_run.items()}
    return record | {"status": row.status, "reason": row.reason or "", "run": row.identity}


def _again(result: SweepResult, point: Point) -> str:
    """Return the command that repeats a run."""
    file = result.folder.run_path(point) / "config.json"
    out = f"{point.identity}-again"
    return shlex.join(["opusim", "train", point.config.trainer.kind, "--config", str(file), "--out", out])


def _pictures(result: SweepResult) -> list[dict[str, str]]:
    """Draw each figure that has something to show, and write its data next to it."""
    pictures = []
    for name, (caption, draw, data) in _FIGURES.items():
        figure = draw(result)
        if figure is not None:
            content = save_figure(figure, result.folder.figures / f"{name}.png")
            _write_csv(result.folder.figures / f"{name}.csv", curve_rows(data(result)))
            pictures.append({"caption": caption, "source": data_url(content)})
    return pictures


def _write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_file(path, text.getvalue().encode())


def _render(
    result: SweepResult, pictures: list[dict[str, str]], records: Sequence[Mapping[str, Any]], spec: str
) -> str:
    rows = list(result.rows.values())
    columns = list(dict.fromkeys(key for record in records for key in record))
    runs = [
        {key: record.get(key, "") for key in columns} | {"again": _again(result, point)}
        for record, point in zip(records, result.points, strict=True)
    ]
    return render(
        "sweep.html",
        title=result.spec.title,
        pictures=pictures,
        settings=setting_rows(result),
        guarantees=_guarantees(result) or [("", {"status": "no run has figures yet"})],
        runs=runs,
        total=len({point.identity for point in result.points}),
        finished=sum(row.status != "failed" for row in rows),
        failed=sum(row.status == "failed" for row in rows),
        modes=sorted({point.config.mode for point in result.points}),
        versions=distinct(_versions(result)),
        spec=spec,
    )


def _guarantees(result: SweepResult) -> list[tuple[str, dict[str, str]]]:
    """Return the statements about each series at its weakest setting, the one with the least noise."""
    found = []
    for name in [*result.series, *result.references]:
        runs = result.finished(name)
        if runs:
            point, row = max(runs, key=_weakness)
            stored = point.config.mode == "experiment"
            setting = ", ".join(f"{key} = {value}" for key, value in point.values.items() if key != "seed")
            found += [
                (name, {"setting": setting, **statement})
                for statement in guarantee_rows(row.guarantees, seed_stored=stored)
            ]
    return found


def _weakness(run: tuple[Point, Row]) -> tuple[float, float]:
    """Order runs by proven epsilon, then by decreasing noise of the run's setting."""
    point, row = run
    values = {key.split(".")[-1]: value for key, value in point.values.items()}
    noise = next(
        (float(values[key]) for key in ("sigma", "noise_multiplier", "temperature_c") if key in values), 0.0
    )
    return row.proven_epsilon or 0.0, -(noise if row.noise_std is None else row.noise_std)


def _versions(result: SweepResult) -> list[tuple[str, dict[str, str]]]:
    """Return the package versions of the finished runs, by series."""
    return [
        (name, RunFolder(result.folder.run_path(point)).read_facts()["versions"])
        for name in [*result.series, *result.references]
        for point, _ in result.finished(name)[:1]
    ]


def _mean_and_error(values: Sequence[float]) -> str:
    if not values:
        return _NOTHING
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{error}"


def _mean(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return shown(statistics.fmean(known)) if known else _NOTHING


def _epsilons(values: Sequence[float | None]) -> str:
    """Format one epsilon, or the range over the runs of a setting."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return _NOTHING
    if math.isclose(known[0], known[-1], rel_tol=1e-3) or known[0] == known[-1]:
        return number(known[0])
    return f"{number(known[0])} to {number(known[-1])}"
