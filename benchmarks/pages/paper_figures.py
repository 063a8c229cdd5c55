"""What the results say of each table and figure of the papers: the texts of docs/papers.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.convex import curves, hyperplanes, tuned
from benchmarks.convex.accountants import SHUFFLE_EPSILONS
from benchmarks.markdown import with_error
from benchmarks.pdfa import figure2
from benchmarks.pdfa.table1 import SIGMAS
from benchmarks.results_file import load_results
from benchmarks.ulr import resnet
from benchmarks.ulr import table1 as ulr_table1
from benchmarks.zeroth_order import ablations, joint_clip, membership

Figures = Callable[[], str]


def _range(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):+.2f} to {max(found):+.2f} points in {len(found)} cells"


def pdfa_table() -> str:
    cells = load_results("pdfa_table1")["cells"]
    feedbacks = ("bp", "dfa", "tdfa", "pdfa")
    parts = [f"{name} {_range(c['difference'] for c in cells if c['row'] == name)}" for name in feedbacks]
    readings = load_results("pdfa_readings").get("rows", [])
    kept = {(row["row"], row["column"]): row["test"] for row in readings if row["reading"] == "kept"}
    moved = max((abs(row["test"] - kept[row["row"], row["column"]]) for row in readings), default=0.0)
    return (
        f"ours minus the paper's: {'; '.join(parts)}. Other readings of what the paper leaves unsaid move a cell by up "
        f"to {moved:.1f} points ([which](../benchmarks/pdfa/README.md#what-the-paper-leaves-unsaid))"
    )


def pdfa_curves() -> str:
    """Return the accuracies at the end of the curves, and the alignment of the second layer."""
    data = figure2.shown_data()
    curves = figure2.curves_of(data)
    parts = []
    for row in dict.fromkeys(row for row, _ in curves):
        ends = [held_out[-1] for (one, _), held_out in curves.items() if one == row]
        parts.append(f"{row} {', '.join(f'{end:.1f}' for end in ends)} %")
    noises = list(dict.fromkeys(column for _, column in curves))
    cosines = [figure2.alignment("pdfa", f"{sigma:g}", 1) for sigma in SIGMAS]
    falls = ", ".join(f"{value:.2f}" for value in cosines if value is not None)
    return (
        f"[the figure](pdfa_figure2.png). Curves on {data}, {figure2.EPOCHS[data]} epochs, held-out accuracy at the "
        f"end, {', '.join(noises)}: {'; '.join(parts)}. FashionMNIST, cosine of photonic DFA's second layer with "
        f"backpropagation after 15 epochs, sigma {', '.join(f'{sigma:g}' for sigma in SIGMAS)}: {falls}"
    )


def ulr_table() -> str:
    cells = ulr_table1.cells()
    parts = [
        f"{name} {_range(statistics.mean(c['test']) - c['paper'] for c in cells if c['part'] == part)}"
        for part, name in (("published", "DP-ULR"), ("opacus", "DP-SGD"))
    ]
    seeds = {
        part: min(len(c["test"]) for c in cells if c["part"] == part) for part in ("published", "opacus")
    }
    return f"ours minus the paper's: {'; '.join(parts)}; at least {min(seeds.values())} seed a cell"


def widths() -> str:
    """Return the mean accuracies of each width and batch."""
    rows = ulr_table1.width_rows()
    parts = []
    for width, batch in dict.fromkeys((r["width"], r["batch"]) for r in rows):
        mine = [r for r in rows if (r["width"], r["batch"]) == (width, batch)]
        ulr, dp_sgd = (statistics.fmean(r[key] for r in mine) for key in ("ulr", "dp_sgd"))
        parts.append(f"{width}, batch {batch}: {ulr:.1f} and {dp_sgd:.1f} %")
    return f"DP-ULR and DP-SGD: {'; '.join(parts)}; the paper names no layers, only 2.5 and 5 times the parameters"


def ulr_rejection() -> str:
    rows = load_results("ulr_figure2")["rows"]
    parts = [
        f"{row['part']:.2f} at q = {row['q']:g}, N = {row['records']:,}"
        for row in rows
        if row["part"] is not None
    ]
    return (
        "the ratio is below 1e-3 only for N_B / (q N) up to "
        + "; ".join(parts)
        + ', less than "slightly less than 1"'
    )


def ulr_resnet() -> str:
    """Return the accuracies without protection, and those of each form of it by batch and noise."""
    rows = resnet.means()
    plain = [
        f'"{row["trainer"]}" {with_error(row["tests"], ".1f")} after {row["epochs"]} epochs'
        for row in rows
        if row["form"] == "plain"
    ]
    parts = [f"without protection {', '.join(plain)}"]
    for form in resnet.FORMS:
        for batch in resnet.BATCHES:
            mine = sorted(
                (r for r in rows if (r["form"], r["batch"]) == (form, batch)), key=lambda r: r["noise"]
            )
            if mine:
                tests = " and ".join(with_error(row["tests"], ".1f") for row in mine)
                noises = " and ".join(f"{row['noise']:g}" for row in mine)
                parts.append(f"{form}, batch {batch}, noise {noises}: {tests}")
    return f"test accuracy [%], {'; '.join(parts)} ([the table](../benchmarks/ulr/README.md))"


def convex_untuned(row: str) -> str:
    """Return the accuracies of a row of `benchmarks.convex.accuracy`; empty without results."""
    cells = [cell for cell in load_results("convex").get("cells", []) if cell["row"] == row]
    parts = [f"{cell['test']:.1f} % at {cell['epsilon']:g}" for cell in cells]
    return f"not tuned: {', '.join(parts)}" if parts else ""


def convex_tuned(data: str, paper: str) -> str:
    """Return the accuracies of private searches on a data set with the epsilon of all; empty without results.

    Args:
        data: The data set.
        paper: The paper's figures.
    """
    parts = []
    for (name, _, _), found in sorted(tuned.cells().items()):
        if name == data:
            tests = [row["test"] for row in found if row["test"] is not None]
            parts.append(f"{with_error(tests, '.1f')} % at {max(row['epsilon'] for row in found):.2f}")
    means = " or ".join(f"{mean}" for name, mean in tuned.PLANNED if name == data)
    shown = ", ".join(parts)
    return (
        f"the last iterate, tuned privately with {means} trials: {shown}; the paper: {paper}" if parts else ""
    )


def public_features(row: str) -> str:
    """Return the accuracies of a row of the private accuracies; empty without results."""
    cells = [c for c in load_results("private_accuracy_records").get("cells", []) if c["row"] == row]
    parts = [f"{c['test']:.1f} ± {c['test_standard_error']:.1f} % at {c['epsilon']:g}" for c in cells]
    where = "[on public features](../benchmarks/private_accuracy/README.md)"
    return f"{row.split(', ')[1]} {where}: {', '.join(parts)}" if parts else ""


def convex_curves(data: str) -> str:
    points = load_results(curves.name_of(data))["points"]
    seeds = len({point.get("seed", 0) for point in points})
    parts = []
    for name in dict.fromkeys(point["row"] for point in points):
        least, most = (
            statistics.fmean(p["test"] for p in points if (p["row"], p["epsilon"]) == (name, epsilon))
            for epsilon in _ends(p["epsilon"] for p in points if p["row"] == name)
        )
        parts.append(f"{name} {least:.1f} to {most:.1f} %")
    return (
        f"{seeds} seed{'s' if seeds > 1 else ''}, a run for each epsilon from {min(curves.EPSILONS):g} to "
        f"{max(curves.EPSILONS):g}: {'; '.join(parts)}"
    )


def _ends(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def convex_hyperplanes(*noises: float) -> str:
    """Return the test accuracies at the end of the curves of some noise levels."""
    found = hyperplanes.cells(hyperplanes.EPOCHS)
    parts = []
    for noise in noises:
        shown = [
            f"{'the network' if p is None else f'P = {p}'} {with_error([curve['test'] for curve in curves], '.1f')}"
            for (level, p), curves in found.items()
            if level == noise
        ]
        if shown:
            parts.append((f"sigma = {noise:g}: " if noise else "") + ", ".join(shown))
    if not parts:
        return ""
    ends = "; ".join(parts)
    return (
        f"[the figure](convex_hyperplanes.png); test accuracy [%] after {hyperplanes.EPOCHS} epochs, {ends}"
    )


def _worse(epsilons: list[float]) -> str:
    return (
        f"worse than the Gaussian from epsilon {min(epsilons):g}"
        if epsilons
        else "never worse than the Gaussian"
    )


def accountants(part: str) -> str:
    found = load_results("convex_accountants")[part]
    if part == "shuffled":
        at, plain = SHUFFLE_EPSILONS.index(1.0), list(found.values())[-1]
        parts = []
        for name, values in list(found.items())[:-1]:
            worse = [
                e for e, mine, other in zip(SHUFFLE_EPSILONS, values, plain, strict=True) if mine > other
            ]
            parts.append(f"{name}: delta {values[at]:.1e}, {_worse(worse)}")
        return (
            f"at epsilon 1, {'; '.join(parts)}; Gaussian, not amplified: {plain[at]:.1e}. The paper finds "
            "1,000 shuffled batches worse than that"
        )
    return "at the end: " + "; ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())


def _zo_mean(method: str, epsilon: float) -> str:
    runs = load_results("zo_sst2")["cells"].get(f"{method}, {epsilon:g}", {}).get("runs", {})
    return f"{100 * statistics.fmean(run['accuracy'] for run in runs.values()):.1f}" if runs else ""


def zo(*methods: str, epsilons: tuple[float, ...] = (0.5, 1.0, 4.0)) -> str:
    parts = [
        f"{method}: {', '.join(value for e in epsilons if (value := _zo_mean(method, e)))} %"
        for method in methods
    ]
    return f"SST-2 head, epsilon {', '.join(f'{e:g}' for e in epsilons)}: {'; '.join(parts)}"


def zo_study(study: str, value: Callable[[Any], str], laws: tuple[str, ...]) -> Figures:
    def text() -> str:
        found = [(cell, values) for cell, values in ablations.accuracies(study) if cell.law in laws]
        if not found:
            return ""
        parts = [
            f"{law}: "
            + ", ".join(
                f"{statistics.fmean(values):.1f} at {value(cell)}"
                for cell, values in found
                if cell.law == law
            )
            for law in laws
            if any(cell.law == law for cell, _ in found)
        ]
        return f"SST-2 head, accuracy [%]: {'; '.join(parts)}"

    return text


def zo_loss() -> str:
    cells = load_results("zo_ablations")["cells"]
    parts = []
    for cell, _ in ablations.accuracies("records"):
        if cell.law == "gaussian" and cell.records in (250, 5000):
            runs = list(cells[cell.key].values())
            first, last = (statistics.fmean(run["losses"][at] for run in runs) for at in (0, -1))
            parts.append(f"n = {cell.records}: {first:.2f} to {last:.2f}")
    return f"training loss, SST-2 head: {'; '.join(parts)}" if parts else ""


def zo_sigma(*tables: str) -> Figures:
    def text() -> str:
        rows = [row for row in load_results("zo_sigma_tables")["rows"] if row["table"] in tables]
        agree = sum("agrees" in row["verdict"] or "rounded up is" in row["verdict"] for row in rows)
        return f"{agree} of {len(rows)} epsilons agree to the printed digits" if rows else ""

    return text


def zo_memory() -> str:
    rows = load_results("zo_memory")["rows"]
    base = rows["inference, 2 x 512"]["peak_mib"]
    names = ("zo", "zo, lora", "dp-sgd, ghost", "dp-sgd, hooks", "dp-sgd, lora", "dp-sgd, bitfit")
    parts = [f"{name} {rows[f'{name}, 2 x 512']['peak_mib'] / base:.2f}" for name in names]
    return f"163 million parameters on a processor; peak memory over that of inference, 512 tokens: {', '.join(parts)}"


def zo_membership() -> str:
    rows = membership.table_rows(load_results("zo_membership")["cells"])
    kinds = {"token": "a new token each, as in the paper", "1": "a feature of their own each"}
    parts = [
        f"{text}: "
        + "; ".join(
            f"{method} {', '.join(row[3].split()[0] for row in reversed(rows) if row[:2] == (method, kind))}"
            for method in membership.PLANS
        )
        + f", standard errors up to {max(float(row[3].split()[2]) for row in rows if row[1] == kind):.1f}"
        for kind, text in kinds.items()
        if any(row[1] == kind for row in rows)
    ]
    paper = "; ".join(
        f"{method} {', '.join(f'{area:g}' for area in reversed(areas))}"
        for method, areas in membership.PAPER.items()
    )
    return (
        "linear head on frozen embeddings, area [%] at epsilon 0.5, 1, 4, 10, inf, canaries with "
        f"{'; canaries with '.join(parts)}; the paper's language model: {paper}"
    )


def zo_joint() -> str:
    """Return the accuracies of joint clips; empty without results."""
    cells = load_results(joint_clip.NAME).get("cells", {})
    parts = []
    for name in (name for name, plan in joint_clip.PLANS.items() if plan.zo):
        found = {e: cells.get(joint_clip.key_of(name, e), {}).get("runs") for e in (0.5, 1.0, 4.0)}
        means = [
            f"{statistics.fmean(joint_clip.figures(cells[joint_clip.key_of(name, e)])):.1f} at {e:g}"
            for e, runs in found.items()
            if runs
        ]
        if means:
            parts.append(f"{name}: {', '.join(means)}")
    return "; ".join(parts)
