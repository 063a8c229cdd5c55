"""Does an epoch of record-protected likelihood ratio training cost at most one of Opacus's ghost clipping?

MNIST, batch 500 (120 steps an epoch), 784-128-64-32-10 GELU, SGD with momentum, clip norm 1, noise multiplier 1; one
antithetic pair a module, both noises drawn. Steps are timed on batches that are already drawn, so no data loader counts
on either side. K = 1 to 100 pairs are reported, the published form's time with its eigendecompositions, and the peak
memory of a step next to that of a plain forward and backward pass, which a bound on the rows of a pass must keep below
twice that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.bare import bare
from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import void
from benchmarks.speed.record_step import CLIP_NORM, NOISE_MULTIPLIER, REFERENCE, ghost_step
from benchmarks.timing import interleaved
from opusim.randomness.streams import noise_stream
from opusim.training.config import load_config
from opusim.training.config.sections import OptimizerConfig
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.record import RecordGradients
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from opusim.training.ulr.trainer import PlainUpdate, PublishedUpdate, UlrTrainer

MODULE, NAME = "benchmarks.ulr.epoch", "ulr_epoch"
BATCH, STEPS_AN_EPOCH = 500, 120
COPIES = (1, 2, 5, 10, 20, 50, 100)
REPEATS, STEPS = 15, 10
WIDTHS = (784, 128, 64, 32, 10)


def paper_model(seed: int = 0, hidden: Sequence[int] = WIDTHS[1:-1]) -> nn.Sequential:
    """784-128-64-32-10, or other hidden layers, GELU between the layers."""
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise((WIDTHS[0], *hidden, WIDTHS[-1])):
        modules += [nn.Linear(fan_in, fan_out), nn.GELU()]
    return nn.Sequential(*modules[:-1])


def ulr_trainer(copies: int, *, rows_per_pass: int | None = None, mode: str = "experiment") -> UlrTrainer:
    """A trainer whose records are clipped and noised."""
    network = ModuleSequence(paper_model(), n_inputs=WIDTHS[0])
    protection = RecordGradients(
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        divisor=BATCH,
        noise=noise_stream(mode, 0, "central-noise"),
    )
    update = PlainUpdate(
        network,
        Estimator(copies=copies, reduction="antithetic", rows_per_pass=rows_per_pass),
        sigma=0.1,
        noise=noise_stream(mode, 0, "output-noise"),
        protection=protection,
    )
    return bare(
        UlrTrainer,
        network,
        load_config({"trainer": {"kind": "ulr"}}),
        optimizer=make_optimizer(network.parameters, OptimizerConfig()),
        update=update,
    )


def ulr_step(x: torch.Tensor, y: torch.Tensor, copies: int, **options: object) -> Callable[[], None]:
    trainer = ulr_trainer(copies, **options)
    count = iter(range(10**9))
    return lambda: void(trainer.step(x, y, step=next(count)))


def published_step(x: torch.Tensor, y: torch.Tensor, copies: int) -> Callable[[], None]:
    """A step of Algorithm 1 with its eigendecompositions, extra noise added."""
    network = ModuleSequence(paper_model(), n_inputs=WIDTHS[0])
    options = UlrConfig(
        form="published", copies=copies, sigma=1.0, target_std=4.0, clip_norm=CLIP_NORM, remedy="extra-noise"
    )
    update = PublishedUpdate(
        network,
        options,
        BATCH,
        noise=noise_stream("experiment", 0, "output-noise"),
        extra=noise_stream("experiment", 0, "extra-noise"),
    )
    trainer = bare(
        UlrTrainer,
        network,
        load_config({"trainer": {"kind": "ulr"}}),
        optimizer=make_optimizer(network.parameters, OptimizerConfig()),
        update=update,
    )
    count = iter(range(10**9))
    return lambda: void(trainer.step(x, y, step=next(count)))


def plain_step(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A forward and a backward pass, no update."""
    model = paper_model()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that tensors of one step hold at once, above what was there before it."""
    step()  # gradients and states that stay
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def speed_rows() -> list[Row]:
    """Return an epoch's time against Opacus, and a step's memory against a plain pass."""
    results = load_results(NAME)
    rows = [
        (
            f"time of an MNIST epoch, 784-128-64-32-10, batch 500, {entry['work']}, {entry['threads']} thread(s)",
            f"{entry['ratio']:.2f} of Opacus ghost clipping",
            command(MODULE),
        )
        for entry in results.get("rows", [])
        if entry["work"].startswith("ulr")
    ]
    memory = results.get("peak_bytes", {})
    plain = memory.get("plain forward and backward")
    return rows + [
        (
            f"peak memory of a step, batch 500, {name}",
            f"{value / plain:.2f} of a plain forward and backward pass",
            command(MODULE),
        )
        for name, value in memory.items()
        if name.startswith("ulr")
    ]


def main() -> None:
    warnings.filterwarnings("ignore", module="opacus")
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(0, 10, (BATCH,))
    work = {
        REFERENCE: ghost_step(paper_model(), x, y),
        "plain forward and backward": plain_step(x, y),
        "ulr, K = 1": ulr_step(x, y, 1),
        "ulr, K = 1, release mode": ulr_step(x, y, 1, mode="release"),
    }
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = interleaved(work, repeats=REPEATS, inner=STEPS)
        if threads == 1:
            more = {f"ulr, K = {copies}": ulr_step(x, y, copies) for copies in COPIES[1:]}
            more |= {f"ulr as published, K = {copies}": published_step(x, y, copies) for copies in (1, 10)}
            seconds |= interleaved(more, repeats=5, inner=1, warm_up=1)
        for name, value in seconds.items():
            ratio = value / seconds[REFERENCE]
            rows.append({"threads": threads, "work": name, "epoch_s": STEPS_AN_EPOCH * value, "ratio": ratio})
            print(f"{threads} thread(s)  {name:30s} {STEPS_AN_EPOCH * value:8.2f} s   {ratio:6.2f} of Opacus")
    memory = {
        "plain forward and backward": peak_bytes(plain_step(x, y)),
        "ulr, K = 10": peak_bytes(ulr_step(x, y, 10)),
        "ulr, K = 10, 250 rows a pass": peak_bytes(ulr_step(x, y, 10, rows_per_pass=250)),
        "ulr, K = 10, all in one pass": peak_bytes(ulr_step(x, y, 10, rows_per_pass=40 * 2 * BATCH)),
    }
    for name, value in memory.items():
        print(f"{name:32s} {value / 2**20:7.2f} MiB")
    save_results(
        NAME,
        {
            "batch": BATCH,
            "steps_an_epoch": STEPS_AN_EPOCH,
            "repeats": REPEATS,
            "bar": "ratio <= 1 at K = 1; memory at most 2 plain passes",
            "rows": rows,
            "peak_bytes": memory,
        },
    )


if __name__ == "__main__":
    main()
