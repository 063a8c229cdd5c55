"""Write what the benchmarks measured: a README in each folder, the index, and the tables of README and docs.

`make bench-report` runs this; a test compares the committed pages with what it would write. Each benchmark makes
its own section, next to its measurement. What the papers' tables and figures show stands in papers/README.md.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.markdown import markdown, section
from benchmarks.pages.papers.page import papers_page

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
WRITTEN = "Written by `make bench-report` from `results/`; nothing here is typed by hand."
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "any_module": ("Any module", ("private:page_section",)),
    "pdfa": (
        "Photonic direct feedback alignment",
        ("demo:page_section", "readings:page_section", "private:page_section"),
    ),
    "private_accuracy": (
        "Accuracy under protection on public features",
        ("records:page_section", "bands:page_section", "labels:page_section", "users:page_section"),
    ),
    "ulr": ("Likelihood ratio training", ("table1:proven_section",)),
    "convex": ("Convex training", ("accuracy:page_section", "noise:page_section")),
    "zeroth_order": (
        "Zeroth-order training",
        (
            "memory:page_section",
            "sst2_language:page_section",
            "sst2_language:precision_section",
        ),
    ),
    "analog": (
        "Analog devices",
        ("lifetimes:page_section", "in_situ:page_section", "product:page_section"),
    ),
    "known_models": (
        "Known models",
        (
            "nanogpt:page_section",
            "images:page_section",
            "private:page_section",
            "readout_rules:page_section",
        ),
    ),
    "devices": (
        "Devices",
        (
            "learning:page_section",
            "real_opu:page_section",
            "count_attack:page_section",
            "own_bench:page_section",
        ),
    ),
    "attacks": (
        "Audits",
        (
            "guarantees:page_section",
            "final_model:page_section",
            "self_test:page_section",
            "one_run:page_section",
            "silent:page_section",
        ),
    ),
    "curves": ("Sweeps: noise against privacy against accuracy", ("pages.sweeps:sweeps_section",)),
    "speed": (
        "Speed",
        (
            "pages.ratios:page_section",
            "trak:page_section",
            "gpu:page_section",
            "card_steps:page_section",
            "operators:page_section",
            "walk:page_section",
        ),
    ),
}
"""The title of each folder's page, and what makes its sections."""
BLOCKS: dict[str, dict[str, str]] = {
    "README.md": {"measured": "pages.headlines:headline_table"},
    "docs/choosing-a-trainer.md": {
        "protections": "pages.headlines:protection_table",
        "literature": "private_accuracy.records:docs_table",
    },
    "docs/devices.md": {
        "effects": "devices.effects:docs_table",
        "faults": "devices.faults:docs_table",
        "monitor": "devices.monitor:docs_table",
        "named_faults": "devices.monitor:named_table",
        "fault_names": "devices.monitor:confusion_table",
    },
    "docs/calibrate.md": {
        "account": "devices.camera_account:docs_table",
        "chain": "devices.chain:docs_table",
        "chain_kept": "devices.chain:kept_table",
        "broken_noises": "devices.calibration_faults:broken_table",
    },
    "docs/serving.md": {
        "served_faults": "devices.served_faults:docs_table",
        "served": "speed.served:docs_table",
    },
    "docs/private-loops.md": {"opacus": "any_module.private:docs_table"},
}
"""Tables between markers of a page, by name, and what makes them."""


def text_of(name: str) -> str:
    """Return what a function of the benchmarks writes, such as "devices.faults:docs_table"."""
    return str(pkgutil.resolve_name(f"benchmarks.{name}")())


def folder_page(folder: str) -> str:
    """Return the whole of a folder's README."""
    title, sections = SECTIONS[folder]
    parts = [f"# {title}: results", WRITTEN.replace("results/", "../results/")]
    parts += [text_of(name if name.startswith("pages.") else f"{folder}.{name}") for name in sections]
    return "\n\n".join(part for part in parts if part) + "\n"


def index_page() -> str:
    """Return the whole of benchmarks/README.md: every benchmark with its question, by folder."""
    head = (
        f"# Benchmarks\n\n{WRITTEN} Each benchmark is a program that opens with its question; its result is one JSON "
        "file in [results](results), with date, machine, versions and commit, that of the last part if it was measured "
        "in several. At 02c3c03 or before, norms were computed in float32; later commits clip linear layers up to 1e-4 "
        "lower and convolutions up to 0.2 %. Timings are ratios within one run. "
        "What repeats the four papers stands in [their tables and figures](papers/README.md). "
        "[results/nightly.md](results/nightly.md) sums up the nightly tests."
    )
    parts = [
        section(title, f"Results: [{folder}/README.md]({folder}/README.md).", _questions(folder))
        for folder, (title, _) in SECTIONS.items()
    ]
    return "\n\n".join((head, *parts)) + "\n"


def _questions(folder: str) -> str:
    """Return a folder's programs, a line each."""
    if folder == "curves":
        specs = sorted((BENCHMARKS / folder).glob("*.toml"))
        rows = [(f"`opusim curve benchmarks/curves/{spec.name}`", _first_comment(spec)) for spec in specs]
        return markdown(("command", "question"), list(rows))
    return markdown(("command", "question"), list(_programs(folder)))


def _first_comment(spec: Path) -> str:
    return spec.read_text().splitlines()[0].lstrip("# ").strip()


def _programs(folder: str) -> Iterator[tuple[str, ...]]:
    for path in sorted((BENCHMARKS / folder).glob("*.py")):
        source = path.read_text()
        if 'if __name__ == "__main__"' in source:
            question = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
            yield (f"`python -m benchmarks.{folder}.{path.stem}`", question)


def with_block(text: str, name: str, table: str) -> str:
    """Return a page whose block of this name, between its two markers, holds the table."""
    begin, end = f"<!-- {name}: written by `make bench-report` -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def pages() -> dict[Path, str]:
    """Return the text of every page that is written from results."""
    found = {
        BENCHMARKS / "papers" / "README.md": papers_page(),
        BENCHMARKS / "README.md": index_page(),
        **{BENCHMARKS / folder / "README.md": folder_page(folder) for folder in SECTIONS},
    }
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text()
        for name, source in blocks.items():
            text = with_block(text, name, text_of(source))
        found[ROOT / page] = text
    return found


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
