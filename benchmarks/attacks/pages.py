"""How good is the self-test of the mechanism? The section of the page that `benchmarks.pages` writes."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results

NAME = "mechanism_selftest"
COLUMNS = (
    "fault",
    "planted in",
    "found in experiment mode",
    "found in release mode",
    "CPU s",
)
_NO_FAULT = "none"


def table_rows(cells: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two rows a fault: the trainers that were attempted often, and all others with all label protections."""
    rows: list[tuple[str, ...]] = []
    for fault in dict.fromkeys(cell["fault"] for cell in cells.values()):
        if fault == _NO_FAULT:
            continue
        mine = [cell for cell in cells.values() if cell["fault"] == fault]
        often = [cell for cell in mine if len(cell["runs"]) > 1]
        for trainer in dict.fromkeys(cell["trainer"] for cell in often):
            rows.append(_row(fault, trainer, [cell for cell in often if cell["trainer"] == trainer]))
        once = [cell for cell in mine if len(cell["runs"]) == 1]
        if once:
            rows.append(_row(fault, _names(once), once))
    return rows


def _names(cells: list[dict[str, Any]]) -> str:
    """The trainers of records, then the label protections."""
    records = dict.fromkeys(cell["trainer"] for cell in cells if cell["protection"] == "record")
    labels = dict.fromkeys(cell["protection"] for cell in cells if cell["protection"] != "record")
    return ", ".join([*records, *(f"{name} (all feedbacks)" for name in labels)])


def _row(fault: str, what: str, cells: list[dict[str, Any]]) -> tuple[str, ...]:
    seconds = [run["cpu_s"] for cell in cells for run in cell["runs"]]
    return (fault, what, _found(cells, "experiment"), _found(cells, "release"), f"{max(seconds):.1f}")


def _found(cells: list[dict[str, Any]], mode: str) -> str:
    runs = [run for cell in cells if cell["mode"] == mode for run in cell["runs"]]
    return f"{sum(run['right'] for run in runs)} of {len(runs)}" if runs else "–"


def mechanism_section() -> str:
    """Planted faults and false alarms; empty without results."""
    results = load_results(NAME)
    if not results:
        return ""
    cells = results["cells"]
    runs = [run for cell in cells.values() if cell["fault"] == _NO_FAULT for run in cell["runs"]]
    checks, low = (sum(run[key] for run in runs) for key in ("checks", "below_1_percent"))
    text = (
        f"`opusim audit --mechanism KIND` at an alarm level of {results['level']:g}, two runs of 60 steps "
        f"({results['date']}, `python -m benchmarks.attacks.self_test measure`). A fault counts as found if a check "
        "that is meant for it raises the alarm. Trainers stand for protection.kind = record. CPU s is the longest "
        f"self-test. Without a fault: {sum(run['alarm'] for run in runs)} alarms in {len(runs)} self-tests, and {low} "
        f"of {checks:,} p-values below 0.01 (experiment mode has the same seeds for every trainer). Required: 19 of 20 "
        "within 60 CPU seconds."
    )
    return "\n\n".join(("## Planted faults that the self-test of the mechanism finds", text, _table(cells)))


def _table(cells: dict[str, Any]) -> str:
    return markdown(COLUMNS, table_rows(cells))
