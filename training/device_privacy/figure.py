"""Temperature to sigma to epsilon of a camera's label readings, as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from opusim.camera.exposure import OperatingPoint
from opusim.errors import ConfigError
from training.device_privacy.camera import LIGHTS, LabelCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STEPS = 25


def temperature_epsilon_figure(counts: LabelCounts, targets: Sequence[float]) -> Figure:
    """Noise of a reading and epsilon against the temperature, at the described light and at less.

    Dotted lines are the targets, dots the least temperatures that reach them.

    Raises:
        ConfigError: The device has no dark current.
    """
    from matplotlib.figure import Figure

    if counts.temperatures_c is None:
        raise ConfigError(counts.name, "camera.dark", "is off, so there is no temperature to draw against")
    temperatures = np.linspace(*counts.temperatures_c, _STEPS)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for light, color in zip(LIGHTS, ("C0", "C1", "C2", "C3"), strict=True):
        points = [OperatingPoint(temperature_c=float(t), light=light) for t in temperatures]
        label = "described light" if light == 1 else f"{light:g} of it"
        left.plot(temperatures, [counts.law.std(point) for point in points], color=color, label=label)
        right.plot(temperatures, [counts.epsilon(point) for point in points], color=color, label=label)
        for target in targets:
            found = counts.temperature_for(target, light)
            if found is not None and found > counts.temperatures_c[0]:
                right.plot(found, target, "o", color=color)
                right.annotate(
                    f"{found:.0f} °C", (found, target), xytext=(5, 4), textcoords="offset points", fontsize=9
                )
    for target in targets:
        right.axhline(target, color="0.5", linestyle=":", linewidth=1)
    left.set(yscale="log", xlabel="sensor temperature, °C", ylabel="standard deviation, projection units")
    left.set_title("Noise of a reading")
    right.set(yscale="log", xlabel="sensor temperature, °C", ylabel=f"epsilon at delta = {counts.delta:g}")
    right.set_title("Epsilon of one reading of every label, from photon counts")
    left.legend()
    _, labels, outputs = counts.law.light_e.shape
    figure.suptitle(f"{counts.name}: {labels} labels, {outputs:,} outputs")
    return figure
