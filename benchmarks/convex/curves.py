"""How does accuracy grow with epsilon on MNIST: the convex last iterate, and three models under DP-SGD?

The counterpart of the paper's Figure 2, for replacing a record at delta 1e-5. Each point is a run of its own with its
own epsilon (a last iterate has no curve along training: every model on the way would cost more), at the settings that
`benchmarks.convex.accuracy search` chose for the data set at the nearest of its two epsilons (P = 64); all training
records, three seeds. `--data fashion-mnist` and `--data cifar-10` are the counterparts of Figures 7 and 3. MNIST's
curves are drawn in docs/convex.png. Runs that were begun resume, and a point is trained again if a longer search
prefers other settings.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import typer

from benchmarks.convex.accuracy import PAPER, TUNED, best_point, run_once, trials_of
from benchmarks.convex.rows import Point
from benchmarks.markdown import compared, markdown, standard_error, with_error
from benchmarks.options import listed, seeds_of
from benchmarks.results_file import load_results, save_results
from opusim.training.runs.drawing import new_figure, save_figure, style

EPSILONS, SEEDS, DATA = (1.0, 3.0, 8.0, 0.5), (0, 1, 2), "mnist"
DATA_SETS = ("mnist", "fashion-mnist", "cifar-10")
ROWS = (
    "convex, last iterate",
    "ReLU network, DP-SGD",
    "logistic regression, DP-SGD",
    "convex, Poisson DP-SGD",
)
MODULE, NAME = "benchmarks.convex.curves", "convex_curves"
PICTURE = Path(__file__).parents[2] / "docs" / "convex.png"


def nearest(epsilon: float) -> float:
    """The searched epsilon that is nearest in ratio."""
    return min((4.76, 1.33), key=lambda searched: abs(math.log(searched / epsilon)))


def table(data: str) -> str:
    """Return the mean accuracy of each way to train by epsilon, as Markdown."""
    found = accuracies(data)
    epsilons = sorted({epsilon for by_epsilon in found.values() for epsilon in by_epsilon})
    rows = [(row, *(with_error(mine.get(e, [])) for e in epsilons)) for row, mine in found.items()]
    return markdown(("trained by", *(f"epsilon {epsilon:g}" for epsilon in epsilons)), rows)


def accuracies(data: str) -> dict[str, dict[float, list[float]]]:
    """Return the accuracies of all seeds by row and epsilon."""
    found: dict[str, dict[float, list[float]]] = {row: {} for row in ROWS}
    for (row, epsilon, _), point in finished(data).items():
        found[row].setdefault(epsilon, []).append(point["test"])
    return {row: by_epsilon for row, by_epsilon in found.items() if by_epsilon}


def ahead_and_behind(ours: dict[float, list[float]], other: dict[float, list[float]]) -> tuple[str, str]:
    """Return the epsilons at which a mean is more than two standard errors of the difference ahead, and behind."""
    signs = {epsilon: compared(ours[epsilon], other.get(epsilon, [])) for epsilon in sorted(ours)}
    ahead, behind = (", ".join(f"{e:g}" for e in signs if signs[e] == sign) or "none" for sign in (1, -1))
    return ahead, behind


def finished(data: str) -> dict[tuple[str, float, int], dict[str, Any]]:
    """Return the points of a data set that have the settings that its search prefers now, by row, epsilon and seed."""
    points = load_results(name_of(data)).get("points", [])
    chosen = {cell: wanted(cell[0], data, cell[1]) for cell in {(p["row"], p["epsilon"]) for p in points}}
    return {
        (point["row"], point["epsilon"], point.get("seed", 0)): point
        for point in points
        if point["point"] == chosen[point["row"], point["epsilon"]]
    }


def wanted(row: str, data: str, epsilon: float) -> Point | None:
    """Return the settings that the search chose at the nearest of its epsilons; None without a search."""
    return best_point(row, data, nearest(epsilon)) if trials_of(row, data, nearest(epsilon)) else None


def name_of(data: str) -> str:
    """Name of the results of a data set."""
    return NAME if data == DATA else f"{NAME}_{data.replace('-', '')}"


def main(data: str = DATA, seeds: str = ",".join(map(str, SEEDS))) -> None:
    """Train what is missing, save each point as it comes, and draw."""
    names = listed("--data", data, DATA_SETS)
    for name, seed, row, epsilon in itertools.product(names, seeds_of(seeds), ROWS, EPSILONS):
        key, points = (row, epsilon, seed), finished(name)
        if key not in points:
            found = run_once(row, name, epsilon, best_point(row, name, nearest(epsilon)), seed)
            parts = ("row", "epsilon", "seed", "point", "test", "proven_epsilon")
            kept = {part: found[part] for part in parts}
            save_results(name_of(name), {"data": name, "points": [*points.values(), kept]})
            print(kept, flush=True)
    if DATA in names:
        draw()


def draw() -> None:
    """One line a row with the standard error over seeds, and the paper's two tuned figures."""
    found = accuracies(DATA)
    figure, axes = new_figure()
    for number, (row, mine) in enumerate(found.items()):
        epsilons = sorted(mine)
        means = [statistics.fmean(mine[epsilon]) for epsilon in epsilons]
        errors = [standard_error(mine[epsilon]) or 0.0 for epsilon in epsilons]
        axes.errorbar(epsilons, means, errors, capsize=3, label=row, **style(number))
    paper = sorted((TUNED[epsilon], last) for (data, epsilon), (last, *_) in PAPER.items() if data == DATA)
    label = "the paper, tuning included (not covered)"
    axes.plot(*zip(*paper, strict=True), "x", color="#000000", label=label)
    axes.set_xscale("log")
    ticks = sorted(EPSILONS)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("epsilon, replacing a record, delta 1e-5")
    axes.set_ylabel("test accuracy [%]")
    axes.legend(frameon=False)
    save_figure(figure, PICTURE)


if __name__ == "__main__":
    typer.run(main)
