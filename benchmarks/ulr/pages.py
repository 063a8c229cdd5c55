"""What did likelihood ratio training reach? Rows and sections of the pages that `benchmarks.pages` writes."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results
from benchmarks.ulr.paper import PAPER

Row = tuple[str, str, str]


def ulr_speed_rows() -> list[Row]:
    """An epoch beside Opacus, memory beside a plain pass."""
    results = load_results("ulr_epoch")
    command = "`python -m benchmarks.ulr.epoch`"
    rows = [
        (
            f"time of an MNIST epoch, 784-128-64-32-10, batch 500, {entry['work']}, {entry['threads']} thread(s)",
            f"{entry['ratio']:.2f} of Opacus ghost clipping",
            command,
        )
        for entry in results.get("rows", [])
        if entry["work"].startswith("ulr")
    ]
    memory = results.get("peak_bytes", {})
    plain = memory.get("plain forward and backward")
    return rows + [
        (
            f"peak memory of a step, batch 500, {name}",
            f"{value / plain:.2f} of a plain forward and backward pass",
            command,
        )
        for name, value in memory.items()
        if name.startswith("ulr")
    ]


def ulr_readme_rows() -> list[Row]:
    """What the README shows of them, and how far Table 1 is from the paper."""
    cells = [cell for cell in ulr_cells() if cell["part"] == "published"]
    differences = [statistics.mean(cell["test"]) - cell["paper"] for cell in cells]
    rows: list[Row] = []
    if cells:
        figure = f"{min(differences):+.2f} to {max(differences):+.2f} points ({len(cells)} cells)"
        claim = "MNIST, Table 1 of the DP-ULR paper: ours minus the paper's"
        rows.append((claim, figure, "`python -m benchmarks.ulr.table1 published`"))
    headline = "K = 1, 1 thread(s)"
    return rows + [row for row in ulr_speed_rows() if row[0].endswith(headline) and "published" not in row[0]]


def ulr_cells() -> list[dict[str, Any]]:
    """The cells of Table 1 that were trained, with their accuracies."""
    cells = []
    for (batch, target), paper in PAPER.items():
        for part, figure in zip(("published", "opacus"), paper, strict=True):
            rows = load_results(f"ulr_{part}").get("rows", [])
            key = "test" if part == "published" else "best"  # as in the paper
            test = [r[key] for r in rows if (r["batch"], r["target_std"]) == (batch, target)]
            if test:
                cells.append({"batch": batch, "target": target, "part": part, "paper": figure, "test": test})
    return cells


def ulr_sections() -> list[str]:
    """Table 1 of the DP-ULR paper as far as it was trained, the proven form, and CIFAR-10."""
    sections = []
    rows: list[tuple[str, ...]] = [
        (
            "DP-ULR" if cell["part"] == "published" else "DP-SGD (Opacus)",
            str(cell["batch"]),
            f"{cell['target']:g}",
            f"{cell['paper']:.2f}",
            _mean_text(cell["test"]),
            str(len(cell["test"])),
            _verdict(cell),
        )
        for cell in ulr_cells()
    ]
    if rows:
        content = load_results("ulr_published")
        setting = content["rows"][0]
        pairs = {row["batch"]: f"{row['sigma']:g} and {row['lr']:g}" for row in content["rows"]}
        chosen = ", ".join(f"{pair} at batch {batch}" for batch, pair in sorted(pairs.items()))
        header = ("trainer", "batch", "sigma_0", "paper [%]", "ours [%]", "seeds", "bar")
        text = (
            "Test accuracy after 25 epochs, mean and standard error; of DP-SGD the best of all epochs, as there. "
            f"K = {setting['copies']}; sigma and learning rate, chosen on validation records: {chosen}; "
            f"{content['date']}, `python -m benchmarks.ulr.table1 search`, `published`, `opacus`. The bar: at most two "
            "points below the paper. Accuracy and the formulas' epsilon by epoch: "
            "[docs/ulr_figure3.png](../docs/ulr_figure3.png)."
        )
        sections.append("\n\n".join(("## Table 1 of the DP-ULR paper (MNIST)", text, markdown(header, rows))))
    proven = load_results("ulr_proven").get("rows", [])
    if proven:
        cells = dict.fromkeys((r["epsilon"], r["trainer"]) for r in proven)
        rows = []
        for epsilon, trainer in sorted(cells):
            mine = [r for r in proven if (r["epsilon"], r["trainer"]) == (epsilon, trainer)]
            seconds = statistics.mean(r["seconds"] for r in mine)
            tests = [r["test"] for r in mine]
            rows.append((trainer, f"{epsilon:g}", _mean_text(tests), str(len(tests)), f"{seconds:.0f}"))
        text = (
            "Clipped records, central Gaussian noise, Poisson batches of 1000, delta 1e-5, 10 epochs, SGD at 0.5 with "
            "momentum 0.9 for both (`python -m benchmarks.ulr.table1 proven`); `bp` is DP-SGD."
        )
        header = ("trainer", "epsilon", "test [%]", "seeds", "seconds a run")
        sections.append(
            "\n\n".join(("## The proven form at equal proven epsilon (MNIST)", text, markdown(header, rows)))
        )
    found = load_results("ulr_resnet")
    if found:
        rows = [
            (name, f"{found[name]['test']:.2f}", f"{statistics.mean(found[name]['epoch_s']):.0f}")
            for name in ("ulr", "backpropagation")
        ]
        text = (
            f"{found['epochs']} epochs, batch {found['batch']}, Adam at {found['lr']:g}, K = {found['copies']} "
            f"antithetic pairs, sigma = {found['sigma']:g}, one seed, no protection, one thread of a shared machine "
            f"({found['date']}, `python -m benchmarks.ulr.resnet`). No bar."
        )
        header = ("trainer", "test [%]", "seconds an epoch")
        sections.append("\n\n".join(("## ResNet-5 on CIFAR-10", text, markdown(header, rows))))
    return sections


def _verdict(cell: dict[str, Any]) -> str:
    if cell["part"] == "opacus":
        return "none"
    return "met" if statistics.mean(cell["test"]) >= cell["paper"] - 2 else "**missed**"


def _mean_text(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"
