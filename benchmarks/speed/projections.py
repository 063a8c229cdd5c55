"""What do simulated projections and features cost over the products that they stand for?

    python -m benchmarks.speed.projections [projection] [camera] [matrix_free] [features]     (all four by default)

Noise included; medians of interleaved turns.

- `projection`: a ternary projection 4096 to 16,384, batch 256, one thread and two. Required: 0.9 of the speed of
  torch's float32 product, and five times that of lightonml's simulated device, which needs a positive and a negative
  frame; without lightonml (`make bench` installs it) that row is left out.
- `camera`: the physical twin at that size. Required: a frame a vector at most 1.5 times the time of a complex64
  product; a ternary vector's four frames at most 1.5 times two such products, since R(a - x) = Ra - Rx.
- `matrix_free`: 10^5 inputs to 10^6 outputs, timed on a slice of the outputs, whose matrix no memory holds. Required:
  0.7 of the rate an entry of a stored float32 product at batch 1024, 0.4 at batch 64, under 1 GiB. One more row shows
  that 10^6 inputs run.
- `features`: 784 to 10,000 on the twin, as bytes, over the float32 products P x and Q x, one thread. Required: at most
  1.5 times their time, and 60,000 images into a file with a peak of memory below 1 GiB above the imports. And one
  vector, 784 to 1,000, bare and through each wrapper, the fastest turn. Required: at most 0.6 ms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks import timing
from benchmarks.options import program_of_parts
from benchmarks.timing import Step, interleaved_turns, memory_rise, with_threads
from opusim import NoisyDevice, OpticalFeatures, OpticalLayer, open_device
from opusim.lightonml import OPU
from opusim.lightonml.projections import sklearn as sklearn_map
from opusim.lightonml.projections import torch as torch_map
from opusim.medium.transmission import IMAGINARY_PLANE, REAL_PLANE, Medium

MODULE = "benchmarks.speed.projections"
N_INPUTS, N_OUTPUTS, BATCH, REPEATS = 4096, 16384, 256, 11
WINDOW = {"n_inputs": N_INPUTS, "n_outputs": N_OUTPUTS}
DEVICE, PRODUCT, LIGHTON = "gaussian device", "float32 product", "lightonml, two passes"
FRAMES, TERNARY, COMPLEX = "a frame a vector", "ternary, four frames", "complex64 product"
FREE_OUTPUTS, SLICE, DEPTH, FREE_BARS = 10**6, 2048, 8192, {1024: 0.7, 64: 0.4}
PIXELS, FEATURES, COMPONENTS, RECORDS, ALL_RECORDS = 784, 10_000, 1000, 4000, 60_000
TWINS, LIMIT_MIB = ("camera", "camera_fitted"), 1024


def ternary_batch(size: int = BATCH, n_inputs: int = N_INPUTS) -> torch.Tensor:
    """Return invented vectors of -1, 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-1, 2, (size, n_inputs), generator=generator).float()


def lighton_passes(x: torch.Tensor) -> dict[str, Step]:
    """Return two passes through lightonml's simulated device; nothing if it is not installed."""
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
    try:
        from lightonml import OPU as LightOn
        from lightonml.internal.simulated_device import SimulatedOpuDevice
    except ImportError:
        print("lightonml is not installed: its row is left out; `make bench` installs it")
        return {}
    simulated = SimulatedOpuDevice()
    simulated.build_random_matrix(N_INPUTS, N_OUTPUTS, 1)
    options = {"max_n_features": N_INPUTS, "rescale": "none", "disable_pbar": True, "verbose_level": 0}
    opu = LightOn(n_components=N_OUTPUTS, opu_device=simulated, **options)
    opu.open()
    opu.fit1d(n_features=N_INPUTS, online=False)
    positive, negative = ((sign * x > 0).to(torch.uint8).numpy() for sign in (1, -1))
    return {LIGHTON: lambda: np.subtract(opu.linear_transform(positive), opu.linear_transform(negative))}


def measure_projection() -> dict[str, Any]:
    """Return the device's speed over that of its rivals."""
    x = ternary_batch()
    with open_device("gaussian", **WINDOW) as device:
        matrix = device.matrix().T.contiguous()
        work: dict[str, Step] = {DEVICE: lambda: device.project(x), PRODUCT: lambda: x @ matrix}
        work |= lighton_passes(x)
        rows = [
            {
                "threads": threads,
                "seconds": seconds,
                "speed_ratio": {name: seconds[name] / seconds[DEVICE] for name in work if name != DEVICE},
            }
            for threads, seconds in with_threads(work, repeats=REPEATS)
        ]
    bars = {PRODUCT: 0.9, LIGHTON: 5.0}
    return {"shape": {**WINDOW, "batch": BATCH, "repeats": REPEATS}, "bars": bars, "rows": rows}


def measure_camera() -> dict[str, Any]:
    """Return the twin's time over that of the products that its optics stand for."""
    x, rows = ternary_batch(), []
    frames, as_complex = (x > 0).float(), x.to(torch.complex64)
    for name in ("camera", "camera_low_light"):  # counts below 64 electrons take the slow way
        with open_device(name, **WINDOW) as device:
            matrix = torch.complex(*(device.speckle.dense(plane) for plane in (REAL_PLANE, IMAGINARY_PLANE)))
            work = {
                FRAMES: lambda device=device: device.intensities(frames),
                TERNARY: lambda device=device: device.project(x),
                COMPLEX: lambda matrix=matrix: as_complex @ matrix,
            }
            for threads, seconds in with_threads(work, repeats=5):
                ratios = {
                    each: seconds[each] / (n * seconds[COMPLEX]) for each, n in ((FRAMES, 1), (TERNARY, 2))
                }
                rows.append({"threads": threads, "device": name, "seconds": seconds, "time_ratio": ratios})
    return {"shape": {**WINDOW, "batch": BATCH, "repeats": 5}, "bar": 1.5, "rows": rows}


def free_projection(batch: int, n_inputs: int) -> Step:
    """Return a projection whose matrix is computed on the way."""
    x, medium = ternary_batch(batch, n_inputs), Medium(n_inputs, FREE_OUTPUTS, 1)
    return lambda: medium.project(x, range(SLICE))


def measure_matrix_free() -> dict[str, Any]:
    """Return the rate of a projection over that of a product with as many operations an entry, and its memory."""
    rows = []
    for n_inputs, batch in (*((10**5, batch) for batch in FREE_BARS), (10**6, 64)):
        part, matrix = ternary_batch(batch, DEPTH), torch.randn(DEPTH, SLICE)
        work = {"projection": free_projection(batch, n_inputs), "product": lambda: part @ matrix}  # noqa: B023
        peak = memory_rise(MODULE, "matrix_free", str(batch), str(n_inputs))
        for threads, seconds in with_threads(work, repeats=3, warm_up=1):
            shape = {"threads": threads, "batch": batch, "n_inputs": n_inputs, "n_outputs": FREE_OUTPUTS}
            rate = (seconds["product"] / DEPTH) / (seconds["projection"] / n_inputs)
            rows.append(shape | {"slice": SLICE, "seconds": seconds, "rate_ratio": rate, "peak_mib": peak})
    return {"bars": FREE_BARS, "limit_mib": LIMIT_MIB, "repeats": 3, "rows": rows}


def images(records: int) -> np.ndarray:
    """Return frames, uint8, a fifth of whose mirrors are on, as in MNIST above the threshold 25."""
    return (np.random.default_rng(0).random((records, PIXELS), dtype=np.float32) < 0.2).astype(np.uint8)


def features_into_a_file(name: str) -> None:
    """Write the features of all images of a device."""
    x = images(ALL_RECORDS)
    window = {"n_inputs": PIXELS, "n_outputs": FEATURES}
    with tempfile.TemporaryDirectory() as folder, open_device(name, **window) as device:
        shape = (ALL_RECORDS, FEATURES)
        device.intensities(x, out=np.lib.format.open_memmap(f"{folder}/f.npy", "w+", np.uint8, shape))


def feature_row(name: str) -> dict[str, Any]:
    """Return seconds of features and products, and the median of their paired ratios."""
    x, codes = images(RECORDS), np.empty((RECORDS, FEATURES), dtype=np.uint8)
    as_floats, product = torch.from_numpy(x).float(), torch.empty(RECORDS, FEATURES)
    with open_device(name, n_inputs=PIXELS, n_outputs=FEATURES) as device:
        p, q = (device.speckle.dense(plane) for plane in (REAL_PLANE, IMAGINARY_PLANE))
        work: dict[str, Step] = {
            "features": lambda: device.intensities(x, out=codes),
            "products": lambda: (torch.mm(as_floats, p, out=product), torch.mm(as_floats, q, out=product)),
        }
        turns = interleaved_turns(work, repeats=5, warm_up=1, clock=time.process_time)
    ratio = statistics.median(a / b for a, b in zip(turns["features"], turns["products"], strict=True))
    seconds = {each: statistics.median(values) for each, values in turns.items()}
    peak = memory_rise(MODULE, "features", name)
    return {"device": name, "seconds": seconds, "time_ratio": ratio, "peak_mib": peak}


def wrappers(device: NoisyDevice) -> dict[str, Step]:
    """Return a call of one vector for the bare device and for each wrapper around it."""
    x = images(50)
    one, vector, tensor = x[:1], x[0], torch.from_numpy(x[:1])
    features = OpticalFeatures(COMPONENTS, device=device).fit(x)
    layer = OpticalLayer(device)
    batches, online = (
        OPU(COMPONENTS, device=device).fit1d(n_features=PIXELS, online=online) for online in (False, True)
    )
    transformer = sklearn_map.OPUMap(COMPONENTS, opu=OPU(COMPONENTS, device=device)).fit(one)
    module = torch_map.OPUMap(COMPONENTS, opu=OPU(COMPONENTS, device=device))
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


def measure_features() -> dict[str, Any]:
    """Return the ratio and the memory of features, and milliseconds of one vector."""
    torch.set_num_threads(1)
    vectors = []
    for name in TWINS:
        with open_device(name, n_inputs=PIXELS, n_outputs=COMPONENTS) as device:
            turns = interleaved_turns(wrappers(device), repeats=15, inner=100, clock=time.process_time)
        for wrapper, seconds in turns.items():
            times = {"fastest_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}
            vectors.append({"device": name, "wrapper": wrapper, **times})
    shape = {"n_inputs": PIXELS, "n_features": FEATURES, "records": RECORDS, "repeats": 5}
    required = {"time_ratio": 1.5, "aim": 1.2, "peak_mib": LIMIT_MIB, "vector_ms": 0.6}
    features = [feature_row(name) for name in TWINS]
    return {"shape": shape, "required": required, "features": features, "vectors": vectors}


PARTS = {
    "projection": measure_projection,
    "camera": measure_camera,
    "matrix_free": measure_matrix_free,
    "features": measure_features,
}
"""What measures each file of results."""


def print_memory(part: str, *arguments: str) -> None:
    """Print the peak of memory of a projection, or by how much all features of a device raise it."""
    if part == "matrix_free":
        batch, n_inputs = map(int, arguments)
        free_projection(batch, n_inputs)()
        print(timing.resident_mib("VmHWM"))
        return
    (name,) = arguments
    with open_device(name, n_inputs=PIXELS, n_outputs=1) as device:
        compile_ = lambda: device.intensities(np.ones((1, PIXELS), np.uint8))  # noqa: E731
        timing.print_memory_rise(compile_, lambda: lambda: features_into_a_file(name))


if __name__ == "__main__":
    print_memory(*sys.argv[2:]) if sys.argv[1:2] == ["--memory"] else program_of_parts(PARTS)
