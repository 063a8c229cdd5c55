"""A release run's folder is its owner's: every file 0600, every folder 0700, from creation on."""

import csv
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opusim import files, training
from opusim.training.reports.run_report import write_report
from opusim.training.reports.sweep_report import write_sweep
from opusim.training.runs.run import load_run
from opusim.training.sweeps.execution import run_sweep
from opusim.training.sweeps.sweep import SweepFolder, SweepResult, points_of, read_spec
from tests.support.command import opusim

SMALL: dict[str, Any] = {
    "epochs": 1, "threads": 1, "data": {"name": "digits", "validation_fraction": 0.2}, "sampler": {"batch_size": 100},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "last-iterate": {
        "trainer": {"kind": "convex", "hyperplanes": 4}, "optimizer": {"lr": 1.0, "momentum": 0.0},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100},
        "protection": {"kind": "last-iterate", "epsilon": 4.0},
    },
    "label-readout": {
        "trainer": {"kind": "pdfa"}, "model": {"hidden": [8]},
        "protection": {"kind": "label-readout", "noise": "device", "epsilon": 4.0},
    },
    "zo": {
        "trainer": {"kind": "zo"}, "model": {"hidden": [8]}, "sampler": {"scheme": "poisson", "batch_size": 100},
        "protection": {"kind": "record", "epsilon": 4.0},
    },
}  # fmt: skip


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that all may enter, under a umask that closes nothing: what is closed is closed on purpose."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    before = os.umask(0)
    yield folder
    os.umask(before)


def creations(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Every file and folder under a folder, with its mode at the moment of its creation."""
    found: list[tuple[Path, int]] = []
    real_open, real_mkdir = os.open, os.mkdir

    def note(path: Any, mode: int) -> None:
        if Path(path).is_relative_to(root):
            found.append((path, mode))

    def opened(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        creates = flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = real_open(path, flags, mode, **options)
        if creates:
            note(path, os.fstat(descriptor).st_mode)
        return descriptor

    def made(path: Any, mode: int = 0o777, **options: Any) -> None:
        real_mkdir(path, mode, **options)
        note(path, os.stat(path).st_mode)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "mkdir", made)
    return found


def wide(folder: Path) -> list[str]:
    """Files and folders that others may use."""
    paths = [path for path in [folder, *folder.rglob("*")] if path.stat().st_mode & 0o077]
    return [f"{path} {stat.S_IMODE(path.stat().st_mode):o}" for path in paths]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_release_run_is_its_owners(open_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    created = creations(open_folder / "run", monkeypatch)
    run = training.train({**SMALL, **KINDS[kind], "mode": "release"}, folder=open_folder / "run")
    write_report(run)
    assert len(created) > 5
    assert not [path for path, mode in created if mode & 0o077]
    assert not wide(open_folder / "run")


def test_an_unfinished_last_iterate_is_its_owners(open_folder: Path, stop_at: type) -> None:
    folder = open_folder / "given"
    folder.mkdir()  # a folder of the user's, which others may enter, is closed before anything is written
    settings = {**SMALL, **KINDS["last-iterate"], "mode": "release", "checkpoint": {"every_steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        training.train(settings, folder=folder, watcher=stop_at(3))
    assert list((folder / "checkpoints").iterdir())
    assert not wide(folder)
    folder.chmod(0o755)  # by hand
    training.train(folder=folder, resume=True)
    assert not wide(folder)
    assert load_run(folder).summary


def test_an_experiment_follows_the_umask(open_folder: Path) -> None:
    os.umask(0o022)
    training.train({**SMALL, "trainer": {"kind": "bp"}, "model": {"hidden": [8]}}, folder=open_folder / "run")
    assert stat.S_IMODE((open_folder / "run").stat().st_mode) == 0o755
    assert stat.S_IMODE((open_folder / "run" / "config.json").stat().st_mode) == 0o644


def test_a_wide_leftover_is_closed_before_it_is_written(open_folder: Path) -> None:
    files.make_private_folder(open_folder / "private")
    path = open_folder / "private" / "file"
    path.touch(0o666)
    os.close(files.open_to_write(path, os.O_WRONLY))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_writing_neither_blocks_nor_follows_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "victim").write_text("notes")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            files.open_to_write(tmp_path / name, os.O_WRONLY | os.O_TRUNC)
    assert (tmp_path / "victim").read_text() == "notes"


def test_an_audit_of_a_release_run_is_kept_elsewhere(open_folder: Path) -> None:
    config = {**SMALL, "trainer": {"kind": "bp"}, "model": {"hidden": [40]}, "mode": "release"}
    config["sampler"] = {"scheme": "poisson", "batch_size": 20}
    config["protection"] = {"kind": "record", "noise_multiplier": 2.0}
    run = training.train(config, folder=open_folder / "run")
    write_report(run)
    before = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
    refused = opusim("audit", "run", "--trials", "40", cwd=open_folder)
    assert (refused.returncode, refused.stderr.strip().count("\n")) == (2, 0)
    assert "--out" in refused.stderr
    done = opusim("audit", "run", "--trials", "40", "--seed", "1", "--out", "audit", cwd=open_folder)
    assert done.returncode == 0, done.stderr
    assert "Not for release: this audit holds figures of private records" in done.stderr
    assert {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()} == before
    assert not wide(open_folder / "audit")
    page = (open_folder / "audit" / "report.html").read_text()
    assert "Not for release" in page
    assert "null control" in page
    (run.folder.path / "audit.json").write_bytes((open_folder / "audit" / "audit.json").read_bytes())
    assert "null control" not in write_report(run).read_text()  # one that an earlier version left there


SPEC = """\
title = "Released"
[config]
epochs = 1
mode = "release"
model.hidden = [8]
trainer.kind = "bp"
sampler = { scheme = "poisson", batch_size = 100 }
protection.kind = "record"
[axes]
protection.epsilon = [2.0, 8.0]
"""


def test_a_sweep_keeps_no_times_of_release_runs(open_folder: Path) -> None:
    (open_folder / "spec.toml").write_text(SPEC)
    read, text = read_spec(open_folder / "spec.toml")
    points, folder = points_of(read, text), SweepFolder(open_folder / "sweep")
    left: list[float | None] = []
    rows = run_sweep(points, folder, jobs=1, on_row=lambda row, seconds: left.append(seconds))
    write_sweep(SweepResult(spec=read, points=points, rows=rows, folder=folder), SPEC)
    assert [row.status for row in rows.values()] == ["done", "done"]
    assert left == [None, None]
    for row in json.loads(folder.data_file.read_text())["runs"]:
        assert row["row"]["wall_s"] is None
        assert not {"seconds", "joules", "frames"} & row["row"]["figures"].keys()
    with folder.table_file.open(newline="") as file:
        assert {row["wall_seconds"] for row in csv.DictReader(file)} == {""}
    assert all(json.loads(path.read_text())["wall_s"] is None for path in (folder.path / "rows").iterdir())
    for point in points:
        assert not wide(folder.run_path(point))
