"""A sweep is a folder: the spec, a run folder for each configuration, a row for each run, figures and a report.

What a sweep keeps of each run: a row of figures, or the reason why there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accounting.guarantee import Guarantee, Status
from training.attacks.findings import Role, read_audit
from training.config.run import RunConfig
from training.errors import RunFolderError
from training.runs.folder import AUDIT_FILE
from training.runs.run import Run, evaluate_run
from training.runs.storage import read_json, write_json
from training.sweeps.points import Point

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run's figures.

    Attributes:
        identity: Name of the run folder.
        status: done; stopped (its privacy budget was spent before the end); failed.
        reason: Why it stopped or failed, in one line; None for a run that is done.
        figures: The run's summary: accuracies and losses per split, frames, seconds, joules; of one in release mode
            those on test records only; empty for a failed run.
        noise_std: Standard deviation of the device's Gaussian noise, units of the projection; None without one.
        guarantees: What is said of its privacy.
        wall_s: Seconds that it took, of all its processes; None for a run in release mode, whose time tells the sizes
            of its secret batches.
    """

    identity: str
    status: Literal["done", "stopped", "failed"]
    reason: str | None = None
    figures: Mapping[str, Any]
    noise_std: float | None = None
    guarantees: Sequence[Guarantee] = ()
    wall_s: float | None = 0.0

    @property
    def accuracy(self) -> float | None:
        """On test records, else on validation records, in [0, 1]; None where the run keeps none."""
        found = self.figures.get("test_accuracy", self.figures.get("validation_accuracy"))
        return None if found is None else float(found)

    def epsilon(self, *statuses: Status) -> float | None:
        """The smallest epsilon of these statuses (at one delta, in one unit); None where nothing is said."""
        found = [g.epsilon for g in self.guarantees if g.status in statuses]
        return min(found) if found else None

    @property
    def proven_epsilon(self) -> float | None:
        """Proven, maybe under a device model; infinite where no finite guarantee exists."""
        return self.epsilon(Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL, Status.NONE)

    @property
    def claimed_epsilon(self) -> float | None:
        """A paper's formula with its hypotheses taken as given; None where no paper claims anything."""
        values = [g.formula_value for g in self.guarantees if g.formula_value is not None]
        return min(values) if values else self.epsilon(Status.CLAIMED)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        values["figures"] = dict(self.figures)
        values["guarantees"] = [guarantee.to_json() for guarantee in self.guarantees]
        return {"schema_version": SCHEMA_VERSION, **values}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        values = {key: value for key, value in content.items() if key != "schema_version"}
        values["guarantees"] = tuple(Guarantee.from_json(value) for value in values["guarantees"])
        return cls(**values)


def row_of(run: Run, config: RunConfig, *, wall_s: float) -> Row:
    """The row of a finished run."""
    summary = dict(run.summary or {})
    stopped = summary.pop("stopped", None)
    if config.mode == "release":  # keeps no figure of its data, but public test records measure its model
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
    """The row of a run that has no figures."""
    text = error if isinstance(error, str) else " ".join(str(error).split()) or type(error).__name__
    return Row(identity=identity, status="failed", reason=text, figures={})


def write_row(path: Path, row: Row) -> None:
    """Keep a row, without figures that are not finite."""
    values = row.to_json()
    values["figures"] = {k: v for k, v in values["figures"].items() if _kept(v)}
    write_json(path, values)


def read_row(path: Path) -> Row | None:
    """The row that was kept, or None.

    Raises:
        RunFolderError: The file is no row.
    """
    if not path.exists():
        return None
    content = read_json(path)
    try:
        return Row.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{path}: is no row of a sweep ({error!r}); delete it, and the same command writes it again"
        ) from error


def audited_epsilon(run_folder: Path) -> float | None:
    """The largest lower bound that an audit of this run found, at its delta; None where it was not audited."""
    file = run_folder / AUDIT_FILE
    if not file.exists():
        return None
    found = [f.result.epsilon_lower for f in read_audit(file).findings if f.role is Role.RUN]
    return max(found) if found else None


def _noise_std(device: Mapping[str, Any] | None) -> float | None:
    """The standard deviation that a device's description gives its readings directly or by a temperature."""
    if not device or not device.get("noise"):
        return None
    from opusim.description.schema import NoiseSettings

    return NoiseSettings.model_validate(device["noise"]).value()


def _kept(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class SweepFolder:
    """Paths and files of a sweep.

    Files: `runs/` (ordinary run folders, named by their configuration's digest, so that points of one configuration
    share one), `rows/` (a JSON file a run), `table.csv` and `sweep.json` (all rows), `figures/` (PNG and data),
    `report.html`, `lock`.

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
        """Where the row of a point's run is kept."""
        return self.path / "rows" / f"{point.identity}.json"

    def rows(self, points: Sequence[Point]) -> dict[str, Row]:
        """The rows that are there, by the run's identity."""
        found = {point.identity: read_row(self.row_path(point)) for point in points}
        return {identity: row for identity, row in found.items() if row is not None}
