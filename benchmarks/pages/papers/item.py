"""One table or figure of a paper, with the state that the results give it."""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results

PAPERS = tomllib.loads((Path(__file__).parent / "papers.toml").read_text())
"""What is said of each paper's items, the states, and the hours that commands take."""
COSTS: dict[str, float] = PAPERS["hours"]


def called(spec: Mapping[str, Any]) -> Any:
    """Return what a function of a specification returns: `call` names it, the rest are its arguments."""
    name, options = spec["call"], {key: value for key, value in spec.items() if key != "call"}
    return resolve_name(name if name.startswith("benchmarks.") else f"benchmarks.pages.papers.{name}")(
        **options
    )


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure of a paper.

    Attributes:
        name: As the paper numbers it.
        shows: What it shows.
        state: One of the states of papers.toml.
        figures: What makes ours, from the results, and the paper's, as Markdown; None if `text` says all.
        text: Why there are no figures, or where they are.
        differs: What differs from the paper's setting.
        run: Modules and arguments of `python -m benchmarks.`, one string each.
        results: Names of its results.
        left: What counts or lists the trainings that its commands still have to do.
        picture: A file in docs/ that shows it, and what to say of it to who cannot see it; empty without one.
    """

    name: str
    shows: str
    state: str
    figures: Mapping[str, Any] | None = None
    text: str = ""
    differs: str = ""
    run: Sequence[str] = ()
    results: Sequence[str] = ()
    left: Sequence[Mapping[str, Any]] = ()
    picture: Sequence[str] = ()

    def order(self) -> tuple[str, int]:
        """Return the place on the page: figures, then tables, by number."""
        kind, number = self.name.split()
        return kind, int(number) if number.isdigit() else 100

    def now(self) -> Now:
        """Read the results."""
        text = self.text
        if self.figures and any(map(load_results, self.results)):
            text = called(self.figures)
        left = sum(n if isinstance(n, int) else len(n) for n in map(called, self.left))
        state = "queued" if not text else "smaller" if left else self.state
        of = "these commands" if len(self.run) > 1 else "the command"
        trainings = f"{left} more run{'s' if left > 1 else ''} of {of} not done." if left else ""
        return Now(item=self, state=state, shown=blocks(text, trainings), incomplete=not text or left > 0)


@dataclass(frozen=True, kw_only=True)
class Now:
    """An item with the present results.

    Attributes:
        item: The item.
        state: Its state; one whose trainings are not complete is at best smaller.
        shown: What the results say, and how many trainings are missing.
        incomplete: Whether results are missing, or trainings are left.
    """

    item: Item
    state: str
    shown: str
    incomplete: bool

    @property
    def heading(self) -> str:
        """Its heading below the overview; empty if the overview says all."""
        return f"{self.item.name}: {self.item.shows}" if self.item.run else ""

    def row(self) -> tuple[str, ...]:
        """Return the row of the overview."""
        item = self.item
        if not self.heading:
            return item.name, item.shows, f"{self.state}: {self.shown}" if self.shown else self.state
        return f"[{item.name}](#{_anchor(self.heading)})", item.shows, self.state

    def details(self) -> str:
        """Return what follows the overview, as Markdown; empty if the overview says all."""
        item = self.item
        if not self.heading:
            return ""
        hours = sum(COSTS[words] for words in item.run)
        commands = ", ".join(f"`python -m benchmarks.{words}`" for words in item.run)
        return blocks(
            f"### {self.heading}",
            "![{1}](../../docs/{0})".format(*item.picture) if item.picture else "",
            self.shown,
            f"*Differs:* {item.differs}." if item.differs else "",
            f"*Run ({f'{hours:.1f} hours' if hours >= 0.1 else 'minutes'}):* {commands}",
        )


def _anchor(heading: str) -> str:
    """Return the name of a heading in links, as on GitHub and in the documentation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def blocks(*parts: str) -> str:
    """Return paragraphs and tables, one below the other; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; empty without rows, and "-" stands for what a row lacks at its end."""
    found = [tuple(row) for row in rows]
    filled = [(*row, *["-"] * (len(header) - len(row))) for row in found]
    return markdown(tuple(header), filled) if found else ""


def compared(ours: Sequence[float], others: Sequence[float]) -> int:
    """Return 1 or -1 if a mean is more than two standard errors of the difference above or below another one, else 0.

    Also 0 without two values of each.
    """
    if min(len(ours), len(others)) < 2:
        return 0
    error = math.hypot(*(statistics.stdev(part) / len(part) ** 0.5 for part in (ours, others)))
    difference = statistics.fmean(ours) - statistics.fmean(others)
    return (difference > 2 * error) - (difference < -2 * error)
