"""Damaged, odd and hostile files at every reader of the command: exit code 2 and one line at once, no traceback."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opusim import training
from opusim.training.cli import main
from opusim.training.data import formats as data_folder
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import RunFolder
from tests.support.hostile_files import SECONDS, TooLong, within


def bytes_of(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": bytes_of(b""),
    "not UTF-8": bytes_of(b'{"a": "\xff\xfe"}\n'),
    "deep JSON": bytes_of(b"[" * 100_000 + b"\n"),
    "deep TOML": bytes_of(b"a = " + b"[" * 100_000),
    "object": bytes_of(b"{}\n"),
    "named pipe": pipe,
    "folder": directory,
}
"""What a reader meets before it looks at content, of which tests/test_hostile_data.py and its like draw more."""
TRAIN = ("train", "bp", "--out", "run")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "run.toml": [(*TRAIN, "--config", "run.toml")],
    "run.json": [(*TRAIN, "--config", "run.json")],
    "opu.toml": [
        ("device", "show", "opu.toml"),
        ("account", "device", "opu.toml"),
        ("train", "pdfa", "--device", "opu.toml"),
    ],
    "certificate.toml": [("device", "check", "gaussian", "certificate.toml")],
    "spec.toml": [("curve", "spec.toml", "--draw-only", "--out", "sweep")],
    "MNIST/raw/train-images-idx3-ubyte": [(*TRAIN, "--data", "mnist")],
    "MNIST/raw/train-images-idx3-ubyte.gz": [(*TRAIN, "--data", "mnist")],
    "CIFAR10-jpeg/cifar10-jpeg.tar.xz": [(*TRAIN, "--data", "cifar-10")],
    "arrays.npz": [("evaluate", "unfinished", "--data", "npz:arrays.npz")],
    "steps.zo": [("zo", "replay", "steps.zo")],
    "tuning.json": [("tune", "convex", "--data", "digits", "--epsilon", "8", "--epochs", "1", "--out", ".")],
}
"""Commands that read a file of the user."""
HARMLESS = {("run.toml", "empty"), ("run.json", "object")}  # the defaults


@pytest.fixture
def opusim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The command in this process: its exit code and what it printed on standard error."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["opusim", *map(str, arguments)])
        capsys.readouterr()
        with within(SECONDS), pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr().err

    return command


def assert_refused(result: tuple[int, str], *, may_pass: bool = False) -> None:
    code, printed = result
    if may_pass and code == 0:
        return
    lines = [line for line in printed.splitlines() if line.strip()]
    assert code == 2, printed
    assert len(lines) == 1, printed
    assert lines[0].startswith("opusim: "), printed


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file in COMMANDS for damage in DAMAGES if (file, damage) not in HARMLESS],
)
def test_files_of_the_user(
    tmp_path: Path,
    opusim: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    unfinished: Path,
    file: str,
    damage: str,
) -> None:
    monkeypatch.setenv(data_folder.VARIABLE, str(tmp_path))
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "unfinished").symlink_to(unfinished)
    (tmp_path / "result.json").write_text("{}")  # of a search
    DAMAGES[damage](tmp_path / file)
    for command in COMMANDS[file]:
        assert_refused(opusim(*command))


SPEC = 'title = "t"\nconfig = { trainer = { kind = "bp" }, model = { hidden = [4] }, epochs = 1 }\n[axes]\nseed = [0]\n'


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_of_sweeps(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ("curve", tmp_path / "spec.toml", "--draw-only", "--out", tmp_path / "sweep")
    from opusim.training.sweeps.sweep import points_of, read_spec

    (point,) = points_of(*read_spec(tmp_path / "spec.toml"))
    rows = tmp_path / "sweep" / "rows"
    rows.mkdir(parents=True)
    DAMAGES[damage](rows / f"{point.identity}.json")
    assert_refused(opusim(*arguments))


def begun(folder: Path, kind: str, stop: object, **changes: Any) -> Path:
    config = {"epochs": 1, "threads": 1, "trainer": {"kind": kind}, "model": {"hidden": [4]}, **changes}
    with pytest.raises(KeyboardInterrupt):
        training.train({**config, "checkpoint": {"every_steps": 1}}, folder=folder, watcher=stop)
    return folder


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory, stop_at: type) -> Path:
    return begun(tmp_path_factory.mktemp("odd") / "run", "bp", stop_at(3))


@pytest.fixture(scope="module")
def runs(unfinished: Path, tmp_path_factory: pytest.TempPathFactory, stop_at: type) -> dict[str, Path]:
    """Unfinished runs that have, together, every file that a run folder can have."""
    folder = tmp_path_factory.mktemp("odd")
    return {
        "bp": unfinished,
        "zo": begun(folder / "zo", "zo", stop_at(3)),
        "components": begun(folder / "components", "bp", stop_at(3), data={"components": 5}),
        "monitored": begun(folder / "monitored", "pdfa", stop_at(3), device={"monitor": {"every_steps": 5}}),
    }


EVALUATE, REPORT, RESUME = ("evaluate",), ("report",), ("train", "resume", "--quiet")
ACCOUNT, REPLAY = ("account", "run"), ("zo", "replay")
READERS = {
    ("bp", "config.json"): EVALUATE,
    ("bp", "checkpoints/step-0000000003.safetensors"): EVALUATE,
    ("bp", "metrics.jsonl"): REPORT,
    ("bp", "timing.jsonl"): REPORT,
    ("bp", "audit.json"): REPORT,
    ("bp", "ledger.jsonl"): ACCOUNT,
    ("bp", "ledger.head"): ACCOUNT,
    ("bp", "lock"): RESUME,
    ("zo", "steps.zo"): REPLAY,
    ("zo", "steps.mark.json"): REPLAY,
    ("zo", "base.safetensors"): REPLAY,
    ("components", "components.safetensors"): EVALUATE,
    ("monitored", "baseline.safetensors"): RESUME,
}
"""A command that reads each file of a run folder."""


def damaged(source: Path, folder: Path, name: str, damage: str) -> Path:
    shutil.copytree(source, folder)
    DAMAGES[damage](folder / name)
    return folder


@pytest.mark.parametrize(("kind", "name"), list(READERS))
def test_run_folders(
    tmp_path: Path, opusim: Callable[..., tuple[int, str]], runs: dict[str, Path], kind: str, name: str
) -> None:
    """Some damages leave a sound file, such as an empty table of metrics; no command hangs or shows a traceback."""
    refused = 0
    for number, damage in enumerate(DAMAGES):
        folder = damaged(runs[kind], tmp_path / f"run-{number}", name, damage)
        result = opusim(*READERS[kind, name], folder)
        assert_refused(result, may_pass=True)
        refused += result[0] != 0
    assert refused >= len(DAMAGES) // 2


def test_a_command_that_hangs_is_noticed(tmp_path: Path) -> None:
    """The planted fault: a reader that opens whatever stands there."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TooLong), within(0.2):
        (tmp_path / "pipe").read_bytes()


def test_a_checkpoint_that_links_to_itself_ends_in_an_error(tmp_path: Path) -> None:
    """It is listed, and yet `exists` says no: not to be taken for one that a writer has just replaced."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-0000000003.safetensors").symlink_to("step-0000000003.safetensors")
    with (
        within(5),
        pytest.raises(RunFolderError, match="step-0000000003.safetensors is not a readable checkpoint"),
    ):
        folder.newest_header()
