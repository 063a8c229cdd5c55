"""What does rejecting small batches cost by the paper's formula (Figure 2 of the DP-ULR paper)?

The ratio of the first term of eq. 11, which rejection adds, to the second, alpha = 1.1 and sigma_0 = 4 as there, over
the number of records N and the smallest batch N_B as a part of the mean batch q N. The paper does not name its q; drawn
are 0.01 (of its section 3.4) and 0.1. The paper finds the ratio below 1e-3 for N of 1,000 or more and N_B "slightly
less than the mean batch size qN"; kept is the largest part N_B / (q N) at which it is. Draws docs/ulr_figure2.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from benchmarks.results_file import save_results
from opusim.training.runs.drawing import save_figure

MODULE, NAME = "benchmarks.ulr.figure2", "ulr_figure2"
ORDER, TARGET, RATES = 1.1, 4.0, (0.01, 0.1)
RECORDS, NEGLIGIBLE = (1_000, 10_000, 60_000, 1_000_000), 1e-3
PICTURE = Path(__file__).parents[2] / "docs" / "ulr_figure2.png"


def ratio(q: float, records: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return the first term of eq. 11 over the second, with N_B = part q N rounded down and at least 1."""
    least = np.maximum(np.floor(part * q * records), 1.0)
    log_first = np.log(q) + binom.logpmf(least - 1, records, q) - binom.logsf(least - 1, records, q)
    return np.asarray(np.exp(log_first) / (2 * q**2 * ORDER / TARGET**2))


def largest_part(q: float, records: int) -> float | None:
    """Return the largest N_B / (q N) <= 1 whose ratio is negligible, or None if none is."""
    least = np.arange(1, int(q * records) + 1)
    found = least[ratio(q, np.full(len(least), records), least / (q * records) + 1e-12) < NEGLIGIBLE]
    return float(found.max() / (q * records)) if len(found) else None


def draw() -> None:
    """One panel for each sampling rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    records, parts = np.meshgrid(np.round(np.logspace(2.5, 6, 141)), np.linspace(0.4, 1.0, 121))
    levels = [-12, -9, -6, -3, -2, -1, 0, 1, 2]
    panels: Any = figure.subplots(1, len(RATES), sharey=True)
    for axes, q in zip(panels, RATES, strict=True):
        values = np.log10(np.maximum(ratio(q, records, parts), 1e-15))
        lines = axes.contour(records, parts, values, levels=levels, cmap="viridis")
        axes.clabel(lines, fmt=lambda level: f"1e{level:.0f}", fontsize=8)
        axes.set_xscale("log")
        axes.set_title(f"q = {q:g}")
        axes.set_xlabel("records N")
    panels[0].set_ylabel("smallest batch over mean batch, N_B / (q N)")
    save_figure(figure, PICTURE)


def main() -> None:
    rows = [
        {
            "q": q,
            "records": records,
            "part": largest_part(q, records),
            "at_mean": float(ratio(q, np.array([records]), np.array([1.0]))[0]),
        }
        for q in RATES
        for records in RECORDS
    ]
    save_results(NAME, {"order": ORDER, "target_std": TARGET, "rows": rows})
    draw()


if __name__ == "__main__":
    main()
