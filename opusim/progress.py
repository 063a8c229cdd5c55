"""Progress of long work: a bar on a terminal and in a notebook; elsewhere a plain line now and then, for commands."""

from __future__ import annotations

import html
import math
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from opusim.tables import duration

Show = bool | Literal["lines"]
"""Whether work shows a bar on a terminal and in a notebook; "lines" also writes lines where there is neither."""
BETWEEN_LINES_S = 10.0
"""Least time between two lines."""
_WORTH_A_LINE_S = 5.0
"""Work that is expected to take less gets no line."""
_POLL_S = 0.5
_BETWEEN_FRAMES_S = 0.2
"""Minimum time between two updates of a progress display in a notebook, seconds."""


class Progress:
    """Report the work done, the whole work and the time left; standard output stays clean.

    Off a terminal, the first line comes with the first unit of work, and only if the work takes more than 5 s. Later
    ones are at least 10 s apart. The first unit also sets things up (kernels are compiled, caches filled), for minutes
    on a busy machine. So its line says that the time left is not known yet, and the next one comes with the second
    unit, whose pace tells. Estimates leave the first unit out.

        >>> with Progress("audit", "trials") as progress:
        ...     progress.start(2)
        ...     progress.advance()
        ...     progress.advance()

    Args:
        label: Name of the command.
        unit: What is counted, in the plural.
        show: See `Show`; False shows nothing.
        stream: Where to write, or None for standard error.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        label: str,
        unit: str,
        *,
        show: Show = "lines",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._unit, self._clock = label, unit, clock
        self._show, self._stream = show, sys.stderr if stream is None else stream
        self._bar: Bar | None = None
        self._cell: _NotebookBar | None = None
        self._task: TaskID | None = None
        self._total = self._first = self._done = 0
        self._left_s: float | None = None
        self._started = clock()
        self._set_up: tuple[int, float] | None = None  # units done and seconds spent at the first report
        self._last_line: float | None = None
        self._without_estimate = False
        self._stop = threading.Event()
        self._poller: threading.Thread | None = None

    @property
    def is_shown(self) -> bool:
        """Whether anything is shown; known once the block is entered."""
        return self._show == "lines" or self._bar is not None or self._cell is not None

    def __enter__(self) -> Self:
        if not self._show:
            return self
        ipython: Any = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if getattr(shell, "kernel", None) is not None:  # this process is the kernel of a notebook
            self._cell = _NotebookBar(ipython.display)
        elif self._stream.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[news]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._poller is not None:
            self._poller.join()
        if self._cell is not None:
            self._cell.clear()
        elif self._bar is not None:
            self._bar.stop()
        elif self._last_line is not None and error is None:
            self._write(f"done after {duration(self._clock() - self._started)}")

    def start(self, total: int, *, done: int = 0, at_once: bool = False) -> None:
        """Begin to count to `total` from `done`; `at_once`: show a line before the first unit, which may be slow."""
        self._total, self._first, self._done = total, done, done
        self._left_s, self._started, self._set_up = None, self._clock(), None
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=total, completed=done, news="")
        elif self._cell is None and self._show == "lines" and done < total and at_once:
            self._line(None, "")

    def advance(
        self, more: int = 1, *, done: int | None = None, left_s: float | None = None, news: str = ""
    ) -> None:
        """Count more units, or set how many are done; `left_s` is the time left (None: by the pace), `news` words."""
        if not self.is_shown:
            return
        self._done = self._done + more if done is None else done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, news=news)
            return
        spent = self._clock() - self._started
        first, begun = self._set_up or (self._first, 0.0)
        counted = self._done - first
        pace = (spent - begun) / counted * (self._total - self._done) if counted > 0 else None
        self._left_s = pace if left_s is None else left_s
        is_set_up = left_s is None and self._set_up is None and counted == 1
        if self._set_up is None and counted > 0:
            self._set_up = self._done, spent
        if self._last_line is not None:
            is_due = self._without_estimate or self._clock() - self._last_line >= BETWEEN_LINES_S
        else:
            is_due = spent + (self._left_s or 0.0) >= _WORTH_A_LINE_S
        if self._cell is not None:
            left = "" if self._left_s is None or is_set_up else f"about {duration(self._left_s)} left"
            text = ", ".join(
                part for part in (f"{self._done:,} of {self._total:,} {self._unit}", left, news) if part
            )
            self._cell.update(self._done, self._total, f"{self._label}: {text}")
        elif self._show == "lines" and is_due and self._done < self._total:
            self._line(self._left_s, news, is_set_up=is_set_up)

    def follow(self, total: int, count: Callable[[], int]) -> None:
        """Count to about `total` by looking twice a second, from a thread, for work that does not report progress."""
        self.start(total)
        if not self.is_shown:
            return

        def poll() -> None:
            while not self._stop.wait(_POLL_S):
                self.advance(done=min(count(), total))

        self._poller = threading.Thread(target=poll, daemon=True)
        self._poller.start()

    def say(self, text: str) -> None:
        """Write a line at once, above the progress bar if there is one; nothing if no progress is shown."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self.is_shown:
            self._write(text)

    def _line(self, left_s: float | None, news: str, *, is_set_up: bool = False) -> None:
        left = "" if left_s is None else f", about {duration(left_s)} left"
        self._without_estimate = is_set_up
        if is_set_up:
            left = "; the time left is not known yet"
        self._write(f"{self._done:,} of {self._total:,} {self._unit}{left}{f' ({news})' if news else ''}")

    def _write(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._stream, flush=True)
        self._last_line = self._clock()


class _NotebookBar:
    """A bar below a notebook's cell, without a widget, so that every front end shows it; removed at the end."""

    def __init__(self, display: Any) -> None:
        self._html = display.HTML
        self._handle = display.display(self._html(""), display_id=True)
        self._updated = -math.inf

    def update(self, done: int, total: int, text: str) -> None:
        """Show the progress and a line of text, unless the last update was a moment ago."""
        if time.monotonic() - self._updated >= _BETWEEN_FRAMES_S:
            bar = f'<progress value="{done}" max="{total}"></progress>'
            self._handle.update(self._html(f"{bar} {html.escape(text)}"))
            self._updated = time.monotonic()

    def clear(self) -> None:
        """Clear the output of the cell."""
        self._handle.update(self._html(""))
