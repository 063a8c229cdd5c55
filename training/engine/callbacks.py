"""Watch a run while it trains, or send its figures to TensorBoard, MLflow or Weights & Biases.

    opusim.train(config, callbacks=[opusim.TensorBoardLogger("logs")])

A logger needs its library (the extra `tracking` has TensorBoard and MLflow) and gets what `metrics.jsonl` gets, so a
release run sends epochs and steps only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from opusim.devices.usage import Usage
from training.data.formats import required_library


class Watcher(Protocol):
    """Receives the progress of a run, such as a progress bar."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        """Training starts, or resumes, at a step."""

    def on_step(self, *, step: int) -> None:
        """So many steps are done."""

    def on_epoch(self, record: dict[str, Any]) -> None:
        """An epoch's metrics were written."""


@runtime_checkable
class UsageWatcher(Watcher, Protocol):
    """A watcher that is told what a run will take of its device."""

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        """So many steps are left and will take so much of the device, or so much on average; called once.

        It comes before labels are read and the first step begins. For an algorithm that does not tell its work, it
        comes behind the first step, and in release mode not at all.
        """


@runtime_checkable
class FeaturesWatcher(Watcher, Protocol):
    """A watcher that is told what optical features (data.features) will take of their device."""

    def on_features(self, expected: Usage) -> None:
        """The features of all records will take so much of the device, unless they are kept from an earlier run."""


class Callback:
    """Receives the progress of a run, as a `Watcher` does, and its end; override the methods that you need."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        """Training starts, or resumes, at a step."""

    def on_step(self, *, step: int) -> None:
        """So many steps are done."""

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        """So many steps are left and will take so much of the device, or so much on average, before the first one."""

    def on_features(self, expected: Usage) -> None:
        """Optical features will take so much of their device, unless they are kept from an earlier run."""

    def on_epoch(self, record: dict[str, Any]) -> None:
        """An epoch's metrics were written: "epoch", "step", and outside release mode its figures."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Training ended.

        Args:
            summary: The final figures, or None if the run stopped before its end.
        """


class Watchers(Callback):
    """Calls several watchers in order; a context manager whose exit calls `on_end`.

    Args:
        watchers: Watchers, and callbacks, whose `on_end` is called too.

    Attributes:
        summary: What `on_end` receives.
    """

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self.summary: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self.summary)

    def on_start(self, *, step: int, total_steps: int) -> None:
        """See Callback.on_start."""
        for watcher in self._watchers:
            watcher.on_start(step=step, total_steps=total_steps)

    def on_step(self, *, step: int) -> None:
        """See Callback.on_step."""
        for watcher in self._watchers:
            watcher.on_step(step=step)

    def on_usage(self, expected: Usage, *, steps: int, is_mean: bool) -> None:
        """See Callback.on_usage; watchers without that method are left out."""
        for watcher in self._watchers:
            if isinstance(watcher, UsageWatcher):
                watcher.on_usage(expected, steps=steps, is_mean=is_mean)

    def on_features(self, expected: Usage) -> None:
        """See Callback.on_features; watchers without that method are left out."""
        for watcher in self._watchers:
            if isinstance(watcher, FeaturesWatcher):
                watcher.on_features(expected)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Callback.on_epoch."""
        for watcher in self._watchers:
            watcher.on_epoch(record)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See Callback.on_end; if one raises, the others are still called."""
        with ExitStack() as ends:
            for watcher in reversed(self._watchers):  # the stack calls the last one first
                if isinstance(watcher, Callback):
                    ends.callback(watcher.on_end, summary)


class TensorBoardLogger(Callback):
    """Writes an epoch's figures as TensorBoard scalars at its last step.

    Args:
        path: Folder of the event files, one for each run.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(path))

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Callback.on_epoch."""
        for name, value in figures_of(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See Callback.on_end."""
        self._writer.close()


class MLflowLogger(Callback):
    """Writes an epoch's figures as MLflow metrics at its last step, and the final ones at the end.

    Args:
        experiment: Name of the experiment; it is made if it does not exist.
        tracking_uri: Where MLflow keeps its runs; None takes MLflow's own setting.
        name: Name of the run in MLflow; None lets MLflow choose one.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """

    def __init__(
        self, experiment: str = "opusim", *, tracking_uri: str | None = None, name: str | None = None
    ) -> None:
        self._client = _library("mlflow", "mlflow").MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self.run_id: str = self._client.create_run(place, run_name=name).info.run_id

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Callback.on_epoch."""
        self._log(record, record["step"])

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See Callback.on_end."""
        if summary is not None:
            self._log(summary, summary["steps"])
        self._client.set_terminated(self.run_id, status="KILLED" if summary is None else "FINISHED")

    def _log(self, record: Mapping[str, Any], step: int) -> None:
        for name, value in figures_of(record).items():
            self._client.log_metric(self.run_id, name, value, step=step)


class WandbLogger(Callback):
    """Writes an epoch's figures to a Weights & Biases run at its last step, and the final ones into its summary.

    Args:
        **options: Of `wandb.init`, such as project and name.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self._run = _library("wandb", "wandb").init(**options)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """See Callback.on_epoch."""
        self._run.log(figures_of(record), step=record["step"])

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """See Callback.on_end."""
        self._run.summary.update(figures_of(summary or {}))
        self._run.finish(exit_code=int(summary is None))


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name; the entries of a list are numbered from 1, as in "alignment/1"."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            found |= {f"{name}/{number}": float(entry) for number, entry in enumerate(value, start=1)}
        elif isinstance(value, int | float) and name != "step":
            found[name] = float(value)
    return found


def _library(module: str, package: str) -> Any:
    return required_library(module, f"{package} is missing; install it: pip install {package}")
