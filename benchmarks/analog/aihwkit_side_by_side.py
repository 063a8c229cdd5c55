"""Do moments of a weight, and the time of a product, agree with aihwkit's on the same machine?

Moments: weights of 0.2, 0.5 and 1 on 2^18 pairs of devices, mean and standard deviation at 1 s, 1 h, 1 day and 1 year,
by the noise models of aihwkit and by `opusim.crossbar.conductances`; aihwkit's resistive memory knows 1 s and 1 day
only. Required: within 2 %. They need aihwkit's Python files only:

    pip download --no-deps --no-binary aihwkit aihwkit==1.2.0 && tar xzf aihwkit-1.2.0.tar.gz
    python -m benchmarks.analog.aihwkit_side_by_side --aihwkit aihwkit-1.2.0/src

Product: 4096 x 4096, batch 256, one thread, without voltage drop, the tile of `StandardHWATrainingPreset` against the
crossbar `pcm`; both have converters of 8 bits and the same noise. Required: at least 5 times faster. This needs a
compiled aihwkit; without one it is left out. The wheel of aihwkit 1.1.0 runs beside torch 2.10, so an environment of
its own measures the product and writes it to a file of its own:

    python3.11 -m venv aihwkit && . aihwkit/bin/activate
    pip install torch==2.10.0 && pip install -e . && pip install --no-deps aihwkit==1.1.0
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.analog.aihwkit_side_by_side --only-product
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from benchmarks.markdown import command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim import load_description, open_device
from opusim.crossbar.device import Pairs
from opusim.tables import print_table

MODULE, NAME, TIMES_NAME = (
    "benchmarks.analog.aihwkit_side_by_side",
    "analog_aihwkit",
    "analog_aihwkit_product",
)
DEVICES, WEIGHTS = 2**18, (0.2, 0.5, 1.0)
TIMES_S = {"1 s": 1.0, "1 h": 3600.0, "1 d": 86_400.0, "1 y": 31_557_600.0}
MODELS = {
    "pcm": ("pcm", "PCMLikeNoiseModel", 25.0),
    "hermes": ("hermes", "HermesNoiseModel", 20.7),
    "reram": ("reram", "ReRamWan2022NoiseModel", 40.0),
}
"""For each preset aihwkit's module and class, and g_max in microsiemens."""
WITHIN, FASTER = 0.02, 5.0
SIZE, BATCH = 4096, 256


def noise_model(name: str, source: Path) -> Any:
    """Return aihwkit's noise model; its packages are entered without their __init__, which load compiled code."""
    for package in ("aihwkit", "aihwkit.inference", "aihwkit.inference.noise", "aihwkit.inference.converter"):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(source.joinpath(*package.split(".")))]
            sys.modules[package] = module
    file, kind, g_max = MODELS[name]
    return getattr(importlib.import_module(f"aihwkit.inference.noise.{file}"), kind)(g_max=g_max)


def moments(weights: torch.Tensor) -> tuple[float, float]:
    return float(weights.double().mean()), float(weights.double().std())


def theirs(name: str, weight: float, seconds: float, source: Path) -> tuple[float, float]:
    """Return mean and spread of a pair of devices in aihwkit."""
    model, sides = noise_model(name, source), []
    for target in (weight, 0.0):
        g = torch.full((DEVICES,), target * model.g_max)
        programmed, nu = model.apply_programming_noise_to_conductance(g), model.generate_drift_coefficients(g)
        sides.append(model.apply_drift_noise_to_conductance(programmed, nu, seconds) / model.g_max)
    return moments(sides[0] - sides[1])


def ours(name: str, weight: float, seconds: float) -> tuple[float, float]:
    settings = load_description(name).crossbar
    if settings is None:
        raise RuntimeError(f"{name} is no crossbar")
    wanted = torch.full((DEVICES // 512, 512), weight)
    return moments(Pairs(wanted, settings, chip=1, number=0).weights(seconds, 0))


def compared(source: Path) -> list[dict[str, Any]]:
    """Return a row for each preset, time and weight."""
    torch.manual_seed(1)
    rows = []
    for name in MODELS:
        for label, seconds in TIMES_S.items():
            if name == "reram" and label not in ("1 s", "1 d"):
                continue
            for weight in WEIGHTS:
                (mean, std), (mean_there, std_there) = (
                    ours(name, weight, seconds),
                    theirs(name, weight, seconds, source),
                )
                rows.append(
                    {
                        "device": name,
                        "time": label,
                        "weight": weight,
                        "mean": mean,
                        "mean_aihwkit": mean_there,
                        "std": std,
                        "std_aihwkit": std_there,
                    }
                )
    return rows


def product_times() -> dict[str, Any] | None:
    """Return seconds of a product in both and aihwkit's version, or None without a compiled aihwkit."""
    for package in [each for each in sys.modules if each.partition(".")[0] == "aihwkit"]:
        del sys.modules[package]
    try:
        linear = importlib.import_module("aihwkit.nn").AnalogLinear
        version = importlib.metadata.version("aihwkit")
        config = importlib.import_module("aihwkit.simulator.presets").StandardHWATrainingPreset()
    except ImportError:
        return None
    config.forward.ir_drop = 0.0
    layer = linear(SIZE, SIZE, bias=False, rpu_config=config).eval()
    x = torch.rand(BATCH, SIZE) * 2 - 1
    with (
        torch.no_grad(),
        open_device("pcm", n_inputs=SIZE, n_outputs=SIZE, crossbar={"product": {"ir_drop": 0.0}}) as device,
    ):
        crossbar = device.require("multiply")
        work = {"pcm": lambda: crossbar.multiply(x), "aihwkit": lambda: layer(x)}
        seconds = interleaved(work, repeats=5, warm_up=1, clock=time.process_time)
    return {"aihwkit": version, "threads": torch.get_num_threads(), "seconds": seconds}


def largest(rows: list[dict[str, Any]], name: str, what: str) -> float:
    """Return the largest relative difference of a moment."""
    return max(abs(row[what] / row[f"{what}_aihwkit"] - 1) for row in rows if row["device"] == name)


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (name, *(f"{100 * largest(rows, name, what):.2f}" for what in ("mean", "std")))
        for name in MODELS
        if any(row["device"] == name for row in rows)
    ]


HEADER = ("device", "mean, largest difference [%]", "spread, largest difference [%]")


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    rows = found["rows"]
    worst = max(largest(rows, row["device"], what) for row in rows for what in ("mean", "std"))
    timed = load_results(TIMES_NAME)
    product = "aihwkit's tile was not compiled here, so its product was not timed"
    if timed:
        ratio = timed["seconds"]["aihwkit"] / timed["seconds"]["pcm"]
        product = (
            f"a product of {SIZE} x {SIZE} at batch {BATCH} without voltage drop takes the tile of aihwkit "
            f"{timed['aihwkit']} {ratio:.1f} times as long as `pcm` ({timed['date']}, one thread, processor time, "
            f"torch {timed['machine']['versions']['torch'].partition('+')[0]}; required {FASTER:g}, "
            f"{verdict(ratio >= FASTER)})"
        )
    text = (
        f"Mean and spread of weights {', '.join(f'{weight:g}' for weight in WEIGHTS)} on {DEVICES:,} pairs at 1 s to 1 "
        f"year, against the noise models of aihwkit {found['aihwkit']} ({found['date']}, {command(MODULE)}). Required: "
        f"within {100 * WITHIN:g} % ({verdict(worst <= WITHIN)}); {product}."
    )
    return section("Side by side with aihwkit", text, markdown(HEADER, table(rows)))


def main() -> None:
    """Compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--aihwkit", type=Path, help="folder that holds the package aihwkit; the installed one"
    )
    parser.add_argument("--no-save", action="store_true", help="leave the results files as they are")
    parser.add_argument("--only-product", action="store_true", help="time the product only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.only_product:
        source = given.aihwkit or installed_source()
        if source is None:
            parser.error(
                "aihwkit is not installed; give --aihwkit with the folder src of its source distribution"
            )
        rows = compared(source)
        print_table("Moments against aihwkit", HEADER, table(rows))
        version = (source / "aihwkit" / "VERSION.txt").read_text().strip()
        if not given.no_save:
            save_results(NAME, {"aihwkit": version, "rows": rows})
    product = product_times()
    print("no compiled aihwkit: its product is not timed" if product is None else product)
    if product is not None and not given.no_save:
        save_results(TIMES_NAME, product)


def installed_source() -> Path | None:
    """Return the folder that holds the installed package aihwkit, or None."""
    installed = importlib.util.find_spec("aihwkit")
    return None if installed is None or installed.origin is None else Path(installed.origin).parents[1]


if __name__ == "__main__":
    main()
