"""The tables and figures of the DP-ULR paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.markdown import with_error
from benchmarks.pages.papers.item import blocks, compared, table
from benchmarks.results_file import load_results
from benchmarks.ulr import figure2, figure3, resnet, table1

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
        '*The paper finds* this for N of 1,000 or more and N_B "slightly less than the mean batch size qN". '
        "*Here*, by its formula, it takes a large data set or much less: for its batches of "
        f"{', '.join(map(str, figure3.BATCHES))} among 60,000 records at most {', '.join(_batch_parts())} of q N.",
    )


def _batch_parts() -> list[str]:
    """Return the largest N_B / (q N) of the paper's batches at which rejection is negligible."""
    records = figure3.N_RECORDS
    parts = [figure2.largest_part(batch / records, records) for batch in figure3.BATCHES]
    return ["none" if part is None else f"{part:.2f}" for part in parts]


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
    ours = {cell for cell in table1.PAPER if _leads(found, *cell)}
    paper = {cell for cell, (ulr, dp_sgd) in table1.PAPER.items() if ulr > dp_sgd}
    conclusion = (
        "*The paper finds* DP-ULR ahead of DP-SGD with the large batch and behind it with the small one; by its table "
        f"it is ahead {_places(paper)}. *Here* it is ahead, by more than two standard errors, "
        f"{_places(ours)}."
    )
    columns = ("batch", "sigma_0", *PARTS.values())
    shown = table(columns, rows)
    return blocks(text, shown, conclusion, _sensitive(found), paper_rate()) if found else ""


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
    return blocks(
        "Test accuracy [%], by chance 10, without protection:",
        table(("trained by", "epochs", "seeds", "test [%]"), plain),
        "*Matched*: noise shaped by a record's Jacobian; *10 orthogonal*: ten copies in orthogonal directions; K = 2 "
        "and sigma = 0.3 unless named.",
        "With noise, 8 epochs. Noise is sigma_0 in the published form, the noise multiplier in the others:",
        table(("form", "batch", "seeds", *(f"noise {noise:g}" for noise in resnet.NOISES)), private),
        "*The paper finds* DP-ULR comparable with DP-SGD in accuracy and privacy cost for suitable parameters, which "
        "it does not name. *Here* no such parameters were found: the published form stays near chance "
        f"([why](../../docs/ulr.md#5-when-to-choose-it)). Only K was varied, at batch 64 and noise 1: after "
        f"{resnet.SEARCH_EPOCHS} epochs on a quarter of the records the accuracy on the others is {_copies()}.",
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
