"""What does a product on a simulated crossbar cost, noise included, over torch's float32 product?

4096 x 4096, batch 256, one thread, in processor time. Required: at most 3.5 times the float32 product without the drop
of voltage; the read noise of `pcm` depends on the input and takes a second product. With the drop it is reported only.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.results_file import save_results
from benchmarks.timing import interleaved
from opusim import open_device

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


if __name__ == "__main__":
    save_results(NAME, measure())
