"""What do fixed physical batches cost, and does the time of a step tell how many records were drawn?

Private steps of 784-512-10 on invented records, by `make_private` with and without `fixed_batches`: forward, backward
and optimizer, without the reading of records. The share of the variance of a step's time that a line through the number
of drawn records explains (R^2) is what time tells; chance alone explains 1 / steps of it on average.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results

MODULE, NAME = "benchmarks.speed.fixed_batches", "fixed_batches"
RECORDS, BATCHES, STEPS, WARM = 60_000, (32, 256, 1024), 50, 5


def loop(folder: Path, data: TensorDataset, batch: int, *, fixed: bool) -> opusim.PrivateTraining:
    """Return a private loop."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    return opusim.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=batch),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        target_delta=1e-6,
        seed=0,
        fixed_batches=fixed,
        folder=folder,
    )


def timed(private: opusim.PrivateTraining, batches: Any) -> tuple[int, float]:
    """Take a step; return its drawn records and its processor time in seconds."""
    model, optimizer, criterion, loader = private
    x, y = next(batches)
    start = time.process_time()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    taken = time.process_time() - start
    rows, drawn, _ = loader._last  # type: ignore[attr-defined]
    return rows if drawn is None else drawn, taken


def row(data: TensorDataset, batch: int) -> dict[str, float]:
    """Alternate steps of both loops; return medians, and what time tells of the number of records."""
    with TemporaryDirectory() as folder:
        loops = {f: loop(Path(folder) / str(f), data, batch, fixed=f) for f in (False, True)}
        batches = {f: iter(private.data_loader) for f, private in loops.items()}
        found: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        for number in range(WARM + STEPS):
            for f, private in loops.items():
                step = timed(private, batches[f])
                if number >= WARM:
                    found[f].append(step)
        rows = loops[True].physical_batches.rows(0)
        for private in loops.values():
            private.close()
    medians = {f: float(np.median([seconds for _, seconds in steps])) for f, steps in found.items()}
    told = {f: float(np.corrcoef(np.array(steps).T)[0, 1] ** 2) for f, steps in found.items()}
    return {
        "batch": batch,
        "rows": rows,
        "ms": 1e3 * medians[False],
        "fixed_ms": 1e3 * medians[True],
        "told": told[False],
        "fixed_told": told[True],
    }


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [
        (
            f"{row['batch']:g}",
            f"{row['rows']:g}",
            f"{row['rows'] / row['batch']:.2f}",
            f"{row['ms']:.2f}",
            f"{row['fixed_ms']:.2f}",
            f"{row['fixed_ms'] / row['ms']:.2f}",
            f"{row['told']:.2f}",
            f"{row['fixed_told']:.2f}",
        )
        for row in found.get("rows", [])
    ]
    text = (
        f"Private steps of 784-512-10 on the drawn records and on a fixed number of rows (`fixed_batches`), processor "
        f"time of one thread, medians of {found.get('steps')} steps, alternated, {RECORDS:,} records "
        f"({found.get('date')}, {command(MODULE)}). The last columns show the share of the variance of a step's time "
        f"that the number of drawn records explains; chance alone explains {1 / STEPS:.2f}."
    )
    head = ("expected records", "fixed rows", "ratio", "ms", "ms, fixed", "ratio", "time tells", "fixed")
    return section("Fixed physical batches", text, markdown(head, rows)) if rows else ""


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(RECORDS, 784, generator=generator), torch.randint(0, 10, (RECORDS,), generator=generator)
    )
    rows = []
    for batch in BATCHES:
        rows.append(row(data, batch))
        print(", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()))
    save_results(NAME, {"steps": STEPS, "threads": 1, "rows": rows})


if __name__ == "__main__":
    main()
