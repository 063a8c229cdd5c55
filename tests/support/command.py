"""The `opusim` command as a test calls it: in this process, or in a process of its own."""

import contextlib
import io
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from opusim.training.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-W", "error", "-c", "from opusim.training.cli import main; main()"]
WIDTH = "140"
"""Columns of the output."""


@dataclass(frozen=True)
class Finished:
    """What a command left behind: its exit code, and everything that it printed."""

    returncode: int
    stdout: str
    stderr: str


def opusim(*arguments: object, cwd: Path, **environment: str) -> Finished:
    """Run `opusim ARGUMENTS` in this process, which saves the seconds that a new one spends on imports.

    The working folder, the environment, to which variables are added, the arguments and torch's number of threads are
    restored afterwards. An exception that leaves the command ends it like a process: traceback on standard error, exit
    code 1.
    """
    printed, complained = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH, **environment}),
        mock.patch.object(sys, "argv", ["opusim", *map(str, arguments)]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            torch.set_num_threads(threads)
    return Finished(code, printed.getvalue(), complained.getvalue())


def opusim_process(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `opusim ARGUMENTS` in a process of its own, for tests of what only a process shows."""
    settings = {**os.environ, "COLUMNS": WIDTH, "PYTHONPATH": str(ROOT), **environment}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=settings)
