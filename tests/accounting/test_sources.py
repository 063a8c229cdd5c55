"""Every section that accounting cites stands on the page, and nothing outside the repository is cited."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "privacy.md").read_text()
ULR = (ROOT / "docs" / "ulr.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "accounting").rglob("*.py")))


def cited(text: str, page: str = "privacy") -> set[str]:
    joined = " ".join(text.split())
    found = re.findall(rf"docs/{page}\.md, sections? (\d+)(?: and (\d+))?", joined)
    return {number for pair in found for number in pair if number}


def test_cited_sections_exist() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", PAGE, flags=re.MULTILINE))
    assert {"2", "3", "4", "5", "6", "7", "9"} <= cited(SOURCES) <= sections
    assert cited("docs/privacy.md, section 99") - sections  # planted
    others = set(re.findall(r"^## (\d+)\. ", ULR, flags=re.MULTILINE))
    assert {"3", "4", "5"} <= cited(SOURCES, "ulr") <= others


def test_nothing_outside_the_repository_is_cited() -> None:
    assert not re.search(r"THEORY|\.\./shared", SOURCES)
