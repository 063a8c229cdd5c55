"""One table or figure of a paper, with the state that the results give it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results

COSTS: dict[str, float] = {
    "pdfa.table1": 0.6,
    "pdfa.readings": 0.6,
    "pdfa.figure2": 0.0,
    "ulr.figure2": 0.0,
    "ulr.figure3": 0.0,
    "ulr.resnet plain": 2.5,
    "ulr.resnet private": 5.0,
    "ulr.resnet search": 0.5,
    "ulr.table1 widths": 1.7,
    "ulr.table1 search": 0.5,
    "ulr.table1 published": 1.6,
    "ulr.table1 opacus": 0.5,
    "ulr.table1 proven": 0.7,
    "convex.accountants": 0.0,
    "convex.accuracy search": 0.8,
    "convex.accuracy measure": 2.0,
    "convex.hyperplanes --noise 0": 0.3,
    "convex.hyperplanes --noise 5,15": 0.6,
    "convex.curves": 0.7,
    "convex.curves --data cifar-10": 0.5,
    "convex.curves --data fashion-mnist": 0.6,
    "convex.tuned": 0.2,
    "convex.tuned --trials 10": 0.4,
    "convex.tuned --data cifar-10 --trials 10": 1.1,
    "zeroth_order.ablations --study records": 0.1,
    "zeroth_order.ablations --study clip": 0.01,
    "zeroth_order.ablations --study batch": 0.01,
    "zeroth_order.ablations --study steps": 0.03,
    "zeroth_order.joint_clip": 0.03,
    "zeroth_order.membership measure": 0.2,
    "zeroth_order.memory": 0.1,
    "zeroth_order.sigma_tables": 0.0,
    "zeroth_order.sst2_head measure": 0.3,
    "zeroth_order.sst2_language measure": 12.0,
    "zeroth_order.sst2_lora measure": 0.3,
}
"""Hours of two cores that a whole command takes, from finished runs or estimated from a few steps; 0: a minute."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure of a paper.

    Attributes:
        name: As the paper numbers it.
        shows: What it shows.
        state: One of `page.STATES`.
        figures: Ours, from the results, and the paper's, as Markdown; or the reason why there are none.
        differs: What differs from the paper's setting.
        run: Modules and arguments of `python -m benchmarks.`, one string each.
        results: Names of its results.
        left: Counts the trainings that its commands still have to do; None if it has results or has none.
        picture: A file in docs/ that shows it, and what to say of it to who cannot see it; empty without one.
    """

    name: str
    shows: str
    state: str
    figures: Callable[[], str] | str
    differs: str = ""
    run: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    left: Callable[[], int] | None = None
    picture: tuple[str, str] | tuple[()] = ()

    def order(self) -> tuple[str, int]:
        """Return the place on the page: figures, then tables, by number."""
        kind, number = self.name.split()
        return kind, int(number) if number.isdigit() else 100

    def now(self) -> Now:
        """Read the results."""
        text = self.figures if isinstance(self.figures, str) else ""
        if callable(self.figures) and any(map(load_results, self.results)):
            text = self.figures()
        left = self.left() if self.left else 0
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


SEE_RESULTS = "The figures stand on the page of results."
"""What an item shows whose conclusions need trainings that are not done yet."""


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
