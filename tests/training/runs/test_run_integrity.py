"""A run folder whose files were changed, cut or put back is refused, and the message names the file."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.torch import save

from opusim import training
from opusim.accounting.guarantee import LedgerCorrupt
from opusim.accounting.journal import Journal, read_positioned
from opusim.accounting.ledger import read_ledger
from opusim.errors import DeviceError
from opusim.training.attacks.run_audit import audit_run
from opusim.training.engine import session
from opusim.training.engine.callbacks import Callback
from opusim.training.errors import RunFolderError, RunInterrupted
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.reports.run_report import write_report
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import append_line
from tests.support.command import opusim

STEPS = 8
BASE: dict[str, Any] = {
    "epochs": 2, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 16}, "checkpoint": {"every_steps": 2}, "trainer": {"kind": "dfa"},
    "protection": {"kind": "record", "noise_multiplier": 1.3},
}  # fmt: skip
RELEASE = {**BASE, "mode": "release"}
DATA = np.random.default_rng(1).normal(size=(64, 5)), np.arange(64) % 3


def train(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> training.Run:
    return training.train(config, data=DATA, folder=folder, resume=config is None, **options)


def paid_steps(folder: Path) -> int:
    return sum(payment.steps for payment in read_ledger(folder).payments)


# The ledger


def stop(folder: Path, watcher: Callback, config: dict[str, Any] | None = BASE) -> None:
    """Train until the watcher ends it."""
    with pytest.raises((RunInterrupted, KeyboardInterrupt)):
        train(folder, config, watcher=watcher)


def refuses_the_ledger(folder: Path, message: str) -> None:
    """Every reader that states guarantees refuses it; the model is still there."""
    run = training.load_run(RunFolder(folder))
    run.predict(DATA[0])
    out = folder.parent / f"{folder.name}-audit"
    audit = partial(audit_run, folder, data=DATA, out=out)
    for read in (lambda: run.guarantees, lambda: write_report(run), audit):
        with pytest.raises(LedgerCorrupt, match=message):
            read()
    for line in (["report", folder], ["account", "run", folder], ["account", "run", folder / "ledger.jsonl"]):
        told = opusim(*line, cwd=folder)
        assert (told.returncode, told.stderr.count("\n"), "ledger.jsonl: line" in told.stderr) == (2, 1, True)


def test_an_old_ledger_put_back_after_three_kills_is_refused(tmp_path: Path, stop_at: type) -> None:
    """All kills come before the first checkpoint behind step 0, so a process that resumes has to seal what it finds."""
    kept = {}
    for _ in range(3):
        stop(tmp_path, stop_at(1), None if RunFolder(tmp_path).started else RELEASE)
        kept = kept or {file: file.read_bytes() for file in tmp_path.glob("ledger.*")}
    for file, content in kept.items():
        file.write_bytes(content)
    message = "is missing: checkpoint step-0000000000 was written when the ledger had"
    with pytest.raises(LedgerCorrupt, match=message):
        train(tmp_path)
    refuses_the_ledger(tmp_path, message)


@pytest.mark.parametrize("finished", [True, False])
def test_rewritten_lines_with_new_hashes_are_refused(tmp_path: Path, finished: bool, ctrl_c_at: type) -> None:
    if finished:
        train(tmp_path, BASE)
    else:
        stop(tmp_path, ctrl_c_at(5))
    entries = read_positioned(tmp_path / "ledger.jsonl")[0]
    for file in tmp_path.glob("ledger.*"):
        file.unlink()
    journal = Journal(tmp_path / "ledger.jsonl")
    for entry in entries:
        for mechanism in entry.get("mechanisms", []):
            mechanism["noise_multiplier"] = 9.0
        journal.append(entry)
    journal.close()
    (lower,) = read_ledger(tmp_path).guarantees()  # by itself it is a ledger
    assert lower.epsilon < 0.5
    refuses_the_ledger(tmp_path, "is not the line that checkpoint")
    if not finished:
        with pytest.raises(LedgerCorrupt, match="is not the line that checkpoint"):
            train(tmp_path)


def test_a_line_behind_the_end_of_a_run_is_refused(tmp_path: Path) -> None:
    train(tmp_path, RELEASE)
    journal = Journal(tmp_path / "ledger.jsonl")
    journal.append({"returned": {"first_step": 1, "steps": STEPS - 1}})
    journal.close()
    assert paid_steps(tmp_path) == 1
    refuses_the_ledger(tmp_path, "was added after summary.json was written")


# The other files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ctrl_c_at: type) -> dict[bool, Path]:
    """A run with every file that there is, stopped (False) and finished (True)."""
    config = {
        **BASE, "data": {**BASE["data"], "components": 3}, "sampler": {"batch_size": 16}, "trainer": {"kind": "pdfa"},
        "device": {"name": "gaussian", "noise": {"sigma": 0.5}, "monitor": {"every_steps": 3}},
        "protection": {"kind": "label-readout", "noise": "device", "epsilon": 2.0},
    }  # fmt: skip
    root = tmp_path_factory.mktemp("whole")
    stop(root / "stopped", ctrl_c_at(5), config)
    shutil.copytree(root / "stopped", root / "finished")
    train(root / "finished")
    return {False: root / "stopped", True: root / "finished"}


def set_key(path: Path, *keys: str, value: Any) -> None:
    content = json.loads(path.read_text())
    inner = reduce(getitem, keys[:-1], content)
    assert inner[keys[-1]] != value
    inner[keys[-1]] = value
    path.write_text(json.dumps(content, indent=2) + "\n")


def flip_last_byte(path: Path) -> None:
    *content, last = path.read_bytes()
    path.write_bytes(bytes([*content, last ^ 1]))


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "device": ("config.json", lambda path: set_key(path, "device", "noise", "sigma", value=0.7)),
    "standardisation": ("config.json", lambda path: set_key(path, "data", "standardisation", "mean", value=0.7)),
    "class count": ("config.json", lambda path: set_key(path, "data", "n_classes", value=2)),
    "white space": ("config.json", lambda path: path.write_text(path.read_text() + " ")),
    "baseline": ("baseline.safetensors", flip_last_byte),
    "labels": ("labels.safetensors", flip_last_byte),
    "components": ("components.safetensors", flip_last_byte),
    "no baseline": ("baseline.safetensors", Path.unlink),
    "no labels": ("labels.safetensors", Path.unlink),
    "no components": ("components.safetensors", Path.unlink),
}  # fmt: skip


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("change", list(CHANGES))
def test_changed_files_are_named(whole: dict, tmp_path: Path, change: str, finished: bool) -> None:
    folder = Path(shutil.copytree(whole[finished], tmp_path / "run"))
    name, alter = CHANGES[change]
    training.load_run(folder)
    alter(folder / name)
    message = f"{name} is (not the file that|missing, and) checkpoint step-.* was written under.*restore the"
    with pytest.raises(RunFolderError, match=message):
        training.load_run(folder)
    if not finished:
        with pytest.raises(RunFolderError, match=message):
            train(folder)


@pytest.mark.parametrize("name", ["labels.safetensors", "baseline.safetensors", "components.safetensors"])
def test_added_files_are_refused(whole: dict[bool, Path], tmp_path: Path, name: str, ctrl_c_at: type) -> None:
    stop(tmp_path / "run", ctrl_c_at(5))
    shutil.copyfile(whole[True] / name, tmp_path / "run" / name)
    with pytest.raises(RunFolderError, match=f"{name} was added after checkpoint step-0000000005"):
        train(tmp_path / "run")


METRICS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut": lambda content: content[:-30],
    "changed": lambda content: content.replace(b'"epoch": 1', b'"epoch": 7'),
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("change", list(METRICS))
def test_cut_or_changed_metrics_are_refused(whole: dict, tmp_path: Path, change: str, finished: bool) -> None:
    folder = Path(shutil.copytree(whole[finished], tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(METRICS[change](metrics.read_bytes()))
    message = "metrics.jsonl was (cut or emptied|changed) since checkpoint step-.*restore it"
    run = training.load_run(folder)
    for read in (lambda: run.metrics, lambda: write_report(run)):
        with pytest.raises(RunFolderError, match=message):
            read()
    if not finished:
        with pytest.raises(RunFolderError, match=message):
            train(folder)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"correct\\": ', b'"correct\\":1'), (b'\\"step\\": ', b'\\"step\\":1')]
)
def test_a_changed_header_is_refused(whole: dict[bool, Path], tmp_path: Path, old: bytes, new: bytes) -> None:
    folder = Path(shutil.copytree(whole[False], tmp_path / "run"))
    newest = list_checkpoints(folder / "checkpoints")[-1]
    content = newest.read_bytes()
    assert content.count(old) == 1
    newest.write_bytes(content.replace(old, new))
    for read in (lambda: train(folder), lambda: training.load_run(folder), lambda: read_checkpoint(newest)):
        with pytest.raises(RunFolderError, match="step-0000000005.safetensors is damaged .its header"):
            read()


def test_a_changed_summary_is_refused(whole: dict[bool, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[True], tmp_path / "run"))
    summary = folder / "summary.json"
    kept = summary.read_bytes()
    assert training.load_run(folder).summary is not None
    for keys, value in (("train_accuracy", 0.999), ("schema_version", 1), ("seal ledger lines", 1)):
        summary.write_bytes(kept)
        set_key(summary, *keys.split(), value=value)
        for asked in ("summary", "guarantees"):
            with pytest.raises(RunFolderError, match="summary.json was changed since it was written"):
                getattr(training.load_run(folder), asked)


def test_a_copy_of_a_release_run_goes_on_only_when_that_is_confirmed(tmp_path: Path, ctrl_c_at: type) -> None:
    stop(tmp_path / "run", ctrl_c_at(3), RELEASE)
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    with pytest.raises(RunFolderError, match="was copied or restored.*opusim train resume .*copy --moved"):
        train(copy)
    assert training.load_run(copy).guarantees == training.load_run(tmp_path / "run").guarantees
    (tmp_path / "run").rename(tmp_path / "renamed")
    train(tmp_path / "renamed")
    with pytest.raises(RunInterrupted):
        train(copy, watcher=ctrl_c_at(5), moved=True)
    train(copy)  # it was confirmed once


def test_a_copy_of_an_experiment_goes_on(tmp_path: Path, ctrl_c_at: type) -> None:
    stop(tmp_path / "run", ctrl_c_at(3))
    train(Path(shutil.copytree(tmp_path / "run", tmp_path / "copy")))


def test_the_command_confirms_a_move(tmp_path: Path, ctrl_c_at: type) -> None:
    settings = ["mode=release", "threads=1", "model.hidden=[4]", "epochs=1", "sampler.scheme=poisson"]
    with pytest.raises(RunInterrupted):
        training.train(settings=settings, folder=tmp_path / "run", watcher=ctrl_c_at(2))
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    told = opusim("train", "resume", copy, "--quiet", cwd=tmp_path)
    assert (told.returncode, told.stderr.count("\n"), "--moved" in told.stderr) == (2, 1, True)
    assert opusim("train", "resume", copy, "--quiet", "--moved", cwd=tmp_path).returncode == 0


def test_a_device_error_costs_the_failed_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    step = FeedbackTrainer.step

    def fails_once(self: FeedbackTrainer, *arguments: Any, **options: Any) -> Any:
        begun.append(options["step"])
        if begun == [0, 1, 2, 3]:
            raise DeviceError("the lamp is out")
        return step(self, *arguments, **options)

    monkeypatch.setattr(FeedbackTrainer, "step", fails_once)
    with pytest.raises(DeviceError, match="the lamp is out"):
        train(tmp_path, RELEASE)
    train(tmp_path)
    assert begun == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert paid_steps(tmp_path) == len(begun)


# The folder itself


def test_two_runs_begun_at_once_take_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    together = threading.Barrier(2)
    load_data = session.load_data
    wait = partial(together.wait, timeout=30)
    monkeypatch.setattr(session, "load_data", lambda *given: (wait(), load_data(*given))[1])
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(training.train, BASE, data=DATA) for _ in range(2)]
    paths = {run.result().folder.path for run in runs}
    assert paths == {Path("runs/dfa-arrays-1"), Path("runs/dfa-arrays-2")}


def test_a_file_in_the_place_of_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError, match="run folder runs/dfa-arrays-1 cannot be made: runs is a file"):
        training.train(BASE, data=DATA)


@pytest.mark.parametrize("place", ["given", "chosen", "there before"])
def test_a_refused_run_leaves_no_folder(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = Mock(side_effect=DeviceError("the device is held by another process"))
    monkeypatch.setattr("opusim.training.engine.plan.RunPlan.opened_device", refuses)
    monkeypatch.chdir(tmp_path)
    folder = None if place == "chosen" else tmp_path / "runs" / "one"
    if place == "there before" and folder is not None:
        folder.mkdir(parents=True)
    with pytest.raises(DeviceError, match="held by another process"):
        training.train(BASE, data=DATA, folder=folder)
    assert list((tmp_path / "runs").rglob("*")) == ([folder] if place == "there before" else [])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    training.train(BASE, data=DATA, folder=folder)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file and folder that is synced."""
    found: list[Path] = []
    fsync = os.fsync
    linked = "/proc/self/fd/{}".format
    monkeypatch.setattr(
        os, "fsync", lambda file: (found.append(Path(os.readlink(linked(file)))), fsync(file))
    )
    return found


def test_a_new_folder_with_files_survives_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    """Every folder that a new name was written into is synced: those above the run folder too."""
    run = tmp_path / "a" / "b" / "run"
    train(run, BASE)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", run, run / "checkpoints"} <= set(synced)


def test_the_first_line_of_metrics_syncs_its_name(tmp_path: Path, synced: list[Path]) -> None:
    for _ in range(2):
        append_line(tmp_path / "metrics.jsonl", {})
    assert synced.count(tmp_path) == 1


def test_an_earlier_run_is_refused_by_its_version(whole: dict[bool, Path], tmp_path: Path) -> None:
    for finished, source in whole.items():
        folder = Path(shutil.copytree(source, tmp_path / str(finished)))
        set_key(folder / "config.json", "schema_version", value=1)
        message = r"config\.json: schema_version 1 is not 2; read it with the opusim that wrote it"
        for read in (lambda folder=folder: training.load_run(folder), lambda folder=folder: train(folder)):
            with pytest.raises(RunFolderError, match=message):
                read()
        told = opusim("evaluate", folder, cwd=tmp_path)
        assert (told.returncode, "schema_version 1 is not 2" in told.stderr) == (2, True)


def test_an_earlier_checkpoint_is_refused_by_its_version(whole: dict[bool, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole[False], tmp_path / "run"))
    newest = list_checkpoints(folder / "checkpoints")[-1]
    checkpoint = read_checkpoint(newest)
    facts = {"schema_version": 1, "step": checkpoint.step, "progress": {}}
    facts["digest"] = checkpoint.header.tensors
    newest.write_bytes(save(checkpoint.tensors, metadata={"opusim": json.dumps(facts)}))
    for read in (lambda: read_checkpoint(newest), lambda: training.load_run(folder), lambda: train(folder)):
        with pytest.raises(RunFolderError, match="schema_version 1 is not 2; read it with the opusim"):
            read()
