"""Figures of the analog benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

_COLOURS = {"pcm": "C0", "hermes": "C2", "reram": "C3"}


def lifetimes_figure(
    panels: Mapping[str, Mapping[tuple[str, str], Mapping[str, float]]], times_s: Mapping[str, float]
) -> Figure:
    """Draw accuracy over the time since programming, a panel for each network.

    Args:
        panels: for each network and (device, training) the accuracies at the names of `times_s`, percent, and the
            one in digital memory under "digital".
        times_s: seconds of each time's name.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (network, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for (device, training), found in curves.items():
            if found:
                style = "-" if training == "clean" else "--"
                values = [found[time] for time in times_s]
                label = f"{device}, {training} ({found['digital']:.1f} digital)"
                axes.plot(
                    list(times_s.values()), values, style, marker="o", color=_COLOURS[device], label=label
                )
        axes.set(xscale="log", xlabel="time since programming", ylabel="test accuracy [%]", title=network)
        axes.set_xticks(list(times_s.values()), list(times_s))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure
