"""Do a mixer and a small ResNet learn images by direct feedback alignment, and what helps convolutions?

CIFAR-10 and FashionMNIST: two epochs of 30,000 training records, a tenth of all held out for validation; batch 64, Adam
with a warm-up over 5 % of the steps and a cosine decay; mean cross-entropy; three seeds of parameters, batches and B.

Models: `mixer-small`, three post-norm blocks of width 64 on patches of 4 x 4, and `resnet-small`, three stages of one
block of 16, 32 and 64 channels. Methods: backpropagation (bp), digital DFA with e itself (dfa) and with its ternary
code (tdfa), photonic DFA through the `gaussian` device with four bit planes of e (pdfa) or with its stochastic ternary
code, and a model of which only the last block and the head learn (top-only). Points: every block but the last,
broadcast over positions, all with the same outputs of B. Learning rates and the ternary threshold: the best of three on
validation records after one epoch (seed 0). All methods with feedback take dfa's rate.

Remedies for convolutions: points at layers or stages, full feedback or broadcast, a head that starts as the feedback
matrix, as many channels at every stage, one point, local heads, and vector units under a global error broadcast.

Required: pdfa within one point of dfa; the best remedy within 10 points of bp. A second call resumes: the results keep
every finished run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.any_module.convolutions import LocalHeads, VectorisedNetwork
from benchmarks.markdown import Row, command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from opusim import FeedbackAlignment, open_device
from training.data import Dataset, load_dataset
from training.data.samplers import ShuffledEpochsSampler
from training.networks.image_models import Mixer, ResNet
from training.networks.models import multiply_adds

MODULE, NAME = "benchmarks.any_module.images", "any_module_images"
SHAPES = {"cifar-10": (3, 32, 32), "fashion-mnist": (1, 28, 28)}
CLASSES, SEEDS, MATRIX_SEED = 10, range(3), 20210603
RECORDS, EPOCHS, BATCH, WARM_UP = 30_000, 2, 64, 0.05
RATES, THRESHOLDS = (1e-3, 2e-3, 5e-3), (0.6, 1.0, 1.5)
MOST_SHORTFALL, MOST_GAP = 1.0, 10.0
WIDTHS, EVEN_WIDTHS = (16, 32, 64), (24, 24, 24)
FED_BACK = (
    "dfa",
    "points at 3 stages, broadcast, shared outputs",
    "3 stages, shared, head starts as B",
    "24 channels at every stage, head starts as B",
)
"""Rows of the ResNet at which every block but the last, or every block, learns from B e."""
PLANES, DRAWN = {"encoding": "planes", "planes": 4}, {"encoding": "stochastic"}
LAYERS, STAGES = ("stem", "blocks.?.first", "blocks.?"), ("blocks.?",)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the tables.

    Attributes:
        build: Returns the model for records of a shape.
        points: Feedback points; None backpropagates.
        options: Further arguments of FeedbackAlignment.
        device: Whether the projection goes through the device.
        aligned: Whether the head starts as the feedback matrix.
        ternary: Whether the error is shown as its ternary code; the threshold is searched for.
        rate: Row of the same table whose learning rate is taken; None searches for one.
    """

    build: Callable[[tuple[int, ...]], nn.Module]
    points: str | tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    device: bool = False
    aligned: bool = False
    ternary: bool = False
    rate: str | None = None


def mixer(shape: tuple[int, ...]) -> nn.Module:
    return Mixer(shape, CLASSES)


def resnet(shape: tuple[int, ...]) -> nn.Module:
    return ResNet(shape, CLASSES)


def even_resnet(shape: tuple[int, ...]) -> nn.Module:
    return ResNet(shape, CLASSES, widths=EVEN_WIDTHS)


def local_heads(shape: tuple[int, ...]) -> nn.Module:
    return LocalHeads(ResNet(shape, CLASSES, widths=WIDTHS), WIDTHS, CLASSES)


def methods(build: Callable[[tuple[int, ...]], nn.Module]) -> dict[str, Method]:
    """Return the methods for one model."""
    return {
        "bp": Method(build=build),
        "dfa": Method(build=build, points="blocks"),
        "tdfa": Method(build=build, points="blocks", ternary=True, rate="dfa"),
        "pdfa": Method(build=build, points="blocks", options=PLANES, device=True, rate="dfa"),
        "pdfa, stochastic": Method(build=build, points="blocks", options=DRAWN, device=True, rate="dfa"),
        "top-only": Method(build=build, points="blocks", options={"gain": 0.0}),
    }


def remedies() -> dict[str, Method]:
    """Return what is tried on the ResNet besides the five methods."""

    def by(points: tuple[str, ...], **options: Any) -> Method:
        return Method(build=resnet, points=points, options=options, rate="dfa")

    started: dict[str, Any] = {"points": STAGES, "aligned": True, "rate": "dfa"}

    return {
        "points at 7 layers, full, own outputs": by(LAYERS, spread="full", slices="own"),
        "points at 7 layers, broadcast, own outputs": by(LAYERS, slices="own"),
        "points at 3 stages, full, own outputs": by(STAGES, spread="full", slices="own"),
        "points at 3 stages, broadcast, own outputs": by(STAGES, slices="own"),
        "points at 3 stages, broadcast, shared outputs": by(STAGES),
        "3 stages, shared, head starts as B": Method(build=resnet, **started),
        "24 channels at every stage, head starts as B": Method(build=even_resnet, **started),
        "24 channels at every stage, head starts as B, device": Method(
            build=even_resnet, device=True, options=PLANES, **started
        ),
        "24 channels at every stage, bp": Method(build=even_resnet, rate="bp"),
        "one point behind the second stage": by(("blocks.1",)),
        "local heads, no feedback": Method(build=local_heads),
        "vector units, bp": Method(build=lambda shape: VectorisedNetwork(shape, CLASSES, broadcast=False)),
        "vector units, global error broadcast": Method(
            build=lambda shape: VectorisedNetwork(shape, CLASSES, broadcast=True)
        ),
    }


TABLES: dict[str, dict[str, Method]] = {
    "resnet": {**methods(resnet), **remedies()},
    "mixer": methods(mixer),
}
"""The rows measured for each model."""


@cache
def images(name: str) -> Dataset:
    return load_dataset(name, validation_fraction=0.1, split_seed=0)


def new_model(method: Method, shape: tuple[int, ...], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return method.build(shape)


def train(
    method: Method, name: str, rate: float, threshold: float | None, seed: int, *, epochs: int = EPOCHS
) -> nn.Module:
    """Return a model trained by one method.

    Args:
        method: The row.
        name: The data set.
        rate: Adam's learning rate.
        threshold: Of the ternary code; None if the method takes none.
        seed: Of parameters, batches and the device's noise.
        epochs: Passes over the records.
    """
    x, y = images(name).train.x[:RECORDS].view(-1, *SHAPES[name]), images(name).train.y[:RECORDS]
    model = new_model(method, SHAPES[name], seed)
    feedback = None if method.points is None else with_points(method, model, x[:2], threshold, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    sampler = ShuffledEpochsSampler(n_records=len(x), seed=seed, batch_size=BATCH, drop_last=True)
    steps = epochs * sampler.steps_per_epoch
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min(1.0, (k + 1) / (WARM_UP * steps)) * (1 + math.cos(math.pi * k / steps)) / 2,
    )
    model.train()
    for step in range(steps):
        index = sampler.indices(step)
        optimizer.zero_grad()
        loss_of(model, x[index], y[index]).backward()
        optimizer.step()
        decay.step()
        if isinstance(model, VectorisedNetwork):
            model.keep_signs()
    if feedback is not None:
        if feedback.device is not None:
            feedback.device.close()
        feedback.remove()
    return model


def with_points(
    method: Method, model: nn.Module, example: Tensor, threshold: float | None, seed: int
) -> FeedbackAlignment:
    """Put the feedback points on a model; its device is open."""
    matrix = MATRIX_SEED + seed
    code: dict[str, Any] = {} if threshold is None else {"encoding": "ternary", "threshold": threshold}
    feedback = FeedbackAlignment(model, method.points or "blocks", seed=matrix, **method.options, **code)
    n_inputs, n_outputs = feedback.shape(example)
    if method.device:
        feedback.device = open_device(
            "gaussian", n_inputs=n_inputs, n_outputs=n_outputs, seed=seed, medium={"seed": matrix}
        )
    if method.aligned:
        feedback.start_from_feedback(model.get_submodule("head"))  # type: ignore[arg-type]
    return feedback


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss that training backpropagates or feeds back."""
    if isinstance(model, LocalHeads):
        return model.loss(x, y)
    return functional.cross_entropy(model(x), y)


@torch.no_grad()
def accuracy(model: nn.Module, part: str, name: str) -> float:
    """Return the accuracy on a part of a data set, per cent."""
    model.eval()
    records = getattr(images(name), part)
    x = records.x.view(-1, *SHAPES[name]).split(500)
    right = sum(
        int((model(batch).argmax(dim=1) == labels).sum())
        for batch, labels in zip(x, records.y.split(500), strict=True)
    )
    return 100 * right / len(records)


def find_rate(results: dict[str, Any], name: str, table: str, row: str) -> float:
    """Return a row's learning rate, from the results or by a search on validation records."""
    method = TABLES[table][row]
    if method.rate is not None:
        return find_rate(results, name, table, method.rate)
    return best_of(
        results,
        f"{name}, {table}, {row}, rate",
        RATES,
        lambda rate: train(method, name, rate, None, SEEDS[0], epochs=1),
        name,
    )


def find_threshold(results: dict[str, Any], name: str, table: str) -> float:
    """Return the threshold of the ternary code, from the results or by a search on validation records."""
    rate = find_rate(results, name, table, "dfa")
    return best_of(
        results,
        f"{name}, {table}, threshold",
        THRESHOLDS,
        lambda threshold: train(TABLES[table]["tdfa"], name, rate, threshold, SEEDS[0], epochs=1),
        name,
    )


def best_of(
    results: dict[str, Any],
    key: str,
    values: tuple[float, ...],
    trained: Callable[[float], nn.Module],
    name: str,
) -> float:
    """Return the value with the best validation accuracy; accuracies are kept in the results."""
    found: dict[str, float] = results["search"].setdefault(key, {})
    for value in values:
        if str(value) not in found:
            found[str(value)] = accuracy(trained(value), "validation", name)
            save_results(NAME, results)
            print(f"{key} {value:g}: {found[str(value)]:.2f} %", flush=True)
    return float(max(found, key=lambda value: found[value]))


def settings() -> dict[str, Any]:
    return {
        "epochs": EPOCHS,
        "batch": BATCH,
        "rates": list(RATES),
        "thresholds": list(THRESHOLDS),
        "records": RECORDS,
        "multiply_adds": {
            f"{name}, {table}, {row}": multiply_adds(new_model(method, shape, 0), shape)
            for name, shape in SHAPES.items()
            for table, rows in TABLES.items()
            for row, method in rows.items()
        },
    }


def runs() -> Iterator[tuple[str, str, str, int]]:
    """All runs, a data set after the other, its remedies last."""
    for name in SHAPES:
        for rows in (methods(resnet), remedies()):
            for table in TABLES:
                yield from (
                    (name, table, row, seed) for row in rows if row in TABLES[table] for seed in SEEDS
                )


def measure() -> None:
    """Train every run that the results lack."""
    torch.set_num_threads(1)
    results = load_results(NAME) or {"search": {}, "runs": {}}
    results |= {"settings": settings()}
    for name, table, row, seed in runs():
        key = f"{name}, {table}, {row}, {seed}"
        if key in results["runs"]:
            continue
        method, rate = TABLES[table][row], find_rate(results, name, table, row)
        threshold = find_threshold(results, name, table) if method.ternary else None
        started = time.perf_counter()
        model = train(method, name, rate, threshold, seed)
        seconds = time.perf_counter() - started
        results["runs"][key] = {
            "validation": accuracy(model, "validation", name),
            "test": accuracy(model, "test", name),
            "rate": rate,
            "threshold": threshold,
            "seconds": round(seconds, 1),
        }
        save_results(NAME, results)
        print(f"{key}: {results['runs'][key]}", flush=True)


def figures(results: dict[str, Any], name: str, table: str, row: str, part: str = "test") -> list[float]:
    """Accuracies of the seeds measured so far, per cent."""
    keys = (f"{name}, {table}, {row}, {seed}" for seed in SEEDS)
    return [results["runs"][key][part] for key in keys if key in results["runs"]]


def mean(results: dict[str, Any], name: str, table: str, row: str, part: str = "test") -> float | None:
    """Mean accuracy of all seeds, per cent, or None if one is missing."""
    found = figures(results, name, table, row, part)
    return statistics.mean(found) if len(found) == len(SEEDS) else None


def shortfalls(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return dfa minus pdfa in points, by data set and model."""
    found = {}
    for name in SHAPES:
        for table in TABLES:
            digital, photonic = (mean(results, name, table, row) for row in ("dfa", "pdfa"))
            if digital is not None and photonic is not None:
                found[name, table] = digital - photonic
    return found


def best_remedies(results: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Return, by data set, the row of FED_BACK that is best on validation records, and bp minus its test accuracy."""
    found = {}
    for name in SHAPES:
        means = {row: mean(results, name, "resnet", row, "validation") for row in FED_BACK}
        known = {row: figure for row, figure in means.items() if figure is not None}
        reference = mean(results, name, "resnet", "bp")
        if reference is not None and known:
            best = max(known, key=lambda row: known[row])
            found[name] = (best, reference - statistics.mean(figures(results, name, "resnet", best)))
    return found


def cell(results: dict[str, Any], name: str, table: str, row: str) -> str:
    """Mean and standard error of the test accuracy, per cent."""
    found = figures(results, name, table, row)
    if len(found) < len(SEEDS):
        return "-"
    return f"{statistics.mean(found):.1f} ± {statistics.stdev(found) / len(found) ** 0.5:.1f}"


def methods_table(results: dict[str, Any]) -> str:
    """Return the table of the five methods."""
    columns = [(name, table) for name in SHAPES for table in TABLES]
    rows = [(row, *(cell(results, name, table, row) for name, table in columns)) for row in methods(resnet)]
    return markdown(("method", *(f"{name}, {table} [%]" for name, table in columns)), rows)


def remedies_table(results: dict[str, Any]) -> str:
    """Return the table of the remedies, with bp minus each."""
    rows = []
    for row in ("bp", "dfa", "top-only", *remedies()):
        cells: list[str] = []
        for name in SHAPES:
            figure, reference = (mean(results, name, "resnet", each) for each in (row, "bp"))
            gap = "-" if figure is None or reference is None else f"{reference - figure:.1f}"
            cells += [cell(results, name, "resnet", row), gap]
        rows.append((row, *cells))
    return markdown(("ResNet", *(part for name in SHAPES for part in (f"{name} [%]", "bp minus it"))), rows)


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    used = results["settings"]
    most = max(used["multiply_adds"].values()) / 1e6
    text = (
        f"Test accuracy, mean and standard error of {len(SEEDS)} seeds, after {used['epochs']} epochs of "
        f"{used['records']:,} records; at most {most:.1f} million multiply-adds an image "
        f"({results['date']}, {command(MODULE)}). Each learning rate is the best of "
        f"{', '.join(f'{rate:g}' for rate in used['rates'])} on validation records. top-only: the last block and the "
        "head learn. dfa, tdfa and pdfa feed the same error back to the blocks before them."
    )
    return section(
        "Images",
        text,
        methods_table(results),
        _judgement(results),
        "Convolutions learn poorly by DFA (Refinetti et al. 2021). The remedies, and how far they stay behind "
        "backpropagation, in points; vector units after Clark et al. 2021, local heads after Belilovsky et al. 2019:",
        remedies_table(results),
    )


def _judgement(results: dict[str, Any]) -> str:
    """Return how the requirements are met."""
    lost, best = shortfalls(results), best_remedies(results)
    parts = []
    if lost:
        worst = max(lost.values())
        judged = verdict(worst <= MOST_SHORTFALL)
        parts.append(f"pdfa at most {MOST_SHORTFALL:g} point below dfa: {judged}, {worst:+.2f} at worst.")
    for name, (row, gap) in best.items():
        parts.append(
            f"Best remedy on {name} at most {MOST_GAP:g} points below bp: {verdict(gap <= MOST_GAP)}, {gap:.1f} "
            f"({row})."
        )
    return " ".join(parts)


def headline_rows() -> list[Row]:
    """Return the lines of the overview."""
    results = load_results(NAME)
    rows = []
    for name in SHAPES if results else ():
        for table in TABLES:
            cells = ", ".join(f"{row} {cell(results, name, table, row)}" for row in methods(resnet))
            what = f"{name}, {table}, test accuracy [%], mean of {len(SEEDS)} seeds"
            rows.append((what, cells, command(MODULE)))
    return rows


if __name__ == "__main__":
    measure()
