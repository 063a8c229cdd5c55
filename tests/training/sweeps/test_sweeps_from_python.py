"""A sweep from Python: a user's model and data, kept runs, a DataFrame and a figure."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import opusim
from opusim.training import sweep
from opusim.training.reports.sweep import Sweep

SPEC: dict[str, Any] = {
    "config": {"epochs": 2, "sampler": {"batch_size": 16}},
    "axes": {"device.noise.sigma": [0.0, 2.0], "seed": [0, 1]},
}


def records() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(80, 6))
    return x, (x[:, 0] > 0).astype(int)


class Net(nn.Module):
    """A module that no folder can describe."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def table(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(
        SPEC, data=records(), test=records(), model=net, folder=tmp_path_factory.mktemp("sweep") / "a", jobs=1
    )


def test_a_warning_names_its_run(tmp_path: Path) -> None:
    class Warning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("odd", stacklevel=1)
            return super().forward(x)

    spec = {"config": {"epochs": 1}, "axes": {"seed": [0, 1]}}
    with pytest.warns(UserWarning, match="odd") as caught:
        found = sweep(
            spec, data=records(), test=records(), model=Warning(), folder=tmp_path / "sweep", jobs=1
        )
    assert (found.frame().status == "done").all()
    assert {str(one.message) for one in caught} >= {f"runs, seed = {seed}: odd" for seed in (0, 1)}


def test_each_run_is_that_of_train_on_a_copy_of_the_model(table: Sweep, net: Net, tmp_path: Path) -> None:
    before = copy.deepcopy(net.state_dict())
    frame = table.frame()
    assert frame[["device.noise.sigma", "seed"]].to_numpy().tolist() == [[0, 0], [0, 1], [2, 0], [2, 1]]
    assert (frame.status == "done").all()
    config = {**SPEC["config"], "seed": 1, "threads": 1, "device": {"noise": {"sigma": 2.0}}}
    model = copy.deepcopy(net)
    run = opusim.train(config, data=records(), test=records(), model=model, folder=tmp_path / "run")
    assert frame.accuracy[3] == run.summary["test_accuracy"]  # type: ignore[index]
    kept = opusim.load_run(table.result.folder.path / "runs" / frame.run[3], model=Net())
    torch.testing.assert_close(kept.model.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_a_printed_sweep_is_the_table_of_a_notebook(table: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    printed = [re.findall(r"[^│┃]+", line) for line in str(table).splitlines()]
    rows = [[cell.strip() for cell in cells] for cells in printed if len(cells) > 1]
    shown = re.findall(r"<tr>(.*?)</tr>", table._repr_html_())
    assert rows == [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in shown]
    assert len(rows) == 3  # the header and two settings
    assert "\n" not in repr(table)


def test_kept_runs_have_the_same_inputs(table: Sweep, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = records()
    folder = table.result.folder.path
    with monkeypatch.context() as patched:
        patched.setattr("opusim.training.sweeps.execution.train_on", None)  # nothing is trained again
        again = sweep(
            SPEC, data=(torch.tensor(x), torch.tensor(y)), test=records(), model=copy.deepcopy(net), folder=folder,
            jobs=1,
        )  # fmt: skip
    pandas.testing.assert_frame_equal(again.frame(), table.frame())
    one = {**SPEC, "axes": {"device.noise.sigma": [2.0]}}
    others = [sweep(one, data=(x + 1, y), model=net, folder=folder, jobs=1)]
    others.append(sweep(one, data=(x, y), model=Net(), folder=folder, jobs=1))
    assert not set(table.frame().run) & {run for other in others for run in other.frame().run}


def test_a_run_that_fails_has_a_row_with_its_reason(tmp_path: Path) -> None:
    x, y = records()
    spec = {"config": {"epochs": 1}, "axes": {"sampler.batch_size": [16, 100_000]}}
    found = sweep(spec, data=(x, y), folder=tmp_path / "sweep", jobs=1).frame()
    assert found.status.tolist() == ["done", "failed"]
    assert "batch_size" in found.reason[1]
