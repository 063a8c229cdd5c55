"""What the templates of the result pages see: results, Markdown, and the benchmarks' modules."""

from __future__ import annotations

import pkgutil
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.markdown import command, compared, difference, table, verdict, with_error
from benchmarks.results_file import load_results, selected

TEMPLATES = Path(__file__).parent / "templates"


def use(name: str) -> Any:
    """Return a module of the benchmarks, such as "devices.faults"."""
    return pkgutil.resolve_name(f"benchmarks.{name}")


def one(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the first row that has these values, or None."""
    return next(iter(selected(rows, **wanted)), None)


@cache
def environment() -> Environment:
    """Return the templates' environment: `f` formats a value, `d` also None as a dash."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    found.globals.update(results=load_results, use=use, selected=selected, one=one, mean=statistics.fmean)
    found.globals.update(table=table, command=command, verdict=verdict)
    found.globals.update(with_error=with_error, difference=difference, compared=compared)
    found.filters["f"] = format
    found.filters["d"] = lambda value, form: "-" if value is None else format(value, form)
    return found


def tidy(text: str) -> str:
    """Return what a template wrote with one empty line between its parts."""
    return re.sub(r"\n{3,}", "\n\n", text).strip()
