"""One run of a sweep, in whatever process it is done: begun, gone on with, or found finished; never made twice."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from accounting.errors import BudgetExceeded
from training.config.run import RunConfig
from training.config.sections import DataConfig, SplitRule
from training.data import Dataset
from training.data.catalogue import build_dataset
from training.engine.session import train_on
from training.errors import FolderBusy, RunInterrupted
from training.runs.folder import RunFolder
from training.runs.run import Run, load_run
from training.sweeps.rows import Row, failed_row, row_of, write_row

_POLL_S = 1.0


def run_point(config: RunConfig, run_path: Path, row_path: Path) -> Row:
    """Train one point and keep its row; a failure is a row as well.

    A folder that another process still writes (one that outlived its sweep) is waited for.

    Args:
        config: The point's configuration.
        run_path: Its run folder.
        row_path: Where its row is kept.
    """
    folder = RunFolder(run_path)
    started = time.perf_counter()
    try:
        run = _finished(config, folder)
        row = row_of(run, config, wall_s=_wall(folder, time.perf_counter() - started))
    except RunInterrupted:
        raise
    except Exception as error:  # one run's failure must not take the others along
        row = failed_row(run_path.name, error)
    write_row(row_path, row)
    return row


def _finished(config: RunConfig, folder: RunFolder) -> Run:
    while not folder.finished:
        try:
            dataset = _dataset(config.data, config.split)
            resume = folder.started
            return train_on(folder.read_config() if resume else config, dataset, folder, resume=resume)
        except FolderBusy:
            time.sleep(_POLL_S)
        except BudgetExceeded:
            break  # its folder is finished, with the reason
    return load_run(folder.path)


@lru_cache(maxsize=1)
def _dataset(options: DataConfig, split: SplitRule) -> Dataset:
    """The data set of this process's last run, which is mostly that of the next."""
    return build_dataset(options, split)


def _wall(folder: RunFolder, measured: float) -> float:
    """Seconds of training over all processes that wrote the folder, or of this call where it trained from the start."""
    written = sum(record["wall_s"] for record in folder.read_timing())
    return max(measured, written)
