"""How near does direct feedback alignment come to backpropagation on nanoGPT's characters, and through which device?

Tiny Shakespeare from $OPUSIM_DATA/tinyshakespeare/input.txt, its first nine tenths to train and the rest to validate,
as nanoGPT cuts it; the model, AdamW, schedule, clip and batches are nanoGPT's (`benchmarks.known_models.gpt`), and the
whole validation text is read in stretches that do not overlap. FeedbackAlignment is given what the row says and nothing
else. Nothing was tuned: the learning rate is nanoGPT's in every row. Draws docs/nanogpt.png at the end.

    OPUSIM_DATA=... python -m benchmarks.known_models.nanogpt            (nanoGPT's setting for a processor; resumes)
    OPUSIM_DATA=... python -m benchmarks.known_models.nanogpt --full     (its setting for a card; needs one)
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.known_models.gpt import FULL, GPT, SMALL, Setting
from benchmarks.known_models.training import BP, Column, Row, Task, last, runs_of, table, train_rows
from benchmarks.markdown import with_error
from benchmarks.options import Full, Processes, RowNames, listed
from benchmarks.results_file import load_results
from opusim.training.runs.drawing import save_figure, style

MODULE, NAME = "benchmarks.known_models.nanogpt", "nanogpt"
TOP, DFA, TDFA, PDFA = "top only", "dfa", "tdfa", "pdfa, gaussian"
READOUT = "learnt read-out"
CAMERA, FITTED = "pdfa, camera", "pdfa, camera_fitted"
SIGMAS = (0.3, 1.0, 3.0, 10.0)
ENCODINGS = ("ternary", "planes", "sign")
INSIDE = ("blocks.?.attention", "blocks.?.mlp")
ROWS: dict[str, Row] = {
    BP: Row(feedback=None, seeds=3),
    TOP: Row(feedback={"gain": 0.0}, seeds=3),
    DFA: Row(seeds=3),
    PDFA: Row(device="gaussian", seeds=3),
    TDFA: Row(feedback={"encoding": "stochastic"}, seeds=3),
    CAMERA: Row(device="camera", seeds=3),
    FITTED: Row(device="camera_fitted"),
    **{
        f"pdfa, gaussian, noise {sigma:g}": Row(device="gaussian", sections={"noise": {"sigma": sigma}})
        for sigma in SIGMAS
    },
    **{f"pdfa, gaussian, {name}": Row(feedback={"encoding": name}, device="gaussian") for name in ENCODINGS},
    READOUT: Row(readout=100, seeds=3),
    f"{READOUT}, gaussian": Row(device="gaussian", readout=100, seeds=3),
    f"{READOUT}, gaussian, 4 times the outputs": Row(device="gaussian", readout=100, outputs=4),
    f"{READOUT}, camera, 4 times the outputs": Row(device="camera", readout=100, outputs=4),
    f"{READOUT} without plain feedback": Row(readout=100, plain=0.0),
    f"{READOUT} without plain feedback, gaussian": Row(device="gaussian", readout=100, plain=0.0),
    "dfa, points inside blocks": Row(feedback={"points": INSIDE}),
    "dfa, one batch in 100 backpropagated": Row(backpropagated=100, seeds=3),
}
PICTURE = Path(__file__).parents[2] / "docs" / "nanogpt.png"


@cache
def texts() -> tuple[Tensor, Tensor, int]:
    """Return the characters to train and to validate as numbers, and the size of the vocabulary."""
    file = Path(os.environ.get("OPUSIM_DATA", "data")) / "tinyshakespeare" / "input.txt"
    if not file.exists():
        remedy = "set OPUSIM_DATA to a folder that holds tinyshakespeare/input.txt"
        raise FileNotFoundError(f"{file} is missing; {remedy}, the file of nanoGPT's data/shakespeare_char")
    text = file.read_text()
    characters = sorted(set(text))
    numbers = torch.tensor([characters.index(c) for c in text], dtype=torch.int64)
    cut = int(0.9 * len(numbers))
    return numbers[:cut], numbers[cut:], len(characters)


@dataclass(frozen=True)
class Characters(Task):
    """Predict the next character."""

    setting: Setting
    name: str
    place: torch.device

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.setting.steps

    def model(self) -> nn.Module:
        return GPT(self.setting, texts()[2])

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """See Task.batch: stretches that start anywhere."""
        train, _, _ = texts()
        generator = torch.Generator().manual_seed(seed * 2**32 + step)
        count, length = self.setting.batch, self.setting.context
        starts = torch.randint(len(train) - length, (count, 1), generator=generator)
        found = train[starts + torch.arange(length + 1)].to(self.place)
        return found[:, :-1], found[:, 1:]

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """See Task.loss: nats a character."""
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """See Task.measure: the loss over the validation text."""
        text, length = texts()[1], self.setting.context
        count = (len(text) - 1) // length * length
        inputs, targets = (part.view(-1, length).split(128) for part in (text[:count], text[1 : count + 1]))
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            scores = model(x.to(self.place)).flatten(0, 1)
            total += float(functional.cross_entropy(scores, y.flatten().to(self.place), reduction="sum"))
        return {"validation": total / count}


def small() -> Characters:
    """Return the setting for a processor."""
    return Characters(SMALL, NAME, torch.device("cpu"))


def full() -> Characters:
    """Return the setting for a card."""
    return Characters(FULL, f"{NAME}_full", torch.device("cuda"))


def ratio(results: dict[str, Any], row: str) -> list[float]:
    """Return the perplexity of a row over backpropagation's, seed by seed."""
    mine, best = (last(runs_of(results, name, ROWS[name].seeds), "validation") for name in (row, BP))
    return [math.exp(own - other) for own, other in zip(mine, best, strict=False)]


def draw() -> None:
    """Draw losses by steps, losses by the device's noise, and alignment and scale by depth; means over the seeds."""
    from matplotlib.figure import Figure

    results = load_results(NAME)
    found = {name: runs for name, row in ROWS.items() if (runs := runs_of(results, name, row.seeds))}
    ends = {name: statistics.fmean(last(runs, "validation")) for name, runs in found.items()}
    figure = Figure(figsize=(10, 8), layout="constrained")
    steps, noise, depth, scale = figure.subplots(2, 2).flat
    # 1. The loss after each part of the run.
    shown = [name for name in (TOP, PDFA, READOUT, DFA, BP) if name in found]
    for number, name in enumerate(shown):
        curve = _means([[part["validation"] for part in run["curve"]] for run in found[name]])
        each = found[name][0]["step"] // len(curve)
        at = [each * part for part in range(1, len(curve) + 1)]
        steps.plot(at, curve, label=name, **style(number))
    steps.set(xlabel="step", ylabel="validation loss [nats a character]")
    # 2. The loss at the end against the noise of the device, and what needs no device.
    names = [f"{PDFA}, noise {sigma:g}" for sigma in SIGMAS]
    if all(name in ends for name in names):
        noise.plot(SIGMAS, [ends[name] for name in names], label=PDFA, **style(1))
    for number, name in enumerate(shown):
        if name in (TOP, DFA, BP):
            noise.axhline(ends[name], **style(number) | {"marker": "", "label": name})
    noise.set(xscale="log", xlabel="noise of a reading, sigma", ylabel="validation loss at the end")
    noise.set_xticks(SIGMAS, [f"{sigma:g}" for sigma in SIGMAS])
    # 3. What the points receive and hold at the end.
    for number, name in enumerate(shown):
        if name in (PDFA, READOUT, DFA):
            for axes, key in ((depth, "depth"), (scale, "scale")):
                values = _means([run[key] for run in found[name] if run.get(key)])
                axes.plot(range(1, len(values) + 1), values, label=name, **style(number))
    depth.set(ylabel="feedback's cosine with the true gradient", ylim=(0, 1))
    scale.set(ylabel="root mean square of the stream", ylim=(0, None))
    for axes in (depth, scale):
        axes.set_xlabel("point, from the input to the output")
        axes.set_xticks(range(1, SMALL.layers))
    for axes in (steps, noise, depth, scale):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, PICTURE)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column."""
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def figures(results: dict[str, Any]) -> str:
    """Return the table of the rows: losses, perplexities over backpropagation's, and costs."""
    columns: dict[str, Column] = {
        "validation loss": lambda _, runs: with_error(last(runs, "validation"), ".3f"),
        "perplexity over backpropagation's": lambda row, _: with_error(ratio(results, row), ".3f"),
    }
    return table(results, ROWS, columns)


def main(rows: RowNames = "", processes: Processes = 2, *, full_setting: Full = False) -> None:
    """Train every run that the results lack; runs that were begun resume."""
    task = full() if full_setting else small()
    train_rows(task, ROWS, names=listed("--rows", rows, list(ROWS)), processes=processes)
    draw()


if __name__ == "__main__":
    typer.run(main)
