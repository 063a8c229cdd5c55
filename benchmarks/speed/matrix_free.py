"""What does a projection cost whose matrix no memory holds, over a product with a stored matrix?

10^5 inputs to 10^6 outputs, timed on a slice of the outputs, at batch 1024 and 64, one thread and two; the medium's
entries are computed on the way. Required: 0.7 of the rate of torch's float32 product at batch 1024, 0.4 at batch 64,
under 1 GiB. One more row shows that 10^6 inputs to 10^6 outputs run. It is measured against a product (batch, 8192) by
(8192, 2048), the same number of operations an entry.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim.medium.transmission import Medium
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.matrix_free", "matrix_free"
N_OUTPUTS, SLICE, DEPTH = 10**6, 2048, 8192
BARS = {1024: 0.7, 64: 0.4}
LIMIT_MIB = 1024
MEMORY = """
import json, sys, torch
from opusim.medium.transmission import Medium
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
n, batch, outputs = (int(a) for a in sys.argv[1:])
base = peak()
x = torch.randint(-1, 2, (batch, n), dtype=torch.float32)
Medium(n, 10**6, 1).project(x, range(outputs))
print(json.dumps([base, peak()]))
"""


def peak_mib(n_inputs: int, batch: int, outputs: int) -> tuple[float, float]:
    """Largest resident memory of a process of its own, MiB: after the imports, and after the work."""
    call = [sys.executable, "-c", MEMORY, str(n_inputs), str(batch), str(outputs)]
    base, peak = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    return base, peak


def measure(threads: int, batch: int, n_inputs: int, repeats: int) -> dict[str, Any]:
    """Seconds an entry and record of both, and the ratio of the rates."""
    torch.set_num_threads(threads)
    x = torch.randint(-1, 2, (batch, n_inputs), generator=torch.Generator().manual_seed(1)).float()
    medium = Medium(n_inputs, N_OUTPUTS, 1)
    matrix, part = torch.randn(DEPTH, SLICE), x[:, :DEPTH].contiguous()
    seconds = interleaved(
        {"projection": lambda: medium.project(x, range(SLICE)), "product": lambda: part @ matrix},
        repeats=repeats,
        warm_up=1,
    )
    rate = (seconds["product"] / DEPTH) / (seconds["projection"] / n_inputs)
    base, peak = peak_mib(n_inputs, batch, SLICE)
    shape = {"threads": threads, "batch": batch, "n_inputs": n_inputs, "n_outputs": N_OUTPUTS, "slice": SLICE}
    return shape | {"seconds": seconds, "rate_ratio": rate, "imports_mib": base, "peak_mib": peak}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a line for each shape, batch and number of threads."""
    shape = ("threads", "inputs", "outputs (timed)", "batch")
    lines = []
    for row in rows:
        bar = f"{BARS[row['batch']]:g}" if row["n_inputs"] == 10**5 else "runs"
        cells = (f"{row['n_inputs']:,}", f"{row['n_outputs']:,} ({row['slice']:,})", str(row["batch"]))
        memory = f"{row['peak_mib']:.0f} MiB ({row['imports_mib']:.0f} of them imports)"
        lines.append((str(row["threads"]), *cells, f"{row['rate_ratio']:.2f}", bar, memory))
    title = "Matrix-free projection against a stored float32 product, rate an entry"
    print_table(title, (*shape, "of the product's rate", "required", "peak memory"), lines)


def speed_rows() -> list[Row]:
    """Return the rate of a projection without the matrix over that of a product with one."""
    return [
        (
            f"rate of a projection without its matrix, {entry['n_inputs']:,} to {entry['n_outputs']:,}, batch "
            f"{entry['batch']}, {entry['threads']} thread(s)",
            f"{entry['rate_ratio']:.2f} of a stored float32 product, {entry['peak_mib']:.0f} MiB",
            command(MODULE),
        )
        for entry in load_results(NAME).get("rows", [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    started = time.perf_counter()
    rows = [measure(threads, batch, 10**5, repeats) for batch in BARS for threads in (1, 2)]
    rows.append(measure(2, 64, 10**6, 1))
    print_rows(rows)
    print(f"{time.perf_counter() - started:.0f} s in all; memory limit {LIMIT_MIB} MiB")
    save_results(NAME, {"bars": BARS, "limit_mib": LIMIT_MIB, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
