"""The tables and figures of the DP-ULR paper."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.markdown import with_error
from benchmarks.pages.papers.item import Item, blocks, compared, table
from benchmarks.results_file import load_results
from benchmarks.ulr import figure3, resnet, table1

INTRODUCTION = (
    "q is the sampling rate, N the number of records, N_B the smallest batch that is kept, and K the number of noisy "
    "copies of a record. The published form is the paper's Algorithm 1; the proven form clips the estimates of records "
    "and adds central Gaussian noise ([ulr](ulr.md)). The paper has five seeds; its standard deviations are left out."
)
PARTS = {"published": "DP-ULR", "opacus": "DP-SGD"}


def rejection() -> str:
    """Return the largest part of the mean batch that the paper's statement holds for."""
    rows = load_results("ulr_figure2")["rows"]
    records = list(dict.fromkeys(row["records"] for row in rows))
    found = [
        (
            f"{q:g}",
            *("none" if row["part"] is None else f"{row['part']:.2f}" for row in rows if row["q"] == q),
        )
        for q in dict.fromkeys(row["q"] for row in rows)
    ]
    return blocks(
        "Rejection is negligible, that is, the first term of eq. 11 is below 1e-3 of the second, up to this "
        "N_B / (q N):",
        table(("q", *(f"N = {n:,}" for n in records)), found),
        'The paper finds this for N of 1,000 or more and N_B "slightly less than the mean batch size qN": that holds '
        "for large data sets only.",
    )


def cells() -> str:
    """Return ours and the paper's figure for each cell of Table 1, and what the proven form reaches."""
    found = {(cell["batch"], cell["target"], cell["part"]): cell for cell in table1.cells()}
    rows = []
    for batch, target in table1.PAPER:
        row = [str(batch), f"{target:g}"]
        for part in PARTS:
            cell = found.get((batch, target, part))
            row.append(f"{with_error(cell['test'])} ({cell['paper']:.2f})" if cell else "-")
        rows.append(tuple(row))
    seeds = sorted({len(cell["test"]) for cell in found.values()})
    text = (
        f"Test accuracy [%] after {table1.EPOCHS} epochs, {' or '.join(map(str, seeds))} seeds, the paper's in "
        'brackets. DP-SGD has the best epoch on test records in every cell; the paper takes it "if needed":'
    )
    leads = []
    for batch in dict.fromkeys(batch for batch, _ in table1.PAPER):
        ahead = [
            f"{target:g}" for size, target in table1.PAPER if size == batch and _leads(found, batch, target)
        ]
        leads.append(
            f"at batch {batch} with sigma_0 = {', '.join(ahead)}" if ahead else f"never at batch {batch}"
        )
    conclusion = (
        "The paper finds DP-ULR ahead of DP-SGD with the large batch and behind it with the small one. Ours is ahead, "
        f"by more than two standard errors, {'; '.join(leads)}."
    )
    columns = ("batch", "sigma_0", *PARTS.values())
    return blocks(text, table(columns, rows), conclusion, paper_rate(), proven()) if found else ""


def _leads(found: Mapping[tuple[int, float, str], dict[str, Any]], batch: int, target: float) -> bool:
    """Whether DP-ULR's mean is more than two standard errors of the difference above DP-SGD's."""
    cells = [found.get((batch, target, part)) for part in PARTS]
    ulr, dp_sgd = ([] if cell is None else cell["test"] for cell in cells)
    return compared(ulr, dp_sgd) > 0


def paper_rate() -> str:
    """Return what DP-ULR reaches at the paper's learning rate, by the cells of the search."""
    rows = [
        (
            str(batch),
            f"{target:g}",
            "{:.1f}".format(
                max(
                    row["validation"]
                    for row in table1.rows_of("search")
                    if (row["batch"], row["target_std"], row["lr"], row["epochs"])
                    == (batch, target, 0.01, table1.EPOCHS)
                )
            ),
            f"{table1.PAPER[batch, target][0]:.2f}",
        )
        for batch, target in table1.SEARCH_CELLS
    ]
    header = ("batch", "sigma_0", "held out [%]", "the paper, test [%]")
    return blocks(
        "DP-ULR with the paper's learning rate of 0.01, sigma = 2 and one seed:", table(header, rows)
    )


def proven() -> str:
    """Return what the proven form with the most copies reaches at DP-SGD's epsilon; empty without results."""
    names = {"ulr, 128 orthogonal": "DP-ULR, the proven form", "bp": "DP-SGD"}
    rows = [
        (
            name,
            *(
                with_error(
                    [
                        row["test"]
                        for row in table1.rows_of("proven")
                        if (row["trainer"], row["epsilon"]) == (trainer, epsilon)
                    ]
                )
                for epsilon in (1.0, 3.0)
            ),
        )
        for trainer, name in names.items()
    ]
    text = (
        "Not in the paper: test accuracy [%] of the proven form (10 epochs, batches of 1,000, 128 copies in "
        "orthogonal directions) and of DP-SGD at the same proven epsilon:"
    )
    return (
        blocks(text, table(("trained by", "epsilon 1", "epsilon 3"), rows))
        if table1.rows_of("proven")
        else ""
    )


def epochs() -> str:
    """Return the figure, and how far the formula's epsilon is from DP-SGD's at the end."""
    last = [
        (
            figure3.ulr_epsilon(batch, target, table1.EPOCHS),
            figure3.dp_sgd_epsilon(batch, target, table1.EPOCHS),
        )
        for batch in figure3.BATCHES
        for target in figure3.TARGETS
    ]
    ratios = [formula / accounted for formula, accounted in last]
    return (
        f"After {table1.EPOCHS} epochs eq. 11 with N_B = q N gives {min(ratios):.1f} to "
        f"{max(ratios):.0f} times the epsilon of DP-SGD. In the paper's figure both overlap: its DP-SGD has the "
        "second term of eq. 11 only, so the first would have to be negligible."
    )


def resnet5() -> str:
    """Return the accuracies without protection, and those of each form of it by batch and noise."""
    rows = resnet.means()
    plain = [
        (row["trainer"], str(row["epochs"]), str(len(row["tests"])), with_error(row["tests"], ".1f"))
        for row in rows
        if row["form"] == "plain"
    ]
    private = []
    for form in resnet.FORMS:
        for batch in resnet.BATCHES:
            mine = sorted(
                (r for r in rows if (r["form"], r["batch"]) == (form, batch)), key=lambda r: r["noise"]
            )
            seeds = " and ".join(map(str, dict.fromkeys(len(row["tests"]) for row in mine)))
            if mine:
                private.append((form, str(batch), seeds, *(with_error(row["tests"], ".1f") for row in mine)))
    names = "../benchmarks/ulr/README.md#resnet-5-on-cifar-10-figure-4-of-the-dp-ulr-paper"
    return blocks(
        f"Test accuracy [%], by chance 10, without protection ([what the names mean, and all curves]({names})):",
        table(("trained by", "epochs", "seeds", "test [%]"), plain),
        "With noise, 8 epochs. Noise is sigma_0 in the published form, the noise multiplier in the others:",
        table(("form", "batch", "seeds", *(f"noise {noise:g}" for noise in resnet.NOISES)), private),
        "The paper calls DP-ULR comparable with DP-SGD in the end, for suitable parameters: not confirmed "
        "([why the published form stays near chance](ulr.md#6-when-to-choose-it)).",
    )


def widths() -> str:
    """Return ours and the paper's figure for each width and batch."""
    found = table1.width_rows()
    rows = []
    for width, batch in dict.fromkeys((row["width"], row["batch"]) for row in found):
        mine = [row for row in found if (row["width"], row["batch"]) == (width, batch)]
        ulr, dp_sgd = (
            f"{with_error([row[key] for row in mine], '.1f')} ({paper:.2f})"
            for key, paper in zip(("ulr", "dp_sgd"), table1.WIDTHS_PAPER[width, batch], strict=True)
        )
        rows.append((width, str(batch), str(len(mine)), ulr, dp_sgd))
    rows.sort(key=lambda row: (int(row[1]), list(table1.WIDTHS).index(row[0])))
    text = "Test accuracy [%], the paper's in brackets. DP-SGD has the best epoch on test records:"
    shrinks = [f"{batch}" for batch in table1.WIDTH_BATCHES if _shrinks(found, batch)]
    conclusion = (
        "The paper finds that DP-ULR's lead shrinks with the width at batch 64 and stays the same at 128 and 256. Ours "
        f"shrinks at {', '.join(shrinks) or 'none'}."
    )
    return blocks(text, table(("width", "batch", "seeds", *PARTS.values()), rows), conclusion) if rows else ""


def _shrinks(found: list[dict[str, Any]], batch: int) -> bool:
    """Whether DP-ULR's mean lead falls from each width to the next at a batch size."""
    leads = [
        [row["ulr"] - row["dp_sgd"] for row in found if (row["width"], row["batch"]) == (width, batch)]
        for width in table1.WIDTHS
    ]
    return all(leads) and all(fmean(wide) < fmean(narrow) for narrow, wide in pairwise(leads))


ITEMS = (
    Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
    Item(
        name="Figure 2",
        shows="what rejection adds to eq. 11, contours",
        differs="q = 0.01 and 0.1 are ours, as the paper names none for this figure",
        state="repeated",
        figures=rejection,
        run=("ulr.figure2",),
        results=("ulr_figure2",),
        picture=(
            "ulr_figure2.png",
            "Contours of the part that rejection adds, by records and smallest batch",
        ),
    ),
    Item(
        name="Table 1",
        shows="MNIST, DP-ULR and DP-SGD by batch and sigma_0",
        differs=(
            "learning rates of 0.001 (batch 64) and 0.003 (200 and 500) for DP-ULR, chosen on held-out records, "
            "where the paper has 0.01; K = 30 and sigma are ours, as the paper names none, and sigma is the same for "
            "all layers and steps, where Algorithm 1 controls it; no GELU behind the last layer; test accuracy only; "
            "three seeds"
        ),
        state="smaller",
        figures=cells,
        run=("ulr.table1 search", "ulr.table1 published", "ulr.table1 opacus", "ulr.table1 proven"),
        results=("ulr_published", "ulr_opacus", "ulr_proven"),
        left=table1.left,
    ),
    Item(
        name="Figure 3",
        shows="accuracy and epsilon by epoch",
        differs=(
            "training accuracy only; settings and seeds of Table 1; N_B = q N, as in Algorithm 1, since the "
            "experiments name none; epsilon of DP-SGD by a Renyi accountant, where the paper takes a bound of it; both "
            "formulas outside their conditions, too"
        ),
        state="smaller",
        figures=epochs,
        picture=(
            "ulr_figure3.png",
            "Accuracy and epsilon by epoch of DP-ULR and DP-SGD, by batch and sigma_0",
        ),
        run=("ulr.table1 published", "ulr.table1 opacus", "ulr.figure3"),
        results=("ulr_published", "ulr_opacus"),
        left=table1.left,
    ),
    Item(
        name="Figure 4",
        shows="ResNet-5 on CIFAR-10, DP-ULR and DP-SGD",
        differs=(
            "a JPEG copy of CIFAR-10; average pooling behind two convolutions, Adam at 0.002 falling as a cosine, K = "
            "2 and sigma = 0.3 (of the proven form 10 and 0.03, with a clip for each module) are ours, and so are "
            "DP-SGD at batch 500 or noise 4 and the proven form; DP-SGD is ours, on Poisson batches; 8 epochs, as the "
            "paper names none; accuracy after training only, without the figure's epsilon"
        ),
        state="smaller",
        figures=resnet5,
        run=("ulr.resnet plain", "ulr.resnet private", "ulr.resnet search"),
        results=("ulr_resnet", "ulr_resnet_search"),
        left=resnet.left,
    ),
    Item(
        name="Table C1",
        shows="MNIST, three widths, sigma_0 = 8",
        differs=(
            "the layers of medium and large are ours, as the paper names only 2.5 and 5 times the "
            "parameters; batches of 128 and 256 take the settings of 200; else as in Table 1"
        ),
        state="smaller",
        figures=widths,
        run=("ulr.table1 widths",),
        results=("ulr_published", "ulr_widths"),
        left=table1.widths_left,
    ),
)
