"""The tables and figures of the DP-ZO paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.markdown import difference, with_error
from benchmarks.pages.papers.item import blocks, table
from benchmarks.results_file import load_results
from benchmarks.zeroth_order import ablations, membership, sst2_language
from benchmarks.zeroth_order.sst2_head import EPSILONS, PURE_EPSILONS

Rows = list[tuple[str, ...]]
Cells = Mapping[tuple[str, str], list[float]]
"""Accuracies in per cent by law of noise and column."""
LAWS = {
    "gaussian": "DP-ZO, Gaussian noise",
    "laplace": "DP-ZO, Laplace noise",
    "dp-sgd": "DP-SGD",
    "none": "ZO, no privacy",
}
MEMORY = {
    "zo": (11.6, 11.7),
    "zo, lora": (10.3, 11.1),
    "dp-sgd, ghost": (32.9, 39.6),
    "dp-sgd, hooks": (51.3, 51.4),
    "dp-sgd, lora": (11.4, 18.1),
    "dp-sgd, bitfit": (12.2, 21.3),
}
"""Gigabytes at 128 and 512 tokens in the paper's Table 5."""
COLUMNS = {
    "records": "n = {0.records:,}",
    "clip": "C = {0.clip:g}",
    "batch": "batch {0.batch}",
    "steps": "{0.steps:,} steps",
}
"""What a study's cells are told apart by."""


def _paper(name: str, *values: float | str) -> tuple[str, ...]:
    """Return the line of a paper's figures, "-" where it has none."""
    return (f"the paper, {name}", *(value if isinstance(value, str) else f"{value:.2f}" for value in values))


def _runs(results: str, cell: str) -> list[float]:
    """Return the accuracies in per cent of a cell of some results, by seed."""
    runs = load_results(results).get("cells", {}).get(cell, {}).get("runs", {})
    return [100 * runs[seed]["accuracy"] for seed in sorted(runs, key=int)]


def _accuracies(methods: Mapping[str, str], epsilons: tuple[float, ...], *, of: str = "zo_sst2") -> Rows:
    """Return the accuracies in some results: a line for each method, by epsilon."""
    return [
        (name, *(with_error(_runs(of, f"{method}, {epsilon:g}"), ".1f") for epsilon in epsilons))
        for method, name in methods.items()
    ]


def by_epsilon(
    methods: Mapping[str, str],
    paper: list[Any],
    note: str,
    epsilons: tuple[float, ...] = tuple(sorted(EPSILONS)),
) -> str:
    """Return the accuracies of a head by method and epsilon.

    Args:
        methods: What the table calls the methods of the results.
        paper: The paper's lines.
        note: What says what follows the table, one of `NOTES`.
        epsilons: The columns.
    """
    header = ("trained by", *(f"epsilon {epsilon:,.16g}" for epsilon in epsilons))
    rows = [*_accuracies(methods, tuple(epsilons)), *(_paper(*line) for line in paper)]
    return blocks("Accuracy [%]:", table(header, rows), NOTES[note]())


def main_results() -> str:
    """Return the accuracies of the head, and the paper's."""
    epsilons = (0.5, 1.0, 4.0)
    paper = [_paper("DP-ZO on SST-2", 85.41, 91.19, 92.59), _paper("DP-SGD on SST-2", 64.33, 90.25, 92.06)]
    rows = [*_accuracies({"zo, gaussian, 75000 steps": "DP-ZO", "dp-sgd": "DP-SGD"}, epsilons), *paper]
    header = ("trained by", *(f"epsilon {epsilon:g}" for epsilon in epsilons))
    return blocks("Accuracy [%]:", table(header, rows), _against_dp_sgd(epsilons))


def language_model() -> str:
    """Return what a language model reaches; empty before a run of zeroth order is done."""
    rows = sst2_language.table_rows(load_results(sst2_language.NAME).get("cells", {}))
    if not any(row[0] in sst2_language.DIRECTIONS for row in rows):
        return ""
    return blocks("SmolLM2-135M on SST-2:", table(sst2_language.HEADER.split(" | "), rows))


def language_bars() -> str:
    """Return where the bars of a language model are; empty before it has any."""
    return "see Table 2" if language_model() else ""


def _against_dp_sgd(epsilons: tuple[float, ...]) -> str:
    """Say how far DP-ZO is from DP-SGD."""
    apart = []
    for epsilon in epsilons:
        theirs = _runs("zo_sst2", f"dp-sgd, {epsilon:g}")
        ours = _runs("zo_sst2", f"zo, gaussian, 75000 steps, {epsilon:g}")
        apart.append(f"{difference(ours, theirs)} at {epsilon:g}")
    return (
        "*The paper finds* DP-ZO comparable with DP-SGD, and by its table far ahead at epsilon 0.5 on SST-2. *Here* "
        f"DP-ZO less DP-SGD is {', '.join(apart)}."
    )


def study(
    name: str, laws: list[str], paper: list[Any], note: list[Any], records: list[int] | None = None
) -> str:
    """Return the accuracies of a study's cells; empty without results.

    Args:
        name: The study.
        laws: The noises that are shown.
        paper: The paper's lines.
        note: What says what follows the table from the accuracies, one of `NOTES`, and what it is called with.
        records: Numbers of records that are shown; None for all.
    """
    found = {
        (cell.law, COLUMNS[name].format(cell)): values
        for cell, values in ablations.accuracies(name)
        if cell.law in laws and (records is None or cell.records in records)
    }
    columns = list(dict.fromkeys(each for _, each in found))
    rows = [(LAWS[law], *(with_error(found.get((law, each), []), ".1f") for each in columns)) for law in laws]
    shown = table(("trained by", *columns), [*rows, *(_paper(*line) for line in paper)])
    says, *options = note
    return blocks("Accuracy [%]:", shown, NOTES[says](found, *options)) if found else ""


def _apart(cells: Cells, first: tuple[str, str], second: tuple[str, str]) -> str:
    """Return how far one cell is above another one."""
    return difference(cells.get(first, []), cells.get(second, []))


def _gains(cells: Cells, fewer: str, more: str, law: str, noisy_gain: float, free_gain: float) -> str:
    """Say what more records gain with noise and without."""
    noisy, free = (_apart(cells, (each, more), (each, fewer)) for each in (law, "none"))
    return (
        "*The paper finds* that more records help with noise, and little without it: from "
        f"{fewer} to {more} by {noisy_gain:+.1f} and {free_gain:+.1f}. *Here* they help by {noisy} and {free}."
    )


def _leads(cells: Cells, few: str, many: str, paper: str) -> str:
    """Say how far DP-ZO is ahead of DP-SGD at two numbers of records."""
    first, second = (_apart(cells, ("gaussian", each), ("dp-sgd", each)) for each in (few, many))
    return (
        "*The paper finds* DP-ZO comparable with DP-SGD for few records and behind it for many: less "
        f"DP-SGD it is {paper}. *Here* it is {first} at {few} and {second} at {many}, behind at both."
    )


def _clips(cells: Cells) -> str:
    """Say what the clip changes."""
    one, tenth, hundredth = (("gaussian", f"C = {clip}") for clip in ("1", "0.1", "0.01"))
    return (
        "*The paper finds* C = 1 much worse than the others, which lie within 2 points (by its table 2.6). *Here* "
        f"the accuracy changes by {_apart(cells, one, tenth)} from C = 0.1 to 1, and by "
        f"{_apart(cells, hundredth, tenth)} from 0.1 to 0.01. The paper's epsilon of 0.35 is 0.344 by our accountant, "
        "rounded up."
    )


def _eightfold(cells: Cells, first: str, last: str, paper: float) -> str:
    """Say what the last column gains over the first one."""
    ours = _apart(cells, ("gaussian", last), ("gaussian", first))
    return (
        "*The paper finds* that more steps help more than larger batches (Tables 19 and 20): from "
        f"{first} to {last} by {paper:+.1f}. *Here* the gain is {ours}."
    )


def laws_apart() -> str:
    """Return how far Gaussian noise is ahead of Laplace noise, by epsilon."""
    apart = [
        difference(
            *(_runs("zo_sst2", f"zo, {law}, 75000 steps, {epsilon}") for law in ("gaussian", "laplace"))
        )
        for epsilon in ("0.5", "1", "4")
    ]
    return (
        "*The paper finds* Gaussian noise ahead, by less than 1 point at epsilon 4. By epsilon its lead is 2.5, "
        f"1.8 and 0.9 there and {', '.join(apart)} here."
    )


def pure_lead() -> str:
    """Return how far DP-ZO is ahead of DP-SGD under Laplace noise, by epsilon."""
    leads = []
    for method in ("zo, laplace, pure", "zo, laplace, pure, whole batch"):
        found = (
            difference(
                _runs("zo_sst2", f"{method}, {e:g}"), _runs("zo_sst2", f"dp-sgd, laplace, pure, {e:g}")
            )
            for e in PURE_EPSILONS
        )
        leads.append(", ".join(found))
    return (
        "*The paper finds* DP-ZO far ahead of DP-SGD at every pure epsilon, since Laplace noise is large in "
        f"many dimensions. *Here*, by epsilon, DP-ZO less DP-SGD is {leads[0]}; of whole batches {leads[1]}. A "
        "head has 385 weights, where LoRA has millions."
    )


def loss() -> str:
    """Return the training losses at the first and last point of the curves."""
    found = {
        cell.records: curve
        for cell, _ in ablations.accuracies("records")
        if cell.law == "gaussian" and (curve := ablations.losses(cell))
    }
    rows = [(f"{n:,}", f"{curve[0]:.2f}", f"{curve[-1]:.2f}") for n, curve in found.items()]
    note = ""
    if {250, 5000} <= set(found):
        early = [f"{found[n][2000 * ablations.POINTS // 10_000 - 1]:.2f}" for n in (5000, 250)]
        note = (
            "*The paper finds* that 5,000 records converge faster than 250. *Here* the loss after 2,000 steps is "
            f"{early[0]} with 5,000 and {early[1]} with 250; after 10,000 steps it is {found[5000][-1]:.2f} and "
            f"{found[250][-1]:.2f}."
        )
    text = "Training loss at epsilon 1:"
    header = ("records", "after 500 steps", "after 10,000 steps")
    return blocks(text, table(header, rows), note) if rows else ""


def sigmas(number: int) -> str:
    """Return how many epsilons of a table of noise levels our accountant confirms."""
    rows = [row for row in load_results("zo_sigma_tables")["rows"] if row["table"] == str(number)]
    agree = [row for row in rows if "agrees" in row["verdict"] or "rounded up is" in row["verdict"]]
    others = [
        f" At sigma {row['noise']} (column {row['law']}) ours is {row['our_epsilon']:.3f}, the paper's "
        f"{row['paper_epsilon']}."
        for row in rows
        if row not in agree
    ]
    return (
        f"{len(agree)} of {len(rows)} epsilons agree to the printed digits.{''.join(others)}" if rows else ""
    )


def memory() -> str:
    """Return the peak memory of each method over that of inference, and over that of DP-ZO beside the paper's."""
    rows, lengths = load_results("zo_memory")["rows"], (128, 512, 1024)
    names = {
        "zo": "DP-ZO",
        "zo, lora": "DP-ZO, LoRA",
        "dp-sgd, ghost": "DP-SGD, ghost clipping",
        "dp-sgd, hooks": "DP-SGD, gradients of records",
        "dp-sgd, lora": "DP-SGD, LoRA",
        "dp-sgd, bitfit": "DP-SGD, BitFit",
    }

    def peak(method: str, length: int) -> float:
        return float(rows[f"{method}, 2 x {length}"]["peak_mib"])

    shown = [
        (name, *(f"{peak(method, n) / peak('inference', n):.2f}" for n in lengths))
        for method, name in names.items()
    ]
    against = [
        (
            names[method],
            *(
                f"{peak(method, n) / peak(base, n):.1f} ({MEMORY[method][k] / MEMORY[base][k]:.1f})"
                for k, n in enumerate((128, 512))
            ),
        )
        for method in MEMORY
        if (base := "zo, lora" if method in ("dp-sgd, lora", "dp-sgd, bitfit") else "zo") and "sgd" in method
    ]
    return blocks(
        "Peak memory over that of inference:",
        table(("method", *(f"{n:,} tokens" for n in lengths)), shown),
        "Peak memory over that of DP-ZO, for LoRA and BitFit of DP-ZO with LoRA; the paper's in brackets:",
        table(("method", "128 tokens", "512 tokens"), against),
        "*The paper finds* that DP-SGD takes several times DP-ZO's memory, and with LoRA or BitFit the more the longer "
        "the sequence. *Here* the same.",
    )


def half_memory() -> str:
    """Return the peak memory of zeroth order in bfloat16 over that of inference, by length."""
    rows, lengths = load_results("zo_memory")["rows"], (128, 512, 1024)
    found = [
        rows[f"zo, bfloat16, 2 x {n}"]["peak_mib"] / rows[f"inference, bfloat16, 2 x {n}"]["peak_mib"]
        for n in lengths
    ]
    header = ("", *(f"{n:,} tokens" for n in lengths))
    return blocks(
        "Peak memory in bfloat16 over that of inference:",
        table(header, [("DP-ZO", *(f"{ratio:.2f}" for ratio in found))]),
    )


def inference_attacks() -> str:
    """Return the areas under the curve by canaries, trainer and epsilon, and the paper's."""
    found = membership.table_rows(load_results("zo_membership")["cells"])
    kinds = {"token": "a new token each, as in the paper", "1": "a feature of their own each"}
    names = {"zo": "DP-ZO", "dp-sgd": "DP-SGD"}
    rows: Rows = [
        (text, names[method], *(row[3] for row in reversed(found) if row[:2] == (method, kind)))
        for kind, text in kinds.items()
        for method in membership.PLANS
        if any(row[:2] == (method, kind) for row in found)
    ]
    rows += [
        ("the paper's language model", names[method], *(f"{area:.1f}" for area in reversed(areas)))
        for method, areas in membership.PAPER.items()
    ]
    epsilons = (
        "without noise" if epsilon == float("inf") else f"epsilon {epsilon:g}"
        for epsilon in reversed(membership.EPSILONS)
    )
    return blocks(
        "Area under the ROC curve [%]:",
        table(("canaries", "trained by", *epsilons), rows),
        "*The paper finds* that ZO without noise leaks less than SGD and about as much as DP-SGD at epsilon 10, and "
        "that DP-ZO up to epsilon 4 is near random guesses (50). *Here* the canaries with a feature of their own show "
        "the first; by them ZO without noise leaks as DP-SGD between epsilon 1 and 4, and DP-ZO at 4 is no guess. "
        "Those with new tokens decide nothing: even without noise both have about 59, since the head of a frozen "
        "encoder has no weight for a token.",
    )


NOTES: dict[str, Callable[..., str]] = {
    "gains": _gains,
    "leads": _leads,
    "clips": _clips,
    "eightfold": _eightfold,
    "laws_apart": laws_apart,
    "pure_lead": pure_lead,
}
"""What says what follows a table."""
