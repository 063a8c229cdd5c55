"""What does a sweep cost on top of its runs, and does it keep two cores busy?

Two hundred runs of about a second each (PDFA on digits), two side by side. Overhead: the sweep's time times the number
of jobs, over the sum of the times that the runs measured themselves, minus 1; the start of the processes and the
report are in it. Busy: processor time of the sweep and its processes over its time and the jobs; it is a lower bound
if other programs share the cores. Required: less than 10 %, above 85 %.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from pathlib import Path

import typer
from opusim.training.sweeps.sweep import SweepFolder, SweepResult, points_of, read_spec

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from opusim.training.reports.sweep_report import write_sweep
from opusim.training.sweeps.execution import run_sweep

MODULE, NAME = "benchmarks.speed.sweep", "sweep_overhead"
JOBS, RUNS, EPOCHS = 2, 200, 15
SPEC = f"""\
title = "Two hundred short runs"
[config]
epochs = {EPOCHS}
model.hidden = [256, 256]
sampler.batch_size = 32
[axes]
seed = {list(range(RUNS))}
"""


def speed_rows() -> list[Row]:
    """Return the sweep's overhead over its runs."""
    found = load_results(NAME)
    if not found:
        return []
    name = (
        f"overhead of a sweep of {found['runs']} runs of {found['run_s']:.1f} s, {found['jobs']} side by side"
    )
    figure = f"{100 * found['overhead']:.1f} % over the runs; cores busy {100 * found['busy']:.0f} %"
    return [(name, figure, command(MODULE))]


def main(save: bool = False) -> None:
    """Measure; --save renews benchmarks/results/sweep_overhead.json."""
    path = Path(tempfile.mkdtemp())
    file = path / "spec.toml"
    file.write_text(SPEC)
    used, started = _processor_seconds(), time.perf_counter()
    spec, text = read_spec(file)
    points, folder = points_of(spec, text), SweepFolder(path / "sweep")
    rows = run_sweep(points, folder, jobs=JOBS)
    write_sweep(SweepResult(spec=spec, points=points, rows=rows, folder=folder), SPEC)
    wall = time.perf_counter() - started
    _stop_workers()
    busy = (_processor_seconds() - used) / (wall * JOBS)
    runs_s = sum(row.wall_s for row in rows.values())
    overhead = wall * JOBS / runs_s - 1
    print(f"{len(rows)} runs of {runs_s / len(rows):.2f} s: {wall:.1f} s on {JOBS} jobs; ", end="")
    print(f"overhead {100 * overhead:.1f} %, cores busy {100 * busy:.0f} %")
    shutil.rmtree(path)
    if save:
        figures = {"runs": len(rows), "run_s": runs_s / len(rows), "wall_s": wall, "jobs": JOBS}
        save_results(NAME, {**figures, "overhead": overhead, "busy": busy})


def _processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _stop_workers() -> None:
    """End joblib's processes, so that their time counts."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


if __name__ == "__main__":
    typer.run(main)
