"""What the pages show of the ready sweeps, whose `table.csv` stands as benchmarks/results/curve_NAME.csv."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from benchmarks.markdown import markdown

_RESULTS = Path(__file__).parents[1] / "results"
_SWEEPS = {
    "pdfa_fashion": "FashionMNIST",
    "pdfa_digits": "Digits",
    "all_trainers_mnist": "MNIST, all trainers",
}
_TAIL = ("accuracy", "epsilon_proven", "epsilon_claimed")


def curve_sections() -> list[str]:
    """A table a sweep: means over seeds, and their standard deviation."""
    return [_section(name, title) for name, title in _SWEEPS.items() if _file(name).exists()]


def _file(name: str) -> Path:
    return _RESULTS / f"curve_{name}.csv"


def _section(name: str, title: str) -> str:
    with _file(name).open(newline="") as file:
        records = list(csv.DictReader(file))
    axes = [
        key for key in list(records[0])[: list(records[0]).index("accuracy")] if key not in ("series", "seed")
    ]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for record in records:
        groups.setdefault((record["series"], *(record[key] for key in axes)), []).append(record)
    rows: list[tuple[str, ...]] = [
        (
            *setting,
            _mean([100 * float(record["accuracy"]) for record in found]),
            *(found[0][key] for key in _TAIL[1:]),
        )
        for setting, found in groups.items()
    ]
    header = ("series", *axes, "test accuracy [%]", "epsilon, proven", "epsilon, claimed")
    text = (
        f"`opusim curve benchmarks/curves/{name}.toml`: mean over seeds and their standard deviation. Epsilon is for "
        "whole records, delta 1e-5; inf where no finite guarantee is proven; claimed by the paper's formula with its "
        "hypotheses taken as given."
    )
    return "\n\n".join((f"## {title}: noise against privacy against accuracy", text, markdown(header, rows)))


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
