"""Tables and figures of the result pages, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def table(header: str, rows: Iterable[Any], form: str = "") -> str:
    """Return a table in Markdown.

    Args:
        header: The names of the columns, such as "device | ratio".
        rows: The lines: their cells, or what `form` shows of each.
        form: The cells of a line, such as "{device} | {ratio:.2f}" of a mapping, or "{0} | {1:.2f}" of a sequence.
    """
    if form:
        rows = [(form.format_map(row) if isinstance(row, Mapping) else form.format(*row),) for row in rows]
    return markdown(header.split(" | "), rows)


def command(module: str, *arguments: str) -> str:
    """Return the command that runs a benchmark, as Markdown."""
    return f"`{' '.join(('python -m', module, *arguments))}`"


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of some values; None of fewer than two."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def with_error(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean of some values and, of more than one, its standard error, as text; "-" without values."""
    if not values:
        return "-"
    mean, error = f"{statistics.fmean(values):{form}}", standard_error(values)
    return mean if error is None else f"{mean} ± {error:{form.lstrip('+')}}"


def difference(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the mean difference of values, seed by seed, and its standard error, as text; "-" unless both are full."""
    pairs = zip(mine, theirs, strict=True) if len(mine) == len(theirs) else ()
    return with_error([a - b for a, b in pairs], "+.1f")


def compared(ours: Sequence[float], others: Sequence[float]) -> int:
    """Return 1 or -1 if a mean is more than two standard errors of the difference above or below another one, else 0.

    Also 0 without two values of each.
    """
    if min(len(ours), len(others)) < 2:
        return 0
    error = math.hypot(*(standard_error(part) or 0.0 for part in (ours, others)))
    apart = statistics.fmean(ours) - statistics.fmean(others)
    return (apart > 2 * error) - (apart < -2 * error)


def verdict(met: bool | None) -> str:
    """Whether a requirement is met; "none" if nothing is required."""
    return {True: "met", False: "**missed**", None: "none"}[met]
