"""How do steps, ledgers, samplers, readings and sweeps grow with their size, and does any outgrow a straight line?

Each curve is processor time on one thread against a size, the least of several repeats, and the memory that a process
of its own takes for it beyond what its imports take. A slope is that of the logarithms over the last decade of sizes.
Required: at most 1.05. The curves are drawn in docs/growth.png. `--long` adds the sizes that take minutes, `--memory`
measures memory only.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.bare import feedback_trainer
from benchmarks.markdown import Row, command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from opusim import open_device
from opusim.accounting.composition import Budget
from opusim.accounting.ledger import Ledger, read_ledger
from opusim.accounting.mechanisms.records import RecordCentral
from opusim.medium.transmission import Medium
from opusim.tables import print_table
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data import from_arrays
from opusim.training.data.samplers import PoissonSampler
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import PdfaConfig
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.runs.drawing import save_figure, style
from opusim.training.sweeps.sweep import parse_spec, points_of

MODULE, NAME = "benchmarks.speed.growth", "growth"
REQUIRED = 1.05
PICTURE = Path(__file__).parents[2] / "docs" / "growth.png"
Curves = Mapping[str, Mapping[str, float]]
"""Values by what grows and by size."""
MECHANISM = RecordCentral(
    noise_multiplier=1.1, sampling_probability=0.001, clip_norm=1.0, divisor=100.0, steps=1
)
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What is measured at several sizes.

    Attributes:
        of: What grows.
        sizes: Each about three times the one before; the last decade gives the slope.
        prepared: Returns the work at a size, given a folder; only the work is timed.
        long: Sizes that take minutes.
    """

    of: str
    sizes: tuple[int, ...]
    prepared: Callable[[int, Path], Callable[[], Any]]
    long: tuple[int, ...] = ()


def step_of(widths: list[int], batch: int) -> Callable[[], Any]:
    """Return a photonic DFA step of a fully connected network."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    hidden = [module for layer in layers[:-1] for module in (layer, nn.Tanh())]
    network = FullyConnected(nn.Sequential(*hidden, layers[-1]))
    device = open_device("gaussian", n_inputs=widths[-1], n_outputs=sum(widths[1:-1]))
    optimizer = make_optimizer(network.parameters, OptimizerConfig())
    trainer = feedback_trainer(ClosedForm(network, PdfaConfig(), device=device), optimizer)
    x, y = torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,))
    trainer.step(x, y, step=0)  # loads kernels, makes the optimizer's state
    return lambda: trainer.step(x, y, step=1)


def paid_ledger(steps: int, folder: Path) -> Callable[[], Any]:
    """Return the payment of so many steps, 64 a line as in an experiment."""
    numbers = iter(range(10**6))

    def pay() -> None:
        path = folder / f"paid-{steps}-{next(numbers)}.jsonl"
        with Ledger(path, mode="experiment", delta=1e-5, enforced=True, block=64) as ledger:
            for step in range(steps):
                ledger.pay(step, MECHANISM, until=steps)

    return pay


def budgeted_ledger(steps: int, folder: Path) -> Callable[[], Any]:
    """Return the payment of so many steps under a budget that they do not exhaust, 16 a line as in release mode."""
    numbers = iter(range(10**6))

    def pay() -> None:
        path = folder / f"budgeted-{steps}-{next(numbers)}.jsonl"
        budget = Budget(epsilon=1e6, delta=1e-5)
        with Ledger(path, mode="release", delta=1e-5, enforced=True, block=16, budget=budget) as ledger:
            for step in range(steps):
                ledger.pay(step, MECHANISM, until=steps)

    return pay


def stated_ledger(steps: int, folder: Path) -> Callable[[], Any]:
    """Return the reading of a ledger of so many steps, and its guarantee."""
    path = folder / f"stated-{steps}.jsonl"
    with Ledger(path, mode="experiment", delta=1e-5, enforced=True, block=64) as ledger:
        for step in range(steps):
            ledger.pay(step, MECHANISM, until=steps)
    return lambda: read_ledger(path).guarantees()


def sampled_batch(records: int, folder: Path) -> Callable[[], Any]:
    """Return the draw of a Poisson batch of about 256 records."""
    sampler = PoissonSampler(n_records=records, seed=1, sampling_probability=256 / records)
    return lambda: sampler.indices(3)


def data_set(records: int, folder: Path, *, mapped: bool) -> Callable[[], Any]:
    """Return the making of a data set of records with 30 features, in memory or mapped from a file."""
    file = folder / f"records-{records}.npy"
    if not file.exists():
        rows = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(records, 30))
        for start in range(0, records, 10**5):
            rows[start : start + 10**5] = torch.randn(min(10**5, records - start), 30).numpy()
        rows.flush()
    x, y = np.load(file, mmap_mode="r" if mapped else None), np.arange(records) % 2
    return lambda: from_arrays(x, y, n_classes=2, validation_fraction=0.1, split_seed=0)


def read_outputs(outputs: int, folder: Path) -> Callable[[], Any]:
    """Return a projection of 16 rows of 64 inputs, whose matrix is not stored."""
    medium, x = Medium(64, outputs, 1, dense_limit_mib=0), torch.randn(16, 64).sign()
    return lambda: medium.project(x, range(outputs))


def expanded_sweep(runs: int, folder: Path) -> Callable[[], Any]:
    """Return the checks of a sweep file of so many runs."""
    spec = {
        "title": "growth",
        "config": {"data": {"name": "digits"}},
        "axes": {"seed": list(range(runs))},
    }

    def expand() -> int:
        return len(points_of(*parse_spec(spec, "growth")))

    return expand


CURVES = (
    Curve(
        of="a PDFA step, weights of a hidden layer",
        sizes=(2**14, 2**16, 2**18, 2**20),
        prepared=lambda n, _: step_of([64, math.isqrt(n), math.isqrt(n), 10], 256),
        long=(2**22, 2**24),
    ),
    Curve(
        of="a PDFA step, records of a batch",
        sizes=(64, 256, 1024, 4096),
        prepared=lambda n, _: step_of([784, 256, 256, 10], n),
    ),
    Curve(
        of="a PDFA step, hidden layers",
        sizes=(3, 10, 30, 100),
        prepared=lambda n, _: step_of([64, *[128] * n, 10], 256),
    ),
    Curve(
        of="steps paid in a ledger",
        sizes=(1_000, 10_000, 100_000),
        prepared=paid_ledger,
        long=(1_000_000,),
    ),
    Curve(
        of="steps paid under a budget",
        sizes=(1_000, 10_000, 100_000),
        prepared=budgeted_ledger,
        long=(1_000_000,),
    ),
    Curve(
        of="a ledger read and stated, steps",
        sizes=(1_000, 10_000, 100_000),
        prepared=stated_ledger,
        long=(1_000_000,),
    ),
    Curve(
        of="a Poisson batch of 256, records to choose from",
        sizes=(10_000, 100_000, 1_000_000),
        prepared=sampled_batch,
        long=(10_000_000,),
    ),
    Curve(
        of="a data set made of records in memory, records",
        sizes=(10_000, 100_000, 1_000_000),
        prepared=partial(data_set, mapped=False),
        long=(10_000_000,),
    ),
    Curve(
        of="a data set made of records on disk, records",
        sizes=(10_000, 100_000, 1_000_000),
        prepared=partial(data_set, mapped=True),
        long=(10_000_000,),
    ),
    Curve(
        of="a projection without its matrix, outputs",
        sizes=(1_000, 10_000, 100_000),
        prepared=read_outputs,
        long=(1_000_000,),
    ),
    Curve(of="a sweep checked, runs", sizes=(10, 100, 1_000), prepared=expanded_sweep, long=(10_000,)),
)
CURVE_NAMES = tuple(curve.of for curve in CURVES)


def seconds_of(work: Callable[[], Any]) -> float:
    """Least processor seconds of a call."""
    found = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
        if found[0] > 2:
            break
    return min(found)


def memory_of(of: str, size: int) -> float:
    """Return the MiB that a curve's work at a size takes at its peak, at least 1; called in a process of its own.

    Pages of mapped files do not count: the system takes them back when it needs memory.
    """
    torch.set_num_threads(1)
    before = _anonymous()
    (curve,) = (each for each in CURVES if each.of == of)
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    with tempfile.TemporaryDirectory() as name:
        work = curve.prepared(size, Path(name))
        watcher.start()
        kept = work()
    peak = max(peak, _anonymous())
    done.set()
    watcher.join()
    del kept
    return max(1.0, peak - before)


def _anonymous() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def slope_of(seconds: Mapping[int, float]) -> float:
    """Slope of the logarithms between the largest size and the one a decade below, or the next smaller."""
    sizes = sorted(seconds)
    last = sizes[-1]
    first = max((size for size in sizes if 10 * size <= last), default=sizes[0])
    return math.log(seconds[last] / seconds[first]) / math.log(last / first)


def table_rows(curves: Curves, shown: Callable[[float], str]) -> list[tuple[str, ...]]:
    """Return a line for each curve, as text."""
    rows: list[tuple[str, ...]] = []
    for of, found in curves.items():
        values = {int(size): value for size, value in found.items()}
        slope = slope_of(values)
        cells = ", ".join(f"{size:,}: {shown(values[size])}" for size in sorted(values))
        rows.append((of, cells, f"{slope:.2f}", verdict(slope <= REQUIRED)))
    return rows


def time_rows(curves: Curves) -> list[tuple[str, ...]]:
    """Return a line for each curve of time."""
    return table_rows(curves, lambda seconds: f"{1000 * seconds:.3g} ms")


def memory_rows(curves: Curves) -> list[tuple[str, ...]]:
    """Return a line for each curve of memory."""
    return table_rows(curves, lambda mib: f"{mib:.0f} MiB")


TIME_COLUMNS = ("what grows", "processor time", "slope", f"at most {REQUIRED:g}")
MEMORY_COLUMNS = ("what grows", "memory beyond imports", "slope", f"at most {REQUIRED:g}")


def draw(times: Curves, memory: Curves) -> None:
    """Draw time and memory against size, all as logarithms; sizes and times relative to the first of their curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, of in enumerate(CURVE_NAMES):
        for axes, curves in ((left, times), (right, memory)):
            if of not in curves:
                continue
            sizes = sorted(map(int, curves[of]))
            first = curves[of][str(sizes[0])] if axes is left else 1.0
            values = [curves[of][str(size)] / first for size in sizes]
            axes.loglog(
                [size / sizes[0] for size in sizes],
                values,
                label=of if axes is left else None,
                **(style(number) | {"markersize": 4}),
            )
    for axes, text in ((left, "processor time, over that of the smallest"), (right, "memory [MiB]")):
        axes.set(xlabel="size, over the smallest that was measured", ylabel=text)
        axes.spines[["top", "right"]].set_visible(False)
    ends = left.get_xlim()
    left.loglog(ends, ends, color="0.6", linewidth=1, zorder=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save_figure(figure, PICTURE)


def page_section() -> str:
    """Return the section of the result pages."""
    results = load_results(NAME)
    text = (
        "Processor time on one thread, memory of a process of its own at its peak without mapped files, and the "
        "slopes of their logarithms over the last decade of sizes ([the figure](../../docs/growth.png) has a grey "
        "line of slope 1). A Poisson batch compares one number for each record, and a data set puts its records in "
        "random order: a million of them leave the cache. Memory breaks first, by the records of a data set: keep "
        "their features in a file and map it."
    )
    tables = (
        markdown(TIME_COLUMNS, time_rows(results.get("curves", {}))),
        markdown(MEMORY_COLUMNS, memory_rows(results.get("memory", {}))),
    )
    return section("Growth with size", text, command(MODULE), *tables)


def speed_rows() -> list[Row]:
    """Return the steepest slope."""
    curves = load_results(NAME).get("curves", {})
    slopes = {of: slope_of({int(size): value for size, value in each.items()}) for of, each in curves.items()}
    if not slopes:
        return []
    steepest = max(slopes, key=lambda of: slopes[of])
    text = f"{slopes[steepest]:.2f}, the steepest of {len(slopes)} slopes"
    return [(f"growth of {steepest}", text, command(MODULE))]


def main() -> None:
    """Measure, print and save after each curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CURVE_NAMES, help="These curves.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = load_results(NAME)
    times, memory = dict(results.get("curves", {})), dict(results.get("memory", {}))
    for curve in (each for each in CURVES if options.only is None or each.of in options.only):
        sizes = (*curve.sizes, *(curve.long if options.long else ()))
        if not options.memory:
            with tempfile.TemporaryDirectory() as name:
                times[curve.of] = {str(size): seconds_of(curve.prepared(size, Path(name))) for size in sizes}
        memory[curve.of] = {str(size): _apart(curve.of, size) for size in sizes}
        save_results(NAME, {"curves": times, "memory": memory})
    draw(times, memory)
    print_table("Time", TIME_COLUMNS, time_rows(times))
    print_table("Memory", MEMORY_COLUMNS, memory_rows(memory))


def _apart(of: str, size: int) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_of, (of, size))


if __name__ == "__main__":
    main()
