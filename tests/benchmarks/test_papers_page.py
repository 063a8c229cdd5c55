"""docs/papers.md as a whole."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import papers


def test_all_commands_together_take_at_most_a_day() -> None:
    commands = {words for items in papers.PAPERS.values() for item in items for words in item.run}
    assert commands == set(papers.COSTS)
    assert sum(papers.COSTS.values()) <= 24


def test_the_page_is_written_without_results(results: Path) -> None:
    assert "queued" in papers.papers_page()
