"""What epsilon do a camera's counts give at each temperature and light?

`camera_low_light` reads every record's one-hot label once (10 labels, 1,024 outputs, delta 1e-5), accounted by the
exact law of the loss: epsilon at four temperatures and four levels of light, and the temperature, light or bias light
that reaches epsilon 8, 3 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.results_file import load_results, save_results
from opusim.accounting import numerics
from opusim.accounting.mechanisms.labels import label_distance
from opusim.camera.exposure import OperatingPoint
from opusim.description.schema import load_description
from opusim.devices.registry import open_device
from opusim.training.reports.device_privacy import LIGHTS, LabelCounts, label_counts

NAME, DEVICE, DELTA = "camera_account", "camera_low_light", 1e-5
TEMPERATURES_C, EPSILONS = (-30.0, 20.0, 40.0, 60.0), (8.0, 3.0, 1.0)
_DIM = 0.001
"""The light at which some temperature reaches each epsilon."""


def table_of(counts: LabelCounts) -> list[dict[str, Any]]:
    """Epsilon at each temperature and level of light."""
    rows = []
    for temperature in TEMPERATURES_C:
        here = OperatingPoint(temperature_c=temperature)
        epsilons = [
            counts.epsilon(OperatingPoint(temperature_c=temperature, light=light)) for light in LIGHTS
        ]
        row = {"temperature_c": temperature, "dark_e": counts.law.dark_e(here)}
        rows.append(row | {"sigma": counts.law.std(here), "epsilons": epsilons})
    return rows


def ways_of(counts: LabelCounts) -> list[dict[str, Any]]:
    """What reaches each epsilon."""
    found = []
    for epsilon in EPSILONS:
        warm = counts.temperature_for(epsilon, _DIM)
        sigma = counts.law.std(OperatingPoint(temperature_c=warm, light=_DIM)) if warm is not None else None
        found.append(
            {
                "epsilon": epsilon,
                "temperature_c": counts.temperature_for(epsilon, 1.0),
                "temperature_c_dimmed": warm,
                "sigma_dimmed": sigma,
                "light": counts.share_for(epsilon, "light"),
                "bias_e": counts.bias_for(epsilon),
            }
        )
    return found


def gaussian_epsilon(counts: LabelCounts) -> dict[str, float]:
    """What a Gaussian accountant would state of sigma alone at the warmest sensor and a hundredth of the light."""
    point = OperatingPoint(temperature_c=TEMPERATURES_C[-1], light=0.01)
    with open_device(DEVICE, n_inputs=10, n_outputs=1024) as device:
        distance = label_distance(device.require("matrix").matrix().double().numpy())
    mu = distance / counts.law.std(point)
    return {"gaussian": numerics.gaussian_bounds(mu, DELTA).upper, "counts": counts.epsilon(point)}


def ends_of(device: str) -> list[float]:
    """Epsilon at the coldest and the warmest sensor, at the described light and at a thousandth of it."""
    counts = label_counts(load_description(device), n_classes=10, n_outputs=1024, delta=DELTA)
    ends = counts.temperatures_c or (0.0, 0.0)
    return [
        counts.epsilon(OperatingPoint(temperature_c=t, light=light)) for light in (1.0, _DIM) for t in ends
    ]


def main() -> None:
    """Measure what was not saved yet, and save it."""
    counts = label_counts(load_description(DEVICE), n_classes=10, n_outputs=1024, delta=DELTA)
    parts: dict[str, Callable[[], Any]] = {
        "table": lambda: table_of(counts),
        "ways": lambda: ways_of(counts),
        "camera_ends": lambda: ends_of("camera"),
        "gaussian": lambda: gaussian_epsilon(counts),
    }
    before = load_results(NAME)
    save_results(NAME, {name: before.get(name) or part() for name, part in parts.items()})


if __name__ == "__main__":
    main()
