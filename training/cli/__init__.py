"""The `opusim` command: every layer's commands under one name."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""
_COLLECTED_AFTER = 20_000
"""Objects that a command makes before Python looks for cycles among them; Python's own number is 700."""


def main() -> None:
    """Run the command; exit codes: 2 for bad input, 3 for a device fault, 4 for a spent budget, 130 for Ctrl-C.

    Ctrl-C ends it with one line at any time, also while libraries are being imported, which takes seconds and during
    which an exception could come out anywhere. A training run catches Ctrl-C itself and writes a checkpoint.

    Python looks for cycles of objects less often than usual, and not at the end of the process: the objects that
    imports make live as long as the process, and walking through them took a third of a short command's time.
    """
    if threading.current_thread() is not threading.main_thread():
        _run()
        return
    atexit.register(gc.freeze)  # registered first, so it runs after what libraries do at the end
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECTED_AFTER)
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        _run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        gc.set_threshold(*usual)
        signal.signal(signal.SIGINT, before)
        if interrupt.came:
            _say()


class _Interrupt:
    """What Ctrl-C does: it raises KeyboardInterrupt; within an import it ends the process.

    Ending it there loses nothing: files are replaced whole, and the kernel gives locks back.

    Attributes:
        came: Whether it was raised.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                _say()
                os._exit(INTERRUPTED)
            frame = frame.f_back
        self.came = True
        raise KeyboardInterrupt


def _say() -> None:
    os.write(2, b"opusim: interrupted\n")


def _run() -> None:
    from training.cli.app import main as run

    run()
