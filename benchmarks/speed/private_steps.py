"""What does a private step cost beside fastDP, jax_privacy and Opacus, and beside a step without protection?

784-512-512-10 tanh, batch 256, SGD with momentum, clip norm 1, noise multiplier 1; the step only. Each library is asked
for its fastest form: Opacus for ghost clipping, fastDP for its book-keeping (`MixOpt`), jax_privacy for `clipped_grad`
in a compiled step. Each number of threads has a process of its own, which may run on as many cores: the number of
threads of jax follows from that.

    pip install opacus jax-privacy
    git clone https://github.com/awslabs/fast-differential-privacy
    python -m benchmarks.speed.private_steps --fastdp fast-differential-privacy

A library that is not there is left out. Before anything is timed, a step of each library without noise has to give the
weights that clipping one record after the other gives.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import BATCH, autograd_step, new_model
from benchmarks.speed.record_step import CLIP_NORM, NOISE_MULTIPLIER, ghost_training, protected_step
from benchmarks.timing import interleaved
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.private_steps", "private_steps"
UNPROTECTED = "autograd, no protection"
LR, MOMENTUM = 0.01, 0.9
REPEATS, STEPS = 7, 10
TOLERANCE = 1e-5
"""Largest difference of a weight after one step; float32 sums in another order stay far below it."""
COLUMNS = ("step", "1 thread [ms]", "of unprotected", "2 threads [ms]", "of unprotected")
Step = Callable[[], object]
Weights = Callable[[], np.ndarray]


def seeded_model() -> nn.Sequential:
    """Return the network with the same first weights at every call."""
    torch.manual_seed(0)
    return new_model()


def opacus_step(x: torch.Tensor, y: torch.Tensor, noise: float) -> tuple[Step, Weights]:
    """Return a step of DP-SGD by Opacus, and what reads its weights."""
    model = seeded_model()
    step, _ = ghost_training(model, batch=len(x), lr=LR, momentum=MOMENTUM, noise_multiplier=noise)
    return lambda: step(x, y), lambda: flat(model)


def fastdp_step(x: torch.Tensor, y: torch.Tensor, noise: float) -> tuple[Step, Weights]:
    """Return a step of DP-SGD by fastDP's book-keeping, and what reads its weights."""
    model, loss = seeded_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    engine = importlib.import_module("fastDP").PrivacyEngine(
        model,
        batch_size=len(x),
        sample_size=50_000,
        epochs=1,
        noise_multiplier=noise or 1e-9,  # zero would be calibrated
        max_grad_norm=CLIP_NORM,
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        clipping_style="all-layer",
    )
    engine.attach(optimizer)

    def step() -> None:
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: flat(model)


def jax_step(x: torch.Tensor, y: torch.Tensor, noise: float) -> tuple[Step, Weights]:
    """Return a step of DP-SGD by jax_privacy, compiled, and what reads its weights."""
    jax, optax, private = (importlib.import_module(name) for name in ("jax", "optax", "jax_privacy"))
    first = [jax.numpy.array(weights.detach().numpy()) for weights in seeded_model().parameters()]
    records, labels = jax.numpy.array(x.numpy()), jax.numpy.array(y.numpy())

    def loss(parameters: Any, inputs: Any, targets: Any) -> Any:
        *hidden, (last, bias) = zip(parameters[::2], parameters[1::2], strict=True)
        for weight, shift in hidden:
            inputs = jax.numpy.tanh(inputs @ weight.T + shift)
        outputs = inputs @ last.T + bias
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()

    clipped = private.clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), normalize_by=float(len(x)), microbatch_size=1
    )  # one record after the other is faster than 8, 32 or all together
    optimizer = optax.sgd(LR, momentum=MOMENTUM)

    def update(parameters: Any, velocity: Any, key: Any) -> tuple[Any, Any, Any]:
        key, *own = jax.random.split(key, len(parameters) + 1)
        noisy = [
            gradient + noise * CLIP_NORM / len(x) * jax.random.normal(one, gradient.shape)
            for gradient, one in zip(clipped(parameters, records, labels), own, strict=True)
        ]
        changes, velocity = optimizer.update(noisy, velocity, parameters)
        return optax.apply_updates(parameters, changes), velocity, key

    compiled = jax.jit(update, donate_argnums=(0, 1, 2))
    state: list[Any] = [first, optimizer.init(first), jax.random.key(0)]

    def step() -> None:
        state[:] = jax.block_until_ready(compiled(*state))

    return step, lambda: np.concatenate([np.asarray(weights).ravel() for weights in state[0]])


LIBRARIES = {
    "opacus": ("Opacus, ghost clipping", opacus_step),
    "fastDP": ("fastDP, book-keeping", fastdp_step),
    "jax_privacy": ("jax_privacy, compiled", jax_step),
}


def flat(model: nn.Module) -> np.ndarray:
    """Return all weights in a row."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def clipped_by_hand(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Return the weights after a step without noise that clips one record after the other."""
    model = seeded_model()
    parameters = list(model.parameters())
    total = torch.zeros(sum(weights.numel() for weights in parameters))
    for record, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(record), label)
        gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
        total += gradient * min(1.0, CLIP_NORM / gradient.norm().item())
    return flat(model) - LR * total.numpy() / len(x)


def check(x: torch.Tensor, y: torch.Tensor, libraries: list[str]) -> None:
    """Raise ArithmeticError if a step of a library without noise does not clip each record."""
    expected = clipped_by_hand(x, y)
    for library in libraries:
        name, prepared = LIBRARIES[library]
        step, weights = prepared(x, y, 0.0)
        step()
        if not np.abs(weights() - expected).max() < TOLERANCE:
            raise ArithmeticError(f"{name}: its weights are not those of clipped records")


def measured(threads: int, fastdp: str | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of each step on so many cores, and versions; called in a process of its own."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    if fastdp:
        sys.path.append(fastdp)
    libraries = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    check(x, y, libraries)
    work: dict[str, Step] = {
        UNPROTECTED: autograd_step(x, y),
        "opusim, backpropagation": protected_step(x, y, "experiment", "bp"),
        "opusim, photonic DFA": protected_step(x, y, "experiment", "pdfa"),
        "opusim, photonic DFA, release mode": protected_step(x, y, "release", "pdfa"),
    }
    for library in libraries:
        name, prepared = LIBRARIES[library]
        work[name] = prepared(x, y, NOISE_MULTIPLIER)[0]
    return interleaved(work, repeats=REPEATS, inner=STEPS), {
        library: importlib.import_module(library).__version__ for library in libraries
    }


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each step: milliseconds, and those over the unprotected step, by number of threads."""
    base = {row["threads"]: row["ms"] for row in rows if row["work"] == UNPROTECTED}
    lines: dict[str, list[str]] = {}
    for row in rows:
        cells = (f"{row['ms']:.2f}", f"{row['ms'] / base[row['threads']]:.2f}")
        lines.setdefault(row["work"], []).extend(cells)
    return [(work, *cells) for work, cells in lines.items()]


def page_section() -> str:
    """Return the section of the result pages."""
    results = load_results(NAME)
    found = ", ".join(f"{library} {version}" for library, version in results["libraries"].items())
    text = (
        f"A step of 784-512-512-10 on {BATCH} records, clip norm and noise multiplier {CLIP_NORM:g} "
        f"({results['date']}; {found}). A step of photonic DFA draws the device's noise too."
    )
    return section("Private steps", text, command(MODULE), markdown(COLUMNS, table_rows(results["rows"])))


def main(
    fastdp: Annotated[Path | None, typer.Option(help="A checkout of fast-differential-privacy.")] = None,
) -> None:
    """Time the steps of every library that is there, with one thread and with two."""
    rows: list[dict[str, Any]] = []
    libraries: dict[str, str] = {}
    for threads in (1, 2):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, libraries = pool.apply(measured, (threads, str(fastdp.resolve()) if fastdp else None))
        rows += [{"threads": threads, "work": work, "ms": 1e3 * value} for work, value in seconds.items()]
    print_table("Private steps", COLUMNS, table_rows(rows))
    save_results(NAME, {"repeats": REPEATS, "steps_in_a_turn": STEPS, "libraries": libraries, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
