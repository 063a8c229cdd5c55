"""What do optical features cost on the twin, over the two products that its optics stand for, and what one vector?

Features: images of 784 pixels, 784 to 10,000, as bytes through `device.intensities`, over torch's float32 products P x
and Q x of the same sizes; both write into memory that is there. Required: at most 1.5 times the products' time (aim
1.2), and 60,000 images into a file with a peak of memory below 1 GiB above the imports.

One vector: 784 to 1,000, on the bare device and through each wrapper. Required: at most 0.6 ms.

Processor time of one thread. A vector's time is that of the fastest turn, because other processes on a machine take
parts of the cache; its median is stored next to it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved_turns
from opusim import NoisyDevice, OpticalFeatures, OpticalLayer, open_device
from opusim.lightonml import OPU
from opusim.lightonml.projections import sklearn as sklearn_map
from opusim.lightonml.projections import torch as torch_map
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.features", "features"
N_INPUTS, N_FEATURES, N_COMPONENTS, RECORDS, ALL_RECORDS = 784, 10_000, 1000, 4000, 60_000
DEVICES = ("camera", "camera_fitted")
BAR, AIM, LIMIT_MIB, LIMIT_MS = 1.5, 1.2, 1024, 0.6
ON = 0.2
"""Share of the mirrors that are on, as in MNIST above the threshold 25."""
MEMORY = """
import sys, tempfile, numpy as np
from opusim import open_device
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
name, *sizes, share = sys.argv[1:]
n, n_inputs, n_outputs = (int(size) for size in sizes)
with open_device(name, n_inputs=n_inputs, n_outputs=1) as device:  # what a device imports when it is opened
    device.intensities(np.ones((1, n_inputs), np.uint8))
before = status("VmRSS")
x = (np.random.default_rng(0).random((n, n_inputs), dtype=np.float32) < float(share)).astype(np.uint8)
with tempfile.TemporaryDirectory() as folder:
    out = np.lib.format.open_memmap(folder + "/f.npy", mode="w+", dtype=np.uint8, shape=(n, n_outputs))
    with open_device(name, n_inputs=n_inputs, n_outputs=n_outputs) as device:
        device.intensities(x, out=out)
print(status("VmHWM") - before)
"""


def images(records: int) -> np.ndarray:
    """Return frames, uint8, shape (records, N_INPUTS)."""
    return (np.random.default_rng(0).random((records, N_INPUTS)) < ON).astype(np.uint8)


def feature_rows(repeats: int) -> list[dict[str, Any]]:
    """Return seconds of features and products, and their ratio: the median over turns of the paired ratios."""
    x, rows = images(RECORDS), []
    as_floats, codes = torch.from_numpy(x).float(), np.empty((RECORDS, N_FEATURES), dtype=np.uint8)
    product = torch.empty(RECORDS, N_FEATURES)
    for name in DEVICES:
        with open_device(name, n_inputs=N_INPUTS, n_outputs=N_FEATURES) as device:
            p, q = (device.speckle.dense(plane) for plane in (REAL_PLANE, IMAGINARY_PLANE))

            def products(p: torch.Tensor = p, q: torch.Tensor = q) -> None:
                torch.mm(as_floats, p, out=product)
                torch.mm(as_floats, q, out=product)

            def features(device: NoisyDevice = device) -> None:
                device.intensities(x, out=codes)

            turns = interleaved_turns(
                {"features": features, "products": products},
                repeats=repeats,
                warm_up=1,
                clock=time.process_time,
            )
        pairs = zip(turns["features"], turns["products"], strict=True)
        seconds = {work: statistics.median(values) for work, values in turns.items()}
        ratio = statistics.median(own / other for own, other in pairs)
        rows.append({"device": name, "seconds": seconds, "time_ratio": ratio, "peak_mib": peak_mib(name)})
    return rows


def peak_mib(name: str) -> float:
    """Return the peak of memory of all images, MiB above what the imports hold; pages of the file count too."""
    sizes = (str(size) for size in (ALL_RECORDS, N_INPUTS, N_FEATURES))
    call = [sys.executable, "-c", MEMORY, name, *sizes, str(ON)]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def wrappers(device: NoisyDevice) -> dict[str, Callable[[], object]]:
    """Return a call of one vector for the bare device and for each wrapper around it."""
    x = images(50)
    one, vector, tensor = x[:1], x[0], torch.from_numpy(x[:1])
    features = OpticalFeatures(N_COMPONENTS, device=device).fit(x)
    layer = OpticalLayer(device)
    batches, online = (
        OPU(N_COMPONENTS, device=device).fit1d(n_features=N_INPUTS, online=online) for online in (False, True)
    )
    transformer = sklearn_map.OPUMap(N_COMPONENTS, opu=OPU(N_COMPONENTS, device=device)).fit(one)
    module = torch_map.OPUMap(N_COMPONENTS, opu=OPU(N_COMPONENTS, device=device))
    module.fit(tensor)
    return {
        "device.intensities": lambda: device.intensities(one),
        "OpticalFeatures": lambda: features.transform(one),
        "OpticalLayer": lambda: layer(tensor),
        "lightonml OPU": lambda: batches.transform(vector),
        "lightonml OPU, online": lambda: online.transform(vector),
        "lightonml OPUMap, scikit-learn": lambda: transformer.transform(one),
        "lightonml OPUMap, torch": lambda: module(tensor),
    }


def vector_rows(repeats: int, calls: int) -> list[dict[str, Any]]:
    """Return milliseconds of one vector: the fastest turn, and the median."""
    rows = []
    for name in DEVICES:
        with open_device(name, n_inputs=N_INPUTS, n_outputs=N_COMPONENTS) as device:
            work = wrappers(device)
            turns = interleaved_turns(work, repeats=repeats, inner=calls, clock=time.process_time)
        for wrapper, seconds in turns.items():
            times = {"fastest_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}
            rows.append({"device": name, "wrapper": wrapper, **times})
    return rows


def print_rows(features: Sequence[dict[str, Any]], vectors: Sequence[dict[str, Any]]) -> None:
    """Print both tables."""
    lines = [
        (row["device"], f"{row['time_ratio']:.2f}", f"{BAR:g}", f"{row['peak_mib']:.0f} MiB", f"{LIMIT_MIB}")
        for row in features
    ]
    title = f"Features {N_INPUTS} to {N_FEATURES:,}, one thread"
    print_table(title, ("device", "of two products", "required", "peak memory", "required"), lines)
    lines = [
        (row["device"], row["wrapper"], f"{row['fastest_ms']:.2f} ms", f"{row['median_ms']:.2f} ms")
        for row in vectors
    ]
    title = f"One vector {N_INPUTS} to {N_COMPONENTS:,}, required {LIMIT_MS:g} ms"
    print_table(title, ("device", "through", "fastest turn", "median"), lines)


def speed_rows() -> list[Row]:
    """Return the ratio and the memory of features, and the time of one vector."""
    results, rows = load_results(NAME), []
    for entry in results.get("features", []):
        what = (
            f"time of features of the `{entry['device']}` twin 784 to 10,000, all noise included, 1 thread(s)"
        )
        figure = (
            f"{entry['time_ratio']:.2f} of the two float32 products they stand for, "
            f"{entry['peak_mib']:.0f} MiB for 60,000 images"
        )
        rows.append((what, figure, command(MODULE)))
    for name in DEVICES:
        times = [row["fastest_ms"] for row in results.get("vectors", []) if row["device"] == name]
        if times:
            figure = f"bare {times[0]:.2f} ms, slowest wrapper {max(times[1:]):.2f} ms"
            rows.append((f"time of one vector 784 to 1,000 on the `{name}` twin", figure, command(MODULE)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100, help="one-vector calls in a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    vectors = vector_rows(3 * options.repeats, options.calls)
    features = feature_rows(options.repeats)
    print_rows(features, vectors)
    shape = {"n_inputs": N_INPUTS, "n_features": N_FEATURES, "records": RECORDS, "repeats": options.repeats}
    required = {"time_ratio": BAR, "aim": AIM, "peak_mib": LIMIT_MIB, "vector_ms": LIMIT_MS}
    save_results(NAME, {"shape": shape, "required": required, "features": features, "vectors": vectors})


if __name__ == "__main__":
    main()
