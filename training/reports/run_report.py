"""One self-contained HTML page for a run, or for several runs side by side."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from accounting.tables import guarantee_rows
from opusim.files import write_file
from opusim.tables import duration, energy
from training.attacks.findings import Audit, Played, audit_rows, read_audit
from training.attacks.words import paragraphs
from training.config.data import OWN_ARRAYS
from training.config.reading import flat
from training.reports import run_figures as figures
from training.reports.line_chart import LineChart
from training.runs.folder import RunFolder
from training.runs.stored_run import StoredRun
from training.zeroth_order.config import ZoConfig

_NOT_WRITTEN = "–"
NOT_FOR_RELEASE = "Not for release: this audit holds figures of private records, which no guarantee covers."
"""The warning next to an audit of a release run, on the page and on screen."""
RELEASE_DASHES = (
    "A release run keeps no accuracies, times or device usage (–): they depend on the private records, and no "
    "guarantee covers them. Measure its model on public records with: opusim evaluate RUN --data NAME (or --arrays)."
)
"""Explains the dashes in the table of a release run."""


def write_report(
    run: StoredRun,
    *,
    audit: Audit | None = None,
    folder: Path | None = None,
) -> Path:
    """Draw a run's figures and write `report.html`.

    Args:
        run: The run.
        audit: An audit to show besides those in the run folder, which only an experiment has, or in place of the kept
            one of its kind.
        folder: The folder of the page and its figures; None takes the run folder.

    Returns:
        The HTML file.

    Raises:
        OSError: The folder is not writable.
    """
    drawn = [
        ("learning", "Accuracy against epochs", figures.learning_curves([run], [run_name(run)])),
        (
            "alignment",
            "Cosine of each layer's update with its backpropagation gradient",
            figures.alignment_curves(run),
        ),
        (
            "noise",
            "Norm of the signal that each hidden layer receives, and of its noise",
            figures.noise_curves(run),
        ),
    ]
    place = run.folder if folder is None else RunFolder(folder)
    page = _render(
        title=run_name(run),
        runs=[run],
        pictures=[_picture(place.figures / f"{n}.svg", c, f) for n, c, f in drawn if f is not None],
        audits=[
            kept_audits(run.folder, run.config.mode) | ({} if audit is None else {audit.played.file: audit})
        ],
    )
    write_file(place.report_file, page.encode())
    return place.report_file


def write_comparison(
    runs: Sequence[StoredRun],
    path: Path,
    *,
    title: str,
    names: Sequence[str] | None = None,
    extra_pictures: Sequence[tuple[str, Path]] = (),
) -> Path:
    """Write one page on several runs: a table, their learning curves in one figure, the alignment of each pdfa run.

    Args:
        runs: At least one run.
        path: The HTML file; figures go into a folder `figures` next to it.
        title: Heading of the page.
        names: Names of the runs; by default their trainer, data set and device.
        extra_pictures: More figures as (caption, PNG file).

    Returns:
        The HTML file.

    Raises:
        ValueError: There are no runs.
        OSError: The folder is not writable.
    """
    if not runs:
        raise ValueError("runs is empty; give at least one run folder")
    labels = list(names) if names is not None else [run_name(run) for run in runs]
    folder = path.parent / "figures"
    curves = figures.learning_curves(runs, labels)
    pictures = [_picture(folder / "learning.svg", "Accuracy against epochs", curves)] if curves else []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), start=1):
        if run.config.trainer.kind != "pdfa":
            continue
        stem = f"{number}-{run.folder.path.name}"
        for name, caption, figure in (
            (
                "alignment",
                f"{label}: cosine of each layer's update with its gradient",
                figures.alignment_curves(run),
            ),
            ("noise", f"{label}: norm of signal and noise in each hidden layer", figures.noise_curves(run)),
        ):
            if figure is not None:
                pictures.append(_picture(folder / f"{stem}-{name}.svg", caption, figure))
    pictures += [
        {"caption": caption, "source": data_url(file.read_bytes())} for caption, file in extra_pictures
    ]
    page = _render(
        title=title,
        runs=runs,
        pictures=pictures,
        labels=labels,
        audits=[kept_audits(run.folder, run.config.mode) for run in runs],
    )
    write_file(path, page.encode())
    return path


def run_name(run: StoredRun) -> str:
    """Name a run by its trainer, data set and device."""
    kind = run.config.trainer.kind
    noise = f", {run.facts['device']['name']} device" if run.facts.get("device") else ""
    recipe = run.facts["network"].get("recipe", {})
    model = f" with {recipe['name']}" if recipe else ""
    return f"{kind}{model} on {run.facts['data']['name']}{noise}"


def summary_row(run: StoredRun, label: str) -> dict[str, str]:
    """Return a run's figures as text, for tables on paper and on screen."""
    last = run.metrics[-1] if run.metrics else {}
    figures_of_run = run.summary or last
    wall = sum(record["wall_s"] for record in run.folder.read_timing())
    device_time, with_host, device_energy = _times_and_energy(figures_of_run)
    spent = {
        "epochs": str(last.get("epoch", 0)),
        "training time": duration(wall),
        "device frames": f"{figures_of_run.get('frames', 0):,}",
        "device time": device_time,
        "with its host": with_host,
        "device energy": device_energy,
    }
    if run.config.mode == "release":  # its folder holds none of them
        spent = dict.fromkeys(spent, _NOT_WRITTEN)
    figure = figures.main_figure(run)
    return {
        "run": label,
        **{
            f"{part} {figure.label}": figure.shown(figures_of_run.get(f"{part}_{figure.key}"))
            for part in ("validation", "test")
        },
        **spent,
    }


def same_columns(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return rows that all have the columns of all, with dashes for what a run lacks."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column, _NOT_WRITTEN) for column in columns} for row in rows]


def _render(
    *,
    title: str,
    runs: Sequence[StoredRun],
    pictures: list[dict[str, str]],
    audits: Sequence[Mapping[str, Audit]],
    labels: Sequence[str] | None = None,
) -> str:
    names = labels or [run_name(run) for run in runs]
    return render(
        "report.html",
        title=title,
        rows=same_columns([summary_row(run, name) for run, name in zip(runs, names, strict=True)]),
        dashes=RELEASE_DASHES,
        pictures=pictures,
        devices=distinct(
            [
                (name, _device_rows(run.facts["device"], run.facts["noise"]))
                for run, name in zip(runs, names, strict=True)
                if run.facts["device"]
            ]
        ),
        takes=[row for run, name in zip(runs, names, strict=True) for row in _device_time_rows(run, name)],
        data_sets=distinct([(name, run.facts["data"]) for run, name in zip(runs, names, strict=True)]),
        guarantees=[(name, _guarantee_rows(run)) for run, name in zip(runs, names, strict=True)],
        device_notes=dict.fromkeys(run.device_note for run in runs if run.device_note is not None),
        folders=[shlex.quote(str(run.folder.path)) for run in runs],
        audits=[
            (f"{name}, {each.played}", audit_rows(each), [*paragraphs(each), *_warning(run)])
            for run, name, found in zip(runs, names, audits, strict=True)
            for each in found.values()
        ],
        modes=sorted({run.config.mode for run in runs}),
        configurations=[
            (name, shown_values(run.facts["config"])) for run, name in zip(runs, names, strict=True)
        ],
        commands=[_command(run) for run in runs],
        versions=distinct([(name, run.facts["versions"]) for run, name in zip(runs, names, strict=True)]),
    )


def render(template: str, **values: Any) -> str:
    """Return a page made from one of the templates."""
    environment = Environment(
        loader=PackageLoader("training.reports"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)


def _guarantee_rows(run: StoredRun) -> list[dict[str, str]]:
    return guarantee_rows(run.guarantees, seed_stored=run.config.mode == "experiment")


def kept_audits(run: RunFolder, mode: str) -> dict[str, Audit]:
    """Read the audits in a run folder, by file; an audit never writes into the folder of a release run."""
    files = [run.path / name for name in dict.fromkeys(kind.file for kind in Played)]
    return {file.name: read_audit(file) for file in files if mode == "experiment" and file.exists()}


def _warning(run: StoredRun) -> list[str]:
    return [NOT_FOR_RELEASE] if run.config.mode == "release" else []


def distinct(pairs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Group equal values under the names of the runs that share them."""
    groups: list[tuple[list[str], Any]] = []
    for name, value in pairs:
        for names, known in groups:
            if known == value:
                names.append(name)
                break
        else:
            groups.append(([name], value))
    return [("; ".join(names), value) for names, value in groups]


def _picture(path: Path, caption: str, figure: LineChart) -> dict[str, str]:
    content = figure.svg()
    write_file(path, content)
    return {"caption": caption, "source": data_url(content, "image/svg+xml")}


def data_url(picture: bytes, kind: str = "image/png") -> str:
    """Return a picture as a data URL, which keeps the page self-contained."""
    return f"data:{kind};base64,{base64.b64encode(picture).decode()}"


def _command(run: StoredRun) -> str:
    """Return the command that repeats a run from its resolved configuration."""
    trainer = run.config.trainer
    texts_named = isinstance(trainer, ZoConfig) and trainer.language.model is not None
    if run.config.data.name == OWN_ARRAYS and not texts_named:
        return (
            f"opusim.train({str(run.folder.config_file)!r}, data=(x, y))  # Python: the arrays are not kept"
        )
    folder = run.folder.path
    return shlex.join(
        ["opusim", "train", trainer.kind, "--config", str(run.folder.config_file), "--out", f"{folder}-again"]
    )


def _device_time_rows(run: StoredRun, name: str) -> list[tuple[str, ...]]:
    """Return what the run was expected to take of its device, of the features' device, and what it took."""
    known = {
        "expected of training": run.facts.get("expected"),
        "expected of the features' device": run.facts.get("expected_of_features"),
        "taken in training": run.summary if run.summary and run.summary.get("frames") else None,
    }
    return [
        (name, what, f"{found['frames']:,}", *_times_and_energy(found))
        for what, found in known.items()
        if found is not None and found["frames"]
    ]


def _times_and_energy(used: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return device time, the same with its host, and energy, as text; zeros if the numbers are missing."""
    seconds, host = used.get("seconds", 0.0), used.get("host_seconds", 0.0)
    with_host = duration(seconds + host) if host or not seconds else "not known"
    return duration(seconds), with_host, energy(used.get("joules", 0.0))


def _device_rows(device: dict[str, Any], noise: dict[str, Any]) -> list[dict[str, str]]:
    """Return the noise law and the description of a device as rows of key, value, status, source."""
    provenance = device.get("provenance", {})
    law = noise.get("description", noise["law"])
    rows = [{"key": "noise", "value": law, "status": "", "source": ""}]
    for key, value in shown_values({k: v for k, v in device.items() if k != "provenance"}):
        origin = provenance.get(key, {})
        rows.append(
            {
                "key": key,
                "value": value,
                "status": origin.get("status", ""),
                "source": origin.get("source", ""),
            }
        )
    return rows


def shown_values(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Flatten a nested mapping into (dotted key, value) pairs, without empty values."""
    return [(key, str(value)) for key, value in flat(values).items() if value is not None]
