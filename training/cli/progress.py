"""The progress of a sweep: runs done, the time left by the runs so far, and failures as they come.

The progress of a run, for the engine that trains it.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from opusim.progress import Progress
from training.sweeps.rows import Row

if TYPE_CHECKING:
    from training.engine.loop import Watcher


class RunProgress:
    """Shows steps done, the time left and the newest accuracies; a Watcher of the engine.

    Args:
        label: Name of the command.
        stream: Where to write; None takes standard error.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._progress = Progress(label, "steps", stream=stream)
        self._news = ""

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Watcher.on_start."""
        self._progress.start(total_steps, done=step)

    def on_step(self, *, step: int) -> None:
        """See Watcher.on_step."""
        self._progress.advance(done=step, news=self._news)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Watcher.on_epoch."""
        parts = [f"epoch {record['epoch']}"]
        for name in ("train", "validation"):
            accuracy = record.get(f"{name}_accuracy")
            if accuracy is not None:
                parts.append(f"{name} {100 * accuracy:.1f} %")
        self._news = ", ".join(parts)


class Announced:
    """Says a line when training begins, which a refused run never does, and passes all news on; a Watcher.

    Args:
        text: The line.
        watcher: Who is told the news; None for nobody.
    """

    def __init__(self, text: str, watcher: Watcher | None) -> None:
        self._text, self._watcher = text, watcher

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Watcher.on_start."""
        print(self._text, file=sys.stderr, flush=True)
        if self._watcher is not None:
            self._watcher.on_start(step=step, total_steps=total_steps)

    def on_step(self, *, step: int) -> None:
        """See Watcher.on_step."""
        if self._watcher is not None:
            self._watcher.on_step(step=step)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Watcher.on_epoch."""
        if self._watcher is not None:
            self._watcher.on_epoch(record)


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
