"""Which tables and figures of the four papers are repeated? The rows of docs/papers.md.

Each row states what a table or figure shows, its state, our figures as far as results exist, and the command. A row
with results has their date; one whose results do not exist yet is queued, whatever state it will have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.markdown import markdown, section
from benchmarks.pages.paper_figures import (
    Figures,
    convex_accountants,
    convex_cells,
    convex_curves,
    convex_tuned,
    pdfa_table,
    ulr_rejection,
    ulr_resnet,
    ulr_table,
    ulr_widths,
    zo_accuracies,
    zo_loss,
    zo_membership,
    zo_memory,
    zo_sigma,
    zo_study,
)
from benchmarks.results_file import load_results

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


_CONVEX_ROWS = (
    "convex, last iterate",
    "convex, Poisson DP-SGD",
    "ReLU network, DP-SGD",
    "logistic regression, DP-SGD",
)
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
            figures=pdfa_table,
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
            figures=ulr_rejection,
            run=("ulr.figure2",),
            results="ulr_figure2",
        ),
        Item(
            name="Table 1",
            shows="MNIST, DP-ULR and DP-SGD by batch and sigma_0",
            state="repeated",
            figures=ulr_table,
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
            figures=ulr_resnet,
            run=("ulr.resnet plain --epochs 20", "ulr.resnet private", "ulr.variance"),
            results="ulr_resnet",
        ),
        Item(
            name="Table C1",
            shows="MNIST, three widths, sigma_0 = 8",
            state="queued",
            figures=ulr_widths,
            run=("ulr.table1 widths",),
            results="ulr_widths",
        ),
    ),
    "Convex ReLU networks (Koskela 2024)": (
        Item(
            name="Figure 1",
            shows="epsilon by epochs, Theorem 2.8 and DP-SGD",
            state="repeated",
            figures=lambda: convex_accountants("by_epochs"),
            run=("convex.accountants",),
            results="convex_accountants",
        ),
        Item(
            name="Table 1",
            shows="MNIST after private tuning",
            state="repeated",
            figures=convex_tuned,
            run=("convex.tuned",),
            results="convex_tuned",
        ),
        Item(
            name="Table 2",
            shows="CIFAR-10 after private tuning",
            state="queued",
            figures=lambda: (
                f"untuned: {convex_cells('cifar-10', ('convex, last iterate, CIFAR-10',), (4.76,))}; "
                "the paper has 45.5 % after tuning"
            ),
            run=("convex.accuracy measure", "convex.curves --data cifar-10 --seeds 0,1,2"),
            results="convex",
        ),
        Item(
            name="Figure 2",
            shows="MNIST, accuracy by epsilon",
            state="smaller",
            figures=convex_curves,
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
            figures=lambda: convex_accountants("without_replacement"),
            run=("convex.accountants",),
            results="convex_accountants",
        ),
        Item(
            name="Figure 7",
            shows="FashionMNIST, accuracy by epsilon",
            state="smaller",
            figures=lambda: f"two epsilons, 3 seeds: {convex_cells('fashion-mnist', _CONVEX_ROWS)}",
            run=("convex.accuracy measure", "convex.curves --data fashion-mnist"),
            results="convex",
        ),
        Item(
            name="Figure 8",
            shows="bound for shuffled batches",
            state="repeated",
            figures=lambda: convex_accountants("shuffled"),
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
            figures=lambda: zo_accuracies("zo, gaussian, 75000 steps", "dp-sgd"),
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
            figures=lambda: zo_accuracies(
                "zo, laplace, pure", "zo, laplace, pure, whole batch", epsilons=(4.0,)
            ),
            run=(_HEAD,),
            results="zo_sst2",
        ),
        Item(
            name="Table 5",
            shows="memory by length of sequence",
            state="smaller",
            figures=zo_memory,
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
            figures=zo_membership,
            run=("zeroth_order.membership measure",),
            results="zo_membership",
        ),
        Item(
            name="Figure 6",
            shows="training loss by records",
            state="smaller",
            figures=zo_loss,
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        Item(
            name="Table 7",
            shows="records, Gaussian noise at epsilon 1, and without",
            state="smaller",
            figures=zo_study("records", lambda cell: f"n = {cell.records}", ("gaussian", "none")),
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        Item(
            name="Table 8",
            shows="records, Laplace noise at pure epsilon 4",
            state="smaller",
            figures=zo_study("records", lambda cell: f"n = {cell.records}", ("laplace",)),
            run=(f"{_ABLATIONS} --study records",),
            results="zo_ablations",
        ),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="smaller",
                figures=zo_study("records", lambda cell: f"n = {cell.records}", ("gaussian", "dp-sgd")),
                run=(f"{_ABLATIONS} --study records",),
                results="zo_ablations",
            )
            for number, shows in ((9, "records, DP-ZO and DP-SGD, QNLI"), (11, "1,000 records and all"))
        ),
        Item(
            name="Table 10",
            shows="Gaussian against Laplace noise",
            state="smaller",
            figures=lambda: zo_accuracies("zo, gaussian, 75000 steps", "zo, laplace, 75000 steps"),
            run=(_HEAD,),
            results="zo_sst2",
        ),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="repeated",
                figures=zo_sigma(str(number)),
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
                figures=zo_study(study, value, ("gaussian",)),
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
