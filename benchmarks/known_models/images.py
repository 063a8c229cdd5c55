"""How near does direct feedback alignment come to backpropagation on a ResNet-20 and a ViT, and through a device?

CIFAR-10 from $OPUSIM_DATA, whole training set, random crops of the padded image and mirror images; the accuracy is that
of the 10,000 test images after each eighth of the run, and the last one counts. AdamW with one learning rate, warm-up
and half a cosine in every row: nothing was tuned, no row and no step was chosen by its accuracy.

    OPUSIM_DATA=... python -m benchmarks.known_models.images resnet   (10 epochs; 100 with --full, which needs a card)
    OPUSIM_DATA=... python -m benchmarks.known_models.images vit      (2 epochs; 100 with --full)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.known_models.gpt import Block, Setting, initialise
from benchmarks.known_models.training import BP, Column, Row, Task, last, runs_of, table, train_rows
from benchmarks.markdown import compared, with_error
from benchmarks.options import Full, Processes, RowNames, listed
from opusim.training.data import load_dataset
from opusim.training.networks.models import ResNet

MODULE = "benchmarks.known_models.images"
TOP, DFA, PDFA, READOUT = "top only", "dfa", "pdfa, gaussian", "learnt read-out"
COMMON: dict[str, Row] = {
    BP: Row(feedback=None, seeds=3),
    TOP: Row(feedback={"gain": 0.0}, seeds=3),
    DFA: Row(seeds=3),
    PDFA: Row(device="gaussian", seeds=3),
    READOUT: Row(readout=100, seeds=3),
    "dfa, one batch in 100 backpropagated": Row(backpropagated=100, seeds=3),
}
LATE = {"error_at": "blocks.8.input", "points": ["blocks.[0-6]"]}
ROWS: dict[str, dict[str, Row]] = {
    "resnet": COMMON | {f"{READOUT}, error before the last block": Row(feedback=LATE, readout=100)},
    "vit": COMMON
    | {
        f"{PDFA}, planes": Row(feedback={"encoding": "planes"}, device="gaussian", seeds=3),
        f"{PDFA}, no noise": Row(device="gaussian", sections={"noise": {"sigma": 0.0}}, seeds=3),
        f"{PDFA}, head starts as feedback": Row(device="gaussian", start="head", seeds=3),
    },
}
"""The rows of each model."""
CLASSES, BATCH, PADDING, PATCH = 10, 128, 4, 4
EPOCH = 50_000 // BATCH
VIT = Setting(layers=4, heads=4, width=96, context=64, batch=BATCH, steps=0, dropout=0.0, causal=False)


class VisionTransformer(nn.Module):
    """Scores of an image: patches of 4 x 4 pixels with learnt positions, pre-norm blocks, the mean of the stream.

    Source: Dosovitskiy et al. 2021 (arXiv 2010.11929), with the mean in place of a class token (Zhai et al. 2022).
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, setting.width, PATCH, stride=PATCH)
        self.positions = nn.Embedding(setting.context, setting.width)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(setting.width, bias=False)
        self.head = nn.Linear(setting.width, CLASSES)
        initialise(self, setting)

    def forward(self, x: Tensor) -> Tensor:
        """Score images, shape (records, 3, 32, 32)."""
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(self.norm(h).mean(dim=1))
        return scores


@dataclass(frozen=True)
class Kind:
    """A model of a table; half: its forward pass is in bfloat16."""

    title: str
    build: Callable[[], nn.Module]
    epochs: tuple[int, int]
    half: bool
    printed: str


KINDS = {
    "resnet": Kind(
        "ResNet-20",
        lambda: ResNet((3, 32, 32), CLASSES, blocks_per_stage=3, stem_stride=1),
        (10, 100),
        True,
        "BioTorch (Sanfiz and Akrout 2021, 250 epochs): backpropagation 90.6 %, DFA 60.7 to 62.3 %",
    ),
    "vit": Kind(
        f"ViT of {VIT.layers} layers of {VIT.width}",
        lambda: VisionTransformer(VIT),
        (2, 100),
        False,
        "none in print",
    ),
}


@cache
def pictures() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the images and classes to train on, and those of the test."""
    data = load_dataset("cifar-10", validation_fraction=0.0, split_seed=0)
    assert data.test is not None
    shape = (-1, *data.record_shape)
    return data.train.x.view(shape), data.train.y, data.test.x.view(shape), data.test.y


@dataclass(frozen=True)
class Images(Task):
    """Name what an image shows."""

    kind: str
    name: str
    steps: int
    place: torch.device

    def model(self) -> nn.Module:
        return KINDS[self.kind].build()

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """See Task.batch: shuffled epochs; images moved by up to 4 pixels, half of them mirrored."""
        x, y, _, _ = pictures()
        epoch, at = divmod(step, EPOCH)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed * 2**32 + epoch))
        chosen = order[at * BATCH : (at + 1) * BATCH]
        generator = torch.Generator().manual_seed(seed * 2**32 + 2**31 + step)
        side = x.shape[-1]
        shift = torch.randint(2 * PADDING + 1, (2, len(chosen), 1), generator=generator)
        rows, columns = (move + torch.arange(side) for move in shift)
        mirrored = torch.randint(2, (len(chosen), 1), generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
        padded = functional.pad(x[chosen], (PADDING,) * 4)
        each = torch.arange(len(chosen))[:, None, None]
        found = padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return found.contiguous().to(self.place), y[chosen].to(self.place)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self._scores(model, x), y)

    def _scores(self, model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=KINDS[self.kind].half):
            scores: Tensor = model(x.to(memory_format=torch.channels_last))
        return scores.float()

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """See Task.measure: accuracy on the test images, in per cent."""
        _, _, x, y = pictures()
        right = sum(
            int((self._scores(model, part.to(self.place)).argmax(1).cpu() == labels).sum())
            for part, labels in zip(x.split(500), y.split(500), strict=True)
        )
        return {"accuracy": 100 * right / len(y)}


def task_of(kind: str, *, full: bool = False) -> Images:
    """Return the setting of a model for a processor, or for a card."""
    name = f"known_{kind}_full" if full else f"known_{kind}"
    steps = KINDS[kind].epochs[full] * EPOCH // 8 * 8
    return Images(kind, name, steps, torch.device("cuda" if full else "cpu"))


def closed(results: dict[str, Any], row: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of the gap between DFA and backpropagation that a row closes, in per cent; "-" without one."""
    ends = {name: last(runs_of(results, name, COMMON[name].seeds), "accuracy") for name in (BP, DFA)}
    ends["own"] = last(runs, "accuracy")
    if row in (BP, DFA, TOP) or not all(ends.values()):
        return "-"
    if compared(ends[BP], ends[DFA]) < 1:
        return "-"
    best, plain, own = (statistics.fmean(values) for values in ends.values())
    return f"{100 * (own - plain) / (best - plain):.0f}"


def figures(results: dict[str, Any]) -> str:
    """Return the table of the rows: accuracies, the gap that is closed, and costs."""
    columns: dict[str, Column] = {
        "test accuracy [%]": lambda _, runs: with_error(last(runs, "accuracy"), ".2f"),
        "gap closed [%]": lambda row, runs: closed(results, row, runs),
    }
    every = {name: row for rows in ROWS.values() for name, row in rows.items()}
    return table(results, every, columns)


def main(
    model: Annotated[str, typer.Argument(help=f"The model: {' or '.join(KINDS)}.")],
    rows: RowNames = "",
    processes: Processes = 2,
    *,
    full_setting: Full = False,
) -> None:
    """Train every run that the results lack; runs that were begun resume."""
    if model not in KINDS:
        raise typer.BadParameter(f"model = {model}: must be one of {', '.join(KINDS)}")
    names = listed("--rows", rows, list(ROWS[model]))
    train_rows(task_of(model, full=full_setting), ROWS[model], names=names, processes=processes)


if __name__ == "__main__":
    typer.run(main)
