"""A progress bar for a run, with an estimate of the time left."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressBar:
    """Shows steps done, the time left and the newest accuracies; a Watcher of the engine.

    Args:
        label: What stands before the bar.
        console: Where to draw; standard error by default, so that tables on standard output stay clean.
    """

    def __init__(self, label: str, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[news]}"),
            console=console or Console(stderr=True),
            transient=False,
        )
        self._label = label
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Watcher.on_start."""
        self._task = self._progress.add_task(self._label, total=total_steps, completed=step, news="")

    def on_step(self, *, step: int) -> None:
        """See Watcher.on_step."""
        if self._task is not None:
            self._progress.update(self._task, completed=step)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Watcher.on_epoch."""
        if self._task is None:
            return
        parts = [f"epoch {record['epoch']}"]
        for name in ("train", "validation"):
            accuracy = record.get(f"{name}_accuracy")
            if accuracy is not None:
                parts.append(f"{name} {100 * accuracy:.1f} %")
        self._progress.update(self._task, news=", ".join(parts))


class CountingBar:
    """Shows how many of a known number of things are done, and the time left, on standard error.

    Args:
        label: What stands before the bar.
    """

    def __init__(self, label: str) -> None:
        self._bar = ProgressBar(label)
        self._done = 0

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def start(self, total: int) -> None:
        """So many there will be."""
        self._bar.on_start(step=0, total_steps=total)

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        self._bar.on_step(step=self._done)
