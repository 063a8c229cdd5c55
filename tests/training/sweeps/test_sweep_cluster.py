"""A sweep on a Dask cluster: a real scheduler and two workers on this machine's loopback, some of which are killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from training.errors import SweepStopped
from training.sweeps.execution import run_sweep
from training.sweeps.rows import SweepFolder
from training.sweeps.spec import Point, points_of, read_spec

pytest.importorskip("distributed")

SPEC = """\
title = "Digits on a cluster"
[config]
epochs = 60
model.hidden = [16]
[axes]
seed = [0, 1, 2, 3, 4, 5]
"""


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def scheduler(port: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    host = f"--host=127.0.0.1 --port={port} --no-dashboard --no-show".split()
    return running("distributed.cli.dask_scheduler", *host)


def worker(address: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    one = ["--nthreads=1", "--nworkers=1", "--no-nanny", "--no-dashboard", "--host=127.0.0.1"]
    return running("distributed.cli.dask_worker", address, *one)


def swept_points(tmp_path: Path) -> tuple[Path, list[Point]]:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC)
    return file, points_of(*read_spec(file))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_address_without_a_scheduler_is_one_clear_line(tmp_path: Path) -> None:
    _, points = swept_points(tmp_path)
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(SweepStopped, match=f"no Dask scheduler answers at {address}"):
        run_sweep(points, SweepFolder(tmp_path / "sweep"), jobs=1, cluster=address, patience_s=0.5)


@pytest.mark.slow
def test_a_worker_killed_mid_sweep_loses_nothing(tmp_path: Path) -> None:
    _, points = swept_points(tmp_path)
    folder, port = SweepFolder(tmp_path / "sweep"), free_port()
    address = f"tcp://127.0.0.1:{port}"
    with scheduler(port), worker(address) as first, worker(address):
        killed = []

        def kill_one(*_: object) -> None:
            if not killed:
                first.kill()
                killed.append(True)

        rows = run_sweep(points, folder, jobs=1, cluster=address, on_row=kill_one)
    assert killed
    assert sorted(rows) == sorted(point.identity for point in points)
    assert {row.status for row in rows.values()} == {"done"}
    unbroken = run_sweep(points, SweepFolder(tmp_path / "unbroken"), jobs=1)
    assert {i: row.figures for i, row in rows.items()} == {i: row.figures for i, row in unbroken.items()}


@pytest.mark.slow
def test_a_scheduler_killed_mid_sweep_stops_it_and_the_next_goes_on(tmp_path: Path) -> None:
    _, points = swept_points(tmp_path)
    folder, port = SweepFolder(tmp_path / "sweep"), free_port()
    address = f"tcp://127.0.0.1:{port}"
    with (
        scheduler(port) as served,
        worker(address),
        pytest.raises(SweepStopped, match="the same command resumes the sweep"),
    ):
        run_sweep(points, folder, jobs=1, cluster=address, on_row=lambda *_: served.kill())
    before = folder.rows(points)
    assert before
    assert len(before) < len(points)
    rows = run_sweep(points, folder, jobs=1)
    assert {row.status for row in rows.values()} == {"done"}
    assert {i: rows[i] for i in before} == before
