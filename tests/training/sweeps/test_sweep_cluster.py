"""A sweep on a Dask cluster: a real scheduler and two workers on this machine's loopback, some of which are killed."""

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opusim.description.schema import load_description
from opusim.files import to_toml
from opusim.training.errors import SweepStopped
from opusim.training.sweeps.execution import run_in, run_sweep
from opusim.training.sweeps.sweep import Point, SweepFolder, points_of, read_spec
from tests.support.ports import free_port

dask = pytest.importorskip("dask")
pytest.importorskip("distributed")

PAGE = Path(__file__).parents[3] / "docs" / "choosing-a-trainer.md"
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


def scheduler(port: int, protocol: str = "tcp") -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    host = f"--host=127.0.0.1 --port={port} --protocol={protocol} --no-dashboard --no-show".split()
    return running("distributed.cli.dask_scheduler", *host)


def worker(address: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    one = ["--nthreads=1", "--nworkers=1", "--no-nanny", "--no-dashboard", "--host=127.0.0.1"]
    return running("distributed.cli.dask_worker", address, *one)


def swept_points(tmp_path: Path) -> tuple[Path, list[Point]]:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC)
    return file, points_of(*read_spec(file))


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
def test_workers_elsewhere_find_relative_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with scheduler(port), worker(address):
        monkeypatch.chdir(tmp_path / "here")
        lines = [f"{n / 10},{n % 3},{int(n % 3 > 1)}" for n in range(60)]
        Path("table.csv").write_text("\n".join(["a,b,y", *lines]))
        Path("own_nets.py").write_text(
            "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))\n"
        )
        Path("own.toml").write_text(to_toml(load_description("gaussian", {"name": "own"}).dump()))
        Path("spec.toml").write_text(
            'title = "relative"\n[config]\nepochs = 1\nsampler.batch_size = 9\ndevice.name = "own.toml"\n'
            'model.name = "own_nets:build"\ndata.name = "csv:table.csv"\ndata.label = "y"\n[axes]\nseed = [0]\n'
        )
        points = points_of(*read_spec(Path("spec.toml")))
        rows = run_sweep(points, SweepFolder(Path("sweep")), jobs=1, cluster=address)
    assert [(row.status, row.reason) for row in rows.values()] == [("done", None)]


def test_a_worker_without_the_folder_is_named(tmp_path: Path) -> None:
    _, (point, *_) = swept_points(tmp_path)
    with pytest.raises(SweepStopped, match="cannot enter .*nowhere .*start it in a folder that every worker"):
        run_in(tmp_path / "nowhere", point.config, tmp_path / "run", tmp_path / "row.json")


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


def make_certificate(folder: Path) -> None:
    """Make cert.pem and key.pem by the page's command."""
    (command,) = (line for line in PAGE.read_text().splitlines() if line.startswith("openssl req"))
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The settings that docs/choosing-a-trainer.md gives, in the environment of new processes and in this one."""
    make_certificate(tmp_path)
    settings = re.findall(r"DASK_DISTRIBUTED__COMM__(?:TLS__\w+|REQUIRE_ENCRYPTION)=\S+", PAGE.read_text())
    assert len(settings) == 8
    for setting in settings:
        key, value = setting.split("=")
        monkeypatch.setenv(key, value.replace("/etc/dask", str(tmp_path)))
    dask.config.refresh()
    yield tmp_path
    monkeypatch.undo()
    dask.config.refresh()


@pytest.mark.slow
def test_a_sweep_runs_on_an_encrypted_cluster(encrypted: Path) -> None:
    _, points = swept_points(encrypted)
    port = free_port()
    address = f"tls://127.0.0.1:{port}"
    with scheduler(port, "tls"), worker(address):
        rows = run_sweep(points[:1], SweepFolder(encrypted / "sweep"), jobs=1, cluster=address)
        with pytest.raises(SweepStopped, match="does not fit Dask's settings of encryption: they require it"):
            run_sweep(points[:1], SweepFolder(encrypted / "other"), jobs=1, cluster=f"tcp://127.0.0.1:{port}")
        for name in ("cert.pem", "key.pem"):
            (encrypted / name).unlink()
        make_certificate(encrypted)  # a stranger's
        with pytest.raises(SweepStopped, match=address):
            run_sweep(points[1:2], SweepFolder(encrypted / "sweep"), jobs=1, cluster=address, patience_s=2)
    assert [row.status for row in rows.values()] == ["done"]


def test_a_key_that_is_missing_is_one_clear_line(encrypted: Path) -> None:
    _, points = swept_points(encrypted)
    (encrypted / "key.pem").write_text("no key")
    with pytest.raises(SweepStopped, match="does not fit Dask's settings of encryption: .*PEM"):
        run_sweep(points[:1], SweepFolder(encrypted / "sweep"), jobs=1, cluster="tls://127.0.0.1:1")
    (encrypted / "key.pem").unlink()
    with pytest.raises(SweepStopped, match="does not fit Dask's settings of encryption: .*No such file"):
        run_sweep(points[:1], SweepFolder(encrypted / "sweep"), jobs=1, cluster="tls://127.0.0.1:1")


def test_an_encrypted_address_without_a_certificate_is_one_clear_line(tmp_path: Path) -> None:
    _, points = swept_points(tmp_path)
    with pytest.raises(SweepStopped, match="they name no certificate; give certificate and key"):
        run_sweep(points[:1], SweepFolder(tmp_path / "sweep"), jobs=1, cluster="tls://127.0.0.1:1")
