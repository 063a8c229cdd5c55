"""How does temperature set the noise of a camera, of an analog read-out and of a crossbar? Draws docs/temperature.png.

The laws of `camera_low_light` and `gaussian_temperature` as packaged, and of `pcm` with three activation energies of
its conduction, which are assumed: 10 inputs, 2,000 outputs, 64 random ternary vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure

from opusim.devices.registry import open_device
from opusim.temperature import TemperatureLaw, TemperatureTable

PICTURE = Path(__file__).parents[2] / "docs" / "temperature.png"
WINDOW = {"n_inputs": 10, "n_outputs": 2000}
ACTIVATIONS_EV = (0.02, 0.05, 0.1)
_POINTS = 200


def law_of(name: str, **changes: Any) -> TemperatureLaw | TemperatureTable:
    """Return the law of a device for random vectors."""
    x = torch.randint(-1, 2, (64, 10), generator=torch.Generator().manual_seed(1)).float()
    with open_device(name, **WINDOW, **changes) as device:
        return device.temperature_law(x)


def picture() -> Figure:
    """Return the figure: noise and its shares of two devices, and what a crossbar holds."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name, title in (
        (panels[0], "camera_low_light", "camera_low_light: image sensor, 0.2 s"),
        (panels[1], "gaussian_temperature", "gaussian_temperature: photodiode, 10 MΩ"),
    ):
        law = law_of(name)
        temperatures = np.linspace(*law.temperatures_c, _POINTS)
        share = axes.twinx()
        axes.plot(temperatures, [law.std(t) for t in temperatures], color="C0")
        share.plot(temperatures, [100 * law.dark_share(t) for t in temperatures], "--", color="C1")
        if law.thermal_e2_per_k:
            share.plot(temperatures, [100 * law.thermal_share(t) for t in temperatures], ":", color="C1")
        axes.set_ylabel("noise of a reading, projection units", color="C0")
        share.set_ylabel("share of the variance, %:\ndark current dashed, resistor dotted", color="C1")
        axes.set(xlabel="temperature, °C", title=title, ylim=(0, None))
        share.set_ylim(0, 100)
    for activation_ev in ACTIVATIONS_EV:
        held = law_of("pcm", temperature_c=25.0, crossbar={"temperature": {"activation_ev": [activation_ev]}})
        temperatures = np.linspace(*held.temperatures_c, _POINTS)
        panels[2].plot(temperatures, [held.size(t) for t in temperatures], label=f"{activation_ev:g} eV")
    panels[2].legend(title="activation energy (assumed)")
    panels[2].set(
        xlabel="temperature, °C", ylabel="entries of the matrix, root mean square", title="pcm: conductances"
    )
    panels[2].set_ylim(0, None)
    return figure


def main() -> None:
    """Draw the picture."""
    picture().savefig(PICTURE, dpi=110)
    print(PICTURE)


if __name__ == "__main__":
    typer.run(main)
