"""Ctrl-C at any moment of the start: one line, exit code 130, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from opusim.training.cli import main
from tests.support.shared_checks import with_marks

CODE = """
import signal
from opusim.training import cli

take_over = signal.signal

def told(number, handler):
    before = take_over(number, handler)
    print("taken over", flush=True)
    return before

signal.signal = told
cli.main()
"""
"""Says when `main` has taken Ctrl-C over; before that it is Python's."""
NIGHTLY = (0.1, 0.2, 0.7, 1.0)
COMMAND = ["train", "bp", "--data", "digits", "--epochs", "100000", "--quiet", "--out", "run"]


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.5, *with_marks(NIGHTLY, NIGHTLY)])
def test_ctrl_c_at_the_start_is_one_line(tmp_path: Path, delay: float) -> None:
    settings = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CODE, *COMMAND], cwd=tmp_path, env=settings, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "taken over\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert printed.count("\n") == 1, printed
    assert printed.startswith("opusim: ")
    assert "interrupted" in printed or "stopped after step" in printed


def test_the_signal_comes_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["opusim", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGINT) is before


def test_too_many_threads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """torch ends in a segmentation fault where the system gives it no more threads."""
    monkeypatch.setattr(sys, "argv", ["opusim", *COMMAND, "--set", "threads=100000"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "threads" in capsys.readouterr().err
