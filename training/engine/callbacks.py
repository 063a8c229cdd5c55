"""Watch a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from opusim.progress import Progress

if TYPE_CHECKING:
    from opusim.devices.usage import Usage


class Callback:
    """Receives the progress of a run and its end, such as a progress bar; override the methods that you need.

    It gets what `metrics.jsonl` gets, so in a release run epochs and steps only.
    """

    def on_start(self, *, step: int, total_steps: int) -> None:
        """Training starts, or resumes, at a step."""

    def on_step(self, *, step: int) -> None:
        """Steps 0 to `step` - 1 are done."""

    def on_note(self, text: str) -> None:
        """The run has a note about its inputs, such as the size of a language model, before it starts."""

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        """The remaining steps are expected to use the device this much; called once.

        It comes before labels are read and the first step begins. For an algorithm whose work is not known beforehand,
        it comes after the first step, and in release mode not at all.

        Args:
            expected: The expected usage.
            steps: Number of remaining steps.
            is_mean: Whether the usage is a mean, since batch sizes are random.
        """

    def on_features(self, expected: Usage) -> None:
        """Optical features are expected to use their device this much, unless they are cached."""

    def on_epoch(self, record: dict[str, Any]) -> None:
        """An epoch's metrics were written: "epoch", "step", and outside release mode its figures."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Training ended.

        Args:
            summary: The final figures, or None if the run stopped before its end.
        """


class Watchers(Callback):
    """Calls several callbacks in order; a context manager whose exit calls `on_end`.

    Args:
        watchers: The callbacks.

    Attributes:
        summary: What `on_end` receives.
    """

    def __init__(self, watchers: Sequence[Callback]) -> None:
        self._watchers = watchers
        self.summary: Mapping[str, Any] | None = None
        for name in ("on_start", "on_step", "on_note", "on_usage", "on_features", "on_epoch"):
            setattr(self, name, partial(self._each, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self.summary)

    def _each(self, method: str, *arguments: Any, **named: Any) -> None:
        for watcher in self._watchers:
            getattr(watcher, method)(*arguments, **named)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See Callback.on_end; if one raises, the others are still called."""
        with ExitStack() as ends:
            for watcher in reversed(self._watchers):  # the stack calls the last one first
                ends.callback(watcher.on_end, summary)


class RunProgress(Progress, Callback):
    """Shows steps done, the time left and the newest accuracies."""

    _news = ""

    def on_start(self, *, step: int, total_steps: int) -> None:
        """Begin to count."""
        self.start(total_steps, done=step)

    def on_step(self, *, step: int) -> None:
        """Count the steps."""
        self.advance(done=step, news=self._news)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Show the newest figures with the next step."""
        parts = [f"epoch {record['epoch']}"]
        for name in ("train", "validation"):
            accuracy = record.get(f"{name}_accuracy")
            if accuracy is not None:
                parts.append(f"{name} {100 * accuracy:.1f} %")
        words = {"bits_per_byte": "bits per byte", "bits_per_token": "bits per token", "rmse": "RMSE"}
        for key in [key for key in words if f"validation_{key}" in record][:1]:
            parts.append(f"{record[f'validation_{key}']:.4g} {words[key]}")
        if record.get("validation_r2", 0.0) < 0:
            parts.append("R^2 below 0")
        self._news = ", ".join(parts)
