"""Which figures stand on the first pages? The rows of the README's table and of docs/choosing-a-trainer.md."""

from __future__ import annotations

import statistics

from benchmarks.known_models import nanogpt
from benchmarks.markdown import Row, command, markdown
from benchmarks.results_file import load_results

EPSILON = 3.0
THREADS = 1
PROTECTIONS = {
    "record, pdfa, bit planes": "`record`, `pdfa`, bit planes",
    "record, pdfa, ternary": "`record`, `pdfa`, ternary",
    "record, DP-SGD": "`record`, `bp` (DP-SGD)",
    "label, amplified": "`label-amplified`, `pdfa`",
    "label, randomized response": "`label-randomized-response`, `pdfa`",
}


def headline_table() -> str:
    """Return the README's table: what was measured, the figure, and the command that measures it again."""
    rows = [_paper(), _language(), _protected(), _record_step(), _accountant(), _memory()]
    return markdown(("what", "figure", "measure it again"), rows)


def protection_table() -> str:
    """Return what each protection reaches on FashionMNIST at epsilon 3 and at epsilon 1, in per cent."""
    found = {(cell["row"], cell["epsilon"]): cell["test"] for cell in load_results("pdfa_private")["cells"]}
    rows = [
        (name, f"{found[(row, EPSILON)]:.1f}", f"{found[(row, 1.0)]:.1f}")
        for row, name in PROTECTIONS.items()
    ]
    return markdown(("protection and trainer", "accuracy at epsilon 3 [%]", "at epsilon 1"), rows)


def _paper() -> Row:
    """Distance from the table of the photonic DFA paper."""
    cells = [cell["difference"] for cell in load_results("pdfa_table1")["cells"] if cell["row"] == "pdfa"]
    figure = f"{min(cells):+.2f} to {max(cells):+.2f} points in {len(cells)} cells"
    return (
        "Photonic DFA on FashionMNIST, our accuracy minus the paper's",
        figure,
        command("benchmarks.pdfa.table1"),
    )


def _language() -> Row:
    """Perplexity of a small GPT without backpropagation, over backpropagation's."""
    results = load_results(nanogpt.NAME)
    digital, device = (statistics.fmean(nanogpt.ratio(results, row)) for row in ("dfa", "pdfa, gaussian"))
    figure = f"{digital:.2f} times backpropagation's by DFA, {device:.2f} through the device"
    return ("Perplexity of nanoGPT (4 layers of 128) on characters", figure, command(nanogpt.MODULE))


def _protected() -> Row:
    """Accuracy of a network with a hidden layer at a proven epsilon, through the device and by DP-SGD."""
    found = {
        cell["row"]: cell["test"]
        for cell in load_results("private_accuracy_records")["cells"]
        if cell["epsilon"] == EPSILON
    }
    device, digital = (found[f"fashion-mnist, hidden, {name}"] for name in ("pdfa", "DP-SGD"))
    claim = f"FashionMNIST on public features, records protected, proven epsilon {EPSILON:g} at delta 1e-5"
    figure = f"{device:.1f} % through the device, {digital:.1f} % by DP-SGD"
    return (claim, figure, command("benchmarks.private_accuracy.records", "measure"))


def _record_step() -> Row:
    """Speed of a protected step over Opacus."""
    (row,) = (
        row
        for row in load_results("record_step")["rows"]
        if row["work"] == "pdfa, record-protected" and row["threads"] == THREADS
    )
    figure = f"{row['times_faster']:.2f} times faster than Opacus with ghost clipping"
    return (
        "Protected photonic DFA step, 784-512-512-10, batch 256",
        figure,
        command("benchmarks.speed.steps", "record_step"),
    )


def _accountant() -> Row:
    """Speed of the accountant over Microsoft's."""
    ratios = [row["speed_ratio"] for row in load_results("accounting_speed")["cold"]]
    figure = f"{min(ratios):.0f} to {max(ratios):.0f} times faster than prv_accountant, same digits"
    return (
        "Epsilon of 75,000 Poisson-sampled Gaussian steps",
        figure,
        command("benchmarks.speed.accounting"),
    )


def _memory() -> Row:
    """Peak memory of a zeroth-order step over that of inference."""
    rows = load_results("zo_memory")["rows"]
    shape = ", 2 x 1024"
    plain, zo, ghost = (rows[name + shape]["peak_mib"] for name in ("inference", "zo", "dp-sgd, ghost"))
    figure = f"{zo / plain:.2f} times that of inference (DP-SGD by Opacus: {ghost / plain:.2f})"
    return (
        "Peak memory of a zeroth-order step, 163 million parameters",
        figure,
        command("benchmarks.zeroth_order.memory"),
    )
