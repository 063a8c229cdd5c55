"""A sweep is a folder: the spec, a run folder for each configuration, a row for each run, figures and a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from training.sweeps.points import Point
from training.sweeps.rows import Row, read_row


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
