"""The tables and figures of the DP-ZO paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.markdown import difference, with_error
from benchmarks.pages.papers.item import Item, blocks, table
from benchmarks.results_file import load_results
from benchmarks.zeroth_order import ablations, joint_clip, sst2_language
from benchmarks.zeroth_order.sst2_head import EPSILONS, PURE_EPSILONS

Figures = Callable[[], str]
Rows = list[tuple[str, ...]]
Cells = Mapping[tuple[str, str], list[float]]
"""Accuracies in per cent by law of noise and column."""
LAWS = {
    "gaussian": "DP-ZO, Gaussian noise",
    "laplace": "DP-ZO, Laplace noise",
    "dp-sgd": "DP-SGD",
    "none": "ZO, no privacy",
}
_LARGE = "a language model of 1.3 to 66 billion parameters and its GPUs"
MEMORY = {
    "zo": (11.6, 11.7),
    "zo, lora": (10.3, 11.1),
    "dp-sgd, ghost": (32.9, 39.6),
    "dp-sgd, hooks": (51.3, 51.4),
    "dp-sgd, lora": (11.4, 18.1),
    "dp-sgd, bitfit": (12.2, 21.3),
}
"""Gigabytes at 128 and 512 tokens in the paper's Table 5."""
INTRODUCTION = (
    "All figures, and joint clips: [results](../zeroth_order/README.md). "
    "Ours, unless an item says otherwise, is a linear head on frozen embeddings of SST-2; its accuracy is that on the "
    "dev and test sentences together. C is 0.01, where the paper has 0.05, and 1 for DP-SGD, where it has 0.1; rate "
    "and C are those chosen for 10,000 steps. Our ± is a standard error over five seeds, three in the tables by "
    "records, clip, batch and steps; differences are taken seed by seed. The paper has five seeds; its standard "
    "deviations are left out. Epsilon is for adding or removing a record."
)
_HEAD, _ABLATIONS = "zeroth_order.sst2_head measure", "zeroth_order.ablations"


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
    *paper: tuple[str, ...],
    epsilons: tuple[float, ...] = tuple(sorted(EPSILONS)),
    note: Callable[[], str],
) -> Figures:
    """Return what says the accuracies of a head by method and epsilon.

    Args:
        methods: What the table calls the methods of the results.
        paper: The paper's lines.
        epsilons: The columns.
        note: Says what follows the table.
    """

    def text() -> str:
        header = ("trained by", *(f"epsilon {epsilon:,.16g}" for epsilon in epsilons))
        return blocks("Accuracy [%]:", table(header, [*_accuracies(methods, epsilons), *paper]), note())

    return text


def main_results() -> str:
    """Return the accuracies of the head and of LoRA, and the paper's."""
    epsilons = (0.5, 1.0, 4.0)
    lora = _accuracies({"zo, gaussian": "DP-ZO, LoRA", "dp-sgd": "DP-SGD, LoRA"}, epsilons, of="zo_sst2_lora")
    paper = [_paper("DP-ZO on SST-2", 85.41, 91.19, 92.59), _paper("DP-SGD on SST-2", 64.33, 90.25, 92.06)]
    rows = [*_accuracies({"zo, gaussian, 75000 steps": "DP-ZO", "dp-sgd": "DP-SGD"}, epsilons), *lora, *paper]
    header = ("trained by", *(f"epsilon {epsilon:g}" for epsilon in epsilons))
    return blocks("Accuracy [%]:", table(header, rows), _against_dp_sgd(epsilons))


def language_model() -> str:
    """Return what a language model reaches; empty before a run of zeroth order is done."""
    rows = sst2_language.table_rows(load_results(sst2_language.NAME).get("cells", {}))
    if not any(row[0] in sst2_language.DIRECTIONS for row in rows):
        return ""
    return blocks("SmolLM2-135M on SST-2:", table(sst2_language.COLUMN_NAMES, rows))


def _against_dp_sgd(epsilons: tuple[float, ...]) -> str:
    """Say how far DP-ZO is from DP-SGD, and how far with a joint clip."""
    found, apart, joint = load_results(joint_clip.NAME).get("cells", {}), [], []
    for epsilon in epsilons:
        theirs = _runs("zo_sst2", f"dp-sgd, {epsilon:g}")
        ours = _runs("zo_sst2", f"zo, gaussian, 75000 steps, {epsilon:g}")
        clipped = joint_clip.figures(found.get(joint_clip.key_of("zo, joint clip", epsilon), {}))
        apart.append(f"{difference(ours, theirs)} at {epsilon:g}")
        joint.append(f"{difference(clipped, theirs)} at {epsilon:g}")
    lora = difference(_runs("zo_sst2_lora", "zo, gaussian, 4"), _runs("zo_sst2_lora", "dp-sgd, 4"))
    return (
        "*The paper finds* DP-ZO comparable with DP-SGD, and by its table far ahead at epsilon 0.5 on SST-2. *Here* "
        f"DP-ZO less DP-SGD is {', '.join(apart)} for the head, and {lora} at 4 with LoRA. With a joint clip it is "
        f"{', '.join(joint)}, against the same DP-SGD."
    )


def study(
    name: str,
    column: Callable[[Any], str],
    laws: tuple[str, ...],
    *paper: tuple[str, ...],
    only: Callable[[Any], bool] = lambda _: True,
    note: Callable[[Cells], str] = lambda _: "",
) -> Figures:
    """Return what says the accuracies of a study's cells; empty without results.

    Args:
        name: The study.
        column: Names a cell's column.
        laws: The noises that are shown.
        paper: The paper's lines.
        only: Selects cells.
        note: Says from the accuracies what follows the table.
    """

    def text() -> str:
        found = {
            (cell.law, column(cell)): values
            for cell, values in ablations.accuracies(name)
            if cell.law in laws and only(cell)
        }
        columns = list(dict.fromkeys(each for _, each in found))
        rows = [
            (LAWS[law], *(with_error(found.get((law, each), []), ".1f") for each in columns)) for law in laws
        ]
        shown = table(("trained by", *columns), [*rows, *paper])
        return blocks("Accuracy [%]:", shown, note(found)) if found else ""

    return text


def _apart(cells: Cells, first: tuple[str, str], second: tuple[str, str]) -> str:
    """Return how far one cell is above another one."""
    return difference(cells.get(first, []), cells.get(second, []))


def _gains(fewer: str, more: str, law: str, paper: tuple[float, float]) -> Callable[[Cells], str]:
    """Return what says the gain from more records with noise and without."""

    def text(cells: Cells) -> str:
        noisy, free = (_apart(cells, (each, more), (each, fewer)) for each in (law, "none"))
        return (
            "*The paper finds* that more records help with noise, and little without it: from "
            f"{fewer} to {more} by {paper[0]:+.1f} and {paper[1]:+.1f}. *Here* they help by {noisy} and {free}."
        )

    return text


def _leads(few: str, many: str, paper: str) -> Callable[[Cells], str]:
    """Return what says how far DP-ZO is ahead of DP-SGD at two numbers of records."""

    def text(cells: Cells) -> str:
        first, second = (_apart(cells, ("gaussian", each), ("dp-sgd", each)) for each in (few, many))
        return (
            "*The paper finds* DP-ZO comparable with DP-SGD for few records and behind it for many: less "
            f"DP-SGD it is {paper}. *Here* it is {first} at {few} and {second} at {many}, behind at both."
        )

    return text


def _clips(cells: Cells) -> str:
    one, tenth, hundredth = (("gaussian", f"C = {clip}") for clip in ("1", "0.1", "0.01"))
    return (
        "*The paper finds* C = 1 much worse than the others, which lie within 2 points (by its table 2.6). *Here* "
        f"the accuracy changes by {_apart(cells, one, tenth)} from C = 0.1 to 1, and by "
        f"{_apart(cells, hundredth, tenth)} from 0.1 to 0.01. The paper's epsilon of 0.35 is 0.344 by our accountant, "
        "rounded up."
    )


def _eightfold(first: str, last: str, paper: float) -> Callable[[Cells], str]:
    """Return what says the gain from the first column to the last one."""

    def text(cells: Cells) -> str:
        ours = _apart(cells, ("gaussian", last), ("gaussian", first))
        return (
            "*The paper finds* that more steps help more than larger batches (Tables 19 and 20): from "
            f"{first} to {last} by {paper:+.1f}. *Here* the gain is {ours}."
        )

    return text


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


def sigmas(number: int) -> Figures:
    """Return what says how many epsilons of a table of noise levels our accountant confirms."""

    def text() -> str:
        rows = [row for row in load_results("zo_sigma_tables")["rows"] if row["table"] == str(number)]
        agree = [row for row in rows if "agrees" in row["verdict"] or "rounded up is" in row["verdict"]]
        others = [
            f" At sigma {row['noise']} (column {row['law']}) ours is {row['our_epsilon']:.3f}, the paper's "
            f"{row['paper_epsilon']}."
            for row in rows
            if row not in agree
        ]
        text = f"{len(agree)} of {len(rows)} epsilons agree to the printed digits.{''.join(others)}"
        return text if rows else ""

    return text


def memory() -> str:
    """Return the peak memory of each method over that of DP-ZO, ours and the paper's."""
    rows = load_results("zo_memory")["rows"]
    names = {
        "dp-sgd, ghost": "DP-SGD, ghost clipping",
        "dp-sgd, hooks": "DP-SGD, gradients of records",
        "dp-sgd, lora": "DP-SGD, LoRA",
        "dp-sgd, bitfit": "DP-SGD, BitFit",
    }

    def peak(method: str, length: int) -> float:
        return float(rows[f"{method}, 2 x {length}"]["peak_mib"])

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
    """Return what the areas under the curve say."""
    return (
        "*The paper finds* that ZO without noise leaks less than SGD and about as much as DP-SGD at epsilon 10, and "
        "that DP-ZO up to epsilon 4 is near random guesses (50). *Here* the canaries with a feature of their own show "
        "the first; by them ZO without noise leaks as DP-SGD between epsilon 1 and 4, and DP-ZO at 4 is no guess. "
        "Those with new tokens decide nothing: even without noise both have about 59, since the head of a frozen "
        "encoder has no weight for a token."
    )


def _by_records(
    number: int,
    shows: str,
    laws: tuple[str, ...],
    *paper: tuple[str, ...],
    note: Callable[[Cells], str],
    differs: str = "",
    only: Callable[[Any], bool] = lambda _: True,
) -> Item:
    """Return a table of DP-ZO by the number of records."""
    return Item(
        name=f"Table {number}",
        shows=shows,
        differs=differs,
        state="smaller",
        figures=study("records", lambda cell: f"n = {cell.records:,}", laws, *paper, only=only, note=note),
        run=(f"{_ABLATIONS} --study records",),
        results=("zo_ablations",),
        left=partial(ablations.left, "records", *laws),
    )


def _ablation(
    number: int,
    name: str,
    column: Callable[[Any], str],
    paper: tuple[str, ...],
    differs: str,
    note: Callable[[Cells], str],
) -> Item:
    return Item(
        name=f"Table {number}",
        shows=f"{name}, sigma = 15.9" if name == "clip" else name,
        differs=differs,
        state="smaller",
        figures=study(name, column, ("gaussian",), paper, note=note),
        run=(f"{_ABLATIONS} --study {name}",),
        results=("zo_ablations",),
        left=partial(ablations.left, name, "gaussian"),
    )


def _impossible(name: str, shows: str, needs: str = _LARGE) -> Item:
    return Item(name=name, shows=shows, state="not possible", figures=f"needs {needs}")


ITEMS = (
    Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
    Item(name="Figure 2", shows="Table 1 as bars", state="smaller", figures="see Table 1"),
    Item(
        name="Figure 3",
        shows="Table 2 as bars",
        state="smaller" if language_model() else "queued",
        figures="see Table 2",
    ),
    Item(name="Figure 4", shows="Table 3 as bars", state="smaller", figures="see Table 3"),
    Item(
        name="Figure 5",
        shows="memory with half precision and checkpointing",
        state="smaller",
        figures=half_memory,
        differs=(
            "163 million random weights and the whole memory of a process, the paper 2.7 billion and that of a GPU; "
            "two sequences a step, the paper one; at most 1,024 tokens, the paper 2,048; without checkpointing; DP-ZO "
            "only"
        ),
        run=("zeroth_order.memory",),
        results=("zo_memory",),
    ),
    Item(
        name="Figure 6",
        shows="training loss by records",
        differs="10,000 steps; the rate is inverse to the noise, else that of n = 1,000; three seeds, not smoothed",
        state="smaller",
        figures=loss,
        run=(f"{_ABLATIONS} --study records",),
        results=("zo_ablations",),
        left=lambda: ablations.left("records", "gaussian"),
        picture=("zo_figure6.png", "Training loss by step for 250 to 6,920 records"),
    ),
    Item(
        name="Table 1",
        shows="OPT-13B, three tasks, 1,000 records",
        differs=(
            "SST-2 only; LoRA in the top layer of a small encoder with C = 0.05 and 2,000 steps, the paper 75,000; "
            "C = 1 of joint clips"
        ),
        state="smaller",
        figures=main_results,
        run=(_HEAD, "zeroth_order.sst2_lora measure", "zeroth_order.joint_clip"),
        results=("zo_sst2", "zo_sst2_lora", joint_clip.NAME),
        left=joint_clip.left,
    ),
    Item(
        name="Table 2",
        shows="SQuAD by size of model",
        state="smaller",
        figures=language_model,
        differs="one model, SmolLM2-135M, the paper 1.3 to 66 billion parameters; SST-2 instead of SQuAD; LoRA; 100 "
        "steps of 16 of 1,600 sentences; AdamW by Opacus instead of DP-SGD",
        run=("zeroth_order.sst2_language measure",),
        results=(sst2_language.NAME,),
        left=sst2_language.left,
    ),
    Item(
        name="Table 3",
        shows="pure epsilon by Laplace noise",
        state="smaller",
        run=(_HEAD,),
        results=("zo_sst2",),
        figures=by_epsilon(
            {
                "zo, laplace, pure": "DP-ZO",
                "zo, laplace, pure, whole batch": "DP-ZO, whole batch",
                "dp-sgd, laplace, pure": "DP-SGD, whole batch",
            },
            _paper("F1 of DP-ZO on SQuAD", 73.52, 76.75, 78.82, 81.02),
            _paper("F1 of DP-SGD on SQuAD", 47.25, 47.27, 47.36, 76.50),
            epsilons=PURE_EPSILONS,
            note=pure_lead,
        ),
        differs="rate and C are chosen for each row and epsilon (C = 0.05 at 10,450); DP-SGD clips the 1-norm to 7.8; "
        "the whole batch, and with it 200 steps, are ours, for DP-SGD too",
    ),
    _impossible(
        "Table 4",
        "SQuAD by architecture",
        "language models of 6.7 to 13 billion parameters and their GPUs",
    ),
    Item(
        name="Table 5",
        shows="memory by length of sequence",
        differs=(
            "163 million random weights and the whole memory of a process, the paper 2.7 billion and that of a GPU; "
            "DP-SGD by Opacus, without accumulation; at most 1,024 tokens, the paper 2,048, where all but DP-ZO run "
            "out of memory"
        ),
        state="smaller",
        figures=memory,
        run=("zeroth_order.memory",),
        results=("zo_memory",),
    ),
    Item(
        name="Table 6",
        shows="membership inference",
        differs=(
            "DP-ZO has C = 0.05 and 4,000 steps of 64; 20 trainings with 32 canaries each, and ± is the error of ranks "
            "at an area of one half; canaries with a feature of their own are ours"
        ),
        state="smaller",
        figures=inference_attacks,
        run=("zeroth_order.membership measure",),
        results=("zo_membership",),
    ),
    _by_records(
        7,
        "records, Gaussian noise at epsilon 1, and no privacy",
        ("gaussian", "none"),
        _paper("F1 of DP-ZO on SQuAD", 74.86, 78.25, 82.28, 84.29),
        _paper("F1 of ZO on SQuAD, no privacy", 86.40, 86.53, 86.85, 86.92),
        differs=(
            "n = 6,920 is ours; rate and C are those of n = 1,000; 10,000 steps, where 1,000 records have 75,000 in "
            "the paper"
        ),
        note=_gains("n = 500", "n = 5,000", "gaussian", (6.0, 0.4)),
    ),
    _by_records(
        8,
        "records, Laplace noise at pure epsilon 4",
        ("laplace", "none"),
        _paper("F1 of DP-ZO on SQuAD", 73.52, 79.89),
        _paper("F1 of ZO on SQuAD, no privacy", 86.85, 86.92),
        only=lambda cell: cell.records in (1000, 5000),
        note=_gains("n = 1,000", "n = 5,000", "laplace", (6.4, 0.1)),
    ),
    _by_records(
        9,
        "records, DP-ZO and DP-SGD, QNLI",
        ("gaussian", "dp-sgd"),
        _paper("DP-ZO on QNLI", "-", "-", 76.19, 78.66),
        _paper("DP-SGD on QNLI", "-", "-", 73.27, 79.44),
        note=_leads("n = 1,000", "n = 5,000", "+2.9 at n = 1,000, -0.8 at 5,000 and -7.6 at 104,743"),
        differs=(
            "n = 250, 500 and 6,920 are ours, and 10,000 and 50,000 are left out; epsilon 1, delta 1e-5 and 10,000 "
            "steps, where the paper has QNLI, RoBERTa-base, epsilon 3, delta 4.7e-6, and names no C; rate and C are "
            "those of n = 1,000"
        ),
    ),
    Item(
        name="Table 10",
        shows="Gaussian against Laplace noise",
        state="smaller",
        figures=by_epsilon(
            {"zo, gaussian, 75000 steps": LAWS["gaussian"], "zo, laplace, 75000 steps": LAWS["laplace"]},
            _paper("F1 with Gaussian noise, SQuAD", 80.10, 82.28, 83.87),
            _paper("F1 with Laplace noise, SQuAD", 77.58, 80.49, 82.94),
            note=laws_apart,
        ),
        run=(_HEAD,),
        results=("zo_sst2",),
    ),
    _by_records(
        11,
        "1,000 records and all",
        ("gaussian", "dp-sgd", "none"),
        _paper("DP-ZO on SST-2", 91.19, 93.00),
        _paper("DP-SGD on SST-2", 90.25, 95.07),
        _paper("ZO on SST-2, no privacy", 93.69, 94.84),
        differs="rate and C of n = 1,000; SST-2 only, where the paper has QNLI too; 6,920 records in all, the "
        "paper 66,849; 10,000 steps, where 1,000 records have 75,000 in the paper; without SGD",
        only=lambda cell: cell.records in (1000, 6920),
        note=_leads("n = 1,000", "n = 6,920", "+0.9 at n = 1,000 and -2.1 at 66,849 on SST-2"),
    ),
    *(
        Item(
            name=f"Table {number}",
            shows=shows,
            state="repeated",
            figures=sigmas(number),
            run=("zeroth_order.sigma_tables",),
            results=("zo_sigma_tables",),
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
    _ablation(
        15,
        "clip",
        lambda cell: f"C = {cell.clip:g}",
        _paper("F1 on SQuAD", 66.04, 74.26, 76.81, 75.39),
        "the rate is inverse to the noise and not searched for each C",
        _clips,
    ),
    _ablation(
        19,
        "batch",
        lambda cell: f"batch {cell.batch}",
        _paper("F1 on SQuAD", 81.35, 81.63, 81.47, 81.72),
        "epsilon 1 is ours, as the paper names none",
        _eightfold("batch 16", "batch 128", 0.4),
    ),
    _ablation(
        20,
        "steps",
        lambda cell: f"{cell.steps:,} steps",
        _paper("F1 on SQuAD", 81.35, 81.65, 81.42, 82.52),
        "epsilon 1 is ours, as the paper names none",
        _eightfold("10,000 steps", "80,000 steps", 1.2),
    ),
    _impossible("Table 21", "SQuAD by size of model, all sizes"),
)
