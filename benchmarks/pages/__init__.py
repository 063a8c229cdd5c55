"""Write the result pages from benchmarks/results: benchmarks/*/README.md and the tables in the documentation.

`python -m benchmarks.pages` renews them; a test compares the committed pages with what it would write. The text of a
folder's page, with its tables, is templates/FOLDER.md; the tables in other pages are the blocks of templates/blocks.md.
What the papers' tables and figures show stands in papers/README.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.markdown import markdown
from benchmarks.pages.environment import TEMPLATES, environment, tidy
from benchmarks.pages.papers import papers_page

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
FOLDERS = (
    *("any_module", "pdfa", "private_accuracy", "ulr", "convex", "zeroth_order", "analog", "known_models"),
    *("devices", "attacks", "curves", "speed"),
)
BLOCKS = {
    "README.md": ("measured",),
    "docs/choosing-a-trainer.md": ("protections", "literature"),
    "docs/devices.md": ("faults", "monitor", "named_faults", "fault_names"),
    "docs/calibrate.md": ("account", "broken_noises"),
    "docs/own-instrument.md": ("columns",),
    "docs/serving.md": ("served_faults", "served"),
    "docs/private-loops.md": ("opacus",),
}
"""Tables between markers of a page, by name."""


def folder_page(folder: str) -> str:
    """Return the whole of a folder's README; sections without results are left out."""
    return tidy(environment().get_template(f"{folder}.md").render()) + "\n"


def index_page() -> str:
    """Return the whole of benchmarks/README.md: every benchmark with its question, by folder."""
    parts = [environment().get_template("index.md").render()]
    for folder in FOLDERS:
        title = (TEMPLATES / f"{folder}.md").read_text().partition("\n")[0].removesuffix(": results")
        parts.append(
            f"#{title}\n\nResults: [{folder}/README.md]({folder}/README.md).\n\n{_questions(folder)}"
        )
    return "\n\n".join(parts) + "\n"


def _questions(folder: str) -> str:
    """Return a folder's programs, a line each."""
    if folder == "curves":
        specs = sorted((BENCHMARKS / folder).glob("*.toml"))
        questions = (spec.read_text().splitlines()[0].lstrip("# ").strip() for spec in specs)
        commands = (f"`opusim curve benchmarks/curves/{spec.name}`" for spec in specs)
        rows = list(zip(commands, questions, strict=True))
        return markdown(("command", "question"), rows)
    return markdown(("command", "question"), _programs(folder))


def _programs(folder: str) -> Iterator[tuple[str, ...]]:
    for path in sorted((BENCHMARKS / folder).glob("*.py")):
        source = path.read_text()
        if 'if __name__ == "__main__"' in source:
            question = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
            yield (f"`python -m benchmarks.{folder}.{path.stem}`", question)


def with_block(text: str, name: str) -> str:
    """Return a page whose block of this name, between its two markers, is renewed."""
    begin, end = f"<!-- {name}: written by `make bench-report` -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    template = environment().get_template("blocks.md")
    block = "".join(template.blocks[name](template.new_context())).strip()
    return f"{before}{begin}\n{block}\n{end}{after}"


def pages() -> dict[Path, str]:
    """Return the text of every page that is written from results."""
    found = {
        BENCHMARKS / "papers" / "README.md": papers_page(),
        BENCHMARKS / "README.md": index_page(),
        **{BENCHMARKS / folder / "README.md": folder_page(folder) for folder in FOLDERS},
    }
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text()
        for name in blocks:
            text = with_block(text, name)
        found[ROOT / page] = text
    return found


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
