"""What does a product on a simulated crossbar cost, noise included, over torch's float32 product?

4096 x 4096, batch 256, one thread, in processor time. Required: at most 3.5 times the float32 product without the drop
of voltage; the read noise of `pcm` depends on the input and takes a second product. With the drop it is reported only.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.tables import print_table

MODULE, NAME = "benchmarks.analog.product", "analog_product"
SIZE, BATCH, REPEATS = 4096, 256, 5
PRODUCT = "float32 product"
REQUIRED = 3.5


def measure() -> dict[str, Any]:
    """Median seconds of a product, and each device's over torch's."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.rand(rows, SIZE, generator=generator) * 2 - 1 for rows in (BATCH, SIZE))
    work = {PRODUCT: lambda: x @ w.T}
    for name in ("pcm", "reram"):
        for label, changes in ((name, {"ir_drop": 0.0}), (f"{name} with voltage drop", {})):
            crossbar = {"crossbar": {"product": changes}} if changes else {}
            device = open_device(name, n_inputs=SIZE, n_outputs=SIZE, **crossbar)
            device.require("program").program(w)
            work[label] = lambda device=device: device.multiply(x)
    seconds = interleaved(work, repeats=REPEATS, warm_up=1, clock=time.process_time)
    ratios = {name: each / seconds[PRODUCT] for name, each in seconds.items() if name != PRODUCT}
    return {"seconds": seconds, "time_ratio": ratios}


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    text = (
        f"{SIZE} x {SIZE}, batch {BATCH}, one thread, medians of processor time in one process ({found['date']}, "
        f"{command(MODULE)}). Required without voltage drop: at most {REQUIRED:g} times torch's float32 product."
    )
    rows = [(name, f"{ratio:.2f}") for name, ratio in found["time_ratio"].items()]
    return section("Time of a product", text, markdown(("device", "times the float32 product"), rows))


def main() -> None:
    """Measure, print and save."""
    found = measure()
    rows = [
        (name, f"{1e3 * found['seconds'][name]:.0f} ms", f"{ratio:.2f}")
        for name, ratio in found["time_ratio"].items()
    ]
    print_table(f"Products {SIZE} x {SIZE}, batch {BATCH}", ("device", "time", "ratio"), rows)
    save_results(NAME, found)


if __name__ == "__main__":
    main()
