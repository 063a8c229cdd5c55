"""The table of all speed ratios, each with its command."""

from __future__ import annotations

import itertools

from benchmarks.markdown import markdown, section
from benchmarks.speed import accounting, low_rank_directions, module_steps, projections, served, steps
from benchmarks.zeroth_order import memory


def page_section() -> str:
    """Return the table of all ratios."""
    parts = (projections, steps, module_steps, low_rank_directions, accounting, served, memory)
    rows = [row for part in parts for row in part.speed_rows()]
    text = (
        "Medians of interleaved turns in one process; each command opens with what is required. Rows without a number "
        "of threads are of one thread."
    )
    tables = []
    for command, found in itertools.groupby(rows, key=lambda row: row[2]):
        tables += [f"{command}:", markdown(("work", "ratio"), [row[:2] for row in found])]
    return section("Ratios", text, *tables)
