"""A step log takes no step after a failed one, and none of a forked process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from opusim.training.zeroth_order.perturbation import StepEntry
from opusim.training.zeroth_order.step_log import LogContent, LogHeader, StepLog
from tests.support.forked import in_forked_process

HEADER = LogHeader(
    root=1, perturbation=1e-3, directions=1, weight_decay=0.0, settle_every=64, tensors=[], base="base"
)
TENSORS = {"w": torch.zeros(2)}


def entry(number: int) -> StepEntry:
    return StepEntry(rate=0.5, seeds=(number,), scalars=(0.25,))


def append_and_mark(log: StepLog, number: int) -> None:
    log.append(entry(number))
    log.mark(TENSORS)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_after_a_failed_step_the_log_takes_no_other(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    for number in range(3):
        log.append(entry(number))
    log.mark(TENSORS)
    real, calls = os.write, []

    def fail(descriptor: int, *content: memoryview) -> int:
        calls.append(content)
        if content and len(calls) == 1:
            return real(descriptor, bytes(content[0])[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=r"steps\.zo"):
            append_and_mark(log, 3)
    with pytest.raises(OSError, match="takes nothing more in this process"):
        log.append(entry(3))
    with pytest.raises(OSError, match="takes nothing more in this process"):
        log.mark(TENSORS)
    log.close()
    assert LogContent.read(path).entries == [entry(number) for number in range(3)]
    again = StepLog(path, HEADER, steps=3)
    again.append(entry(3))
    again.mark(TENSORS)
    again.close()
    assert LogContent.read(path).entries == [entry(number) for number in range(4)]


def test_ctrl_c_within_a_step_leaves_a_log_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    log.append(entry(0))
    real = os.write

    def interrupted(descriptor: int, content: memoryview) -> int:
        real(descriptor, bytes(content)[:7])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(entry(1))
    log.append(entry(1))
    log.mark(TENSORS)
    log.close()
    assert LogContent.read(path).entries == [entry(0), entry(1)]


def test_a_forked_process_writes_no_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.zo"
    log = StepLog(path, HEADER, steps=0)
    log.append(entry(0))
    assert "RuntimeError" in in_forked_process(lambda: log.append(entry(1)))
    log.append(entry(1))
    log.mark(TENSORS)
    log.close()
    assert LogContent.read(path).entries == [entry(0), entry(1)]
