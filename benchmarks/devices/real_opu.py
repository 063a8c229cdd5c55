"""Is the twin as noisy as the one real OPU with public measurements?

Measurements of hardware: github.com/joneswack/opu-kernel-experiments, commit a37bc6a, csv/feature_evaluation, files
FashionMNIST_real_opu_2.csv (alpha = 20,000), FashionMNIST_real_opu_2_new_param.csv (alpha = 1,000),
FashionMNIST_real_opu_4.csv, FashionMNIST_sim_opu_2.csv and FashionMNIST_sim_opu_4.csv (an ideal matrix), columns
num_features and test_score. Protocol, as in that repository: FashionMNIST, pixels above 10 are mirrors that are on, 16
more are always on; features y = |R x|^degree, divided by their mean of |R x|^2 / |x|^2 (x without the 16), by the root
of their number and, at degree 4, by 10^4; ridge on targets -1 and 1 without an intercept; 60,000 records to train,
10,000 to test. n features are the first n columns of one map.

Each device is read with several maps (seeds of the medium). `fit` tries the light, the background light and the size of
grains on degree 2 at 500 to 5,000 features, with one map; `camera_fitted` has the numbers of the smallest distance to
the middle between the two tunings. Other sizes and degree 4 are left to check it. Required: within half a point of the
middle between the two tunings at 1,000 and 10,000, and below the ideal device by two standard errors from 500 to 10,000
features (paired over maps).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from benchmarks.markdown import markdown, verdict, with_error
from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from opusim import NoisyDevice, open_device
from opusim.training.data import load_dataset

MODULE, NAME = "benchmarks.devices.real_opu", "real_opu"
THRESHOLD, ALWAYS_ON, CLASSES, BATCH = 10 / 255, 16, 10, 2000
SIZES, FITTED_SIZES = (500, 1000, 2000, 5000, 10000), (500, 1000, 2000, 5000)
ALPHAS, SCALES = {2: (1000.0, 20000.0), 4: (100.0,)}, {2: 1.0, 4: 1e-4}
DEVICES, MAPS, SEED = ("ideal", "camera_fitted", "camera"), range(5), 20210603
REAL: dict[tuple[int, float], dict[int, float]] = {
    (2, 1000.0): {500: 82.81, 1000: 84.34, 2000: 85.70, 5000: 87.22, 10000: 87.78},
    (2, 20000.0): {500: 82.10, 1000: 83.72, 2000: 85.09, 5000: 86.25, 10000: 86.56},
    (4, 100.0): {500: 81.59, 1000: 83.92, 2000: 85.29, 5000: 86.57, 10000: 87.33},
}
"""Test accuracy of the hardware, per cent, by degree and alpha."""
MOST_DISTANCE, STANDARD_ERRORS = 0.5, 2.0
GRID = [
    *((b, s, grain) for grain in (1, 4) for b in (0.0, 1.5, 3.0) for s in (200.0, 700.0)),
    *((1.5, s, 4) for s in (300.0, 400.0)),
    *((b, 200.0, 4) for b in (0.5, 0.8, 1.0)),
    (1.2, 250.0, 4),
    *((b, s, 4) for b in (0.0, 0.3) for s in (80.0, 120.0)),
    *((b, s, 8) for b in (1.0, 1.5) for s in (300.0, 700.0)),
]
"""Background light over the mean light of a frame, that mean in electrons, and the pixels that a grain spans."""


class Moments(NamedTuple):
    """What ridge regression needs of a map's features.

    Attributes:
        gram: sum of f f^T over training records, float64, shape (n, n).
        cross: sum of f t^T with targets t, float64, shape (n, classes).
        power: mean over all records of f_2 / (2 |x|^2) with f_2 = |R x|^2, of each feature, float64, shape (n,).
        test: features of the test records, float32, shape (records, n).
    """

    gram: Tensor
    cross: Tensor
    power: Tensor
    test: Tensor


@cache
def frames() -> tuple[Tensor, Tensor, Tensor]:
    """Return the frames of all records, uint8, the training ones first; their labels; and |x|^2 without the bias."""
    data = load_dataset("fashion-mnist", validation_fraction=0.0, split_seed=0)
    if data.test is None:
        raise RuntimeError("FashionMNIST has no test records here; set OPUSIM_DATA")
    scale = data.standardisation
    pixels = torch.cat([data.train.x, data.test.x]) * scale.std + scale.mean
    shown = (pixels > THRESHOLD + 1e-6).to(torch.uint8)
    on = torch.ones(len(shown), ALWAYS_ON, dtype=torch.uint8)
    return torch.cat([shown, on], dim=1), torch.cat([data.train.y, data.test.y]), shown.sum(1).double()


def blocks(device: NoisyDevice) -> Iterator[tuple[slice, Tensor]]:
    """Yield intensities, float32, shape (BATCH, n)."""
    shown = frames()[0]
    for start in range(0, len(shown), BATCH):
        rows = slice(start, min(start + BATCH, len(shown)))
        yield rows, device.intensities(shown[rows])


def moments(device: NoisyDevice, degree: int) -> Moments:
    """Return the moments of a map; the Gram matrix is summed about the first block's mean, for float32's sake."""
    _, labels, size = frames()
    n, n_train = device.n_outputs, len(labels) - 10_000
    gram, sums = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    cross, power = torch.zeros(n, CLASSES, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    test, centre = torch.empty(10_000, n), None
    for rows, numbers in blocks(device):
        power += (numbers.double() / (2 * size[rows, None])).sum(0) / len(labels)
        features = numbers.square_().mul_(1e-4) if degree == 4 else numbers
        if rows.start >= n_train:
            test[rows.start - n_train : rows.stop - n_train] = features
            continue
        centre = features.mean(0) if centre is None else centre
        rest = features - centre
        gram += rest.T @ rest
        sums += rest.sum(0, dtype=torch.float64)
        targets = 2.0 * torch.nn.functional.one_hot(labels[rows], CLASSES).double() - 1.0
        cross += features.double().T @ targets
    if centre is None:
        raise RuntimeError("there are no training records")
    middle = centre.double()
    gram += torch.outer(middle, sums) + torch.outer(sums, middle) + n_train * torch.outer(middle, middle)
    return Moments(gram, cross, power, test)


def accuracies(found: Moments, degree: int, sizes: Sequence[int]) -> dict[str, float]:
    """Return test accuracies, per cent, by alpha and number of features."""
    labels = frames()[1][-len(found.test) :]
    result = {}
    for n in sizes:
        unit = 0.5 / float(found.power[:n].mean())
        factor = unit ** (degree // 2) * SCALES[degree] / math.sqrt(n)
        factor *= 1e4 if degree == 4 else 1.0  # taken off in `moments`
        for alpha in ALPHAS[degree]:
            system = found.gram[:n, :n].clone()
            system.diagonal().add_(alpha / factor**2)
            solution = cho_solve(cho_factor(system.numpy(), overwrite_a=True), found.cross[:n].numpy())
            scores = found.test[:, :n] @ torch.from_numpy(solution).float()
            result[f"{alpha:g}, {n}"] = 100 * float((scores.argmax(1) == labels).double().mean())
    return result


def measure(name: str, number: int, degree: int, sizes: Sequence[int], **overrides: Any) -> dict[str, Any]:
    """Return the accuracies of one map of a device, by its number, and the time that they took."""
    started = time.perf_counter()
    options = {"seed": number, "medium": {"seed": SEED + number}} | overrides
    with open_device(name, n_inputs=frames()[0].shape[1], n_outputs=max(sizes), **options) as device:
        found = moments(device, degree)
    return {"test": accuracies(found, degree, sizes), "seconds": round(time.perf_counter() - started, 1)}


def light(background: float, signal_e: float, grain_pixels: int) -> dict[str, Any]:
    """Return the sections of `camera_fitted` for a background light, a mean signal and a size of grains.

    The gain is such that the brightest pixel that is used fills the converter when all mirrors are on.

    Args:
        background: Background light over the mean light of a frame.
        signal_e: Mean light of a frame, electrons.
        grain_pixels: Pixels that a speckle grain spans.
    """
    with open_device("camera_fitted", n_inputs=frames()[0].shape[1], n_outputs=1) as device:
        settings = device.description.camera
        if settings is None or settings.anchor.highest is None or settings.sensor.adc_bits is None:
            raise TypeError("camera_fitted has no camera with a map of pixels and a converter")
        mirrors = device.n_inputs / (1 - settings.anchor.reference_share)
        anchor_e = signal_e * mirrors / float(frames()[2].mean() + ALWAYS_ON)
        per_flux = settings.light.quantum_efficiency * settings.light.exposure_us * 1e-6
        brightest_e = settings.anchor.highest * anchor_e + background * signal_e
        room = 2**settings.sensor.adc_bits - 1 - settings.sensor.black_level_dn
    fluxes_e = {"anchor_flux_per_s": anchor_e, "bias_flux_per_s": background * signal_e}
    light = {key: value / per_flux for key, value in fluxes_e.items()}
    sensor = {"gain_dn_per_e": room / (1.05 * brightest_e)}
    return {"camera": {"light": light, "sensor": sensor, "grain_pixels": grain_pixels}}


def distance(found: dict[str, float]) -> float:
    """Return the root mean square distance to the middle of the hardware's band at the fitted sizes, points."""
    squares = []
    for n in FITTED_SIZES:
        gap = statistics.mean(found[f"{alpha:g}, {n}"] - REAL[2, alpha][n] for alpha in ALPHAS[2])
        squares.append(gap * gap)
    return math.sqrt(statistics.mean(squares))


def fit() -> None:
    """Try background light, signal and size of grains at the fitted sizes, with one map."""
    results = load_results(NAME) or {"fit": {}, "runs": {}}
    for background, signal, grain in GRID:
        key = f"background {background:g}, signal {signal:g}, grain {grain}"
        if key in results["fit"]:
            results["fit"][key]["distance"] = distance(results["fit"][key]["test"])
            continue
        found = measure("camera_fitted", 0, 2, FITTED_SIZES, **light(background, signal, grain))
        results["fit"][key] = found | {"distance": distance(found["test"])}
        save_results(NAME, results)
        print(key, results["fit"][key], flush=True)


def run() -> None:
    """Measure every device, map and degree that the results lack."""
    results = load_results(NAME) or {"fit": {}, "runs": {}}
    for degree, number, name in product((2, 4), MAPS, DEVICES):
        key = f"{name}, {degree}, {number}"
        if key in results["runs"] or (degree == 4 and name not in ("ideal", "camera_fitted")):
            continue
        results["runs"][key] = measure(name, number, degree, SIZES)
        save_results(NAME, results)
        print(key, results["runs"][key], flush=True)


def figures(results: dict[str, Any], name: str, degree: int, alpha: float, n: int) -> list[float]:
    """Return the accuracies of a device's maps, per cent."""
    keys = (f"{name}, {degree}, {number}" for number in MAPS)
    return [results["runs"][key]["test"][f"{alpha:g}, {n}"] for key in keys if key in results["runs"]]


def table(results: dict[str, Any], degree: int) -> str:
    """Return accuracies against the number of features."""
    rows: list[tuple[str, ...]] = []
    for alpha in ALPHAS[degree]:
        real = REAL[degree, alpha]
        rows.append((f"real OPU, alpha {alpha:g}", *(f"{real[n]:.2f}" for n in SIZES)))
        for name in DEVICES:
            cells = [with_error(figures(results, name, degree, alpha, n)) for n in SIZES]
            if set(cells) != {"-"}:
                rows.append((f"`{name}`, alpha {alpha:g}", *cells))
    return markdown((f"degree {degree}", *(f"{n:,}" for n in SIZES)), rows)


def judgement(results: dict[str, Any]) -> str:
    """Return how the requirements are met, with the two tunings' mean for the twin."""
    parts = []
    for n in (1000, 10000):
        maps = [figures(results, "camera_fitted", 2, alpha, n) for alpha in ALPHAS[2]]
        if not all(maps):
            continue
        twin = [statistics.mean(found) for found in maps]
        middle = statistics.mean(REAL[2, alpha][n] for alpha in ALPHAS[2])
        gap = statistics.mean(twin) - middle
        parts.append(
            f"{n:,} features, `camera_fitted` minus the middle of the real band ({middle:.2f}) at most "
            f"{MOST_DISTANCE:g}: {verdict(abs(gap) <= MOST_DISTANCE)}, {gap:+.2f}."
        )
    least = math.inf
    for alpha in ALPHAS[2]:
        for n in SIZES:
            both = (figures(results, name, 2, alpha, n) for name in ("ideal", "camera_fitted"))
            gaps = [ideal - twin for ideal, twin in zip(*both, strict=False)]
            if len(gaps) > 1:
                error = statistics.stdev(gaps) / len(gaps) ** 0.5
                least = min(least, statistics.mean(gaps) / max(error, 1e-9))
    if least < math.inf:
        parts.append(
            f"Below the ideal device by {STANDARD_ERRORS:g} standard errors at every size: "
            f"{verdict(least >= STANDARD_ERRORS)}, {least:.1f} at least."
        )
    return " ".join(parts)


if __name__ == "__main__":
    program(run, fit)
