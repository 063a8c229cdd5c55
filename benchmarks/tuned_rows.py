"""Tables of accuracy under protection: settings chosen on validation records, then measured with other seeds.

`TunedRows.tune` tries a grid for each row and epsilon with one seed and keeps every trial's validation accuracy.
`TunedRows.measure` trains the best point with other seeds and looks at the test set. Runs are ordinary run folders; a
second call resumes where the first one stopped.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from benchmarks.markdown import standard_error
from benchmarks.results_file import keep_row, rows_of, save_results, selected
from benchmarks.runs import in_parallel, private_accuracy, train_or_read
from opusim.description.section import merged, parse_setting

Point = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """What a row trains, over the table's configuration, and the values of keys that it tries at its epsilons."""

    config: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]]
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...] | None = None

    @property
    def points(self) -> list[Point]:
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True, kw_only=True)
class TunedRows:
    """A table: rows over a base configuration; `measured` changes that of the runs that look at the test set."""

    module: str
    name: str
    folder: Path
    base: Mapping[str, Any]
    rows: Mapping[str, RowPlan]
    seeds: tuple[int, ...]
    measured: Mapping[str, Any] = field(default_factory=dict)
    tuning_seed: int = 100

    @property
    def app(self) -> typer.Typer:
        app = typer.Typer(add_completion=False, no_args_is_help=True)
        app.command()(self.tune)
        app.command()(self.measure)
        return app

    def configuration(self, row: str, epsilon: float, point: Point, seed: int) -> dict[str, Any]:
        """Return the run of one row, epsilon and point."""
        config = merged(
            merged(self.base, self.rows[row].config), {"seed": seed, "protection": {"epsilon": epsilon}}
        )
        for key, value in point.items():
            config = merged(config, parse_setting(f"{key}={value}"))
        return config if seed == self.tuning_seed else merged(config, self.measured)

    def run_once(self, row: str, epsilon: float, point: Point, seed: int) -> dict[str, Any]:
        """Train one point with one seed, resume it, or read it back."""
        tag = "-".join([row, f"{epsilon:g}", *(_shown(value) for value in point.values()), str(seed)])
        folder = self.folder / tag.replace(", ", "-").replace(" ", "-")
        run = train_or_read(self.configuration(row, epsilon, point, seed), folder)
        summary = run.summary or {}
        return {
            "row": row,
            "epsilon": epsilon,
            "point": point,
            "seed": seed,
            **private_accuracy(run),
            "frames": summary["frames"],
            "joules": summary["joules"],
            "seconds": sum(record["wall_s"] for record in run.folder.read_timing()),
        }

    def tune(self, jobs: int = 2, rows: str = "", epsilon: float = 0.0) -> None:
        """Try every point of every grid with one seed; the best by validation accuracy is kept."""
        cells = self._chosen(rows, epsilon)
        tasks = [(*cell, point, self.tuning_seed) for cell in cells for point in self.rows[cell[0]].points]
        for trial in in_parallel(self.run_once, tasks, jobs=jobs):
            cell = {key: trial[key] for key in ("row", "epsilon", "point")}
            keep_row(self.name, cell, "trials", **{key: trial[key] for key in ("validation", "seconds")})

    def measure(self, jobs: int = 2, rows: str = "", epsilon: float = 0.0, seeds: str = "") -> None:
        """Train each row's best point with the other seeds, or with some (such as 3,4)."""
        wanted = {int(seed) for seed in seeds.split(",") if seed}
        tasks = [
            (*cell, self.best_point(*cell), seed)
            for cell in self._chosen(rows, epsilon)
            for seed in self.rows[cell[0]].seeds or self.seeds
            if not wanted or seed in wanted
        ]
        names = list(self.rows)
        for run in in_parallel(self.run_once, tasks, jobs=jobs):
            keep_row(self.name, {key: run[key] for key in ("row", "epsilon", "seed")}, "runs", **run)
            made = rows_of(self.name, "runs")
            runs = [each for each in made if each["point"] == self.best_point(each["row"], each["epsilon"])]
            runs.sort(key=lambda each: (names.index(each["row"]), -each["epsilon"], each["seed"]))
            kept = {"configuration": dict(self.base), "trials": rows_of(self.name, "trials")}
            save_results(self.name, {**kept, "runs": runs, "cells": self.cells_of(runs)})

    def best_point(self, row: str, epsilon: float) -> Point:
        """Return the point of the best validation accuracy, or the only one.

        Raises:
            ValueError: No trial was made.
        """
        if len(self.rows[row].points) == 1:
            return self.rows[row].points[0]
        mine = rows_of(self.name, "trials", row=row, epsilon=epsilon)
        if not mine:
            remedy = f"run: python -m {self.module} tune"
            raise ValueError(f"row {row!r} at epsilon {epsilon:g} has no trials; {remedy}")
        return dict(max(mine, key=lambda trial: trial["validation"])["point"])

    def cells_of(self, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return mean and standard error over seeds, None for one seed, by row and epsilon."""
        cells = []
        for row, plan in self.rows.items():
            for epsilon in plan.epsilons:
                if mine := selected(runs, row=row, epsilon=epsilon):
                    test = [run["test"] for run in mine]
                    figures = {"test": statistics.mean(test), "seeds": len(test)}
                    figures["test_standard_error"] = standard_error(test)
                    means = {
                        key: statistics.mean(run[key] for run in mine)
                        for key in ("validation", "frames", "joules", "seconds")
                        if all(run[key] is not None for run in mine)
                    }
                    cell = {"row": row, "epsilon": epsilon, **figures, "point": mine[0]["point"], **means}
                    cells.append(cell)
        return cells

    def _chosen(self, rows: str, epsilon: float) -> list[tuple[str, float]]:
        """Return the cells whose row has a name, or a text in it if no row has it, at one epsilon or all."""
        return [
            (row, each)
            for row, plan in self.rows.items()
            for each in plan.epsilons
            if (rows == row if rows in self.rows else rows in row) and epsilon in (0.0, each)
        ]


HEADER = "protection | epsilon | test [%] | seeds | validation [%] | frames | kJ | chosen point"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown_accuracy(cell: Mapping[str, Any]) -> str:
    """Return the test accuracy of a cell with its standard error, or with a word on its only seed."""
    error = cell["test_standard_error"]
    return f"{cell['test']:.2f} (one seed)" if error is None else f"{cell['test']:.2f} ± {error:.2f}"


def table_rows(cells: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each cell, as text."""
    return [
        (
            cell["row"],
            f"{cell['epsilon']:g}",
            shown_accuracy(cell),
            str(cell["seeds"]),
            f"{cell['validation']:.2f}" if "validation" in cell else "-",
            f"{cell['frames']:,.0f}",
            f"{cell['joules'] / 1e3:.1f}",
            # keys without their sections, and values
            ", ".join(f"{key.split('.')[-1]} {_shown(value)}" for key, value in cell["point"].items()),
        )
        for cell in cells
    ]
