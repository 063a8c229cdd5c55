"""The benchmarks of private accuracy at a small size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages import folder_page
from benchmarks.private_accuracy import records
from benchmarks.results_file import load_results
from opusim.description.section import merged
from tests.support.paper_data import write_mnist


@pytest.mark.slow
def test_a_row_of_private_accuracy_takes_more_seeds_later(results: Path) -> None:
    write_mnist(results.parent, 60)
    name = "fashion-mnist, convolutions, DP-SGD"
    small = {"epochs": 1, "data": {"name": "mnist"}, "sampler": {"batch_size": 16}}
    row = replace(records.ROWS[name], config=merged(records.ROWS[name].config, small), epsilons=(3.0,))
    table = replace(records.TABLE, rows={name: row}, folder=results.parent / "runs")
    table.measure(jobs=1, seeds="0")
    assert "(one seed)" in folder_page("private_accuracy")
    table.measure(jobs=1, seeds="1")
    first = load_results(records.NAME)["runs"]
    assert "(one seed)" not in folder_page("private_accuracy")
    table.measure(jobs=1, seeds="2")
    found = load_results(records.NAME)["runs"]
    assert [run["seed"] for run in found] == [0, 1, 2]
    assert found[:2] == first
    assert {run["status"] for run in found} == {"proven"}
