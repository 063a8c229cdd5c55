"""How near does direct feedback alignment come to backpropagation on a language model, and what does a device cost?

Text: the sentences of SST-2, labels removed, one a line, as bytes: 706 kB to train, the development file (90 kB) to
choose settings and the best step, the test file (185 kB) to report. Model: the built-in `transformer-lm` with four
post-norm blocks. Adam with a warm-up and a cosine decay. The error is taken at the transform before the vocabulary
layer, a row for each position; every block but the last is a point.

Methods: backpropagation (bp); the last block and what follows it learn, nothing before (top block only); digital DFA
(dfa), with three points a block, and without the aligned start; photonic DFA (pdfa), the error in four bit planes.
Aligned start: the transform starts as the feedback matrix, which a device measures. Learning rates: the best on the
development file in short runs (seed 0); pdfa and the sweeps over noise and frames take dfa's.

A method's share is (top - method) / (top - bp) in bits per byte. Required: dfa at least 50 %, pdfa at least 90 % of
dfa's share. Every call trains what the results lack; a run resumes from a checkpoint in benchmarks/results/cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.markdown import Row, command, markdown, section, verdict, with_error
from benchmarks.results_file import FOLDER, load_results, save_results
from benchmarks.zeroth_order.sentences import read_sentences
from opusim import FeedbackAlignment, open_device
from opusim.randomness.seeds import derive_seed
from opusim.training.networks.sequence_models import TransformerLM

MODULE, NAME = "benchmarks.any_module.language_model", "any_module_language_model"
CACHE = FOLDER / "cache" / "language-model"
BYTES, CONTEXT = 256, 64
WIDTH, HEADS, DEPTH = 64, 4, 4
BATCH, STEPS, WARM_UP, BETAS = 8, 8000, 400, (0.9, 0.99)
EVALUATIONS = 8
RATES, SEARCH_STEPS = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2), 2000
SEEDS, MATRIX_SEED = range(3), 20210603
BP, TOP, DFA, PDFA = "bp", "top block only", "dfa", "pdfa, gaussian"
RANDOM, THREE, CAMERA = "dfa, random start", "dfa, three points a block", "pdfa, camera"
BLOCKS = tuple(f"blocks.{number}" for number in range(DEPTH - 1))
INSIDE = tuple(f"{block}.{part}" for block in BLOCKS for part in ("norm1", "second.1", "norm2"))
PLANES: dict[str, Any] = {"encoding": "planes", "planes": 4}
SIGMAS = (0.0, 1.0, 3.0, 10.0)
LEAST_SHARE, LEAST_PHOTONIC = 0.5, 0.9
LAUNAY = {DFA: 52.0 / 29.8, THREE: 93.3 / 29.8}
"""Perplexity over backpropagation's in Launay et al. 2020: WikiText-103, six blocks of width 512, tokens of BPE."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the tables.

    Attributes:
        points: Feedback points; none for backpropagation.
        aligned: Whether the transform starts as the feedback matrix.
        only_top: Whether nothing before the last point learns.
        device: Name of the device; None projects digitally.
        noise: Section of the device's description, laid over the packaged one.
        options: Further arguments of FeedbackAlignment.
        rate: Row whose learning rate is taken; None searches for one.
        seeds: How many seeds are run.
    """

    points: tuple[str, ...] = BLOCKS
    aligned: bool = True
    only_top: bool = False
    device: str | None = None
    noise: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rate: str | None = DFA
    seeds: int = len(SEEDS)


METHODS: dict[str, Method] = {
    BP: Method(points=(), aligned=False, rate=None),
    DFA: Method(rate=None),
    TOP: Method(only_top=True, rate=None),
    PDFA: Method(device="gaussian", options=PLANES),
    THREE: Method(points=INSIDE),
    RANDOM: Method(aligned=False),
    CAMERA: Method(device="camera", options=PLANES),
}
NOISE = {
    f"sigma {sigma:g}": Method(device="gaussian", noise={"sigma": sigma}, options=PLANES, seeds=1)
    for sigma in SIGMAS
}
CODES: dict[str, dict[str, Any]] = {
    "planes 2": {"encoding": "planes", "planes": 2},
    "ternary": {"encoding": "ternary"},
    "stochastic ternary": {"encoding": "stochastic"},
    f"16 of {CONTEXT} rows": PLANES | {"rows": 16},
    f"4 of {CONTEXT} rows": PLANES | {"rows": 4},
}
FRAMES = {name: Method(device="gaussian", options=code, seeds=1) for name, code in CODES.items()}
ROWS = METHODS | NOISE | FRAMES


@cache
def text(name: str) -> Tensor:
    """Return the bytes of a file's sentences, one a line, shape (n,)."""
    return torch.tensor(list("\n".join(read_sentences(name).text).encode()))


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step, each (BATCH, CONTEXT): stretches that start anywhere."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "batch", step) % 2**63)
    starts = torch.randint(len(text("train")) - CONTEXT, (BATCH, 1), generator=generator)
    found = text("train")[starts + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


@torch.no_grad()
def bits_per_byte(model: nn.Module, name: str) -> float:
    """Return the mean of -log2 p over a file, read in stretches of CONTEXT bytes that do not overlap."""
    data = text(name)
    n = (len(data) - 1) // CONTEXT * CONTEXT
    pairs = zip(
        data[:n].view(-1, CONTEXT).split(128), data[1 : n + 1].view(-1, CONTEXT).split(128), strict=True
    )
    total = sum(
        float(functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
        for x, y in pairs
    )
    return total / n / math.log(2)


def new_model(seed: int) -> TransformerLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TransformerLM((CONTEXT,), BYTES, width=WIDTH, heads=HEADS, depth=DEPTH)


def with_points(method: Method, model: TransformerLM, seed: int) -> FeedbackAlignment:
    """Put the feedback points on a model; its device is open."""
    matrix = MATRIX_SEED + seed
    feedback = FeedbackAlignment(model, method.points, error_at="transform", seed=matrix, **method.options)
    n_inputs, n_outputs = feedback.shape(batch(seed, 0)[0][:2])
    if method.device is not None:
        sections: dict[str, Any] = {"medium": {"seed": matrix}} | (
            {"noise": method.noise} if method.noise else {}
        )
        feedback.noisy_device = open_device(
            method.device, n_inputs=n_inputs, n_outputs=n_outputs, seed=seed, **sections
        )
    if method.aligned:
        feedback.start_from_feedback(model.transform)
    return feedback


def freeze_below_top(model: TransformerLM) -> None:
    """Let only the last block learn, and what follows it."""
    for part in (model.embedding, *list(model.blocks)[:-1]):
        part.requires_grad_(False)


def factor(step: int, steps: int) -> float:
    """Return the learning rate of a step over its highest value: a linear rise, then half a cosine down to 5 %."""
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


@dataclass
class Progress:
    """A run so far; it is written at every evaluation.

    Attributes:
        step: Steps done.
        seconds: Time that they took.
        frames: Frames of one step; 0 without a device.
        curve: Bits per byte on the development file after each part of the run.
        best: State dict of the model where the curve was lowest.
    """

    step: int = 0
    seconds: float = 0.0
    frames: int = 0
    curve: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)


def train(method: Method, rate: float, seed: int, steps: int, file: Path) -> tuple[TransformerLM, Progress]:
    """Return the model at its best evaluation, trained from the start or resumed from a checkpoint.

    Args:
        method: The row.
        rate: Adam's highest learning rate.
        seed: Of parameters, batches, the matrix and the device's noise.
        steps: Length of the run.
        file: The checkpoint.
    """
    model = new_model(seed)
    feedback = with_points(method, model, seed) if method.points else None
    if method.only_top and feedback is not None:
        feedback.remove()
        freeze_below_top(model)
        feedback = None
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate, betas=BETAS)
    progress = Progress()
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        progress = Progress(**kept["progress"])
    while progress.step < steps:
        advance(model, feedback, optimizer, progress, rate, seed, steps)
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
    if feedback is not None and feedback.noisy_device is not None:
        feedback.noisy_device.close()
    model.load_state_dict(progress.best)
    return model, progress


def advance(
    model: TransformerLM,
    feedback: FeedbackAlignment | None,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    rate: float,
    seed: int,
    steps: int,
) -> None:
    """Train to the next evaluation, and evaluate."""
    started = time.perf_counter()
    for step in range(progress.step, progress.step + steps // EVALUATIONS):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(step, steps)
        x, y = batch(seed, step)
        before = 0 if feedback is None else feedback.usage.frames
        if feedback is not None:
            feedback.seek(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        progress.frames = 0 if feedback is None else feedback.usage.frames - before
    progress.step += steps // EVALUATIONS
    progress.curve.append(bits_per_byte(model, "dev"))
    if progress.curve[-1] == min(progress.curve):
        progress.best = {name: value.clone() for name, value in model.state_dict().items()}
    progress.seconds += time.perf_counter() - started


def run(results: dict[str, Any], row: str, rate: float, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Return a run's figures, from the results or by training; the test file is read after runs of full length."""
    part = "runs" if steps == STEPS else "search"
    key = f"{row}, rate {rate:g}, seed {seed}"
    if key not in results[part]:
        file = CACHE / f"{part}-{key.replace(', ', '-').replace(' ', '_')}.pt"
        model, progress = train(ROWS[row], rate, seed, steps, file)
        results[part][key] = {
            "validation": min(progress.curve),
            "curve": [round(value, 4) for value in progress.curve],
            "seconds": round(progress.seconds, 1),
            "frames_per_step": progress.frames,
        } | ({"test": bits_per_byte(model, "test")} if part == "runs" else {})
        save_results(NAME, results)
        print(f"{part}: {key}: {results[part][key]}", flush=True)
    found: dict[str, Any] = results[part][key]
    return found


def rate_of(results: dict[str, Any], row: str) -> float:
    """Return a row's learning rate: the best on the development file in short runs of seed 0."""
    searched = ROWS[row].rate or row
    return min(
        RATES,
        key=lambda rate: float(run(results, searched, rate, SEEDS[0], SEARCH_STEPS)["validation"]),
    )


def plan() -> Iterator[tuple[str, int]]:
    """Yield all runs: the main methods seed by seed, then the tables."""
    for seed in SEEDS:
        yield from ((row, seed) for row in METHODS)
    yield from ((row, SEEDS[0]) for row in NOISE | FRAMES)


def measure() -> None:
    """Train every run that the results lack."""
    torch.set_num_threads(1)
    results = load_results(NAME) or {"search": {}, "runs": {}}
    results["settings"] = {
        "bytes": {name: len(text(name)) for name in ("train", "dev", "test")},
        "model": {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "context": CONTEXT},
        "bytes_per_word": len(text("test")) / len(" ".join(read_sentences("test").text).split()),
        "parameters": sum(p.numel() for p in new_model(0).parameters()),
        "steps": STEPS,
        "search_steps": SEARCH_STEPS,
        "batch": BATCH,
        "rates": list(RATES),
    }
    for row, seed in plan():
        run(results, row, rate_of(results, row), seed)


def runs_of(results: dict[str, Any], row: str) -> list[dict[str, Any]]:
    """Return a row's runs, seed by seed, as far as they are measured."""
    heads = [f"{row}, rate {rate:g}, seed" for rate in RATES]  # a row has runs at one rate only
    keys = [f"{head} {seed}" for seed in SEEDS[: ROWS[row].seeds] for head in heads]
    return [results["runs"][key] for key in keys if key in results["runs"]]


def figures(results: dict[str, Any], row: str, part: str = "test") -> list[float]:
    """Return bits per byte of a row's seeds, as far as they are measured."""
    return [float(found[part]) for found in runs_of(results, row)]


def shares(results: dict[str, Any], row: str) -> list[float]:
    """Return (top - row) / (top - bp) of each seed that all three have measured."""
    measured = zip(*(figures(results, each) for each in (TOP, BP, row)), strict=False)
    return [(top - own) / (top - best) for top, best, own in measured]


def perplexity_ratio(results: dict[str, Any], row: str) -> float | None:
    """Return the perplexity of a byte over backpropagation's, or None if one is not measured."""
    both = list(zip(figures(results, row), figures(results, BP), strict=False))
    return 2 ** statistics.mean(own - best for own, best in both) if both else None


def methods_table(results: dict[str, Any]) -> str:
    """Return the table of the methods."""
    per_word = results["settings"]["bytes_per_word"]
    rows: list[tuple[str, ...]] = []
    for row in METHODS:
        ratio = perplexity_ratio(results, row)
        rows.append(
            (
                row,
                with_error(figures(results, row), ".3f"),
                with_error([100 * share for share in shares(results, row)], ".1f"),
                "-" if ratio is None else f"{ratio:.3f}",
                "-" if ratio is None else f"{ratio**per_word:.2f}",
                f"{LAUNAY[row]:.2f}" if row in LAUNAY else "",
            )
        )
    header = ("method", "test, bits per byte", "share of the gap [%]", "perplexity over bp's, of a byte")
    return markdown((*header, "of a word", "Launay et al. 2020, of a BPE token"), rows)


def device_table(results: dict[str, Any]) -> str:
    """Return the table against noise and against frames."""
    rows: list[tuple[str, ...]] = []
    for row in (PDFA, *NOISE, *FRAMES):
        measured = figures(results, row)[:1]
        share = shares(results, row)[:1]
        frames = figures(results, row, "frames_per_step")[:1]
        rows.append(
            (
                row,
                with_error(measured, ".3f"),
                with_error([100 * each for each in share], ".1f"),
                f"{frames[0]:.0f}" if frames else "-",
            )
        )
    return markdown(
        (
            "through the `gaussian` device (4 bit planes, sigma 0.1, all rows, but for what is named)",
            "bits per byte",
            "share [%]",
            "frames a step",
        ),
        rows,
    )


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    used, size = results["settings"], results["settings"]["bytes"]
    text = (
        f"Sentences of SST-2 as bytes: {size['train']:,} to train, {size['dev']:,} (development file) to choose the "
        f"learning rate of {', '.join(f'{rate:g}' for rate in used['rates'])} in runs of "
        f"{used['search_steps']:,} steps, and the step, {size['test']:,} to test. "
        f"Decoder of {used['model']['depth']} post-norm blocks, width {used['model']['width']}, context "
        f"{used['model']['context']}, {used['parameters']:,} parameters; {used['steps']:,} steps of {used['batch']} "
        f"stretches ({results['date']}, {command(MODULE)}). A word has {used['bytes_per_word']:.1f} bytes. "
        f"Mean and standard error of {_seeds(results)}; rows of the device table have one seed. Width, batch, the "
        "aligned start and the code of pdfa (4 bit planes; a thresholded ternary code lost more) were chosen on the "
        "development file too, and dfa's share depends on them. pdfa and the other dfa rows take dfa's learning rate."
    )
    return section(
        "Language model",
        text,
        methods_table(results),
        _judgement(results),
        *_curves(results),
        device_table(results),
    )


def _seeds(results: dict[str, Any]) -> str:
    """Return how many seeds are finished."""
    done = min(len(runs_of(results, row)) for row in (BP, DFA, TOP))
    return f"{len(SEEDS)} seeds" if done == len(SEEDS) else f"{done} of {len(SEEDS)} seeds so far"


def _judgement(results: dict[str, Any]) -> str:
    """Return how the requirements are met."""
    digital, photonic = shares(results, DFA), shares(results, PDFA)
    if not digital or not photonic:
        return ""
    share, ratio = statistics.mean(digital), statistics.mean(photonic) / statistics.mean(digital)
    return (
        f"Share of dfa at least {100 * LEAST_SHARE:g} %: {verdict(share >= LEAST_SHARE)}, {100 * share:.1f} %. "
        f"Share of pdfa at least {100 * LEAST_PHOTONIC:g} % of dfa's: {verdict(ratio >= LEAST_PHOTONIC)}, "
        f"{100 * ratio:.1f} %."
    )


def _curves(results: dict[str, Any]) -> list[str]:
    """Return a sentence on how far validation still fell in the last eighth of the steps."""
    parts = []
    for row in (BP, DFA, TOP):
        curves = [found["curve"] for found in runs_of(results, row)]
        falls = [before - after for *_, before, after in curves]
        if falls:
            parts.append(f"{row} {statistics.mean(falls):.3f}")
    if not parts:
        return []
    return [
        f"In the last 1/{EVALUATIONS} of the steps, bits per byte on the development file fell by {', '.join(parts)}."
    ]


def headline_rows() -> list[Row]:
    """Return the line of the overview."""
    results = load_results(NAME)
    if not results:
        return []
    cells = ", ".join(f"{row} {with_error(figures(results, row), '.3f')}" for row in (BP, DFA, PDFA, TOP))
    return [
        (
            f"language model on bytes of SST-2, test, bits per byte, mean of {_seeds(results)}",
            cells,
            command(MODULE),
        )
    ]


if __name__ == "__main__":
    measure()
