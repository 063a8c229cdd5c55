"""benchmarks/papers/README.md as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.convex.curves import ahead_and_behind
from benchmarks.markdown import difference
from benchmarks.pages import papers


def test_all_commands_together_take_at_most_a_day_and_a_half() -> None:
    commands = {words for items in papers.PAPERS.values() for item in items for words in item.run}
    assert commands == set(papers.COSTS)
    assert sum(papers.COSTS.values()) <= 36


@pytest.mark.slow
def test_the_page_is_written_without_results(results: Path) -> None:
    assert "queued" in papers.papers_page()


def test_models_differ_by_two_standard_errors_of_the_difference() -> None:
    other = {1.0: [90.0, 90.2], 3.0: [90.0, 90.2], 8.0: [90.0]}  # a standard error of 0.1
    ours = {1.0: [90.2, 90.4], 3.0: [90.5, 90.7], 8.0: [99.0]}  # 1.4 and 3.5 standard errors; one seed
    assert ahead_and_behind(ours, other) == ("3", "none")
    assert ahead_and_behind(other, ours) == ("none", "3")
    assert ahead_and_behind(ours, ours) == ("none", "none")


def test_differences_are_taken_seed_by_seed() -> None:
    assert difference([81.0, 70.0, 62.0], [80.0, 68.0, 59.0]) == "+2.0 ± 0.6"  # 1, 2 and 3
    assert difference([81.0, 70.0], [80.0]) == "-"
