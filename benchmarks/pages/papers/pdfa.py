"""The tables and figures of the photonic DFA paper."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.papers.item import blocks, table
from benchmarks.pdfa import figure2, readings, table1
from benchmarks.results_file import load_results


def curves() -> str:
    """Return the accuracies at the end of the curves, and the alignment of the second layer; empty without curves."""
    columns = {"non-private": "no clip, no noise", "0": "clip, sigma = 0", "0.2": "clip, sigma = 0.2"}
    rows = []
    for feedback in table1.PAPER:
        ends = [f"{found[-1]:.1f}" for column in columns if (found := figure2.curve(feedback, column))]
        if len(ends) == len(columns):
            rows.append((figure2.NAMES[feedback], *ends))
    cosines = [figure2.alignment("pdfa", f"{sigma:g}", 1) for sigma in table1.SIGMAS]
    falls = [("cosine", *("-" if value is None else f"{value:.2f}" for value in cosines))]
    text = (
        "Held-out accuracy [%] at the end of the curves, mean of three seeds, and the cosine of photonic DFA's second "
        "layer with backpropagation by sigma:"
    )
    sigmas = ("sigma", *(f"{sigma:g}" for sigma in table1.SIGMAS))
    shown = blocks(text, table(("feedback", *columns.values()), rows), table(sigmas, falls))
    return blocks(shown, _learns(columns)) if rows else ""


def _learns(columns: Mapping[str, str]) -> str:
    """Say how far alignment and accuracy of photonic DFA fall from the least noise to the most."""
    most = f"{table1.SIGMAS[-1]:g}"
    first, last = (figure2.alignment("pdfa", column, 1) for column in ("0", most))
    if first is None or last is None or not all(figure2.curve("pdfa", column) for column in columns):
        return ""
    clipped, noisy = (figure2.curve("pdfa", column)[-1] for column in ("0", most))
    return (
        "*The paper finds* that the alignment falls with noise and stays high enough to learn. *Here* from sigma = 0 "
        f"to {most} it falls from {first:.2f} to {last:.2f}, and the accuracy by {clipped - noisy:.1f} points."
    )


def cells() -> str:
    """Return ours and the paper's figure for each cell of Table 1."""
    found = {(cell["row"], cell["column"]): cell for cell in load_results("pdfa_table1")["cells"]}
    rows = [
        (
            "no clip, no noise" if column == "non-private" else f"clip, sigma = {column}",
            *(
                f"{cell['test']:.2f} ± {cell['test_standard_error']:.2f} ({cell['paper']:.2f})"
                for feedback in table1.PAPER
                if (cell := found.get((feedback, column)))
            ),
        )
        for column in table1.COLUMNS
    ]
    moves = (
        "Other readings of the paper's equations, tried in "
        f"{len(readings.ROWS) * len(readings.COLUMNS)} cells with {readings.seeds()}, move one by up to "
        f"{readings.largest_move():.1f} points "
        "([which](../pdfa/README.md#other-readings-of-the-papers-equations))."
    )
    names = (figure2.NAMES[feedback] for feedback in table1.PAPER)
    shown = table(("", *names), rows)
    return blocks("Test accuracy [%], the paper's in brackets:", shown, _losses(found), moves)


def _losses(found: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """Say what clip and noise cost each feedback, ours and the paper's; empty unless all cells are there."""
    if not all((row, column) in found for row in table1.PAPER for column in table1.COLUMNS):
        return ""
    optical = ("dfa", "tdfa", "pdfa")

    def falls(first: str, last: str, rows: tuple[str, ...] = optical) -> str:
        """Return the points lost between two columns by some rows, and the paper's in brackets."""
        parts = []
        for key in ("test", "paper"):
            lost = (found[row, first][key] - found[row, last][key] for row in rows)
            parts.append(", ".join(f"{value:.1f}" for value in lost))
        return "{} ({})".format(*parts)

    apart = {
        column: abs(found["pdfa", column]["test"] - found["dfa", column]["test"]) for column in table1.COLUMNS
    }
    free = apart.pop("non-private")
    return (
        "*The paper finds* photonic DFA within 1 % of DFA. *Here* it is within "
        f"{max(apart.values()):.1f} points with the clip, {free:.1f} without.\n\n"
        "*The paper finds* that sigma up to 0.05 costs at most 3 %, most of it by the clip. *Here* (and in its table) "
        f"DFA, ternarized and photonic DFA lose {falls('non-private', '0.05')} points, of which the clip takes "
        f"{falls('non-private', '0')}.\n\n"
        "*The paper finds* backpropagation far more sensitive to clip and noise. *Here* (and in its table) the clip "
        f"costs it {falls('non-private', '0', ('bp',))} points, and sigma = 0.2 another "
        f"{falls('0', '0.2', ('bp',))}, where the others lose {falls('0', '0.2')} by sigma = 0.2."
    )
