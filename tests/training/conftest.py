"""What tests of runs share."""

from __future__ import annotations

import os
import signal

import pytest


class StopAt:
    """A watcher who falls dead after a step: no checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, *, step: int, total_steps: int) -> None:
        pass

    def on_step(self, *, step: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt

    def on_epoch(self, record: dict) -> None:
        pass


class CtrlCAt(StopAt):
    """A watcher who presses Ctrl-C after a step: a checkpoint is written, and the run says how to go on."""

    def on_step(self, *, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session")
def ctrl_c_at() -> type[StopAt]:
    return CtrlCAt


@pytest.fixture(scope="session")
def stop_at() -> type[StopAt]:
    return StopAt
