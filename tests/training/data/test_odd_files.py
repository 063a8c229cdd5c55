"""Damaged, odd and hostile files at every reader of the command: exit code 2 and one line at once, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import load_description, open_device, training
from opusim.devices.certificate import Certificate, GaussianLaw, digest_of
from opusim.training.cli import main
from opusim.training.data import formats as data_folder
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import RunFolder
from tests.support.hostile_files import SECONDS, TooLong, within


def bytes_of(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def cut(path: Path) -> None:
    content = path.read_bytes() if path.is_file() else b"x" * 100
    path.write_bytes(content[: len(content) // 2])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes() if path.is_file() else b"x" * 100)
    for place in range(0, len(content), max(1, len(content) // 7)):
        content[place] ^= 0x55
    path.write_bytes(bytes(content))


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": bytes_of(b""),
    "not UTF-8": bytes_of(b'{"a": "\xff\xfe"}\n'),
    "not UTF-8 as TOML": bytes_of(b'a = "\xff\xfe"\n'),
    "zeros": bytes_of(bytes(1000)),
    "deep JSON": bytes_of(b"[" * 100_000 + b"\n"),
    "deep object": bytes_of(b'{"a":' * 900 + b"1" + b"}" * 900 + b"\n"),
    "deep TOML": bytes_of(b"a = " + b"[" * 100_000),
    "deep keys": bytes_of(b".".join([b"a"] * 900) + b" = 1\n"),
    "long number": bytes_of(b"1" * 100_000),
    "null": bytes_of(b"null\n"),
    "list": bytes_of(b"[1]\n"),
    "object": bytes_of(b"{}\n"),
    "other keys": bytes_of(b'{"schema_version": 1, "lines": {}, "findings": 3, "config": []}\n'),
    "cut": cut,
    "flipped": flipped,
    "named pipe": pipe,
    "folder": directory,
    "link to itself": loop,
}
COMMON = ("empty", "not UTF-8", "deep JSON", "deep TOML", "object", "named pipe", "folder")
EVERY = pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow) for name in DAMAGES]
)


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


@EVERY
def test_configurations(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    for name in ("run.toml", "run.json"):
        DAMAGES[damage](tmp_path / name)
        harmless = (damage, name) in (("empty", "run.toml"), ("object", "run.json"))  # the defaults
        assert_refused(
            opusim("train", "bp", "--config", tmp_path / name, "--set", "optimizer.lr=-1")
            if harmless
            else opusim("train", "bp", "--config", tmp_path / name)
        )


@EVERY
def test_device_descriptions(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    path = tmp_path / "opu.toml"
    DAMAGES[damage](path)
    assert_refused(opusim("device", "show", path))
    assert_refused(opusim("account", "device", path))
    assert_refused(opusim("train", "pdfa", "--device", path))


@EVERY
def test_certificates(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    description = load_description("gaussian")
    path = tmp_path / "certificate.toml"
    Certificate(
        device=description.name,
        description_digest=digest_of(description),
        date="2026-01-01",
        n_inputs=2,
        n_outputs=2,
        frames=10,
        confidence=0.99,
        beta=1e-6,
        noise=GaussianLaw(std=0.01),
    ).write(path)
    DAMAGES[damage](path)
    assert_refused(opusim("device", "check", "gaussian", path))
    with pytest.raises(ValueError, match=r"certificate\.toml"), within(SECONDS):
        open_device("gaussian", n_inputs=2, n_outputs=2, certificate=path)


@EVERY
def test_sweeps(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    path = tmp_path / "spec.toml"
    DAMAGES[damage](path)
    assert_refused(opusim("curve", path, "--draw-only", "--out", tmp_path / "sweep"))


SPEC = 'title = "t"\nconfig = { trainer = { kind = "bp" }, model = { hidden = [4] }, epochs = 1 }\n[axes]\nseed = [0]\n'


@EVERY
def test_rows_of_sweeps(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ("curve", tmp_path / "spec.toml", "--draw-only", "--out", tmp_path / "sweep")
    from opusim.training.sweeps.sweep import points_of, read_spec

    (point,) = points_of(*read_spec(tmp_path / "spec.toml"))
    rows = tmp_path / "sweep" / "rows"
    rows.mkdir(parents=True)
    DAMAGES[damage](rows / f"{point.identity}.json")
    assert_refused(opusim(*arguments), may_pass=damage == "link to itself")  # no row is there


@EVERY
def test_data_files(
    tmp_path: Path,
    opusim: Callable[..., tuple[int, str]],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    unfinished: Path,
) -> None:
    monkeypatch.setenv(data_folder.VARIABLE, str(tmp_path))
    raw, archive = tmp_path / "MNIST" / "raw", tmp_path / "CIFAR10-jpeg"
    raw.mkdir(parents=True)
    archive.mkdir()
    DAMAGES[damage](raw / "train-images-idx3-ubyte.gz")
    DAMAGES[damage](raw / "train-images-idx3-ubyte")
    DAMAGES[damage](archive / "cifar10-jpeg.tar.xz")
    for name in ("mnist", "cifar-10"):
        assert_refused(opusim("train", "bp", "--data", name, "--out", tmp_path / "run"))
    np.savez_compressed(tmp_path / "arrays.npz", x=np.zeros((50, 64)), y=np.zeros(50, int))
    DAMAGES[damage](tmp_path / "arrays.npz")
    assert_refused(opusim("evaluate", unfinished, "--data", f"npz:{tmp_path}/arrays.npz"))
    DAMAGES[damage](tmp_path / "steps.zo")
    assert_refused(opusim("zo", "replay", tmp_path / "steps.zo"))


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
    for number, damage in enumerate(COMMON):
        folder = damaged(runs[kind], tmp_path / f"run-{number}", name, damage)
        result = opusim(*READERS[kind, name], folder)
        assert_refused(result, may_pass=True)
        refused += result[0] != 0
    assert refused >= len(COMMON) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), list(READERS))
def test_run_folders_by_every_command(
    tmp_path: Path, opusim: Callable[..., tuple[int, str]], runs: dict[str, Path], kind: str, name: str
) -> None:
    for command in {EVALUATE, REPORT, RESUME, ACCOUNT, REPLAY if kind == "zo" else ACCOUNT}:
        for number, damage in enumerate(DAMAGES):
            folder = damaged(runs[kind], tmp_path / f"{'-'.join(command)}-{number}", name, damage)
            assert_refused(opusim(*command, folder), may_pass=True)


@EVERY
def test_searches(tmp_path: Path, opusim: Callable[..., tuple[int, str]], damage: str) -> None:
    DAMAGES[damage](tmp_path / "tuning.json")
    (tmp_path / "result.json").write_text(json.dumps({}))
    assert_refused(
        opusim(
            "tune",
            "convex",
            "--data",
            "digits",
            "--epsilon",
            8,
            "--epochs",
            1,
            "--out",
            tmp_path,
        )
    )


def test_a_command_that_hangs_is_noticed(tmp_path: Path) -> None:
    """The planted fault: a reader that opens whatever stands there."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TooLong), within(0.2):
        (tmp_path / "pipe").read_bytes()


def test_a_checkpoint_that_links_to_itself_ends_in_an_error(tmp_path: Path) -> None:
    """It is listed, and yet `exists` says no: not to be taken for one that a writer has just replaced."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    loop(folder.checkpoints / "step-0000000003.safetensors")
    with (
        within(5),
        pytest.raises(RunFolderError, match="step-0000000003.safetensors is not a readable checkpoint"),
    ):
        folder.newest_header()
