"""The tables and figures of the photonic DFA paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.pages.papers.item import SEE_RESULTS, Item, blocks
from benchmarks.pdfa import figure2, readings, table1
from benchmarks.results_file import load_results

INTRODUCTION = (
    "Every cell of Table 1 and every curve of Figure 2, ours next to the paper's: "
    "[results](../pdfa/README.md)."
)


def curves() -> str:
    """Return what the curves show; empty without curves."""
    columns = ("non-private", "0", f"{table1.SIGMAS[-1]:g}")
    known = any(all(figure2.curve(feedback, column) for column in columns) for feedback in table1.PAPER)
    return (_learns(columns) or SEE_RESULTS) if known else ""


def _learns(columns: Sequence[str]) -> str:
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
    """Return what Table 1 shows."""
    found = {(cell["row"], cell["column"]): cell for cell in load_results("pdfa_table1")["cells"]}
    moves = (
        "Other readings of the paper's equations, tried in "
        f"{len(readings.ROWS) * len(readings.COLUMNS)} cells with {readings.seeds()}, move one by up to "
        f"{readings.largest_move():.1f} points ([which](../pdfa/README.md#other-readings-of-the-papers-equations))."
    )
    return blocks(_losses(found), moves)


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


ITEMS = (
    Item(name="Figure 1", shows="sketch of backpropagation and DFA", state="no figures", figures="a sketch"),
    Item(
        name="Figure 2",
        shows="training curves by feedback and noise; alignment by noise",
        differs=(
            "accuracy on the tenth of the training records that is left out, as the caption names no records; a panel "
            "for each feedback; the panel and alignment of ternarized DFA, and the alignment of DFA and the first "
            "layer, are ours; else as in Table 1"
        ),
        state="smaller",
        figures=curves,
        run=("pdfa.table1", "pdfa.figure2"),
        results=("pdfa_table1",),
        left=lambda: len(table1.missing()),
        picture=(
            "pdfa_figure2.png",
            "Accuracy by epoch for four feedbacks, lower at more noise; cosine with backpropagation falling with noise",
        ),
    ),
    Item(
        name="Table 1",
        shows="FashionMNIST, four feedbacks, without protection and at six noise levels",
        differs=(
            "eqs. 8 to 10 are not taken to the letter: hidden neurons are clipped in the forward pass and at "
            "inference, a clipped one has slope 0, the input is not clipped, there is no offset (tau_h_min = 0), B e "
            "is normalised, updates of hidden layers are a sum over the batch divided by sqrt(512), and pixels are "
            "standardised by MNIST's constants. The reading comes from public code whose link to the authors is not "
            "established, and the pixel constants were chosen with the paper's figures in sight; the equations to the "
            "letter are among the readings. An entry of the noise has 0.44 sigma, as section 4 says. Backpropagation "
            "normalises the error at the top, with 3.2 sigma an entry, and sums over the batch. The device is "
            "simulated, without any error but sigma, so photonic DFA without noise is ternarized DFA; the paper used a "
            "real one and simulated sigma, too. Three seeds; the paper names no number"
        ),
        state="smaller",
        figures=cells,
        run=("pdfa.table1", "pdfa.readings"),
        results=("pdfa_table1", "pdfa_readings"),
        left=lambda: len(readings.missing()),
    ),
)
