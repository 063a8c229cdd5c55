"""The progress of a sweep: runs done, the time left by the runs so far, and failures as they come."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from opusim.progress import Progress
from training.sweeps.rows import Row


class SweepProgress:
    """Shows a sweep on standard error.

    Args:
        stream: Where to write; None takes standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._progress = Progress("curve", "runs", stream=stream)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def start(self, done: int, total: int) -> None:
        """So many runs are there, of so many."""
        self._progress.start(total, done=done, at_once=True)

    def advance(self, row: Row, seconds_left: float | None) -> None:
        """One more run ended."""
        if row.status == "failed":
            self._progress.say(f"failed: {row.identity}: {row.reason}")
        self._progress.advance(left_s=seconds_left)
