"""A sweep from Python: a table of runs on a user's own data and model, as a DataFrame and as a figure."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from opusim.plugins import Deferred
from opusim.progress import Show
from opusim.tables import Shown, html_table, table_text
from opusim.training.data import Dataset
from opusim.training.data.tables import OwnData, OwnTest
from opusim.training.reports.sweep_report import accuracy_epsilon, accuracy_noise, setting_rows, sweep_records
from opusim.training.runs.folder import RunFolder
from opusim.training.sweeps.execution import Inputs, run_sweep
from opusim.training.sweeps.sweep import (
    SweepFolder,
    SweepResult,
    one_at_a_time,
    parse_spec,
    points_of,
    read_spec,
)

pandas = Deferred("pandas")


class Sweep(Shown):
    """The runs of a sweep; printed, or in a notebook, it is a table of their settings.

    Attributes:
        result: The points of the table, their rows and the folder that holds them.
    """

    def __init__(self, result: SweepResult) -> None:
        self.result = result

    def frame(self) -> Any:
        """Return a pandas.DataFrame, one row per run: its settings, accuracy, epsilons, device work and run folder.

        Raises:
            ModuleNotFoundError: pandas is missing.
        """
        return pandas.DataFrame(sweep_records(self.result))

    def plot(self) -> Figure:
        """Draw accuracy against the sweep's axis: mean over seeds and its standard error, a line for each series.

        The axis is the spec's `noise`; without it the first that sets a noise level, epsilon if runs state one, and
        else the first of numbers.

        Raises:
            ValueError: No axis has numbers, or no run has an accuracy.
        """
        figure = accuracy_noise(self.result) or accuracy_epsilon(self.result)
        if figure is None:  # the first axis whose values are numbers
            values = (pair for point in self.result.points for pair in point.values.items())
            axis = next((k for k, value in values if k != "seed" and isinstance(value, int | float)), None)
            spec = self.result.spec.model_copy(update={"noise": axis})
            figure = None if axis is None else accuracy_noise(replace(self.result, spec=spec))
        if figure is None:
            raise ValueError(
                "the sweep has no axis of numbers, or no run with an accuracy; look at frame(), which has all runs"
            )
        return figure

    def _shown(self) -> dict[str, object]:
        failed = sum(row.status == "failed" for row in self.result.rows.values())
        return {
            "folder": repr(str(self.result.folder.path)),
            "runs": len(self.result.rows),
            "failed": failed or None,
        }

    def __str__(self) -> str:
        """Return a table with a row for each setting."""
        return table_text(*self._table()).rstrip()

    def _repr_html_(self) -> str:
        """Return the same table for a notebook."""
        return html_table(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = setting_rows(self.result)
        return list(rows[0]), [list(row.values()) for row in rows]


def sweep(
    spec: str | Path | Mapping[str, Any],
    *,
    data: OwnData | Dataset | None = None,
    test: OwnTest | None = None,
    label: str | Sequence[str] | None = None,
    model: nn.Module | None = None,
    folder: str | Path | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    retry_failed: bool = False,
    progress: Show = True,
) -> Sweep:
    """Train a table of runs, and return them; runs that `folder` holds already are not made again.

        >>> import tempfile
        >>> import numpy as np
        >>> table = sweep(
        ...     {"config": {"epochs": 2}, "axes": {"device.noise.sigma": [0.0, 3.0]}},
        ...     data=(np.eye(40), np.arange(40) % 2), folder=tempfile.mkdtemp() + "/sweep", jobs=1
        ... )

    Args:
        spec: What `opusim curve` reads: a TOML file, or a mapping with ``config`` (keys of every run), ``axes`` (lists
            of values by key, of which the runs take all combinations) and ``series``.
        data: User-supplied records of every run; see `opusim.train`.
        test: Test records that go with them.
        label: See `opusim.train`.
        model: A module of which every run trains a copy, from the parameters that it has now.
        folder: The folder of the sweep; None takes a new one under ./runs.
        jobs: Number of parallel runs; one for each processor core by default, and one on a physical device.
        cluster: Address of a Dask scheduler whose workers see the folder; None uses this machine.
        retry_failed: Whether to try runs again that failed before.
        progress: Whether to show a bar of the runs; see `opusim.train`.

    Raises:
        ConfigError: The spec, a configuration or a device description is wrong.
        ValueError, TypeError: The data cannot be used.
        RunFolderError: The folder holds other work, or another process is writing it.
        SweepStopped: The cluster cannot be reached or was lost, or processes die before they start a run.
    """
    read, origin = (
        parse_spec({"title": "sweep", **spec}, "sweep") if isinstance(spec, Mapping) else read_spec(spec)
    )
    inputs = Inputs(data=data, test=test, label=label, model=model)
    points = inputs.applied(points_of(read, origin))
    if folder is None:
        claimed = (RunFolder.claimed(Path("runs") / f"sweep-{n}") for n in itertools.count(1))
        folder = next(found.path for found in claimed if found is not None)
    kept = SweepFolder(folder)
    rows = run_sweep(
        points,
        kept,
        jobs=1 if one_at_a_time(points) else jobs or os.cpu_count() or 1,
        inputs=inputs,
        cluster=cluster,
        retry_failed=retry_failed,
        progress=progress,
    )
    return Sweep(SweepResult(spec=read, points=points, rows=rows, folder=kept))
