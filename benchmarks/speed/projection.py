"""What does a simulated ternary projection cost, noise included, over the bare matrix product?

4096 inputs to 16,384 outputs, batch 256, one thread and two. Required: at least 0.9 of the speed of torch's
float32 product of the same shape, and five times the speed of lightonml's simulated device, which needs two
passes (a positive and a negative frame) for a ternary vector. `make bench` installs lightonml; without it
that row is left out.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.projection", "projection"
N_INPUTS, N_OUTPUTS, BATCH = 4096, 16384, 256
DEVICE, PRODUCT, LIGHTON = "gaussian device", "float32 product", "lightonml, two passes"
BARS = {PRODUCT: 0.9, LIGHTON: 5.0}


def ternary_batch(size: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-1, 2, (size, N_INPUTS), generator=generator).float()


def lighton_passes(x: torch.Tensor) -> Callable[[], object] | None:
    """Two passes through lightonml's simulated device, or None if it is not installed."""
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    try:
        from lightonml import OPU
        from lightonml.internal.simulated_device import SimulatedOpuDevice
    except ImportError:
        return None
    simulated = SimulatedOpuDevice()
    simulated.build_random_matrix(N_INPUTS, N_OUTPUTS, 1)
    opu = OPU(
        n_components=N_OUTPUTS,
        opu_device=simulated,
        max_n_features=N_INPUTS,
        rescale="none",
        disable_pbar=True,
        verbose_level=0,
    )
    opu.open()
    opu.fit1d(n_features=N_INPUTS, online=False)
    positive = (x > 0).to(torch.uint8).numpy()
    negative = (x < 0).to(torch.uint8).numpy()
    return lambda: np.subtract(opu.linear_transform(positive), opu.linear_transform(negative))


def measure(threads: int, work: dict[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Median seconds of each piece of work, and the device's speed as a ratio to the others."""
    torch.set_num_threads(threads)
    with threadpool_limits(threads):  # numpy's product, which lightonml uses
        seconds = interleaved(work, repeats=repeats)
    ratios = {name: seconds[name] / seconds[DEVICE] for name in work if name != DEVICE}
    return {"threads": threads, "seconds": seconds, "speed_ratio": ratios}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a line for each rival and number of threads."""
    cells = []
    for row in rows:
        for name, ratio in row["speed_ratio"].items():
            times = (f"{1e3 * row['seconds'][key]:.1f} ms" for key in (name, DEVICE))
            cells.append((str(row["threads"]), name, *times, f"{ratio:.2f}", f"{BARS[name]:g}"))
    title = f"Ternary projection {N_INPUTS} to {N_OUTPUTS}, batch {BATCH}, noise included"
    header = ("threads", "against", "its time", "device's time", "device is faster by", "required")
    print_table(title, header, cells)


def speed_rows() -> list[Row]:
    """Return the device's speed over that of its rivals."""
    rows: list[Row] = []
    for entry in load_results(NAME).get("rows", []):
        ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in entry["speed_ratio"].items())
        name = f"speed of a ternary projection 4096 to 16384, noise included, {entry['threads']} thread(s)"
        rows.append((name, ratios, command(MODULE)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    x = ternary_batch()
    with open_device("gaussian", n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        matrix = device.matrix().T.contiguous()
        work: dict[str, Callable[[], object]] = {
            DEVICE: lambda: device.project(x),
            PRODUCT: lambda: x @ matrix,
        }
        passes = lighton_passes(x)
        if passes is None:
            print("lightonml is not installed: its row is left out; `make bench` installs it")
        else:
            work[LIGHTON] = passes
        rows = [measure(threads, work, repeats) for threads in (1, 2)]
    print_rows(rows)
    shape = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS, "batch": BATCH, "repeats": repeats}
    save_results(NAME, {"shape": shape, "bars": BARS, "rows": rows})


if __name__ == "__main__":
    main()
