"""The figures on the pages are those of benchmarks/results, and every benchmark can still be run."""

import pkgutil
from pathlib import Path

import pytest

from benchmarks.pages import pages
from tests.support.imports import ROOT, imports_of

OURS = ("opusim", "benchmarks", "tests")


def missing(source: str) -> list[str]:
    """Names of this repository that a source text imports, at whatever place, and that do not exist."""
    found = []
    for name in {each.target for each in imports_of(source) if each.target.split(".")[0] in OURS}:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found.append(name)
    return found


def test_pages_are_what_the_results_say() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is out of date; run `make bench-report`"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_benchmarks_import_what_exists(file: Path) -> None:
    assert not missing(file.read_text())


def test_an_import_of_what_is_gone_is_caught() -> None:
    gone = (
        "def f():\n    from opusim.accounting import nothing_of_this_name\n    import opusim.training.nowhere"
    )
    assert sorted(missing(gone)) == ["opusim.accounting.nothing_of_this_name", "opusim.training.nowhere"]
