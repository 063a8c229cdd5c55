"""Which tables and figures of the four papers are repeated? The rows of docs/papers.md.

Each row states what a table or figure shows, its state, our figures as far as results exist, and the command. A row
with results has their date; one whose results do not exist yet is queued, whatever state it will have.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.convex.accountants import SHUFFLE_EPSILONS
from benchmarks.markdown import markdown, section
from benchmarks.results_file import load_results
from benchmarks.ulr import table1 as ulr_table1
from benchmarks.zeroth_order import ablations, membership

Figures = Callable[[], str]
STATES = {
    "repeated": "the paper's own setting, or its formula",
    "smaller": "the paper's question on data or a model that fits a processor, named in the row",
    "queued": "the command exists and resumes; results are missing, or not complete",
    "not possible": "with the reason",
    "no figures": "a sketch or a list without results",
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure of a paper.

    Attributes:
        name: As the paper numbers it.
        shows: What it shows.
        state: One of `STATES`.
        figures: Ours, from the results, and what differs; or the reason.
        run: Modules and arguments of `python -m benchmarks.`, one string each.
        results: The results whose date the row shows.
    """

    name: str
    shows: str
    state: str
    figures: Figures | str
    run: tuple[str, ...] = ()
    results: str = ""

    def order(self) -> tuple[str, int]:
        """Return the place on the page: figures, then tables, by number."""
        kind, number = self.name.split()
        return kind, int(number) if number.isdigit() else 100

    def row(self) -> tuple[str, ...]:
        """Return the row as text; without results, a row that has a command is queued."""
        found = load_results(self.results) if self.results else {}
        missing = bool(self.results) and not found
        text = self.figures if isinstance(self.figures, str) else ("" if missing else self.figures())
        commands = ", ".join(f"`python -m benchmarks.{words}`" for words in self.run)
        return (
            self.name,
            self.shows,
            "queued" if missing else self.state,
            text or "no results yet",
            commands,
            found.get("date", ""),
        )


def _range(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):+.2f} to {max(found):+.2f} points in {len(found)} cells"


def _pdfa_table() -> str:
    cells = load_results("pdfa_table1")["cells"]
    feedbacks = ("bp", "dfa", "tdfa", "pdfa")
    parts = [f"{name} {_range(c['difference'] for c in cells if c['row'] == name)}" for name in feedbacks]
    return f"ours minus the paper's: {'; '.join(parts)}"


def _ulr_table() -> str:
    cells = ulr_table1.cells()
    parts = [
        f"{name} {_range(statistics.mean(c['test']) - c['paper'] for c in cells if c['part'] == part)}"
        for part, name in (("published", "DP-ULR"), ("opacus", "DP-SGD"))
    ]
    seeds = {
        part: min(len(c["test"]) for c in cells if c["part"] == part) for part in ("published", "opacus")
    }
    return f"ours minus the paper's: {'; '.join(parts)}; at least {min(seeds.values())} seed a cell"


def _widths() -> str:
    rows = load_results("ulr_widths")["rows"]
    parts = [f"{r['width']}, batch {r['batch']}: {r['ulr']:.1f} and {r['dp_sgd']:.1f} %" for r in rows]
    return f"DP-ULR and DP-SGD: {'; '.join(parts)}; the paper names no layers, only 2.5 and 5 times the parameters"


def _ulr_rejection() -> str:
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


def _ulr_resnet() -> str:
    rows = load_results("ulr_resnet")["rows"]
    parts = [
        f"{row['form']}, {row['trainer']}, {row['epochs']} epochs: {row['test']:.1f} %"
        for row in rows
        if row["test"] is not None
    ]
    return "; ".join(parts) + "; private cells and convergence are queued"


def _convex_cells(data: str, names: tuple[str, ...], epsilons: tuple[float, ...] = (1.33, 4.76)) -> str:
    cells = [c for c in load_results("convex")["cells"] if c["data"] == data and c["row"] in names]
    best = {}
    for cell in sorted(cells, key=lambda c: c["test"]):
        best[cell["row"], cell["epsilon"]] = cell["test"]
    parts = [
        f"{name} " + ", ".join(f"{best[name, e]:.1f} % at {e:g}" for e in epsilons if (name, e) in best)
        for name in names
        if any((name, e) in best for e in epsilons)
    ]
    return "; ".join(parts)


_CONVEX_ROWS = (
    "convex, last iterate",
    "convex, Poisson DP-SGD",
    "ReLU network, DP-SGD",
    "logistic regression, DP-SGD",
)


def _convex_tuned() -> str:
    rows = load_results("convex_tuned")["rows"]
    parts = [f"{row['test']:.1f} % at {row['epsilon']:.2f}" for row in rows]
    return f"the last iterate, tuned privately with 5 or 10 trials: {', '.join(parts)}; the paper has 92.7 and 94.4 %"


def _convex_curves() -> str:
    points = load_results("convex_curves")["points"]
    names = dict.fromkeys(point["row"] for point in points)
    parts = []
    for name in names:
        mine = sorted((p["epsilon"], p["test"]) for p in points if p["row"] == name)
        parts.append(f"{name} {mine[0][1]:.1f} to {mine[-1][1]:.1f} %")
    return f"one seed, a run for each epsilon from 0.5 to 8: {'; '.join(parts)}"


def _worse(epsilons: list[float]) -> str:
    return (
        f"worse than the Gaussian from epsilon {min(epsilons):g}"
        if epsilons
        else "never worse than the Gaussian"
    )


def _accountants(part: str) -> str:
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


def _zo(*methods: str, epsilons: tuple[float, ...] = (0.5, 1.0, 4.0)) -> str:
    parts = [
        f"{method}: {', '.join(value for e in epsilons if (value := _zo_mean(method, e)))} %"
        for method in methods
    ]
    return f"SST-2 head, epsilon {', '.join(f'{e:g}' for e in epsilons)}: {'; '.join(parts)}"


def _zo_study(study: str, value: Callable[[Any], str], laws: tuple[str, ...]) -> Figures:
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
        planned = sum(cell.study == study and cell.law in laws for cell in ablations.CELLS)
        rest = "" if len(found) == planned else f"; {planned - len(found)} of {planned} cells are queued"
        return f"SST-2 head, accuracy [%]: {'; '.join(parts)}{rest}"

    return text


def _zo_loss() -> str:
    cells = load_results("zo_ablations")["cells"]
    parts = []
    for cell, _ in ablations.accuracies("records"):
        if cell.law == "gaussian" and cell.records in (250, 5000):
            runs = list(cells[cell.key].values())
            first, last = (statistics.fmean(run["losses"][at] for run in runs) for at in (0, -1))
            parts.append(f"n = {cell.records}: {first:.2f} to {last:.2f}")
    return f"training loss, SST-2 head: {'; '.join(parts)}" if parts else ""


def _zo_sigma(*tables: str) -> Figures:
    def text() -> str:
        rows = [row for row in load_results("zo_sigma_tables")["rows"] if row["table"] in tables]
        agree = sum("agrees" in row["verdict"] or "rounded up is" in row["verdict"] for row in rows)
        return f"{agree} of {len(rows)} epsilons agree to the printed digits" if rows else ""

    return text


def _zo_memory() -> str:
    rows = load_results("zo_memory")["rows"]
    base = rows["inference, 2 x 512"]["peak_mib"]
    names = ("zo", "zo, lora", "dp-sgd, ghost", "dp-sgd, hooks", "dp-sgd, lora", "dp-sgd, bitfit")
    parts = [f"{name} {rows[f'{name}, 2 x 512']['peak_mib'] / base:.2f}" for name in names]
    return f"163 million parameters on a processor; peak memory over that of inference, 512 tokens: {', '.join(parts)}"


def _zo_membership() -> str:
    rows = [row for row in membership.table_rows(load_results("zo_membership")["cells"]) if row[1] == "1"]
    parts = [
        f"{method} {', '.join(row[3].split()[0] for row in reversed(rows) if row[0] == method)}"
        for method in ("zo", "dp-sgd")
    ]
    return f"linear head, canaries of size 1, area [%] at epsilon 0.5, 1, 4, 10, inf: {'; '.join(parts)}"


_LARGE = "a language model of 1.3 to 66 billion parameters and its GPUs"
_HEAD, _ABLATIONS = "zeroth_order.sst2_head measure", "zeroth_order.ablations"

PAPERS: dict[str, tuple[Item, ...]] = {
    "Photonic DFA (Ohana et al. 2021)": (
        Item(
            name="Figure 1", shows="sketch of backpropagation and DFA", state="no figures", figures="a sketch"
        ),
        Item(
            name="Figure 2",
            shows="training curves by feedback and noise; alignment by noise",
            state="smaller",
            figures="the accuracy at the end is that of Table 1. Curves and alignment by layer are in each run's "
            "report (`opusim report`); the figure is not drawn as printed",
            run=("pdfa.table1",),
            results="pdfa_table1",
        ),
        Item(
            name="Table 1",
            shows="FashionMNIST, four feedbacks, seven noise levels",
            state="repeated",
            figures=_pdfa_table,
            run=("pdfa.table1", "pdfa.readings"),
            results="pdfa_table1",
        ),
    ),
    "DP-ULR (Feng et al. 2025)": (
        Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
        Item(
            name="Figure 2",
            shows="what rejection adds to eq. 11, contours",
            state="repeated",
            figures=_ulr_rejection,
            run=("ulr.figure2",),
            results="ulr_figure2",
        ),
        Item(
            name="Table 1",
            shows="MNIST, DP-ULR and DP-SGD by batch and sigma_0",
            state="repeated",
            figures=_ulr_table,
            run=("ulr.table1 search", "ulr.table1 published", "ulr.table1 opacus"),
            results="ulr_published",
        ),
        Item(
            name="Figure 3",
            shows="accuracy and epsilon by epoch",
            state="repeated",
            figures="one seed: [the figure](ulr_figure3.png)",
            run=("ulr.figure3",),
            results="ulr_published",
        ),
        Item(
            name="Figure 4",
            shows="ResNet-5 on CIFAR-10, DP-ULR and DP-SGD",
            state="queued",
            figures=_ulr_resnet,
            run=("ulr.resnet plain --epochs 20", "ulr.resnet private", "ulr.variance"),
            results="ulr_resnet",
        ),
        Item(
            name="Table C1",
            shows="MNIST, three widths, sigma_0 = 8",
            state="queued",
            figures=lambda: _widths(),
            run=("ulr.table1 widths",),
            results="ulr_widths",
        ),
    ),
    "Convex ReLU networks (Koskela 2024)": (
        Item(
            name="Figure 1",
            shows="epsilon by epochs, Theorem 2.8 and DP-SGD",
            state="repeated",
            figures=lambda: _accountants("by_epochs"),
            run=("convex.accountants",),
            results="convex_accountants",
        ),
        Item(
            name="Table 1",
            shows="MNIST after private tuning",
            state="repeated",
            figures=_convex_tuned,
            run=("convex.tuned",),
            results="convex_tuned",
        ),
        Item(
            name="Table 2",
            shows="CIFAR-10 after private tuning",
            state="queued",
            figures=lambda: (
                f"untuned: {_convex_cells('cifar-10', ('convex, last iterate, CIFAR-10',), (4.76,))}; "
                "the paper has 45.5 % after tuning"
            ),
            run=("convex.accuracy measure", "convex.curves --data cifar-10 --seeds 0,1,2"),
            results="convex",
        ),
        Item(
            name="Figure 2",
            shows="MNIST, accuracy by epsilon",
            state="smaller",
            figures=_convex_curves,
            run=("convex.curves",),
            results="convex_curves",
        ),
        Item(
            name="Figure 3",
            shows="CIFAR-10, accuracy by epsilon",
            state="queued",
            figures="see the benchmark's page",
            run=("convex.curves --data cifar-10",),
            results="convex_curves_cifar10",
        ),
        Item(
            name="Figure 4",
            shows="MNIST without noise, accuracy by epochs and hyperplanes",
            state="smaller",
            figures="the curves' ends: [convex](../benchmarks/convex/README.md)",
            run=("convex.hyperplanes --noise 0",),
            results="convex_hyperplanes",
        ),
        Item(
            name="Figure 5",
            shows="MNIST with noise, accuracy by epochs and hyperplanes",
            state="smaller",
            figures="the curves' ends: [convex](../benchmarks/convex/README.md)",
            run=("convex.hyperplanes",),
            results="convex_hyperplanes",
        ),
        Item(
            name="Figure 6",
            shows="accountants, sampling without replacement",
            state="repeated",
            figures=lambda: _accountants("without_replacement"),
            run=("convex.accountants",),
            results="convex_accountants",
        ),
        Item(
            name="Figure 7",
            shows="FashionMNIST, accuracy by epsilon",
            state="smaller",
            figures=lambda: f"two epsilons, 3 seeds: {_convex_cells('fashion-mnist', _CONVEX_ROWS)}",
            run=("convex.accuracy measure", "convex.curves --data fashion-mnist"),
            results="convex",
        ),
        Item(
            name="Figure 8",
            shows="bound for shuffled batches",
            state="repeated",
            figures=lambda: _accountants("shuffled"),
            run=("convex.accountants",),
            results="convex_accountants",
        ),
    ),
    "DP-ZO (Tang et al. 2024)": (
        Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
        *(
            Item(
                name=f"Figure {number}",
                shows=shows,
                state="smaller",
                figures=text,
                run=(run,),
                results=results,
            )
            for number, shows, text, run, results in (
                (2, "Table 1 as bars", "see Table 1", _HEAD, "zo_sst2"),
                (4, "Table 3 as bars", "see Table 3", _HEAD, "zo_sst2"),
            )
        ),
        Item(
            name="Figure 3",
            shows="Table 2 as bars",
            state="not possible",
            figures=f"needs {_LARGE}",
        ),
        Item(
            name="Table 1",
            shows="OPT-13B, three tasks, 1,000 records",
            state="smaller",
            figures=lambda: _zo("zo, gaussian, 75000 steps", "dp-sgd"),
            run=(_HEAD, "zeroth_order.sst2_lora measure"),
            results="zo_sst2",
        ),
        *(
            Item(name=f"Table {number}", shows=shows, state="not possible", figures=f"needs {_LARGE}")
            for number, shows in (
                (2, "SQuAD by size of model"),
                (4, "SQuAD by architecture"),
            )
        ),
        Item(
            name="Table 3",
            shows="pure epsilon by Laplace noise",
            state="smaller",
            figures=lambda: _zo("zo, laplace, pure", "zo, laplace, pure, whole batch", epsilons=(4.0,)),
            run=(_HEAD,),
            results="zo_sst2",
        ),
        Item(
            name="Table 5",
            shows="memory by length of sequence",
            state="smaller",
            figures=_zo_memory,
            run=("zeroth_order.memory",),
            results="zo_memory",
        ),
        Item(
            name="Figure 5",
            shows="memory with half precision and checkpointing",
            state="smaller",
            figures="bfloat16 without checkpointing: [zeroth order](../benchmarks/zeroth_order/README.md)",
            run=("zeroth_order.memory",),
            results="zo_memory",
        ),
        Item(
            name="Table 6",
            shows="membership inference",
            state="smaller",
            figures=_zo_membership,
            run=("zeroth_order.membership measure",),
            results="zo_membership",
        ),
        Item(
            name="Figure 6",
            shows="training loss by records",
            state="smaller",
            figures=_zo_loss,
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        Item(
            name="Table 7",
            shows="records, Gaussian noise at epsilon 1, and without",
            state="smaller",
            figures=_zo_study("records", lambda cell: f"n = {cell.records}", ("gaussian", "none")),
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        Item(
            name="Table 8",
            shows="records, Laplace noise at pure epsilon 4",
            state="smaller",
            figures=_zo_study("records", lambda cell: f"n = {cell.records}", ("laplace",)),
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="smaller",
                figures=_zo_study("records", lambda cell: f"n = {cell.records}", ("gaussian", "dp-sgd")),
                run=(f"{_ABLATIONS} --study records",),
                results="zo_ablations",
            )
            for number, shows in ((9, "records, DP-ZO and DP-SGD, QNLI"), (11, "1,000 records and all"))
        ),
        Item(
            name="Table 10",
            shows="Gaussian against Laplace noise",
            state="smaller",
            figures=lambda: _zo("zo, gaussian, 75000 steps", "zo, laplace, 75000 steps"),
            run=(_HEAD,),
            results="zo_sst2",
        ),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="repeated",
                figures=_zo_sigma(str(number)),
                run=("zeroth_order.sigma_tables",),
                results="zo_sigma_tables",
            )
            for number, shows in (
                (12, "noise for pure epsilon"),
                (13, "noise of Laplace at delta 1e-5"),
                (16, "noise of Table 1, 75,000 steps"),
                (17, "noise of Table 2, 10,000 steps"),
                (18, "noise of DP-SGD"),
            )
        ),
        Item(name="Table 14", shows="prompts", state="no figures", figures="a list"),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="smaller",
                figures=_zo_study(study, value, ("gaussian",)),
                run=(f"{_ABLATIONS} --study {study}",),
                results="zo_ablations",
            )
            for number, shows, study, value in (
                (15, "clip, sigma = 15.9", "clip", lambda cell: f"C = {cell.clip:g}"),
                (19, "batch", "batch", lambda cell: f"batch {cell.batch}"),
                (20, "steps", "steps", lambda cell: f"{cell.steps:,} steps"),
            )
        ),
        Item(
            name="Table 21",
            shows="SQuAD by size of model, all sizes",
            state="not possible",
            figures=f"needs {_LARGE}",
        ),
    ),
}
"""The tables and figures of each paper."""


def papers_page() -> str:
    """Return the whole of docs/papers.md."""
    rows = {title: [item.row() for item in sorted(items, key=Item.order)] for title, items in PAPERS.items()}
    counts = Counter(row[2] for part in rows.values() for row in part)
    total = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    head = (
        "# The papers' tables and figures\n\n"
        "If you come from one of the four papers, look up its table or figure here. Written by `make bench-report` "
        f"from [benchmarks/results](../benchmarks/README.md). {total}.\n\n"
        + markdown(("state", "means"), list(STATES.items()))
        + "\n\nAccuracies are on test records. Run the commands in a checkout, with `OPUSIM_DATA` naming the folder of "
        "the data sets; each resumes what it began, and its question stands at the top of its file."
    )
    header = ("item", "shows", "state", "ours", "command", "date")
    parts = [section(title, markdown(header, part)) for title, part in rows.items()]
    return "\n\n".join((head, *parts)) + "\n"
