"""The progress of a run, for the engine that trains it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TextIO

from opusim.progress import Progress


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
