"""A sweep's folder, and its row for each run: the run's figures, or the reason why there are none."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accounting.guarantee import Status
from opusim.description.schema import NoiseSettings
from training.attacks.findings import read_audit
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.runs.folder import AUDIT_FILE
from training.runs.run import Run, evaluate_run
from training.runs.storage import StoredGuarantee, read_record, write_record
from training.sweeps.spec import Point

SCHEMA_VERSION = 1


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


def row_of(run: Run, config: RunConfig, *, wall_s: float) -> Row:
    """Return the row of a finished run."""
    summary = dict(run.summary or {})
    stopped = summary.pop("stopped", None)
    if (
        config.mode == "release"
    ):  # its summary holds no figures of data, but public test records measure its model
        found = evaluate_run(run.folder.path)
        summary |= {"test_accuracy": found["accuracy"], "test_loss": found["loss"]}
    return Row(
        identity=run.folder.path.name,
        status="done" if stopped is None else "stopped",
        reason=stopped,
        figures=summary,
        noise_std=_noise_std(run.facts.get("device")),
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
    """Read a row, or return None if there is none.

    Raises:
        RunFolderError: The file is not a row, or was changed.
    """
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


def _noise_std(device: Mapping[str, Any] | None) -> float | None:
    """The standard deviation that a device's description gives its readings, directly or by a temperature."""
    if not device or not device.get("noise"):
        return None
    return NoiseSettings.model_validate(device["noise"]).value()


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
