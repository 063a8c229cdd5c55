"""What do accuracy over time, programming noise and converter bits look like, and what does a product cost in energy?

The sweeps take the small convolutional network of `benchmarks.analog.lifetimes`, trained clean for 3 epochs, on `pcm`
one second after programming, first 2,000 test images, one chip: its programming noise multiplied by 0 to 4, and its
ADC with 4 to 9 bits at the same bound. Energies are those of data sheets and papers; each has its source below.

`python -m benchmarks.analog.pictures` measures the sweeps and draws docs/analog_*.png; `--draw` only draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.analog.lifetimes import DEVICES, NETWORKS, TIMES_S, TRAININGS, accuracy, means, network, train
from benchmarks.analog.lifetimes import NAME as LIFETIMES
from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim import convert, load_description
from training.config.sections import DataConfig
from training.data import Dataset
from training.data.catalogue import build_dataset

MODULE, NAME = "benchmarks.analog.pictures", "analog_sweeps"
DOCS = Path(__file__).parents[2] / "docs"
SCALES, BITS, IMAGES = (0.0, 0.5, 1.0, 2.0, 4.0), (4, 5, 6, 7, 8, 9), 2000
_COLOURS = {"pcm": "C0", "hermes": "C2", "reram": "C3"}
GPU_W, GPU_OPERATIONS_PER_S = 400.0, 312e12


def lifetimes_figure(panels: Mapping[str, Mapping[tuple[str, str], Mapping[str, float]]]) -> Figure:
    """Draw accuracy over the time since programming, a panel for each network.

    Args:
        panels: for each network and (device, training) the accuracies of `benchmarks.analog.lifetimes.means`.
    """
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for side, (name, curves) in zip(axes, panels.items(), strict=True):
        for (device, training), found in curves.items():
            if found:
                style = "-" if training == "clean" else "--"
                label = f"{device}, {training} ({found['digital']:.1f} digital)"
                values = [found[time] for time in TIMES_S]
                side.plot([*TIMES_S.values()], values, style, marker="o", color=_COLOURS[device], label=label)
        side.set(xscale="log", xlabel="time since programming", ylabel="test accuracy [%]", title=name)
        side.set_xticks([*TIMES_S.values()], [*TIMES_S])
        side.grid(alpha=0.3)
        side.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


def sweeps_figure(found: Mapping[str, Any]) -> Figure:
    """Draw accuracy against programming noise and against the bits of the ADC, and the energy of a product."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    noise, bits, energies = figure.subplots(1, 3)
    noise.plot(SCALES, found["noise"], "o-")
    noise.set(xlabel="programming noise, multiples of that of pcm", ylabel="test accuracy [%]")
    bits.plot(BITS, found["bits"], "o-")
    bits.set(xlabel="bits of the ADC, bound 10", ylabel="test accuracy [%]")
    for side in (noise, bits):
        side.axhline(found["digital"], color="k", linestyle="--", linewidth=0.8, label="digital")
        side.grid(alpha=0.3)
        side.legend()
    names, joules, sources = zip(*reversed(energy_rows()), strict=True)
    labels = [f"{name}\n{fill(source, 34)}" for name, source in zip(names, sources, strict=True)]
    picojoules = [1e12 * each for each in joules]
    bars = energies.barh(labels, picojoules, height=0.5)
    energies.bar_label(bars, [f"{each:.3g} pJ" for each in picojoules], padding=3)
    energies.set(xscale="log", xlim=(0.01, 20), xlabel="stated energy of a multiply-add [pJ]")
    energies.tick_params(axis="y", labelsize="small")
    energies.grid(alpha=0.3, axis="x")
    return figure


def energy_rows() -> list[tuple[str, float, str]]:
    """Return device, joules of a multiplication with its addition, and the source."""
    rows = []
    for name, label, what in (
        ("hermes", "hermes", "Le Gallo 2023, one-phase read mode, 64 cores of 256 x 256"),
        ("camera", "camera (an OPU)", ""),
    ):
        description = load_description(name)
        frames = description.frames
        if description.crossbar is not None:
            operations = 64 * 256 * 256  # multiplications of the 64 cores of the chip in one product
        else:
            operations = description.n_inputs * description.n_outputs
            source = description.provenance["frames.power_w"]
            what = f"{source.source}; {description.n_inputs:,} x {description.n_outputs:,}"
        joules = frames.frames_per_projection * frames.frame_period_us * 1e-6 * frames.power_w / operations
        rows.append((label, joules, what))
    gpu = 2 * GPU_W / GPU_OPERATIONS_PER_S
    rows.append(("GPU (A100)", gpu, "NVIDIA A100 data sheet: 312 TFLOPS bfloat16, dense, at 400 W"))
    return rows


def sweep(data: Dataset) -> dict[str, Any]:
    """Return accuracies over the noise of programming and the bits of the ADC."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = train(network("cnn"), data, 3, 2e-3, falling=True, seed=1)
    if data.test is None:
        raise RuntimeError("the data set has no test images")
    few = replace(data, test=replace(data.test, x=data.test.x[:IMAGES], y=data.test.y[:IMAGES]))
    crossbar = load_description("pcm").crossbar
    if crossbar is None or crossbar.programming_us is None:
        raise RuntimeError("pcm has no programming noise")

    def on_device(**changes: Any) -> float:
        with convert(model, "pcm", seed=1, crossbar=changes) as analog:
            analog.wait(1.0)
            return round(accuracy(analog, few), 2)

    noise = [on_device(programming_us=[scale * c for c in crossbar.programming_us]) for scale in SCALES]
    bits = [on_device(converter={"adc_bits": count}) for count in BITS]
    return {"digital": round(accuracy(model, few), 2), "noise": noise, "bits": bits}


def draw() -> None:
    """Draw what was measured."""
    rows = load_results(LIFETIMES).get("rows", [])
    if rows:
        panels = {
            name: {
                (device, kind): means(rows, name, device, kind) for device in DEVICES for kind in TRAININGS
            }
            for name in NETWORKS
        }
        shown = {name: curves for name, curves in panels.items() if any(curves.values())}
        lifetimes_figure(shown).savefig(DOCS / "analog_lifetimes.png", dpi=90)
    found = load_results(NAME)
    if found:
        sweeps_figure(found).savefig(DOCS / "analog_sweeps.png", dpi=90)


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    text = (
        f"A small convolutional network on `pcm` one second after programming, {IMAGES:,} test images, one chip, "
        f"{found['digital']:g} % digital ({found['date']}, {command(MODULE)}; "
        "[the figure](../../docs/analog_sweeps.png)). Energies are stated, not measured: power times time of a product "
        "over its multiplications, all inputs and outputs used."
    )
    noise = markdown(
        ("programming noise over that of pcm", "accuracy [%]"),
        [(f"{scale:g}", f"{value:.2f}") for scale, value in zip(SCALES, found["noise"], strict=True)],
    )
    bits = markdown(
        ("bits of the ADC", "accuracy [%]"),
        [(str(count), f"{value:.2f}") for count, value in zip(BITS, found["bits"], strict=True)],
    )
    energies = markdown(
        ("device", "energy of a multiplication and addition [pJ]", "source"),
        [(name, f"{1e12 * joules:.3g}", source) for name, joules, source in energy_rows()],
    )
    return section("Noise, bits and energy", text, "\n\n".join([noise, bits, energies]))


def main() -> None:
    """Measure the sweeps, save and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    if not parser.parse_args().draw:
        found = sweep(build_dataset(DataConfig(name="fashion-mnist")))
        print(found)
        save_results(NAME, found)
    draw()


if __name__ == "__main__":
    main()
