"""What tests of runs share."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opusim.training.engine.callbacks import Callback
from opusim.training.runs.checkpoints import list_checkpoints, reseal_checkpoint
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_header


class StopAt(Callback):
    """A watcher who falls dead after a step: no checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, *, step: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt


class CtrlCAt(StopAt):
    """A watcher who presses Ctrl-C after a step: a checkpoint is written, and the run says how to go on."""

    def on_step(self, *, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session")
def ctrl_c_at() -> type[StopAt]:
    return CtrlCAt


def _reseal(folder: Path) -> None:
    newest = list_checkpoints(folder / "checkpoints")[-1]
    seal = read_header(newest).seal
    reseal_checkpoint(newest, replace(seal, files=RunFolder(folder).digests()))


@pytest.fixture(scope="session")
def reseal() -> Callable[[Path], None]:
    """Has the newest checkpoint of a folder know its files as they are, as if the run had been begun with them."""
    return _reseal


@pytest.fixture(scope="session")
def stop_at() -> type[StopAt]:
    return StopAt


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread costs more than it brings, above all while other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
