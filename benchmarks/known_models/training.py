"""Train the rows of a table: one model, several ways to learn; runs resume, and results are kept run by run."""

from __future__ import annotations

import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.known_models.gpt import optimizer_of, rate
from benchmarks.markdown import markdown
from benchmarks.results_file import FOLDER, load_results, save_results
from opusim import FeedbackAlignment, open_device
from opusim.training.feedback.layout import fits_at

CACHE = FOLDER / "cache" / "known-models"
BP = "backpropagation"
MATRIX_SEED = 20210603
EVALUATIONS = 8
"""Parts of a run; after each it is evaluated and its checkpoint written."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to learn.

    Attributes:
        feedback: Arguments of FeedbackAlignment besides the model and the seed; None for backpropagation.
        device: Name of the device; None projects digitally.
        sections: Sections of the device's description that are laid over the packaged ones.
        backpropagated: One batch in so many is learnt from by backpropagation; 0 for none.
        readout: The read-out is fitted to one batch in so many, and to three more in the first of these; 0 for never.
        plain: Plain feedback beside the read-out, over the learnt part.
        start: The layer whose weights start as feedback; empty for none.
        outputs: Outputs of the device in units of those that the points need; the read-out takes all.
        seeds: How many seeds are run.
    """

    feedback: dict[str, Any] | None = field(default_factory=dict)
    device: str | None = None
    sections: dict[str, Any] = field(default_factory=dict)
    backpropagated: int = 0
    readout: int = 0
    plain: float = 1.0
    start: str = ""
    outputs: int = 1
    seeds: int = 1


class Task(ABC):
    """What is learnt: a model, its batches and its measure."""

    name: str
    steps: int
    place: torch.device

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model; torch's seed is set."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        return optimizer_of(model)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate(step, self.steps)

    @abstractmethod
    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step."""

    @abstractmethod
    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return the figures of a model on held-out records."""


@dataclass
class Progress:
    """A run so far: figures after each part, what the device took, each point's alignment and scale at the end."""

    step: int = 0
    seconds: float = 0.0
    frames: int = 0
    device_seconds: float = 0.0
    joules: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    depth: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)


class Training:
    """One run of a row."""

    def __init__(self, task: Task, row: Row, seed: int, file: Path) -> None:
        self._task, self._row, self._seed, self._file = task, row, seed, file
        torch.manual_seed(seed)
        self.model = task.model().to(task.place)
        self.optimizer = task.optimizer(self.model)
        self.progress = Progress()
        self.feedback = self._points()
        if file.exists():
            kept = torch.load(file, weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.progress = Progress(**kept["progress"])
            if self.feedback is not None:
                self.feedback.column_sum = kept["columns"]
            if self.feedback is not None and kept["readout"] is not None:
                self.feedback.start_readout().load_state_dict(kept["readout"])

    def _points(self) -> FeedbackAlignment | None:
        """Put feedback points on the model."""
        row = self._row
        if row.feedback is None:
            return None
        matrix = MATRIX_SEED + self._seed
        found = FeedbackAlignment(self.model, seed=matrix, **row.feedback)
        shape = found.shape(self._task.batch(self._seed, 0)[0][:2])
        if row.device is not None:
            window = {"n_inputs": shape.n_inputs, "n_outputs": row.outputs * shape.n_outputs}
            options = {"seed": self._seed, "torch_device": str(self._task.place)}
            sections = {"medium": {"seed": matrix}} | row.sections
            found.noisy_device = open_device(row.device, **window, **options, **sections)
        if row.start:
            found.start_from_feedback(row.start)
        return found

    def finish(self) -> Progress:
        """Train to the end and return the progress."""
        part = self._task.steps // EVALUATIONS
        while self.progress.step < self._task.steps:
            started = time.process_time()
            for step in range(self.progress.step, self.progress.step + part):
                self._step(step)
            if self._task.place.type == "cuda":
                torch.cuda.synchronize()
            self.progress.seconds += time.process_time() - started
            self.progress.step += part
            self.model.eval()
            self.progress.curve.append(self._task.measure(self.model))
            self.model.train()
            self._save()
        if self.feedback is not None and self.feedback.gain:
            x, y = self._task.batch(self._seed, self._task.steps)
            found = self.feedback.diagnose(lambda: self._task.loss(self.model, x, y))
            self.progress.depth = [point.signal_alignment for point in found.points]
            self.progress.scale = [point.scale for point in found.points]
        if self.feedback is not None and self.feedback.noisy_device is not None:
            self.feedback.noisy_device.close()
        return self.progress

    def _step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._task.rate(step)
        x, y = self._task.batch(self._seed, step)
        self.optimizer.zero_grad()
        torch.manual_seed(self._seed * 2**32 + step)  # dropout: a resumed run repeats an uninterrupted one
        feedback, row = self.feedback, self._row
        if feedback is None:
            self._task.loss(self.model, x, y).backward()
        elif row.backpropagated and step % row.backpropagated == 0:
            with feedback.backpropagating():
                self._task.loss(self.model, x, y).backward()
        else:
            before = feedback.usage
            if fits_at(step, row.readout):
                feedback.fit_readout(lambda: self._task.loss(self.model, x, y), plain=row.plain)
            feedback.seek(step)
            self._task.loss(self.model, x, y).backward()
            used = feedback.usage - before
            self.progress.frames += used.frames
            self.progress.device_seconds += used.seconds
            self.progress.joules += used.joules
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        readout = None if self.feedback is None else self.feedback.readout
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "columns": None if self.feedback is None else self.feedback.column_sum,
            "readout": None if readout is None else readout.state_dict(),
        }
        torch.save(state, self._file.with_suffix(".new"))
        self._file.with_suffix(".new").replace(self._file)


Work = tuple[Task, str, Row, int, Path]


def key_of(row: str, seed: int) -> str:
    """Return the name of a run in the results."""
    return f"{row}, seed {seed}"


def _run(work: Work) -> tuple[str, dict[str, Any]]:
    """Finish a run and return its figures; runs in a process of its own."""
    torch.set_num_threads(1)
    task, name, row, seed, cache = work
    words = "".join(c if c.isalnum() else "-" for c in name)
    found = Training(task, row, seed, cache / task.name / f"{words}-{seed}.pt").finish()
    return key_of(name, seed), vars(found)


def plan(rows: Mapping[str, Row]) -> Iterator[tuple[str, int]]:
    """Yield the runs of a table, seed by seed."""
    for seed in range(max(row.seeds for row in rows.values())):
        yield from ((name, seed) for name, row in rows.items() if seed < row.seeds)


def train_rows(task: Task, rows: Mapping[str, Row], *, names: Sequence[str], processes: int) -> None:
    """Train every run of some rows that the results lack; those that were begun resume."""
    results = load_results(task.name) or {"runs": {}}
    left = [(n, s) for n, s in plan(rows) if n in names and key_of(n, s) not in results["runs"]]
    work = [(task, name, rows[name], seed, CACHE) for name, seed in left]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for key, found in pool.imap_unordered(_run, work):
            results["runs"][key] = found
            save_results(task.name, results)
            print(f"{key}: {found['curve'][-1]}, {found['seconds']:.0f} s", flush=True)


def runs_of(results: Mapping[str, Any], row: str, seeds: int) -> list[dict[str, Any]]:
    """Return a row's finished runs, seed by seed."""
    keys = [key_of(row, seed) for seed in range(seeds)]
    return [results["runs"][key] for key in keys if key in results.get("runs", {})]


def last(runs: Sequence[Mapping[str, Any]], figure: str) -> list[float]:
    """Return a figure at the end of each run."""
    return [float(run["curve"][-1][figure]) for run in runs]


Column = Callable[[str, Sequence[Mapping[str, Any]]], str]
"""Return a cell from the name of a row and its runs."""


def table(results: Mapping[str, Any], rows: Mapping[str, Row], figures: Mapping[str, Column]) -> str:
    """Return a line for each row that has runs: its figures, by head of the column, and costs on the device."""
    head = ("row", "seeds", *figures, "frames a step", "device time [s]", "energy [kJ]")
    lines: list[tuple[str, ...]] = []
    for name, row in rows.items():
        if runs := runs_of(results, name, row.seeds):
            run = runs[0]
            frames = f"{run['frames'] / run['step']:,.0f}"
            cost = (frames, f"{run['device_seconds']:,.0f}", f"{run['joules'] / 1e3:,.1f}")
            own = (cell(name, runs) for cell in figures.values())
            lines.append((name, str(len(runs)), *own, *(cost if row.device else ("-",) * 3)))
    return markdown(head, lines)
