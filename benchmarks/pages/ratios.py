"""The tables of all speed ratios, each with its command."""

from __future__ import annotations

import itertools

from benchmarks.markdown import markdown
from benchmarks.speed import accounting, low_rank_directions, module_steps, projections, served, steps
from benchmarks.zeroth_order import memory


def tables() -> str:
    """Return a table of ratios for each command."""
    parts = (projections, steps, module_steps, low_rank_directions, accounting, served, memory)
    rows = [row for part in parts for row in part.speed_rows()]
    return "\n\n".join(
        f"{command}:\n\n{markdown(('work', 'ratio'), [row[:2] for row in found])}"
        for command, found in itertools.groupby(rows, key=lambda row: row[2])
    )
