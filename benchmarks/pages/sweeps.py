"""Sections of the ready-made sweeps, whose `table.csv` is kept as benchmarks/results/curve_NAME.csv."""

from __future__ import annotations

import csv
import statistics

from benchmarks.markdown import markdown, section, with_error
from benchmarks.results_file import FOLDER

SWEEPS = {
    "pdfa_fashion": "FashionMNIST",
    "pdfa_digits": "Digits",
    "all_trainers_mnist": "MNIST, all trainers",
    "all_trainers_fashion": "FashionMNIST, all trainers",
    "pixels_cifar": "CIFAR-10 (JPEG)",
    "features_fashion": "FashionMNIST on public features, all trainers",
    "features_mnist": "MNIST on public features",
    "features_cifar": "CIFAR-10 (JPEG) on public features",
}
_COSTS = {
    "frames": ("device_frames", 1),
    "device [kJ]": ("device_joules", 1e3),
}
"""Columns of the tables: the sweep's column, and what it is divided by."""


def sweeps_section() -> str:
    """Return what all tables show, and the table of each sweep."""
    text = (
        "Each by `opusim curve benchmarks/curves/NAME.toml`: mean over seeds and its standard error. Epsilon is for "
        "zeroing a whole record unless the series says otherwise ('convex, last iterate': for replacing one, a larger "
        "change), delta 1e-5; inf where no finite guarantee is proven; claimed "
        "by the paper's formula with its hypotheses taken as given. The device's frames and energy are those "
        "of one run; a dash: not recorded."
    )
    return "\n\n".join((text, *map(_table, SWEEPS)))


def _table(name: str) -> str:
    """Return a sweep's heading and table: means over seeds, and their standard errors."""
    file = FOLDER / f"curve_{name}.csv"
    with file.open(newline="") as lines:
        records = list(csv.DictReader(lines))
    axes = [
        key for key in list(records[0])[: list(records[0]).index("accuracy")] if key not in ("series", "seed")
    ]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for record in records:
        groups.setdefault((record["series"], *(record[key] for key in axes)), []).append(record)
    rows: list[tuple[str, ...]] = [
        (
            *setting,
            with_error([100 * float(record["accuracy"]) for record in found]),
            *(found[0][key] for key in ("epsilon_proven", "epsilon_claimed")),
            *(_cost(found, *cost) for cost in _COSTS.values()),
        )
        for setting, found in groups.items()
    ]
    header = ("series", *axes, "test accuracy [%]", "epsilon, proven", "epsilon, claimed", *_COSTS)
    return section(f"{SWEEPS[name]} (`{name}.toml`)", markdown(header, rows))


def _cost(records: list[dict[str, str]], column: str, unit: float) -> str:
    """Return the mean of a column, or a dash."""
    known = [float(record[column]) for record in records if record.get(column)]
    return f"{statistics.fmean(known) / unit:,.0f}" if known else "-"
