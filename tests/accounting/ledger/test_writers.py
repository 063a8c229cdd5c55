"""A ledger after a failed write, after Ctrl-C and in a forked process: no step is paid twice, no file is spoilt."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opusim.accounting import journal
from opusim.accounting.journal import Journal, read_positioned
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanisms.records import PoissonGaussian
from tests.support.forked import in_forked_process

STEP = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1)


def opened(path: Path, *, mode: str = "release", block: int = 4) -> Ledger:
    return Ledger(path, mode=mode, delta=1e-5, block=block)


def blocks(path: Path) -> list[tuple[int | None, int]]:
    return [(payment.first_step, payment.steps) for payment in read_ledger(path).payments]


# Writes that fail


@contextmanager
def half_a_line() -> Iterator[None]:
    """The disk takes 40 bytes and is full then."""
    real, calls = os.write, []

    def write(descriptor: int, content: memoryview) -> int:
        calls.append(content)
        if len(calls) == 1:
            return real(descriptor, bytes(content)[:40])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


@contextmanager
def failing(name: str, error: BaseException) -> Iterator[None]:
    """A call of the system fails."""

    def fail(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@contextmanager
def limited(path: Path, more: int) -> Iterator[None]:
    """The system lets files grow by a few bytes only: a true error of a file system, EFBIG."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


FAULTS: dict[str, Callable[[Path], object]] = {
    "half a line": lambda path: half_a_line(),
    "fsync": lambda path: failing("fsync", io_error()),
    "head": lambda path: failing("replace", io_error()),
    "no byte": lambda path: limited(path, 0),
    "some bytes": lambda path: limited(path, 60),
}


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_failed_write_nothing_is_paid_and_the_ledger_can_be_read(
    tmp_path: Path, fault: str, mode: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path, mode=mode)
    for step in range(4):
        ledger.pay(step, STEP, until=100)
    position = ledger.position
    with FAULTS[fault](path), pytest.raises(OSError, match=r"ledger\.jsonl"):
        ledger.pay(4, STEP, until=100)
    for step in (4, 5, 6, 8):
        with pytest.raises(OSError, match="takes nothing more in this process"):
            ledger.pay(step, STEP, until=100)
    assert ledger.position == position
    ledger.close()
    found = blocks(path)
    assert found in ([(0, 4)], [(0, 4), (4, 4)])  # a complete line pays for steps that were never computed
    assert len(read_positioned(path)[0]) >= position.lines
    with opened(path, mode=mode) as again:
        for step in range(4, 9):
            again.pay(step, STEP, until=100)
    assert blocks(path)[-1] == (8, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_ledger_whose_first_line_failed_can_be_opened_again(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch()
    before = len(os.listdir("/proc/self/fd"))
    with FAULTS[fault](path), pytest.raises(OSError, match=r"ledger\.jsonl"):
        opened(path)
    assert len(os.listdir("/proc/self/fd")) == before
    with opened(path) as ledger:
        ledger.pay(0, STEP, until=2)
    assert blocks(path) == [(0, 2)]


def test_a_failed_return_leaves_the_steps_paid(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    with failing("fsync", io_error()), pytest.raises(OSError, match="Input/output error"):
        ledger.return_unused()
    with pytest.raises(OSError, match="takes nothing more"):
        ledger.pay(1, STEP, until=100)
    ledger.close()
    assert blocks(path) == [(0, 4)]


# Ctrl-C


@pytest.mark.parametrize("place", ["write", "fsync", "replace", "after the line", "after the journal"])
def test_after_an_interrupt_the_same_ledger_pays_on(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose cell is stopped within `pay` and run again."""
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    with monkeypatch.context() as patch:
        if place == "after the line":
            real = journal._write_head
            patch.setattr(journal, "_write_head", lambda *a: (real(*a), _interrupt()))
        elif place == "after the journal":
            append = Journal.append
            patch.setattr(Journal, "append", lambda *a: (append(*a), _interrupt()))
        else:
            call = getattr(os, place)
            patch.setattr(os, place, lambda *a: (call(*a), _interrupt()))
        with pytest.raises(KeyboardInterrupt):
            ledger.pay(4, STEP, until=100)
    for step in (4, 5):
        ledger.pay(step, STEP, until=100)
    ledger.return_unused()
    paid = ledger.content.payments
    ledger.close()
    assert read_ledger(path).payments == paid
    assert blocks(path)[0] == (0, 4)
    assert blocks(path)[-1] == (4, 2)  # a block that the interrupted call had paid for may stand before it


def _interrupt() -> None:
    raise KeyboardInterrupt


# Forked processes


def test_a_forked_process_cannot_pay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    ledger.pay(0, STEP, until=100)
    before = path.read_bytes()
    for work in (
        lambda: ledger.pay(1, STEP, until=100),
        lambda: ledger.pay(4, STEP, until=100),
        lambda: ledger.pay_once("labels", STEP),
        lambda: ledger._journal.append({"name": "labels"}),
    ):
        found = in_forked_process(work)
        assert found.startswith(f"RuntimeError: {path} belongs to process {os.getpid()}, and process")
    assert in_forked_process(lambda: (ledger.return_unused(), ledger.close())[0]) == "None"
    assert path.read_bytes() == before
    for step in (1, 2, 3, 4):
        ledger.pay(step, STEP, until=100)
    ledger.close()
    assert blocks(path) == [(0, 4), (4, 4)]


def test_a_forked_process_may_read_and_may_keep_a_ledger_of_its_own(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.jsonl", tmp_path / "other.jsonl"

    def work() -> int:
        with opened(other) as own:
            own.pay(0, STEP, until=100)
        return len(ledger.content.payments) + len(read_ledger(path).payments)

    with opened(path) as ledger:
        ledger.pay(0, STEP, until=100)
        assert in_forked_process(work) == "2"
    assert blocks(other) == [(0, 4)]


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_ledger_is_not_copied(tmp_path: Path, made: Callable[[object], object]) -> None:
    with opened(tmp_path / "ledger.jsonl") as ledger, pytest.raises(TypeError, match="cannot be copied"):
        made(ledger)
