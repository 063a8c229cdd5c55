"""One self-contained HTML page for a run, or for several runs side by side.

Its figures are learning curves, alignment with backpropagation, and signal beside noise.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opusim.accounting.explanation import SEED_REBUILDS, guarantee_rows
from opusim.description.section import flat
from opusim.files import write_file
from opusim.tables import data_url, duration, energy, html_page
from opusim.training.attacks.findings import Audit, Played, audit_rows, paragraphs, read_audit
from opusim.training.config.sections import OWN_ARRAYS
from opusim.training.runs.drawing import (
    LineChart,
    alignment_curves,
    beside_guessing,
    learning_curves,
    main_figure,
    noise_curves,
)
from opusim.training.runs.folder import RunFolder, StoredRun, read_run, stated
from opusim.training.zeroth_order.config import ZoConfig

_NOT_WRITTEN = "–"
NOT_FOR_RELEASE = "Not for release: this audit holds figures of private records, which no guarantee covers."
"""The warning next to an audit of a release run, on the page and on screen."""
RELEASE_DASHES = (
    "A release run keeps no accuracies, times or device usage (–): they depend on the private records, and no "
    "guarantee covers them. Measure its model on public records with: opusim evaluate RUN --data NAME."
)
"""Explains the dashes in the table of a release run."""


def write_report(
    run: StoredRun | str | Path, *, audit: Audit | None = None, folder: Path | None = None
) -> Path:
    """Draw a run's figures and write `report.html`.

    Args:
        run: The run, or its folder.
        audit: An audit to show besides those in the run folder, which only an experiment has, or in place of the kept
            one of its kind.
        folder: The folder of the page and its figures; None takes the run folder.

    Returns:
        The HTML file.

    Raises:
        OSError: The folder is not writable.
    """
    run = run if isinstance(run, StoredRun) else read_run(run)
    place = run.folder if folder is None else RunFolder(folder)
    name = run_name(run)
    alignment = "Cosine of each layer's update with its backpropagation gradient"
    noise = "Signal that each hidden layer or feedback point receives, and its noise"
    drawn = [
        ("learning", "Accuracy against epochs", learning_curves([run], [name])),
        ("alignment", alignment, alignment_curves(run)),
        ("noise", noise, noise_curves(run)),
    ]
    found, left_out = shown_audits(run.folder.path, run.config.mode)
    found |= {} if audit is None else {audit.played.file: audit}
    page = _page([(name, run)], name, _pictures(place.figures, drawn), [found], left_out)
    write_file(place.report_file, page.encode(), private=_private([found]))
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
    drawn = [("learning", "Accuracy against epochs", learning_curves(runs, labels))]
    for number, (run, label) in enumerate(zip(runs, labels, strict=True), start=1):
        if run.config.trainer.kind == "pdfa":
            stem = f"{number}-{run.folder.path.name}"
            alignment = f"{label}: cosine of each layer's update with its gradient"
            noise = f"{label}: signal and noise in each hidden layer or point"
            drawn += [
                (f"{stem}-alignment", alignment, alignment_curves(run)),
                (f"{stem}-noise", noise, noise_curves(run)),
            ]
    pictures = _pictures(path.parent / "figures", drawn)
    pictures += [
        {"caption": caption, "source": data_url(file.read_bytes())} for caption, file in extra_pictures
    ]
    each = [shown_audits(run.folder.path, run.config.mode) for run in runs]
    audits, left_out = [found for found, _ in each], [text for _, texts in each for text in texts]
    page = _page(list(zip(labels, runs, strict=True)), title, pictures, audits, left_out)
    write_file(path, page.encode(), private=_private(audits))
    return path


def stated_rows(run: StoredRun) -> list[dict[str, str]]:
    """Return a row for each guarantee of a run."""
    found = stated(run.folder.path)
    return guarantee_rows(found.guarantees, seed_stored=found.mode == "experiment", count=found.public_number)


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
    figure = main_figure(run)
    guessing = 100 / run.facts["data"]["n_classes"] if run.target == "class" else None
    parts = {}
    for part in ("validation", "test"):
        value = figures_of_run.get(f"{part}_{figure.key}")
        said = "" if value is None else beside_guessing(100 * value, guessing)
        parts[f"{part} {figure.label}"] = figure.shown(value) + said
    return {"run": label, **parts, **spent}


def _page(
    named: Sequence[tuple[str, StoredRun]],
    title: str,
    pictures: Sequence[Mapping[str, str]],
    audits: Sequence[Mapping[str, Audit]],
    left_out: Sequence[str],
) -> str:
    """Return the page of some runs by their names, with the audits of each by file, and why others are left out."""
    runs = [run for _, run in named]
    rows = [summary_row(run, name) for name, run in named]
    columns = dict.fromkeys(column for row in rows for column in row)
    return html_page(
        "report.html",
        title=title,
        rows=[{column: row.get(column, _NOT_WRITTEN) for column in columns} for row in rows],
        dashes=RELEASE_DASHES,
        pictures=pictures,
        devices=distinct([(name, _device_rows(run)) for name, run in named if run.facts["device"]]),
        takes=[row for name, run in named for row in _device_time_rows(run, name)],
        data_sets=distinct([(name, run.facts["data"]) for name, run in named]),
        guarantees=[{"run": name, **row} for name, run in named for row in stated_rows(run)],
        device_notes=dict.fromkeys(run.device_note for run in runs if run.device_note is not None),
        rebuilds=SEED_REBUILDS,
        fresh_noise=dict.fromkeys(run.fresh_noise_note for run in runs if run.fresh_noise_note is not None),
        folders=[shlex.quote(str(run.folder.path)) for run in runs],
        audits=[
            (
                f"{name}, {each.played}",
                audit_rows(each),
                [
                    *paragraphs(each),
                    *(
                        [NOT_FOR_RELEASE]
                        if run.config.mode == "release" and each.holds_private_records
                        else []
                    ),
                ],
            )
            for (name, run), found in zip(named, audits, strict=True)
            for each in found.values()
        ],
        left_out=left_out,
        modes=sorted({run.config.mode for run in runs}),
        configurations=[(name, shown_values(run.facts["config"])) for name, run in named],
        commands=[command_of(run) for run in runs],
        versions=distinct([(name, run.facts["versions"]) for name, run in named]),
    )


def kept_audits(folder: Path) -> dict[str, Audit]:
    """Read the audits in a folder, by file."""
    files = [folder / name for name in dict.fromkeys(kind.file for kind in Played)]
    return {file.name: read_audit(file) for file in files if file.exists()}


def shown_audits(folder: Path, mode: str) -> tuple[dict[str, Audit], list[str]]:
    """Return the audits that a page in a run's folder shows, by file, and a sentence on each that it leaves out.

    An audit never writes into the folder of a release run, and a page there shows no figures of private records.
    """
    kept = kept_audits(folder)
    private = [name for name, each in kept.items() if mode == "release" and each.holds_private_records]
    return {name: each for name, each in kept.items() if name not in private}, [
        f"{folder / name} is not shown: it holds figures of private records, which a release run's folder must not "
        "hold; move it into another folder. The dossier judges it: opusim dossier RUN --audits FOLDER."
        for name in private
    ]


def _private(audits: Sequence[Mapping[str, Audit]]) -> bool:
    """Whether a page with these audits shows figures of private records."""
    return any(each.holds_private_records for found in audits for each in found.values())


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


def _pictures(folder: Path, drawn: Sequence[tuple[str, str, LineChart | None]]) -> list[dict[str, str]]:
    """Write the figures that have something to show, (name, caption, figure), and return them for a page."""
    pictures = []
    for name, caption, figure in drawn:
        if figure is not None:
            content = figure.svg()
            write_file(folder / f"{name}.svg", content)
            pictures.append({"caption": caption, "source": data_url(content, "image/svg+xml")})
    return pictures


def command_of(run: StoredRun) -> str:
    """Return the command that repeats a run from its resolved configuration."""
    trainer = run.config.trainer
    texts_named = isinstance(trainer, ZoConfig) and trainer.language.model is not None
    if run.config.data.name == OWN_ARRAYS and not texts_named:
        return (
            f"opusim.train({str(run.folder.config_file)!r}, data=(x, y))  # Python: the arrays are not kept"
        )
    return train_again(trainer.kind, run.folder.path, str(run.folder.path))


def train_again(kind: str, folder: Path, name: str) -> str:
    """Return the command that repeats the run in a folder, into a folder of that name with "-again"."""
    file = str(folder / "config.json")
    return shlex.join(["opusim", "train", kind, "--config", file, "--out", f"{name}-again"])


def _device_time_rows(run: StoredRun, name: str) -> list[dict[str, str]]:
    """Return what the run was expected to take of its device, of the features' device, and what it took."""
    known = {
        "expected of training": run.facts.get("expected"),
        "expected of the features' device": run.facts.get("expected_of_features"),
        "taken in training": run.summary if run.summary and run.summary.get("frames") else None,
    }
    columns = "run", "", "frames", "device time", "with its host", "energy"
    return [
        dict(zip(columns, (name, what, f"{found['frames']:,}", *_times_and_energy(found)), strict=True))
        for what, found in known.items()
        if found is not None and found["frames"]
    ]


def _times_and_energy(used: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return device time, the same with its host, and energy, as text; zeros if the numbers are missing."""
    seconds, host = used.get("seconds", 0.0), used.get("host_seconds", 0.0)
    with_host = duration(seconds + host) if host or not seconds else "not known"
    return duration(seconds), with_host, energy(used.get("joules", 0.0))


def _device_rows(run: StoredRun) -> list[dict[str, str]]:
    """Return the noise law and the description of the run's device as rows of key, value, status, source."""
    device, noise = run.facts["device"], run.facts["noise"]
    provenance = device.get("provenance", {})
    law = "not stated" if noise is None else noise.get("description", noise["law"])
    described = shown_values({key: value for key, value in device.items() if key != "provenance"})
    origins = [(key, value, provenance.get(key, {})) for key, value in described]
    return [
        {"key": key, "value": value, "status": origin.get("status", ""), "source": origin.get("source", "")}
        for key, value, origin in [("noise", law, {}), *origins]
    ]


def shown_values(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Flatten a nested mapping into (dotted key, value) pairs, without empty values."""
    return [(key, str(value)) for key, value in flat(values).items() if value is not None]
