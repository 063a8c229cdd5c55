"""How often does the self-test of the mechanism find a planted fault, and how often does it raise a false alarm?

    python -m benchmarks.mechanism_selftest measure     (resumes; some 6 minutes of one core)
    python -m benchmarks.mechanism_selftest show

Every fault of `tests.support` is planted in every trainer and mode that it reaches, 20 times for `pdfa`, `ulr` and the
faults of `NAMED`, once otherwise; and the product as it is, without a fault, is tested many times.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.console import print_table
from benchmarks.mechanism_pages import COLUMNS, NAME, table_rows
from benchmarks.results_file import load_results, save_results
from tests.support.faults import FAULTS
from tests.support.faults.base import FEEDBACKS, MODES, STEPWISE
from training import audit_mechanism

LEVEL = 1e-4
NAMED = (
    *("noise_too_small", "noise_reused", "clipped_by_layer", "clip_too_wide"),
    *("fixed_size_batches", "fixed_size_batches_on_release"),
)
OFTEN, ATTEMPTS, NULLS = ("pdfa", "ulr"), 20, 5
PROTECTIONS = ("record", "label-budget", "label-amplified", "label-readout", "label-randomized-response")


class Cell(NamedTuple):
    """What is attempted, and how often."""

    fault: str
    trainer: str
    protection: str
    mode: str
    attempts: int

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.fault}, {self.trainer}, {self.protection}, {self.mode}"


def cells() -> Iterator[Cell]:
    """All cells: faults that are planted often, the other faults, then runs without a fault."""
    found = []
    for fault in FAULTS:
        for trainer in STEPWISE:
            for protection in PROTECTIONS:
                for mode in MODES:
                    if fault.applies(trainer=trainer, protection=protection, mode=mode):
                        often = trainer in OFTEN and protection == "record" and fault.name in NAMED
                        found.append(Cell(fault.name, trainer, protection, mode, ATTEMPTS if often else 1))
    for trainer in STEPWISE:
        for protection in PROTECTIONS if trainer in FEEDBACKS else PROTECTIONS[:1]:
            attempts = ATTEMPTS if trainer in OFTEN and protection == "record" else NULLS
            found += [Cell("none", trainer, protection, mode, attempts) for mode in MODES]
    return iter(sorted(found, key=lambda cell: (cell.fault == "none", -cell.attempts)))


def attempt(cell: Cell, number: int) -> dict[str, Any]:
    """One self-test with the fault planted."""
    faults = {fault.name: fault for fault in FAULTS}
    with contextlib.ExitStack() as stack:
        if cell.fault != "none":
            stack.enter_context(faults[cell.fault].planted())
        found = audit_mechanism(
            cell.trainer,
            mode=cell.mode,
            settings=[f"protection.kind={cell.protection}"],
            seed=number if cell.mode == "experiment" else None,
            level=LEVEL,
        )
    wanted = faults[cell.fault].checks if cell.fault != "none" else ()
    named = [check for check in found.alarms if check.name in wanted]
    return {
        "alarm": not found.holds,
        "right": bool(named),
        "cpu_s": round(found.cpu_s, 3),
        "checks": len(found.checks),
        "below_1_percent": sum(check.p_value < 0.01 for check in found.checks),
    }


def measure() -> None:
    torch.set_num_threads(1)
    results = load_results(NAME).get("cells", {})
    for cell in cells():
        kept = results.setdefault(cell.key, {**cell._asdict(), "runs": []})
        while len(kept["runs"]) < cell.attempts:
            kept["runs"].append(attempt(cell, len(kept["runs"])))
        save_results(NAME, {"level": LEVEL, "cells": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["measure", "show"], nargs="?", default="show")
    if parser.parse_args().what == "measure":
        measure()
    print_table("Planted faults found", COLUMNS, table_rows(load_results(NAME).get("cells", {})))


if __name__ == "__main__":
    main()
