"""How well do several processes share a run, and how many workers does a sweep keep busy?

A run: 784-1024-1024-10 tanh, batches of 2,048, shared by 1, 2 and 4 processes of one thread on this machine; a step's
time is the difference of a long and a short run. On two cores four processes can at best be twice as fast as one. For
64 machines of one process each, the step is calculated: the work over 64, what only the first process does (the
device's reading of the whole batch), and the bytes through the first one's network: 2 x 63/64 of the gradient's, and
the outputs of the device.

A sweep: runs of ten seconds, three for each worker, on Dask workers that are processes of this machine. Such a run
trains for a moment and waits, as one waits for an instrument, so that 64 workers fit on two cores. Efficiency is the
time that the runs took over the workers' time.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import typer
from opusim.training.sweeps.sweep import Point, SweepFolder, parse_spec, points_of
from torch import Tensor, nn

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim import open_device
from opusim.processes.ranks import init_process_group
from opusim.tables import print_table
from opusim.training import train
from opusim.training.data import from_arrays
from opusim.training.sweeps.execution import run_sweep
from opusim.training.sweeps.spec import SpecText

MODULE, NAME = "benchmarks.speed.processes", "processes"
RECORDS, BATCH, WIDTHS = 20_480, 2048, (784, 1024, 1024, 10)
SHORT, LONG = 1, 4
PROCESSES, MACHINES, GIGABITS = (1, 2, 4), 64, (10, 100)
WORKERS, RUNS_A_WORKER, WAIT_S = (1, 2, 4, 8, 16, 32, 64), 3, 10.0
RUN_COLUMNS = (
    "trainer", "processes", "step [ms]", "of its speed-up", "processor time, of one process",
    *(f"{MACHINES} machines, {bandwidth} Gbit/s" for bandwidth in GIGABITS),
)  # fmt: skip
SWEEP_COLUMNS = ("workers", "runs", "time [s]", "efficiency")

app = typer.Typer(no_args_is_help=True)


# Runs that processes share


def shared_run(rank: int, world: int, port: int, kind: str, folder: str, found: Tensor) -> None:
    """Train in one of several processes; write a step's seconds and this process's share of processor seconds."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    init_process_group()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, WIDTHS[0], generator=generator)
    y = torch.randint(WIDTHS[-1], (RECORDS,), generator=generator)
    dataset = from_arrays(x, y, n_classes=WIDTHS[-1], validation_fraction=0.1, split_seed=0)
    steps = (LONG - SHORT) * (len(dataset.train.y) // BATCH)
    seconds: list[tuple[float, float]] = []
    for epochs in (SHORT, SHORT, LONG):  # the first loads what the others use
        config = {
            "seed": 0,
            "epochs": epochs,
            "threads": 1,
            "model": {"hidden": list(WIDTHS[1:-1])},
            "sampler": {"batch_size": BATCH, "drop_last": True},
            "trainer": {"kind": kind},
        }
        started = time.perf_counter(), time.process_time()
        train(config, data=dataset, folder=Path(folder) / f"{world}-{len(seconds)}")
        seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    found[rank] = torch.tensor([(b - a) / steps for a, b in zip(seconds[1], seconds[2], strict=True)])


def measured_runs(kind: str) -> list[dict[str, Any]]:
    """Return a row for each number of processes."""
    rows = []
    for world in PROCESSES:
        found = torch.zeros(world, 2, dtype=torch.float64).share_memory_()
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            torch.multiprocessing.spawn(shared_run, args=(world, port, kind, folder, found), nprocs=world)
        rows.append(
            {
                "trainer": kind,
                "processes": world,
                "step_s": float(found[0, 0]),
                "processor_s": float(found[:, 1].sum()),
            }
        )
    return rows


def reading_s() -> float:
    """Return the least seconds that the device takes to read a batch."""
    device = open_device("gaussian", n_inputs=WIDTHS[-1], n_outputs=sum(WIDTHS[1:-1]))
    errors, found = torch.randn(BATCH, WIDTHS[-1]).sign(), []
    for _ in range(10):
        started = time.perf_counter()
        device.project(errors)
        found.append(time.perf_counter() - started)
    return min(found)


def calculated(row: dict[str, Any], reading: float, gigabits: float) -> float:
    """Return the efficiency of 64 machines: the step of one process over 64 times theirs."""
    weights = sum(a * b + b for a, b in pairwise(WIDTHS))
    numbers = 2 * weights + (BATCH * sum(WIDTHS[1:-1]) if row["trainer"] == "pdfa" else 0)
    alone = reading if row["trainer"] == "pdfa" else 0.0
    exchange = 4 * numbers * (MACHINES - 1) / MACHINES / (gigabits * 1e9 / 8)
    return row["step_s"] / (MACHINES * (alone + (row["step_s"] - alone) / MACHINES + exchange))


def run_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each trainer and number of processes, as text."""
    lines = []
    cores = results["machine"]["cores"]
    for row in results["runs"]:
        one = next(r for r in results["runs"] if (r["trainer"], r["processes"]) == (row["trainer"], 1))
        best = min(row["processes"], cores)
        lines.append(
            (
                row["trainer"],
                str(row["processes"]),
                f"{1000 * row['step_s']:.1f}",
                f"{one['step_s'] / row['step_s']:.2f} of {best}",
                f"{row['processor_s'] / one['processor_s']:.2f}",
                *(
                    f"{100 * calculated(row, results['reading_s'], bandwidth):.0f} %" if row is one else ""
                    for bandwidth in GIGABITS
                ),
            )
        )
    return lines


@app.command()
def run(trainers: str = "bp,pdfa") -> None:
    """Time the steps of runs that 1, 2 and 4 processes share."""
    rows = [row for kind in trainers.split(",") for row in measured_runs(kind)]
    save_results(NAME, {"sweeps": []} | _kept() | {"runs": rows, "reading_s": reading_s()})
    print_table("Runs of several processes", RUN_COLUMNS, run_rows(load_results(NAME)))


# Sweeps on many workers


class Waiting(nn.Linear):
    """A layer whose first pass takes as long as an instrument might."""

    waited = False

    def forward(self, x: Tensor) -> Tensor:
        """Wait, once, and apply the layer."""
        if not self.waited:
            self.waited = True
            time.sleep(WAIT_S)
        return super().forward(x)


def waiting_network() -> nn.Module:
    """Return a linear model of digits that waits."""
    return Waiting(64, 10)


def sweep_points(runs: int) -> list[Point]:
    """Return the points of a sweep of so many runs that wait."""
    model = f"{MODULE}:{waiting_network.__name__}"
    spec = {
        "title": "waiting",
        "config": {"epochs": 1, "trainer": {"kind": "bp"}, "model": {"name": model}},
        "axes": {"seed": list(range(runs))},
    }
    return points_of(*parse_spec(spec, SpecText("", "waiting")))


def measured_sweep(workers: int, folder: Path) -> dict[str, Any]:
    """Return how long a sweep on a cluster of so many workers took, each of which has made a run before."""
    from distributed import LocalCluster

    points = sweep_points((RUNS_A_WORKER + 1) * workers)
    with LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=None,
        memory_limit=None,
        silence_logs=logging.CRITICAL,
    ) as cluster:
        address = cluster.scheduler_address
        run_sweep(points[:workers], SweepFolder(folder / "first"), jobs=1, cluster=address)
        started = time.perf_counter()
        rows = run_sweep(points[workers:], SweepFolder(folder / "timed"), jobs=1, cluster=address)
        wall = time.perf_counter() - started
        cluster.close(timeout=60)  # workers of a busy machine need longer than the usual four seconds to end
    failed = [row.reason for row in rows.values() if row.status != "done"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows)} runs failed: {failed[0]}")
    return {"workers": workers, "runs": len(rows), "wall_s": wall}


def sweep_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each number of workers, as text."""
    return [
        (
            str(row["workers"]),
            str(row["runs"]),
            f"{row['wall_s']:.1f}",
            f"{100 * row['runs'] * WAIT_S / row['workers'] / row['wall_s']:.0f} %",
        )
        for row in results["sweeps"]
    ]


@app.command()
def sweep(workers: str = ",".join(map(str, WORKERS))) -> None:
    """Time sweeps on Dask workers."""
    for count in map(int, workers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            row = measured_sweep(count, Path(folder))
        kept: dict[str, Any] = {"runs": [], "reading_s": 0.0, "sweeps": []} | _kept()
        rows = [*(other for other in kept["sweeps"] if other["workers"] != count), row]
        save_results(NAME, {**kept, "sweeps": sorted(rows, key=lambda each: each["workers"])})
    print_table("Sweeps on many workers", SWEEP_COLUMNS, sweep_rows(load_results(NAME)))


def page_section() -> str:
    """Return the section of the result pages."""
    results = load_results(NAME)
    weights, outputs = sum(a * b + b for a, b in pairwise(WIDTHS)), sum(WIDTHS[1:-1])
    runs = (
        f"Steps of {'-'.join(map(str, WIDTHS))} on {BATCH:,} records, shared by processes of one thread on "
        f"{results['machine']['cores']} cores ({results['date']}). Every process moves {8 * weights / 1e6:.1f} MB a "
        f"step for gradients, the first one {4 * BATCH * outputs / 1e6:.1f} MB more for the outputs of its device, "
        f"which it reads for all in {1000 * results['reading_s']:.1f} ms. The columns of {MACHINES} machines are "
        "calculated: their efficiency, if a machine computes as fast as one process here."
    )
    sweeps = (
        f"Sweeps on Dask workers, processes of this machine; a run waits for {WAIT_S:g} s, as for an instrument. "
        "Efficiency is the waiting over the time of all workers."
    )
    return section(
        "Several processes",
        runs,
        command(MODULE, "run"),
        markdown(RUN_COLUMNS, run_rows(results)),
        sweeps,
        command(MODULE, "sweep"),
        markdown(SWEEP_COLUMNS, sweep_rows(results)),
    )


def _kept() -> dict[str, Any]:
    found = load_results(NAME)
    return {key: found[key] for key in ("runs", "reading_s", "sweeps") if key in found}


if __name__ == "__main__":
    app()
