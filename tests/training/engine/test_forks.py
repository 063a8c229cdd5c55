"""A process that is forked from a run, such as by a callback, does not train on with what the run has paid."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import training
from opusim.accounting.ledger import read_ledger
from opusim.training.engine.callbacks import Callback

BASE: dict[str, Any] = {
    "epochs": 1, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 24}, "trainer": {"kind": "bp"},
}  # fmt: skip
RUNS = {
    "steps paid in blocks": {**BASE, "protection": {"kind": "record", "noise_multiplier": 1.3}},
    "everything paid at the start": {**BASE, "protection": {"kind": "label-randomized-response", "epsilon": 2.0}},
}  # fmt: skip
DATA = np.random.default_rng(5).normal(size=(96, 6)).astype(np.float32), np.arange(96) % 3


class Forks(Callback):
    """Forks the process after the second step; the child says in a file how its training ends."""

    child = 0

    def __init__(self, file: Path) -> None:
        self.file, self.steps = file, 0

    def on_step(self, *, step: int) -> None:
        """Fork after the second step."""
        self.steps = step
        if step == 2:
            self.child = os.fork()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns of forks beside threads
@pytest.mark.parametrize("run", RUNS)
def test_a_forked_run_ends_before_its_next_step(tmp_path: Path, run: str) -> None:
    watcher, parent = Forks(tmp_path / "child"), os.getpid()
    try:
        training.train(RUNS[run], data=DATA, folder=tmp_path / "run", watcher=watcher)
        text = "trained to the end"
    except RuntimeError as error:
        text = str(error)
    finally:
        if os.getpid() != parent:
            watcher.file.write_text(f"{watcher.steps}: {text}")
            os._exit(0)
    os.waitpid(watcher.child, 0)
    assert text == "trained to the end"
    found = watcher.file.read_text()
    assert re.fullmatch(rf"2: {tmp_path}/run\S* belongs to process {parent}, .*", found)
    assert read_ledger(tmp_path / "run").payments
    assert watcher.steps == 4
