"""Run folders: without the seconds of training, for tests of what only reads or removes them, and resumed ones."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from torch import Tensor

from opusim.accounting.ledger import Ledger
from opusim.accounting.mechanisms.records import Gaussian
from opusim.training.config.run import load_config
from opusim.training.engine.callbacks import Callback
from opusim.training.engine.session import train
from opusim.training.errors import RunInterrupted
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import Run
from opusim.training.runs.storage import Header, checkpoint_path

STEP = Gaussian(noise_multiplier=2.0)


def made(path: Path, *, mode: str = "experiment", finished: bool = True, steps: int = 8) -> Path:
    """The files of a run of 2 epochs of 4 steps, finished or stopped at step 6; the ledger pays for `steps`."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    config = load_config({"mode": mode, "epochs": 2, "trainer": {"kind": "bp"}})
    facts = {"network": {}, "data": {"name": "digits"}, "device": None, "noise": None, "versions": {}}
    folder.begin(folder.configuration(config, facts))
    with Ledger(folder.ledger_file, mode=mode, delta=1e-5, block=steps) as ledger:
        ledger.pay(0, STEP, until=8)
        position = ledger.position
    measured = {} if mode == "release" else {"validation_accuracy": 0.5}
    folder.append_metrics({"epoch": 1, "step": 4, **measured})
    seal = folder.seal(folder.digests(), position, bound=False)
    header = Header(step=6, progress={}, tensors="", seal=seal)
    folder.checkpoints.mkdir()
    checkpoint_path(folder.checkpoints, 6).write_bytes(
        save(
            {"weight": np.zeros(1)}, metadata=header.to_metadata()
        )  # safetensors 0.4.3 reads no file without tensors
    )
    if finished:
        folder.finish({"steps": 8} | ({} if mode == "release" else {"test_accuracy": 0.912}), position)
    return path


def newest(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint of a run folder."""
    return read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).tensors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two checkpoints hold the same tensors to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def require_resumed_alike(
    folder: Path, config: dict[str, Any], data: Any, stop: Callback, model: Callable[[], Any] = lambda: None
) -> tuple[Run, Run]:
    """Require that a stopped and resumed experiment ends as an uninterrupted one, to the bit, at the same epsilon.

    `stop` ends the second run at a step; `model` makes the module of each run, if they have one. Returns both runs,
    whose folders are `whole` and `cut`.
    """
    whole = train(config, data=data, model=model(), folder=folder / "whole")
    with pytest.raises((RunInterrupted, KeyboardInterrupt)) as stopped:
        train(config, data=data, model=model(), folder=folder / "cut", watcher=stop)
    told = re.match(r"stopped after step \d+ of \d+; .*opusim train resume", str(stopped.value))
    assert told or type(stopped.value) is KeyboardInterrupt
    cut = train(data=data, model=model(), folder=folder / "cut", resume=True)
    assert equal(newest(folder / "whole"), newest(folder / "cut"))
    assert cut.folder.metrics_file.read_bytes() == whole.folder.metrics_file.read_bytes()
    assert [one.epsilon for one in cut.guarantees] == [one.epsilon for one in whole.guarantees]
    return whole, cut
