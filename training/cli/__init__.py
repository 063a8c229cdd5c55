"""The `opusim` command: every layer's commands under one name."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""
_MADE_BY_IMPORTS = 400_000
"""More objects than a command's imports make; with fewer there is nothing to collect."""


def main() -> None:
    """Run the command; the end of `opusim --help` lists the exit codes.

    Ctrl-C ends it with one line at any time, also within an import, where an exception could surface anywhere. A
    training run catches Ctrl-C itself and writes a checkpoint.

    Garbage collection starts after the imports and is skipped at exit: imported objects live as long as the process,
    and scanning them would take much of a short command's time.
    """
    if threading.current_thread() is not threading.main_thread():
        _run()
        return
    atexit.register(gc.freeze)  # registered first, so it runs after what libraries do at the end
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with _collecting_later():
            _run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupt.came:
            _say()


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Delay garbage collection until there are more objects than imports make."""
    usual = gc.get_threshold()

    def as_usual(phase: str, info: dict[str, int]) -> None:
        gc.set_threshold(*usual)

    gc.callbacks.append(as_usual)
    gc.set_threshold(_MADE_BY_IMPORTS)
    try:
        yield
    finally:
        gc.callbacks.remove(as_usual)
        gc.set_threshold(*usual)


class _Interrupt:
    """Handler of Ctrl-C: it raises KeyboardInterrupt, or ends the process if that happens within an import.

    Ending it there loses nothing: files are replaced whole, and the kernel releases locks.

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
    try:
        from opusim.training.cli.app import main as run
    except (MemoryError, ImportError) as error:
        from opusim.processes import exhausted_message, is_exhausted

        if not is_exhausted(error):
            raise
        os.write(2, f"opusim: {exhausted_message()}\n".encode())
        raise SystemExit(2) from None
    run()
