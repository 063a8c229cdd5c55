"""A killed run is resumed and equals the unbroken one bit for bit (experiment mode)."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opusim import training
from opusim.training.errors import RunFolderError, RunInterrupted
from opusim.training.runs.checkpoints import list_checkpoints
from opusim.training.runs.folder import RunFolder
from tests.support.run_folders import equal, newest, require_resumed_alike
from tests.support.shared_checks import with_marks

ROOT = Path(__file__).parents[3]
CONFIG = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 16}, "device": {"name": "gaussian"},
}  # fmt: skip
DATA = np.random.default_rng(1).normal(size=(60, 5)), np.arange(60) % 3


@pytest.fixture
def stopped(tmp_path: Path, ctrl_c_at: type) -> Path:
    """A run that Ctrl-C stopped after step 2 of 12."""
    with pytest.raises(RunInterrupted):
        training.train(CONFIG, data=DATA, folder=tmp_path, watcher=ctrl_c_at(2))
    return tmp_path


@pytest.mark.parametrize("trainer", with_marks(["pdfa", "ulr", "zo"], ["ulr", "zo"]))
def test_sigkill_at_every_touch_of_the_disk(tmp_path: Path, trainer: str) -> None:
    command = [sys.executable, "-m", "tests.support.kill_harness", str(tmp_path), trainer]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    moments, _, states, *_ = result.stdout.split()
    assert int(moments) > 120
    assert int(states) > 30, "the harness found fewer moments than a run has writes"


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*itertools.product(["pdfa", "bp", "ulr"], ["sgd", "adam", "nadam"]), ("zo", "sgd")],
)
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path, kind: str, optimizer: str, ctrl_c_at: type) -> None:
    config = {**CONFIG, "optimizer": {"name": optimizer}, "trainer": {"kind": kind}}
    if kind != "pdfa":
        del config["device"]
    whole, cut = require_resumed_alike(tmp_path, config, DATA, ctrl_c_at(5))
    one, other = (run.folder.path / "summary.json" for run in (whole, cut))
    assert one.read_bytes() == other.read_bytes()


def test_planted_unkeyed_noise_is_found(tmp_path: Path, ctrl_c_at: type, monkeypatch: Any) -> None:
    """If noise did not follow the step, a resumed run would differ."""
    monkeypatch.setattr("opusim.randomness.streams.SeededStream.seek", lambda self, step: None)
    with pytest.raises(AssertionError):
        require_resumed_alike(tmp_path, CONFIG, DATA, ctrl_c_at(5))
    assert not equal(newest(tmp_path / "whole"), newest(tmp_path / "cut"))


def test_resuming_with_other_data_network_or_configuration_is_refused(stopped: Path) -> None:
    x, y = DATA
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    for given, message in (
        ({"data": (x + 1, y)}, "with other data"),
        ({"data": DATA, "model": model}, "another network"),
        ({"data": DATA, "config": {"epochs": 7}}, "leave config and settings out"),
    ):
        with pytest.raises(RunFolderError, match=message):
            training.train(**given, folder=stopped, resume=True)
    # nothing was lost
    assert list_checkpoints(stopped / "checkpoints")[-1].name == "step-0000000002.safetensors"


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path: Path, ctrl_c_at: type) -> None:
    config = {**CONFIG, "checkpoint": {"every_steps": 1, "keep": 2}}
    training.train(config, data=DATA, folder=tmp_path / "unbroken")
    with pytest.raises(RunInterrupted):
        training.train(config, data=DATA, folder=tmp_path / "broken", watcher=ctrl_c_at(5))
    last = list_checkpoints(tmp_path / "broken" / "checkpoints")[-1]
    content = bytearray(last.read_bytes())
    content[-3] ^= 1
    for damaged, message in (content, "damaged.*delete it to"), (content[:100], "not a readable.*delete"):
        last.write_bytes(damaged)
        with pytest.raises(RunFolderError, match=message):
            training.train(data=DATA, folder=tmp_path / "broken", resume=True)
    last.unlink()
    training.train(data=DATA, folder=tmp_path / "broken", resume=True)
    assert equal(newest(tmp_path / "unbroken"), newest(tmp_path / "broken"))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    refused = pytest.raises(RunFolderError, match=f"being written by process {os.getpid()}")
    with RunFolder(tmp_path / "run").writing(new=True), refused:
        training.train(CONFIG, data=DATA, folder=tmp_path / "run")


def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    training.train(CONFIG, data=DATA, folder=tmp_path / "run")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    used, others = "already holds a finished run", "holds other files .metrics.jsonl"
    for folder, message in (("run", used), ("", others)):
        with pytest.raises(RunFolderError, match=message):
            training.train(CONFIG, data=DATA, folder=tmp_path / folder)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_key_that_a_run_lacks_is_named(tmp_path: Path, ctrl_c_at: type, mode: str, reseal: Any) -> None:
    with pytest.raises(RunInterrupted):
        training.train({**CONFIG, "mode": mode}, data=DATA, folder=tmp_path, watcher=ctrl_c_at(2))
    path = tmp_path / "config.json"
    whole = path.read_text()
    facts = json.loads(whole)
    facts["versions"]["opusim"] = "0.0.1"
    del facts["config"]["data"]["whitening"], facts["config"]["trainer"]["through_clip"]
    path.write_text(json.dumps(facts))
    reseal(tmp_path)
    message = "started by opusim 0.0.1, whose configuration had no data.whitening, trainer.through_clip; resume it with"
    with pytest.raises(RunFolderError, match=message):
        training.train(data=DATA, folder=tmp_path, resume=True)
    assert training.load_run(tmp_path).step == 2  # it can be read all the same
    path.write_text(whole)
    reseal(tmp_path)
    training.train(data=DATA, folder=tmp_path, resume=True)


def test_other_versions_give_warning(stopped: Path, reseal: Callable[[Path], None]) -> None:
    path = stopped / "config.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "0.1"'))
    reseal(stopped)
    with pytest.warns(UserWarning, match="other versions of torch"):
        training.train(data=DATA, folder=stopped, resume=True)


def test_the_device_file_is_not_needed_again(tmp_path: Path, ctrl_c_at: type) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(resources.files("opusim.hw_configs").joinpath("gaussian.toml").read_text())
    config = {**CONFIG, "device": {"name": str(file)}}
    with pytest.raises(RunInterrupted):
        training.train(config, data=DATA, folder=tmp_path / "run", watcher=ctrl_c_at(2))
    file.unlink()
    training.train(data=DATA, folder=tmp_path / "run", resume=True)


def test_release_mode_stores_no_seed_and_draws_afresh(tmp_path: Path) -> None:
    config = {**CONFIG, "mode": "release"}
    for name in ("one", "two"):
        training.train(config, data=DATA, folder=tmp_path / name)
    assert "seed" not in json.loads((tmp_path / "one" / "config.json").read_text())["config"]
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert not any(torch.equal(one[name], two[name]) for name in one if name.endswith("weight"))
