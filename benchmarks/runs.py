"""Runs of long experiments: done once, gone on with after a stop, read back afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import training
from training.runs.folder import RunFolder
from training.runs.run import Run


def train_or_read(config: dict[str, Any], path: Path) -> Run:
    """The run of a configuration: read back if it is done, else begun or resumed in its folder."""
    folder = RunFolder(path)
    if folder.finished:
        return training.load_run(path)
    return training.train(config, folder=path, resume=folder.started)
