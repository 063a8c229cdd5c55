"""The tables and figures of the DP-ULR paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.markdown import with_error
from benchmarks.pages.papers.item import Item, blocks, compared, table
from benchmarks.results_file import load_results
from benchmarks.ulr import figure2, figure3, resnet, table1

INTRODUCTION = (
    "All cells, ours next to the paper's: [results](../ulr/README.md). "
    "q is the sampling rate, N the number of records, N_B the smallest batch that is kept, and K the number of noisy "
    "copies of a record. The published form is the paper's Algorithm 1; the proven form clips the estimates of records "
    "and adds central Gaussian noise ([ulr](../../docs/ulr.md)). The paper has five seeds."
)
PARTS = {"published": "DP-ULR", "opacus": "DP-SGD"}


def rejection() -> str:
    """Return the largest part of the mean batch that the paper's statement holds for."""
    return (
        '*The paper finds* rejection negligible for N of 1,000 or more and N_B "slightly less than the mean batch size '
        'qN". *Here*, by its formula (the first term of eq. 11 below 1e-3 of the second), it takes a large data set or '
        f"much less: for its batches of {', '.join(map(str, figure3.BATCHES))} among 60,000 records at most "
        f"{', '.join(_batch_parts())} of q N."
    )


def _batch_parts() -> list[str]:
    """Return the largest N_B / (q N) of the paper's batches at which rejection is negligible."""
    records = figure3.N_RECORDS
    parts = [figure2.largest_part(batch / records, records) for batch in figure3.BATCHES]
    return ["none" if part is None else f"{part:.2f}" for part in parts]


def cells() -> str:
    """Return where DP-ULR is ahead in Table 1, ours and the paper's; empty without results."""
    found = {(cell["batch"], cell["target"], cell["part"]): cell for cell in table1.cells()}
    ours = {cell for cell in table1.PAPER if _leads(found, *cell)}
    paper = {cell for cell, (ulr, dp_sgd) in table1.PAPER.items() if ulr > dp_sgd}
    conclusion = (
        "*The paper finds* DP-ULR ahead of DP-SGD with the large batch and behind it with the small one; by its table "
        f"it is ahead {_places(paper)}. *Here* it is ahead, by more than two standard errors, "
        f"{_places(ours)}."
    )
    return blocks(conclusion, _sensitive(found)) if found else ""


def _places(cells: set[tuple[int, float]]) -> str:
    """Say at which batches and values of sigma_0 some cells lie."""
    parts = []
    for batch in dict.fromkeys(batch for batch, _ in table1.PAPER):
        mine = [f"{target:g}" for size, target in table1.PAPER if size == batch and (size, target) in cells]
        parts.append(
            f"at batch {batch} with sigma_0 = {', '.join(mine)}" if mine else f"never at batch {batch}"
        )
    return "; ".join(parts)


def _sensitive(found: Mapping[tuple[int, float, str], dict[str, Any]]) -> str:
    """Say what the largest sigma_0 costs by batch, ours and the paper's; empty unless all cells are there."""
    corners = [(batch, target) for batch in (64, 500) for target in (0.5, 8.0)]
    if not all((*corner, part) in found for corner in corners for part in PARTS):
        return ""
    costs = []
    for number, (part, name) in enumerate(PARTS.items()):
        ours = [fmean(found[*corner, part]["test"]) for corner in corners]
        paper = [table1.PAPER[corner][number] for corner in corners]
        shown = [f"{values[k] - values[k + 1]:.1f}" for k in (0, 2) for values in (ours, paper)]
        costs.append("{} loses {} ({}) points at batch 64 and {} ({}) at 500".format(name, *shown))
    return (
        "*The paper finds* DP-ULR more sensitive to sigma_0 at large batches, and DP-SGD at small ones. *Here* (and in "
        f"its table), from sigma_0 = 0.5 to 8, {'; '.join(costs)}: both tables confirm it for DP-SGD only."
    )


def _leads(found: Mapping[tuple[int, float, str], dict[str, Any]], batch: int, target: float) -> bool:
    """Whether DP-ULR's mean is more than two standard errors of the difference above DP-SGD's."""
    cells = [found.get((batch, target, part)) for part in PARTS]
    ulr, dp_sgd = ([] if cell is None else cell["test"] for cell in cells)
    return compared(ulr, dp_sgd) > 0


def epochs() -> str:
    """Return how far the formula's epsilon is from DP-SGD's at the end, and which accuracies fall before it."""
    cells = list(itertools.product(figure3.BATCHES, figure3.TARGETS))
    formula, second = (
        [figure3.ulr_epsilon(*cell, table1.EPOCHS, rejected=rejected) for cell in cells]
        for rejected in (True, False)
    )
    accounted = [figure3.dp_sgd_epsilon(*cell, table1.EPOCHS) for cell in cells]
    apart = [
        f"{min(ratios):.1f} to {max(ratios):.0f}"
        for ratios in ([a / b for a, b in zip(formula, other, strict=True)] for other in (second, accounted))
    ]
    curves = {(part, *cell): figure3.curve(part, *cell) for part in PARTS for cell in cells}
    fallen = {
        part: {cell for cell in cells if (values := curves[part, *cell]) and max(values) - values[-1] > 1}
        for part in PARTS
    }
    return blocks(
        f"*The paper finds* that the curves of epsilon overlap. *Here* after {table1.EPOCHS} epochs eq. 11 with N_B = "
        f"q N gives {apart[0]} times what its second term gives, which is the paper's bound of DP-SGD, and {apart[1]} "
        "times the epsilon of a Renyi accountant: for an overlap N_B has to be smaller.",
        "*The paper finds* that DP-SGD degrades at high noise where DP-ULR still converges. *Here* DP-SGD ends "
        f"more than a point below its best epoch {_places(fallen['opacus'])}. DP-ULR does so "
        f"{_places(fallen['published']) if fallen['published'] else 'nowhere'}.",
    )


def resnet5() -> str:
    """Return what was found of the published form."""
    return (
        "*The paper finds* DP-ULR comparable with DP-SGD in accuracy and privacy cost for suitable parameters, which "
        "it does not name. *Here* no such parameters were found: the published form stays near chance "
        f"([why](../../docs/ulr.md#5-when-to-choose-it)). Only K was varied, at batch 64 and noise 1: after "
        f"{resnet.SEARCH_EPOCHS} epochs on a quarter of the records the accuracy on the others is {_copies()}."
    )


def _copies() -> str:
    """Return the held-out accuracies of the published form by its copies."""
    values = [value for value, (form, _) in resnet.SEARCHES.items() if form == "published"]
    rows = load_results(resnet.SEARCHED).get("rows", [])
    found = {value: [row["held_out"] for row in rows if row["value"] == value] for value in values}
    return " and ".join(f"{with_error(part, '.1f')} % for {value}" for value, part in found.items())


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
        lead = with_error([row["ulr"] - row["dp_sgd"] for row in mine], "+.1f")
        rows.append(
            (width, str(batch), str(len(mine)), ulr, dp_sgd, f"{lead} ({_paper_lead(width, batch):+.1f})")
        )
    rows.sort(key=lambda row: (int(row[1]), list(table1.WIDTHS).index(row[0])))
    text = "Test accuracy [%], the paper's in brackets. DP-SGD has the best epoch on test records:"
    falls = [
        f"{_fall(found, 'ulr', batch) - _fall(found, 'dp_sgd', batch):.1f} "
        f"({_paper_lead('small', batch) - _paper_lead('large', batch):.1f}) at {batch}"
        for batch in table1.WIDTH_BATCHES
    ]
    conclusion = (
        "*The paper finds* that DP-ULR's lead diminishes with the width at batch 64 and is consistent at 128 and 256. "
        f"*Here* (and in its table) it falls from small to large by {', '.join(falls)}. At batch 64 it is DP-SGD that "
        f"changes: it gains {-_fall(found, 'dp_sgd', 64):.1f} points with the width, where the paper's loses "
        f"{_paper_fall(64):.1f}; why is open, as the paper names no layers."
    )
    columns = ("width", "batch", "seeds", *PARTS.values(), "lead")
    return blocks(text, table(columns, rows), conclusion) if rows else ""


def _paper_lead(width: str, batch: int) -> float:
    ulr, dp_sgd = table1.WIDTHS_PAPER[width, batch]
    return ulr - dp_sgd


def _paper_fall(batch: int) -> float:
    return table1.WIDTHS_PAPER["small", batch][1] - table1.WIDTHS_PAPER["large", batch][1]


def _fall(found: list[dict[str, Any]], key: str, batch: int) -> float:
    """Return by how much a mean accuracy falls from the small network to the large one; NaN without both."""
    small, large = (
        [row[key] for row in found if (row["width"], row["batch"]) == (width, batch)]
        for width in ("small", "large")
    )
    return fmean(small) - fmean(large) if small and large else math.nan


ITEMS = (
    Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
    Item(
        name="Figure 2",
        shows="what rejection adds to eq. 11, contours",
        differs="q = 0.01 and 0.1 are ours, as the paper names none for this figure; alpha = 1.1 and sigma_0 = 4 as "
        "there",
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
            "where the paper has 0.01; DP-SGD keeps the paper's 0.1; K = 30 and sigma are ours, as the paper names "
            "none, and sigma is the same for all layers and steps, where Algorithm 1 controls it; no GELU behind the "
            "last layer; test accuracy only; three seeds"
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
            "experiments name none; the picture has DP-SGD's epsilon by a Renyi accountant, where the paper takes a "
            "bound of it; both formulas outside their conditions, too"
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
            "the layers of medium and large are ours, as the paper names only 2.5 and 5 times the parameters; "
            "DP-ULR's rate was chosen for the small one, and batches of 128 and 256 take that of 200; else as in "
            "Table 1"
        ),
        state="smaller",
        figures=widths,
        run=("ulr.table1 widths",),
        results=("ulr_published", "ulr_widths"),
        left=table1.widths_left,
    ),
)
