"""How far are private accuracies from the literature? Draws docs/private_accuracy.png from the results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.private_accuracy.records import LITERATURE, NAME
from benchmarks.results_file import load_results

PICTURE = Path("docs/private_accuracy.png")


def picture() -> Figure:
    """Draw test accuracy against epsilon: opusim's cells as points with standard errors, others as crosses."""
    cells = load_results(NAME)["cells"]
    data = list(dict.fromkeys(cell["row"].partition(", ")[0] for cell in cells))
    figure = Figure(figsize=(3.8 * len(data), 6.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(data), squeeze=False)[0], data, strict=True):
        mine = [cell for cell in cells if cell["row"].startswith(f"{name}, ")]
        for index, row in enumerate(dict.fromkeys(cell["row"] for cell in mine)):
            found = sorted((cell for cell in mine if cell["row"] == row), key=lambda cell: cell["epsilon"])
            axes.errorbar(
                [cell["epsilon"] * 1.03**index for cell in found],
                [cell["test"] for cell in found],
                [cell["test_standard_error"] or 0.0 for cell in found],
                fmt="o-",
                markersize=4,
                label=row.partition(", ")[2],
            )
        others = [each for each in LITERATURE if each[0] == name]
        for index, method in enumerate(dict.fromkeys(each[2] for each in others)):
            points = [
                (epsilon * 0.97**index, value) for _, epsilon, other, value in others if other == method
            ]
            label = method.replace("Tramer and Boneh 2021", "T&B 2021").replace("Fu et al. 2024", "Fu 2024")
            axes.plot(*zip(*points, strict=True), "x", color=f"C{9 - index}", label=label)
        axes.set(xscale="log", xlabel="epsilon", title=name, xlim=(0.75, 4.2))
        axes.set_xticks([1, 2, 3], ["1", "2", "3"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=7)
    figure.axes[0].set_ylabel("test accuracy [%]")
    return figure


if __name__ == "__main__":
    picture().savefig(PICTURE, dpi=110, bbox_inches="tight")
