"""A progress bar for a sweep: runs done, the time left by the runs so far, and failures as they come."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from training.sweeps.rows import Row


class SweepBar:
    """Shows a sweep on standard error.

    Args:
        title: What stands before the bar.
        console: Where to draw; standard error by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}"),
            console=console or Console(stderr=True),
        )
        self._title = title
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, done: int, total: int) -> None:
        """So many runs are there, of so many."""
        news = "estimating the time" if done < total else "all there"
        self._task = self._progress.add_task(self._title, total=total, completed=done, news=news)

    def advance(self, row: Row, seconds_left: float | None) -> None:
        """One more run ended."""
        if self._task is None:
            return
        if row.status == "failed":
            self._progress.console.print(f"failed: {row.identity}: {row.reason}", markup=False)
        news = "" if seconds_left is None else f"about {_duration(seconds_left)} left"
        self._progress.update(self._task, advance=1, news=news)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
