"""How often does the self-test of the mechanism find a planted fault, and how often does it raise a false alarm?

    python -m benchmarks.attacks.self_test measure     (resumes; some 6 minutes of one core)

Every fault of `tests.support.faults` is planted in every trainer and mode that it reaches: 20 times for `pdfa`, `ulr`
and the faults of `NAMED`, once otherwise. The product without a fault is tested many times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.options import program
from benchmarks.results_file import load_results, save_results
from opusim import audit_mechanism
from tests.support.faults import FAULTS
from tests.support.faults.base import FEEDBACKS, MODES, STEPWISE

MODULE, NAME = "benchmarks.attacks.self_test", "mechanism_selftest"
LEVEL = 1e-4
_NO_FAULT = "none"
NAMED = (
    *("noise_too_small", "noise_reused", "clipped_by_layer", "clip_too_wide"),
    *("fixed_size_batches", "fixed_size_batches_on_release"),
)
OFTEN, ATTEMPTS, NULLS = ("pdfa", "ulr"), 20, 5
LABELS = ("label-amplified", "label-randomized-response")
PROTECTIONS = ("record", *LABELS, "label-readout", "last-iterate")


class Cell(NamedTuple):
    """What is attempted, and how often."""

    fault: str
    trainer: str
    protection: str
    mode: str
    attempts: int

    @property
    def key(self) -> str:
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
        others = LABELS if trainer in FEEDBACKS else ("last-iterate",) if trainer == "convex" else ()
        for protection in ("record", *others):
            attempts = ATTEMPTS if trainer in OFTEN and protection == "record" else NULLS
            found += [Cell("none", trainer, protection, mode, attempts) for mode in MODES]
    return iter(sorted(found, key=lambda cell: (cell.fault == "none", -cell.attempts)))


def attempt(cell: Cell, number: int) -> dict[str, Any]:
    """One self-test with the fault planted."""
    faults = {fault.name: fault for fault in FAULTS}
    settings: tuple[str, ...] = ()
    with contextlib.ExitStack() as stack:
        if cell.fault != "none":
            settings = faults[cell.fault].settings
            stack.enter_context(faults[cell.fault].planted())
        found = audit_mechanism(
            cell.trainer,
            mode=cell.mode,
            settings=[f"protection.kind={cell.protection}", *settings],
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


def table_rows(cells: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each fault in the trainers that were attempted often, and one in all others."""
    rows: list[tuple[str, ...]] = []
    for fault in dict.fromkeys(cell["fault"] for cell in cells.values()):
        mine = [cell for cell in cells.values() if cell["fault"] == fault != _NO_FAULT]
        for often in (True, False):
            found = [cell for cell in mine if (len(cell["runs"]) > 1) == often]
            if found:
                seconds = max(run["cpu_s"] for cell in found for run in cell["runs"])
                counts = (_found(found, mode) for mode in MODES)
                rows.append((fault, _names(found), *counts, f"{seconds:.1f}"))
    return rows


def _names(cells: list[dict[str, Any]]) -> str:
    """The trainers of records, then the label protections."""
    records = dict.fromkeys(cell["trainer"] for cell in cells if cell["protection"] == "record")
    labels = dict.fromkeys(cell["protection"] for cell in cells if cell["protection"] != "record")
    return ", ".join([*records, *labels])


def _found(cells: list[dict[str, Any]], mode: str) -> str:
    runs = [run for cell in cells if cell["mode"] == mode for run in cell["runs"]]
    return f"{sum(run['right'] for run in runs)} of {len(runs)}" if runs else "–"


def sound(cells: dict[str, Any]) -> dict[str, int]:
    """Return how many self-tests had no fault, their alarms, their checks, and how many p-values were below 0.01."""
    runs = [run for cell in cells.values() if cell["fault"] == _NO_FAULT for run in cell["runs"]]
    return {"runs": len(runs)} | {
        key: sum(run[key] for run in runs) for key in ("alarm", "checks", "below_1_percent")
    }


if __name__ == "__main__":
    program(measure)
