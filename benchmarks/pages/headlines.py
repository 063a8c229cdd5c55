"""Which figures stand on the first pages? The rows of the README's table and of docs/choosing-a-trainer.md."""

from __future__ import annotations

from benchmarks.results_file import load_results

Row = tuple[str, str, str]

EPSILON = 3.0
THREADS = 1
PROTECTIONS = {
    "record, pdfa, bit planes": "`record`, `pdfa`, bit planes",
    "record, pdfa, ternary": "`record`, `pdfa`, ternary",
    "record, DP-SGD": "`record`, `bp` (DP-SGD)",
    "label, amplified": "`label-amplified`, `pdfa`",
    "label, randomized response": "`label-randomized-response`, `pdfa`",
}


def headline_rows() -> list[Row]:
    """What was measured, the figure, and the command that measures it again."""
    return [_paper(), _protected(), _record_step(), _accountant(), _memory()]


def protection_rows() -> list[Row]:
    """What each protection reaches on FashionMNIST at epsilon 3 and at epsilon 1, in per cent."""
    found = {(cell["row"], cell["epsilon"]): cell["test"] for cell in load_results("pdfa_private")["cells"]}
    return [
        (name, f"{found[(row, EPSILON)]:.1f}", f"{found[(row, 1.0)]:.1f}")
        for row, name in PROTECTIONS.items()
    ]


def _paper() -> Row:
    """Distance from the table of the photonic DFA paper."""
    cells = [cell["difference"] for cell in load_results("pdfa_table1")["cells"] if cell["row"] == "pdfa"]
    figure = f"{min(cells):+.2f} to {max(cells):+.2f} points in {len(cells)} cells"
    return ("Photonic DFA on FashionMNIST, our accuracy minus the paper's", figure, _command("pdfa.table1"))


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
    return (claim, figure, _command("private_accuracy.records measure"))


def _record_step() -> Row:
    """Speed of a protected step over Opacus."""
    (row,) = (
        row
        for row in load_results("record_step")["rows"]
        if row["work"] == "pdfa, record-protected" and row["threads"] == THREADS
    )
    figure = f"{row['times_faster']:.2f} times faster than Opacus with ghost clipping"
    return ("Protected photonic DFA step, 784-512-512-10, batch 256", figure, _command("speed.record_step"))


def _accountant() -> Row:
    """Speed of the accountant over Microsoft's."""
    ratios = [row["speed_ratio"] for row in load_results("accounting_speed")["cold"]]
    figure = f"{min(ratios):.0f} to {max(ratios):.0f} times faster than prv_accountant, same digits"
    return ("Epsilon of 75,000 Poisson-sampled Gaussian steps", figure, _command("speed.accounting"))


def _memory() -> Row:
    """Peak memory of a zeroth-order step over that of inference."""
    rows = load_results("zo_memory")["rows"]
    shape = ", 2 x 1024"
    plain, zo, ghost = (rows[name + shape]["peak_mib"] for name in ("inference", "zo", "dp-sgd, ghost"))
    figure = f"{zo / plain:.2f} times that of inference (DP-SGD by Opacus: {ghost / plain:.2f})"
    return (
        "Peak memory of a zeroth-order step, 163 million parameters",
        figure,
        _command("zeroth_order.memory"),
    )


def _command(words: str) -> str:
    return f"`python -m benchmarks.{words}`"
