"""Tables of the ready-made sweeps, whose `table.csv` is kept as benchmarks/results/curve_NAME.csv."""

from __future__ import annotations

import csv
import statistics

from benchmarks.markdown import markdown, with_error
from benchmarks.results_file import FOLDER

_COSTS = {"frames": ("device_frames", 1), "device [kJ]": ("device_joules", 1e3)}
"""Columns of the tables: the sweep's column, and what it is divided by."""


def sweep_table(name: str) -> str:
    """Return a sweep's table: means over seeds with standard errors, without columns that say nothing."""
    with (FOLDER / f"curve_{name}.csv").open(newline="") as lines:
        records = list(csv.DictReader(lines))
    columns = list(records[0])
    axes = [key for key in columns[: columns.index("accuracy")] if key not in ("series", "seed")]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for record in records:
        groups.setdefault((record["series"], *(record[key] for key in axes)), []).append(record)
    rows = [
        (
            *setting,
            with_error([100 * float(record["accuracy"]) for record in found]),
            *(found[0][key] for key in ("epsilon_proven", "epsilon_claimed")),
            *(_cost(found, *cost) for cost in _COSTS.values()),
        )
        for setting, found in groups.items()
    ]
    header = ("series", *axes, "test accuracy [%]", "epsilon, proven", "epsilon, claimed", *_COSTS)
    told = [number for number in range(len(header)) if {row[number] for row in rows} - {"", "-"}]
    return markdown([header[number] for number in told], [[row[number] for number in told] for row in rows])


def _cost(records: list[dict[str, str]], column: str, unit: float) -> str:
    """Return the mean of a column, or a dash."""
    known = [float(record[column]) for record in records if record.get(column)]
    return f"{statistics.fmean(known) / unit:,.0f}" if known else "-"
