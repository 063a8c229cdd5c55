"""A killed run is resumed and equals the unbroken one bit for bit (experiment mode)."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim import training
from opusim.training.errors import RunFolderError, RunInterrupted
from opusim.training.runs.checkpoints import list_checkpoints
from opusim.training.runs.folder import RunFolder
from tests.support.run_folders import equal, newest, require_resumed_alike

ROOT = Path(__file__).parents[3]
CONFIG = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 16}, "device": {"name": "gaussian"},
}  # fmt: skip


def data(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(n, 5)), np.arange(n) % 3


@pytest.mark.parametrize(
    "trainer", ["pdfa", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ulr", "zo"))]
)
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
    whole, cut = require_resumed_alike(tmp_path, config, data(), ctrl_c_at(5))
    assert (whole.folder.path / "summary.json").read_bytes() == (
        cut.folder.path / "summary.json"
    ).read_bytes()


def test_planted_unkeyed_noise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c_at: type
) -> None:
    """If noise did not follow the step, a resumed run would differ."""
    training.train(CONFIG, data=data(), folder=tmp_path / "unbroken")
    with pytest.raises(RunInterrupted):
        training.train(CONFIG, data=data(), folder=tmp_path / "broken", watcher=ctrl_c_at(5))
    monkeypatch.setattr("opusim.randomness.streams.SeededStream.seek", lambda self, step: None)
    training.train(data=data(), folder=tmp_path / "broken", resume=True)
    assert not equal(newest(tmp_path / "unbroken"), newest(tmp_path / "broken"))


def test_resuming_with_other_data_or_network_is_refused(tmp_path: Path, ctrl_c_at: type) -> None:
    with pytest.raises(RunInterrupted):
        training.train(CONFIG, data=data(), folder=tmp_path, watcher=ctrl_c_at(2))
    x, y = data()
    with pytest.raises(RunFolderError, match="with other data"):
        training.train(data=(x + 1, y), folder=tmp_path, resume=True)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    with pytest.raises(RunFolderError, match="another network"):
        training.train(data=data(), model=model, folder=tmp_path, resume=True)
    # nothing was lost
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == "step-0000000002.safetensors"


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path: Path, ctrl_c_at: type) -> None:
    config = {**CONFIG, "checkpoint": {"every_steps": 1, "keep": 2}}
    training.train(config, data=data(), folder=tmp_path / "unbroken")
    with pytest.raises(RunInterrupted):
        training.train(config, data=data(), folder=tmp_path / "broken", watcher=ctrl_c_at(5))
    last = list_checkpoints(tmp_path / "broken" / "checkpoints")[-1]
    content = bytearray(last.read_bytes())
    content[-3] ^= 1
    last.write_bytes(content)
    with pytest.raises(RunFolderError, match="damaged.*delete it to resume"):
        training.train(data=data(), folder=tmp_path / "broken", resume=True)
    last.write_bytes(content[:100])
    with pytest.raises(RunFolderError, match="not a readable checkpoint.*delete it"):
        training.train(data=data(), folder=tmp_path / "broken", resume=True)
    last.unlink()
    training.train(data=data(), folder=tmp_path / "broken", resume=True)
    assert equal(newest(tmp_path / "unbroken"), newest(tmp_path / "broken"))


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with (
        folder.writing(new=True),
        pytest.raises(RunFolderError, match=f"being written by process {os.getpid()}"),
    ):
        training.train(CONFIG, data=data(), folder=tmp_path / "run")


def test_a_used_folder_is_not_overwritten(tmp_path: Path) -> None:
    training.train(CONFIG, data=data(), folder=tmp_path)
    with pytest.raises(RunFolderError, match="already holds a finished run"):
        training.train(CONFIG, data=data(), folder=tmp_path)
    with pytest.raises(RunFolderError, match="nothing to resume"):
        training.train(data=data(), folder=tmp_path, resume=True)


def test_resume_takes_no_configuration(tmp_path: Path, ctrl_c_at: type) -> None:
    with pytest.raises(RunInterrupted):
        training.train(CONFIG, data=data(), folder=tmp_path, watcher=ctrl_c_at(2))
    with pytest.raises(RunFolderError, match="leave config and settings out"):
        training.train({"epochs": 7}, data=data(), folder=tmp_path, resume=True)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_run_begun_before_a_key_was_there_names_key_and_version(
    tmp_path: Path, ctrl_c_at: type, mode: str, reseal: Callable[[Path], None]
) -> None:
    with pytest.raises(RunInterrupted):
        training.train({**CONFIG, "mode": mode}, data=data(), folder=tmp_path, watcher=ctrl_c_at(2))
    path = tmp_path / "config.json"
    whole = path.read_text()
    facts = json.loads(whole)
    facts["versions"]["opusim"] = "0.0.1"
    del facts["config"]["data"]["whitening"], facts["config"]["trainer"]["through_clip"]
    path.write_text(json.dumps(facts))
    reseal(tmp_path)
    message = "started by opusim 0.0.1, whose configuration had no data.whitening, trainer.through_clip; resume it with"
    with pytest.raises(RunFolderError, match=message):
        training.train(data=data(), folder=tmp_path, resume=True)
    assert training.load_run(tmp_path).step == 2  # it can be read all the same
    path.write_text(whole)
    reseal(tmp_path)
    training.train(data=data(), folder=tmp_path, resume=True)


def test_other_versions_give_warning(tmp_path: Path, ctrl_c_at: type, reseal: Callable[[Path], None]) -> None:
    with pytest.raises(RunInterrupted):
        training.train(CONFIG, data=data(), folder=tmp_path, watcher=ctrl_c_at(2))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "0.1"'))
    reseal(tmp_path)
    with pytest.warns(UserWarning, match="other versions of torch"):
        training.train(data=data(), folder=tmp_path, resume=True)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="holds other files .metrics.jsonl"):
        training.train(CONFIG, data=data(), folder=tmp_path)


def test_the_device_file_is_not_needed_again(tmp_path: Path, ctrl_c_at: type) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(resources.files("opusim.hw_configs").joinpath("gaussian.toml").read_text())
    config = {**CONFIG, "device": {"name": str(file)}}
    with pytest.raises(RunInterrupted):
        training.train(config, data=data(), folder=tmp_path / "run", watcher=ctrl_c_at(2))
    file.unlink()
    training.train(data=data(), folder=tmp_path / "run", resume=True)


def test_release_mode_stores_no_seed_and_draws_afresh(tmp_path: Path) -> None:
    config = {**CONFIG, "mode": "release"}
    for name in ("one", "two"):
        training.train(config, data=data(), folder=tmp_path / name)
    assert "seed" not in json.loads((tmp_path / "one" / "config.json").read_text())["config"]
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert not any(torch.equal(one[name], two[name]) for name in one if name.endswith("weight"))
