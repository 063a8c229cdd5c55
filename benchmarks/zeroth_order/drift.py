"""What does perturbing parameters in place and returning leave behind, in float32, bfloat16 and float16?

16,384 parameters N(0, 0.02^2), perturbed to both sides and brought back 300 times, at two lengths. The drift is
the root mean square of what changed, over that of the parameters. A training step's move of 1e-6 z, made
300 times along directions of its own, is measured too: the part of it that arrives (a regression of what changed on
what should have), and the same with the float32 copies that half precision is settled to every 64 steps.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from opusim.medium.transmission import Direction
from opusim.tables import print_table
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, StepEntry

MODULE, NAME = "benchmarks.zeroth_order.drift", "zo_drift"
SIZE, CYCLES, MOVE = 2**14, 300, 1e-6
LENGTHS = (1e-3, 1e-2)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def start(dtype: torch.dtype) -> Tensor:
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def drift(dtype: torch.dtype, length: float) -> float:
    """Relative root mean square of what is left behind."""
    before = start(dtype)
    tensor = before.clone()
    for seed in range(CYCLES):
        for scale in (length, -2 * length, length):
            Direction(seed).add_to(tensor, 0, scale)
    change = tensor.double() - before.double()
    return float(change.square().mean().sqrt() / before.double().square().mean().sqrt())


def arrived(dtype: torch.dtype, length: float, settle_every: int) -> float:
    """The part of the moves that arrives: 1 where training goes where it should."""
    before = start(dtype)
    tensor = before.clone()
    perturbation = InPlacePerturbation([tensor], perturbation=length)
    wanted = torch.zeros(SIZE, dtype=torch.float64)
    for seed in range(CYCLES):
        entry = StepEntry.rounded(rate=MOVE, seeds=(seed,), scalars=(-1.0,))
        perturbation.shift(seed, 1)
        perturbation.shift(seed, -2)
        perturbation.update(entry)
        if (seed + 1) % settle_every == 0:
            perturbation.settle()
        wanted += entry.moves[0] * Direction(seed).entries(0, 0, SIZE).double()
    if settle_every <= CYCLES:
        perturbation.settle()
        tensor = perturbation.copies.get(0, tensor)
    change = tensor.double() - before.double()
    return float((change * wanted).sum() / wanted.square().sum())


COLUMN_NAMES = ("type", "phi", "relative drift", "part of the moves that arrives", "settled")


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as text."""
    kinds = ("drift", "arrived", "arrived_settled")
    return [(row["dtype"], f"{row['perturbation']:g}", *(f"{row[key]:.2g}" for key in kinds)) for row in rows]


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    rows = table_rows(load_results(NAME).get("rows", []))
    text = (
        f"300 perturbations of parameters of size 0.02 in place ({command(MODULE)}): the relative drift, and the part "
        "of as many moves of 1e-6 z that arrives, without float32 copies on disk and with them."
    )
    return (
        section("What perturbing in place leaves behind", text, markdown(COLUMN_NAMES, rows)) if rows else ""
    )


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in TYPES:
        for length in LENGTHS:
            row = {"dtype": str(dtype).removeprefix("torch."), "perturbation": length, "cycles": CYCLES}
            row |= {"drift": drift(dtype, length), "arrived": arrived(dtype, length, 10**9)}
            rows.append(row | {"arrived_settled": arrived(dtype, length, 64)})
    title = f"{CYCLES} perturbations of parameters of size 0.02, in place"
    print_table(title, COLUMN_NAMES, table_rows(rows))
    save_results(NAME, {"rows": rows})


if __name__ == "__main__":
    main()
