"""Run folders without the seconds of training, for tests of what only reads or removes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from accounting.ledger.ledger import Ledger
from accounting.mechanisms.records import Gaussian
from training.config.run import load_config
from training.runs.folder import RunFolder
from training.runs.seal import Header, checkpoint_path

STEP = Gaussian(noise_multiplier=2.0)


def made(path: Path, *, mode: str = "experiment", finished: bool = True, steps: int = 8) -> Path:
    """The files of a run of 2 epochs of 4 steps: it is finished, or stopped at step 6.

    Args:
        path: The folder, which is made.
        mode: experiment or release.
        finished: Whether there is a summary.
        steps: Steps that the ledger pays for.
    """
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
