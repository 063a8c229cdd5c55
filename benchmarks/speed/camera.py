"""What does the physical twin cost, noise included, over the complex product that its optics stand for?

4096 inputs to 16,384 outputs, batch 256, one thread and two. Required: a frame a vector at most 1.5 times the time of
torch's complex64 product of that shape; a ternary vector's four frames at most 1.5 times two such products, since
R(a - x) = Ra - Rx. Binary frames are real, so two float32 products do the work of one complex product.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.projection import BATCH, N_INPUTS, N_OUTPUTS, ternary_batch
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.camera", "camera"
FRAMES, TERNARY, PRODUCT = "a frame a vector", "ternary, four frames", "complex64 product"
PRODUCTS = {FRAMES: 1, TERNARY: 2}
BAR = 1.5


def measure(threads: int, name: str, repeats: int) -> dict[str, Any]:
    """Median seconds, and the twin's time over that of the products it needs."""
    torch.set_num_threads(threads)
    x = ternary_batch()
    frames, as_complex = (x > 0).float(), x.to(torch.complex64)
    with open_device(name, n_inputs=N_INPUTS, n_outputs=N_OUTPUTS) as device:
        parts = (device.speckle.dense(plane) for plane in (REAL_PLANE, IMAGINARY_PLANE))
        matrix = torch.complex(*parts)
        seconds = interleaved(
            {
                FRAMES: lambda: device.intensities(frames),
                TERNARY: lambda: device.project(x),
                PRODUCT: lambda: as_complex @ matrix,
            },
            repeats=repeats,
        )
    ratios = {work: seconds[work] / (count * seconds[PRODUCT]) for work, count in PRODUCTS.items()}
    return {"threads": threads, "device": name, "seconds": seconds, "time_ratio": ratios}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a line for each device, number of threads and piece of work."""
    header = (
        "threads",
        "device",
        "work",
        "its time",
        "complex64 products",
        "their time",
        "ratio",
        "required",
    )
    cells = []
    for row in rows:
        for work, count in PRODUCTS.items():
            times = (row["seconds"][work], count * row["seconds"][PRODUCT])
            own, product = (f"{1e3 * seconds:.0f} ms" for seconds in times)
            ratio = f"{row['time_ratio'][work]:.2f}"
            start = (str(row["threads"]), row["device"], work)
            cells.append((*start, own, str(count), product, ratio, f"{BAR:g}"))
    title = f"Camera twin {N_INPUTS} to {N_OUTPUTS}, batch {BATCH}, all noise included"
    print_table(title, header, cells)


def speed_rows() -> list[Row]:
    """Return the time of the twin over that of the products that its optics stand for."""
    return [
        (
            f"time of the `{entry['device']}` twin 4096 to 16384, all noise included, {entry['threads']} thread(s)",
            ", ".join(f"{work}: {ratio:.2f}" for work, ratio in entry["time_ratio"].items())
            + " of the complex64 products it stands for",
            command(MODULE),
        )
        for entry in load_results(NAME).get("rows", [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    names = ("camera", "camera_low_light")  # many counts are below 64 electrons in the second: the slow way
    rows = [measure(threads, name, repeats) for name in names for threads in (1, 2)]
    print_rows(rows)
    shape = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS, "batch": BATCH, "repeats": repeats}
    save_results(NAME, {"shape": shape, "bar": BAR, "rows": rows})


if __name__ == "__main__":
    main()
