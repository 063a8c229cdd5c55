"""What the results say of each table and figure of the papers: the texts of docs/papers.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.convex import accuracy, curves, hyperplanes, tuned
from benchmarks.convex.accountants import SHUFFLE_EPSILONS
from benchmarks.markdown import with_error
from benchmarks.pdfa import figure2, readings
from benchmarks.pdfa.table1 import PAPER, SIGMAS
from benchmarks.private_accuracy import records
from benchmarks.results_file import load_results
from benchmarks.ulr import figure3 as ulr_figure3
from benchmarks.ulr import resnet
from benchmarks.ulr import table1 as ulr_table1
from benchmarks.ulr.table1 import EPOCHS
from benchmarks.zeroth_order import ablations, joint_clip, membership

CONVEX_ROWS = (accuracy.LAST_ITERATE, "convex, Poisson DP-SGD", "ReLU network, DP-SGD")
CONVEX_PAPER = {
    "mnist": {2.88: (92.7, 92.9, 91.6), 8.91: (94.4, 94.9, 94.4)},
    "cifar-10": {2.88: (41.6, 41.7, 42.7), 8.91: (45.5, 45.9, 47.1)},
}
"""Tables 1 and 2 of the convex paper, by data set and epsilon, in the order of `CONVEX_ROWS`."""
Figures = Callable[[], str]


def _range(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):+.2f} to {max(found):+.2f} points in {len(found)} cells"


def pdfa_table() -> str:
    cells = load_results("pdfa_table1")["cells"]
    feedbacks = ("bp", "dfa", "tdfa", "pdfa")
    parts = [f"{name} {_range(c['difference'] for c in cells if c['row'] == name)}" for name in feedbacks]
    return (
        f"ours minus the paper's: {'; '.join(parts)} (bp: backpropagation; dfa: direct feedback alignment; tdfa: "
        "ternary; pdfa: photonic). Other readings of the paper's equations, tried in "
        f"{len(readings.ROWS) * len(readings.COLUMNS)} cells with {readings.seeds()}, move one by up to "
        f"{readings.largest_move():.1f} points "
        "([which](../benchmarks/pdfa/README.md#other-readings-of-the-papers-equations))"
    )


def pdfa_curves() -> str:
    """Return the accuracies at the end of the curves, and the alignment of the second layer; empty without curves."""
    columns = ("non-private", "0", "0.2")
    parts = []
    for row in PAPER:
        ends = [f"{found[-1]:.1f}" for column in columns if (found := figure2.curve(row, column))]
        if len(ends) == len(columns):
            parts.append(f"{row} {', '.join(ends)} %")
    cosines = [figure2.alignment("pdfa", f"{sigma:g}", 1) for sigma in SIGMAS]
    falls = ", ".join(f"{value:.2f}" for value in cosines if value is not None)
    text = (
        f"[the figure](pdfa_figure2.png). Held-out accuracy at the end, mean of three seeds, without clip and noise, "
        "sigma 0, sigma 0.2: "
        f"{'; '.join(parts)} (bp: backpropagation; dfa: direct feedback alignment; tdfa: ternary; pdfa: photonic). "
        "Cosine of photonic DFA's second layer with backpropagation, "
        f"sigma {', '.join(f'{sigma:g}' for sigma in SIGMAS)}: {falls}"
    )
    return text if parts else ""


def ulr_table() -> str:
    """Return how far the trained cells are from the paper's, and what the proven form reaches."""
    parts = []
    for part, name in (("published", "DP-ULR"), ("opacus", "DP-SGD")):
        cells = [cell for cell in ulr_table1.cells() if cell["part"] == part]
        if cells:
            span = _range(statistics.mean(cell["test"]) - cell["paper"] for cell in cells)
            seeds = sorted({len(cell["test"]) for cell in cells})
            parts.append(
                f"{name} {span} ({' or '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''} each)"
            )
    return "; ".join(
        filter(
            None,
            (
                f"ours minus the paper's: {'; '.join(parts)}; of DP-SGD the best of all epochs on test records in "
                'every cell, where the paper takes it "if needed"',
                ulr_paper_rate(),
                ulr_proven(),
            ),
        )
    )


def ulr_paper_rate() -> str:
    """Return what DP-ULR reaches at the paper's learning rate, by the cells of the search."""
    cells = ulr_table1.SEARCH_CELLS
    found = [
        max(
            row["validation"]
            for row in ulr_table1.rows_of("search")
            if (row["batch"], row["target_std"], row["lr"], row["epochs"]) == (*cell, 0.01, EPOCHS)
        )
        for cell in cells
    ]
    return (
        f"with the paper's learning rate of 0.01, {', '.join(f'{value:.1f}' for value in found)} % of held-out records "
        f"at batch {', '.join(f'{batch} and sigma_0 {target:g}' for batch, target in cells)}, where the paper has "
        f"{', '.join(f'{ulr_table1.PAPER[cell][0]:.2f}' for cell in cells)} on test records"
    )


def ulr_proven() -> str:
    """Return what the proven form with the most copies reaches at DP-SGD's epsilon; empty without results."""
    rows, parts = ulr_table1.rows_of("proven"), []
    for epsilon in (3.0, 1.0):
        mine, other = (
            [row["test"] for row in rows if (row["trainer"], row["epsilon"]) == (trainer, epsilon)]
            for trainer in ("ulr, 128 orthogonal", "bp")
        )
        if mine and other:
            parts.append(f"{with_error(mine)} and {with_error(other)} % at epsilon {epsilon:g}")
    return (
        "not in the paper: the proven form (10 epochs, batches of 1,000, 128 copies in orthogonal directions) and "
        f"DP-SGD have {', '.join(parts)}"
        if parts
        else ""
    )


def widths() -> str:
    """Return the mean accuracies of each width and batch, and the paper's."""
    rows = ulr_table1.width_rows()
    parts = []
    for width, batch in dict.fromkeys((r["width"], r["batch"]) for r in rows):
        mine = [r for r in rows if (r["width"], r["batch"]) == (width, batch)]
        ulr, dp_sgd = (with_error([r[key] for r in mine], ".1f") for key in ("ulr", "dp_sgd"))
        paper = " and ".join(f"{value:.2f}" for value in ulr_table1.WIDTHS_PAPER[width, batch])
        seeds = f", {len(mine)} seed{'s' if len(mine) > 1 else ''}"
        parts.append(f"{width}, batch {batch}{seeds}: {ulr} and {dp_sgd} % (the paper {paper})")
    return f"DP-ULR, and DP-SGD's best of all epochs: {'; '.join(parts)}" if parts else ""


def ulr_epochs() -> str:
    """Return the figure, and how far the formula's epsilon is from DP-SGD's at the end."""
    last = [
        (ulr_figure3.ulr_epsilon(batch, target, EPOCHS), ulr_figure3.dp_sgd_epsilon(batch, target, EPOCHS))
        for batch in ulr_figure3.BATCHES
        for target in ulr_figure3.TARGETS
    ]
    ratios = [formula / accounted for formula, accounted in last]
    return (
        f"[the figure](ulr_figure3.png). After {EPOCHS} epochs eq. 11 with N_B = q N gives {min(ratios):.1f} to "
        f"{max(ratios):.0f} times the epsilon of DP-SGD. In the paper's figure both overlap: it names no N_B, and its "
        "formula for DP-SGD is the second term of eq. 11"
    )


def ulr_rejection() -> str:
    """Return the largest part of the mean batch that the paper's statement holds for."""
    rows = load_results("ulr_figure2")["rows"]
    parts = []
    for q in dict.fromkeys(row["q"] for row in rows):
        mine = [row for row in rows if row["q"] == q]
        found = ", ".join("none" if row["part"] is None else f"{row['part']:.2f}" for row in mine)
        parts.append(f"q = {q:g}: {found}")
    records = ", ".join(f"{row['records']:,}" for row in rows[: len(rows) // len(parts)])
    return (
        "[the contours](ulr_figure2.png). Largest N_B / (q N) at which the first term of eq. 11, which rejection adds, "
        f"is below 1e-3 of the second, N = {records}: {'; '.join(parts)}. The paper finds this for N of 1,000 or more "
        'and N_B "slightly less than the mean batch size qN": that holds for large data sets only'
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
    table = (
        "[what the names mean](../benchmarks/ulr/README.md#resnet-5-on-cifar-10-figure-4-of-the-dp-ulr-paper)"
    )
    return (
        f"test accuracy [%], by chance 10; {'; '.join(parts)} ({table}). The noise is sigma_0 of the published form, "
        "else the multiplier. The paper calls DP-ULR comparable with DP-SGD in the end, for suitable parameters"
    )


def convex_tuned(data: str) -> str:
    """Return what private searches on a data set find, and settings that no epsilon pays for; empty without results.

    Args:
        data: The data set.
    """
    found = []
    for mean in (mean for name, mean in tuned.PLANNED if name == data):
        shown = [
            f"{with_error([row['test'] for row in rows if row['test'] is not None], '.1f')} % at "
            f"{max(row['epsilon'] for row in rows):.2f}"
            for (name, _, trials), rows in sorted(tuned.cells().items())
            if (name, trials) == (data, mean)
        ]
        if shown:
            found.append(f"{mean:g} trials expected: {', '.join(shown)}")
    searched = f"the last iterate, searched privately, at the epsilon of the whole search: {'; '.join(found)}"
    parts = [searched] if found else []
    measured = []
    for row in CONVEX_ROWS:
        tests = [accuracy.tests(row, data, epsilon) for epsilon in (1.33, 4.76)]
        if all(tests):
            measured.append(f"{row} {', '.join(with_error(part, '.1f') for part in tests)} %")
    if measured:
        parts.append(
            f"one training whose settings were chosen at no cost in epsilon, at 1.33 and 4.76: {'; '.join(measured)}"
        )
    paper = "; ".join(
        f"{' / '.join(f'{value:.1f}' for value in values)} % at {epsilon:g}"
        for epsilon, values in CONVEX_PAPER[data].items()
    )
    parts.append(f"the paper, the last iterate, DP-SGD of the convex model and of the network: {paper}")
    return "; ".join(parts) if found or measured else ""


def public_features() -> str:
    """Return what DP-SGD reaches on public features of CIFAR-10; empty without results."""
    row = "cifar-10, linear on mirrored components, DP-SGD"
    tests = [run["test"] for run in load_results(records.NAME).get("runs", []) if run["row"] == row]
    text = (
        "for comparison, a linear model on public scattering features under DP-SGD: "
        f"{with_error(tests, '.1f')} % at 3 for zeroing a record ([by epsilon](../benchmarks/curves/README.md))"
    )
    return text if tests else ""


def convex_curves(data: str) -> str:
    """Return the accuracies at the smallest and largest epsilon; empty without results of the present settings."""
    tests: dict[str, dict[float, list[float]]] = {}
    for (row, epsilon, _), point in curves.finished(data).items():
        tests.setdefault(row, {}).setdefault(epsilon, []).append(point["test"])
    parts = [
        f"{row} "
        + ", ".join(f"{with_error(found[e], '.1f')} % at {e:g}" for e in sorted({min(found), max(found)}))
        for row, found in tests.items()
    ]
    figure = "[the figure](convex.png). " if data == curves.DATA else ""
    table = "[all epsilons](../benchmarks/convex/README.md)"
    return f"{figure}{'; '.join(parts)} ({table})" if parts else ""


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


def _worse(found: list[tuple[float, float]]) -> str:
    """Say from which epsilon on a bound is worse, and the Gaussian's delta there."""
    if not found:
        return f"better than the Gaussian at epsilon {SHUFFLE_EPSILONS[0]:g} to {SHUFFLE_EPSILONS[-1]:g}"
    return f"worse than the Gaussian from epsilon {found[0][0]:g} on, where its delta is {found[0][1]:.1e}"


def accountants(part: str) -> str:
    found, figure = load_results("convex_accountants")[part], "[the curves](convex_accountants.png)."
    if part == "shuffled":
        at, plain = SHUFFLE_EPSILONS.index(1.0), list(found.values())[-1]
        parts = []
        for name, values in list(found.items())[:-1]:
            worse = [
                (e, other)
                for e, mine, other in zip(SHUFFLE_EPSILONS, values, plain, strict=True)
                if mine > other
            ]
            parts.append(f"{name}: delta {values[at]:.1e}, {_worse(worse)}")
        return (
            f"{figure} One epoch, sigma = 5, at epsilon 1, {'; '.join(parts)}; Gaussian, not amplified: "
            f"{plain[at]:.1e}. The paper finds 1,000 shuffled batches worse than the Gaussian: confirmed for smaller "
            "delta only"
        )
    end = {"by_epochs": "after 400 epochs", "without_replacement": "after 10,000 steps"}[part]
    shown = "; ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())
    text = f"{figure} Epsilon at delta 1e-5 {end}: {shown}"
    if part == "by_epochs":
        last, other = [values[-1] for values in list(found.values())[:-1]], list(found.values())[-1][-1]
        tighter = sum(value < other for value in last)
        text += f". The paper finds all {len(last)} products tighter than DP-SGD: confirmed for {tighter}"
    return text


def _zo_mean(method: str, epsilon: float) -> str:
    runs = load_results("zo_sst2")["cells"].get(f"{method}, {epsilon:g}", {}).get("runs", {})
    return with_error([100 * run["accuracy"] for run in runs.values()], ".1f") if runs else ""


def zo(*methods: str, epsilons: tuple[float, ...] = (0.5, 1.0, 4.0), note: str = "") -> str:
    """Return the accuracies of a head by method and epsilon."""
    parts = [
        f"{method}: {', '.join(value for e in epsilons if (value := _zo_mean(method, e)))} %"
        for method in methods
    ]
    text = f"accuracy at epsilon {', '.join(f'{e:g}' for e in epsilons)}: {'; '.join(parts)}"
    return f"{text}; {note}" if note else text


def zo_main() -> str:
    """Return the accuracies of the head, of joint clips and of LoRA, and the paper's."""
    cells = load_results("zo_sst2_lora").get("cells", {})
    lora = [
        f"{key.split(',')[0]} {with_error([100 * run['accuracy'] for run in cells[key]['runs'].values()], '.1f')} %"
        for key in ("zo, gaussian, 4", "dp-sgd, 4")
        if key in cells
    ]
    parts = [
        zo("zo, gaussian, 75000 steps", "dp-sgd"),
        f"LoRA, at epsilon 4: {', '.join(lora)}" if lora else "",
        zo_joint(),
        "the paper on SST-2: DP-ZO 85.4, 91.2, 92.6, DP-SGD 64.3, 90.3, 92.1. That DP-ZO is as good as DP-SGD is "
        "confirmed for the head at epsilon 4, with jointly clipped directions at 0.5; at 1 and 4 these equal the "
        "second DP-SGD and are behind the first",
    ]
    return "; ".join(filter(None, parts))


def zo_study(
    study: str,
    value: Callable[[Any], str],
    laws: tuple[str, ...],
    *,
    only: Callable[[Any], bool] = lambda _: True,
    note: str = "",
) -> Figures:
    """Return what says the accuracies of a study's cells; empty without results.

    Args:
        study: Its name.
        value: Names a cell.
        laws: The noises that are shown.
        only: Selects cells.
        note: Follows the figures.
    """

    def text() -> str:
        found = [
            (cell, values) for cell, values in ablations.accuracies(study) if cell.law in laws and only(cell)
        ]
        if not found:
            return ""
        parts = [
            f"{ablations.SHOWN.get(law, law)}: "
            + ", ".join(
                f"{with_error(values, '.1f')} at {value(cell)}" for cell, values in found if cell.law == law
            )
            for law in laws
            if any(cell.law == law for cell, _ in found)
        ]
        return f"accuracy [%]: {'; '.join(parts)}{f'; {note}' if note else ''}"

    return text


def zo_loss() -> str:
    """Return the training losses at the first and last point of the curves of the fewest and most records."""
    found = {
        cell.records: curve
        for cell, _ in ablations.accuracies("records")
        if cell.law == "gaussian" and cell.records in (250, 5000) and (curve := ablations.losses(cell))
    }
    parts = [f"n = {records:,}: {curve[0]:.2f} to {curve[-1]:.2f}" for records, curve in found.items()]
    text = f"[the figure](zo_figure6.png). Training loss at epsilon 1 after 500 and 10,000 steps: {'; '.join(parts)}"
    if len(found) == 2:
        apart = abs(found[5000][-1] - found[250][-1])
        text += f". The paper finds that 5,000 records converge better than 250; here the ends are {apart:.3f} apart"
    return text if parts else ""


def zo_sigma(*tables: str) -> Figures:
    def text() -> str:
        rows = [row for row in load_results("zo_sigma_tables")["rows"] if row["table"] in tables]
        agree = sum("agrees" in row["verdict"] or "rounded up is" in row["verdict"] for row in rows)
        others = [
            f"; at sigma {row['noise']} (column {row['law']}) ours is {row['our_epsilon']:.3f}, the paper's "
            f"{row['paper_epsilon']}"
            for row in rows
            if not ("agrees" in row["verdict"] or "rounded up is" in row["verdict"])
        ]
        text = f"{agree} of {len(rows)} epsilons agree to the printed digits"
        return text + "".join(others) if rows else ""

    return text


def zo_memory() -> str:
    rows = load_results("zo_memory")["rows"]
    base = rows["inference, 2 x 512"]["peak_mib"]
    names = {
        "zo": "ZO",
        "zo, lora": "ZO with LoRA",
        "dp-sgd, ghost": "DP-SGD with ghost clipping",
        "dp-sgd, hooks": "with per-sample gradients",
        "dp-sgd, lora": "with LoRA",
        "dp-sgd, bitfit": "with BitFit",
    }
    parts = [f"{text} {rows[f'{name}, 2 x 512']['peak_mib'] / base:.2f}" for name, text in names.items()]
    return (
        f"peak memory over that of inference, 512 tokens: {', '.join(parts)}; the paper, 512 tokens, in GB: 11.7, "
        "11.1, 39.6, 51.4, 18.1, 21.3"
    )


def zo_half_memory() -> str:
    """Return the peak memory of zeroth order in bfloat16 over that of inference, by length."""
    rows = load_results("zo_memory")["rows"]
    lengths = (128, 512, 1024)
    found = [
        rows[f"zo, bfloat16, 2 x {n}"]["peak_mib"] / rows[f"inference, bfloat16, 2 x {n}"]["peak_mib"]
        for n in lengths
    ]
    return (
        f"bfloat16, peak memory over that of inference, {', '.join(f'{n:,}' for n in lengths)} tokens: "
        f"{', '.join(f'{ratio:.2f}' for ratio in found)}"
    )


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
        "area under the ROC curve [%] at epsilon 0.5, 1, 4, 10, inf, canaries with "
        f"{'; canaries with '.join(parts)}; the paper's language model: {paper}. Its areas without noise are not "
        "reached with new tokens, since a head has no weight for them: there ZO leaks as much as DP-SGD"
    )


def zo_joint() -> str:
    """Return the accuracies of joint clips and of DP-SGD under the same conditions; empty without results."""
    cells = load_results(joint_clip.NAME).get("cells", {})
    parts = []
    for name in joint_clip.PLANS:
        found = [cells.get(joint_clip.key_of(name, e), {}) for e in (0.5, 1.0, 4.0)]
        if all(cell.get("runs") for cell in found):
            parts.append(
                f"{name} {', '.join(with_error(joint_clip.figures(cell), '.1f') for cell in found)} %"
            )
    return (
        f"50 directions clipped jointly, and public inputs, DP-SGD's rate searched again: {'; '.join(parts)}"
        if parts
        else ""
    )
