"""A release run's folder is its owner's: every file 0600, every folder 0700, from creation on."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import training
from opusim import files
from training.runs.report import write_report
from training.runs.run import load_run

SMALL: dict[str, Any] = {
    "epochs": 1,
    "threads": 1,
    "data": {"name": "digits", "validation_fraction": 0.2},
    "sampler": {"batch_size": 100},
}
KINDS: dict[str, dict[str, Any]] = {
    "last-iterate": {
        "trainer": {"kind": "convex", "hyperplanes": 4},
        "optimizer": {"lr": 1.0, "momentum": 0.0},
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100},
        "protection": {"kind": "last-iterate", "epsilon": 4.0},
    },
    "label-once": {
        "trainer": {"kind": "pdfa"},
        "model": {"hidden": [8]},
        "protection": {"kind": "label-once", "epsilon": 4.0},
    },
    "zo": {
        "trainer": {"kind": "zo"},
        "model": {"hidden": [8]},
        "sampler": {"scheme": "poisson", "batch_size": 100},
        "protection": {"kind": "record", "epsilon": 4.0},
    },
}


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that all may enter, under a umask that closes nothing: what is closed is closed on purpose."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    before = os.umask(0)
    yield folder
    os.umask(before)


class Created:
    """Records the mode of every file and folder at the moment of its creation."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wide: list[str] = []
        self.count = 0
        self._root, self._open, self._mkdir = root, os.open, os.mkdir
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "mkdir", self.mkdir)

    def open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        creates = flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = self._open(path, flags, mode, **options)
        if creates:
            self.note(path, os.fstat(descriptor).st_mode)
        return descriptor

    def mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        self._mkdir(path, mode, **options)
        self.note(path, os.stat(path).st_mode)

    def note(self, path: Any, mode: int) -> None:
        if Path(path).is_relative_to(self._root):
            self.count += 1
            if mode & 0o077:
                self.wide.append(f"{path} {stat.S_IMODE(mode):o}")


def wide(folder: Path) -> list[str]:
    """Files and folders that others may use."""
    return [
        f"{path} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in [folder, *folder.rglob("*")]
        if path.stat().st_mode & 0o077
    ]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_release_run_is_its_owners(open_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    created = Created(open_folder / "run", monkeypatch)
    run = training.train({**SMALL, **KINDS[kind], "mode": "release"}, folder=open_folder / "run")
    write_report(run)
    assert created.count > 5
    assert not created.wide
    assert not wide(open_folder / "run")


def test_an_unfinished_last_iterate_is_its_owners(open_folder: Path) -> None:
    class Stopping:
        def on_start(self, *, step: int, total_steps: int) -> None: ...

        def on_step(self, *, step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

        def on_epoch(self, record: dict[str, Any]) -> None: ...

    folder = open_folder / "given"
    folder.mkdir()  # a folder of the user's, which others may enter, is closed before anything is written
    settings = {**SMALL, **KINDS["last-iterate"], "mode": "release", "checkpoint": {"every_steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        training.train(settings, folder=folder, watcher=Stopping())
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
