"""A run and a private loop that an earlier version wrote, and stopped halfway, are read, resumed and finished.

Their folders stand in `written`, in the formats of that version. A resumed one ends as one that was not stopped. They
are written anew, only if a format gets a new version, by

    PYTHONPATH=. python tests/training/engine/test_written_folders.py
"""

import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opusim
from opusim.accounting.ledger import read_ledger
from opusim.errors import ConfigError
from opusim.training.errors import RunInterrupted
from opusim.training.reports.run_report import write_report
from tests.support.private_loops import parts, private_loop, run_epoch
from tests.training.conftest import CtrlCAt

WRITTEN = Path(__file__).with_name("written")
LEFT_OUT = shutil.ignore_patterns("lock", "timing.jsonl")
CONFIG: dict[str, Any] = {
    "seed": 3, "epochs": 4, "threads": 1, "model": {"hidden": [4]},
    "data": {"n_classes": 3, "validation_fraction": 0.0}, "sampler": {"scheme": "poisson", "batch_size": 8},
    "checkpoint": {"keep": 1}, "trainer": {"kind": "dfa"}, "protection": {"kind": "record", "noise_multiplier": 1.0},
}  # fmt: skip


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(24, 4)), np.arange(24) % 3


def vector(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_run_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "run", tmp_path / "run")
    before = opusim.load_run(tmp_path / "run")
    assert (before.step, before.folder.finished, len(before.metrics)) == (5, False, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of packages
        resumed = opusim.train(data=data(), folder=tmp_path / "run", resume=True)
    whole = opusim.train(CONFIG, data=data(), folder=tmp_path / "whole")
    assert torch.allclose(vector(resumed.model), vector(whole.model), atol=1e-5)
    assert resumed.folder.read_ledger().payments == whole.folder.read_ledger().payments
    assert resumed.metrics[-1]["step"] == 12


def test_a_private_loop_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "loop", tmp_path / "loop")
    resumed = private_loop(tmp_path / "loop", resume=True)
    assert (resumed.step, resumed.extra) == (7, {"note": [1, np.float32(0.5)]})
    whole = private_loop(tmp_path / "whole")
    for private in (resumed, whole):
        while private.step < 15:
            run_epoch(private)
    assert torch.allclose(vector(resumed.module), vector(whole.module), atol=1e-5)
    assert read_ledger(tmp_path / "loop").payments == read_ledger(tmp_path / "whole").payments
    resumed.close()
    whole.close()


def test_a_run_of_a_dropped_kind_is_read_and_not_resumed(tmp_path: Path) -> None:
    """A release run under a label budget, stopped by Ctrl-C; its kind is written by no version any more."""
    folder = shutil.copytree(WRITTEN / "dropped", tmp_path / "run")
    run = opusim.load_run(folder)
    assert (run.step, run.config.protection.kind) == (5, "label-budget")
    (guarantee,) = run.guarantees
    assert guarantee.is_proven
    assert 1.9 < guarantee.epsilon <= 2.0
    assert run.predict(data()[0]).shape == (24,)
    assert "budget of mu" in write_report(run).read_text()
    with pytest.raises(ConfigError, match="protection.kind: 'label-budget' was dropped; take"):
        opusim.train(data=data(), folder=folder, resume=True, moved=True)


def main() -> None:
    """Write the folders of kinds that there are."""
    with tempfile.TemporaryDirectory() as place:
        run, loop = Path(place, "run"), Path(place, "loop")
        with suppress(RunInterrupted):
            opusim.train(CONFIG, data=data(), folder=run, callbacks=[CtrlCAt(5)])
        with private_loop(loop, parts()) as private:
            run_epoch(private)
            run_epoch(private, steps=2)
            private.save({"note": [1, np.float32(0.5)]})
            run_epoch(private, steps=1)
        for folder in (run, loop):
            shutil.copytree(folder, WRITTEN / folder.name, ignore=LEFT_OUT, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
