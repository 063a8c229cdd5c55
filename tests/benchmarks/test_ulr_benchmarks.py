"""The benchmarks of likelihood ratio training at a small size: they resume, and fill their rows of the papers' page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.pages import folder_page
from benchmarks.results_file import keep_row, load_results, save_results
from benchmarks.ulr import resnet, table1
from tests.support.paper_data import ours, take_committed, trains_nothing, write_cifar10, write_mnist


@pytest.mark.slow
def test_resnet(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 2)
    for name, value in (
        ("BATCH", 8),
        ("BATCHES", (8,)),
        ("NOISES", (1.0,)),
        ("EPOCHS", 1),
        ("BEST_EPOCHS", 1),
    ):
        monkeypatch.setattr(resnet, name, value)
    resnet.plain(seeds="0")
    assert len(load_results(resnet.NAME)["rows"]) == len(resnet.PLAIN)
    resnet.private(seeds="0")
    rows = load_results(resnet.NAME)["rows"]
    assert [row["form"] for row in rows[-3:]] == ["DP-SGD", "proven", "published"]
    shutil.rmtree(resnet.FOLDER)
    trains_nothing(lambda: resnet.private(seeds="0"), monkeypatch)
    trains_nothing(lambda: resnet.plain(seeds="0"), monkeypatch)
    assert load_results(resnet.NAME)["rows"] == rows
    assert ours("DP-ULR", "Figure 4")[0] == "smaller"
    resnet.plain(names="backpropagation")
    resnet.private(forms="DP-SGD")
    assert len(load_results(resnet.NAME)["rows"]) == len(rows) + 4


@pytest.mark.slow
def test_resnet_search(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 2)
    monkeypatch.setattr(resnet, "BATCH", 2)
    monkeypatch.setattr(resnet, "BATCHES", (2,))
    resnet.search(seeds="100")
    found = load_results(resnet.SEARCHED)["rows"]
    assert [row["value"] for row in found] == list(resnet.SEARCHES)
    shutil.rmtree(resnet.FOLDER)
    trains_nothing(lambda: resnet.search(seeds="100"), monkeypatch)
    assert load_results(resnet.SEARCHED)["rows"] == found


def test_table_1_trains_only_what_the_results_lack(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ulr_search", "ulr_published", "ulr_opacus", "ulr_proven"):
        take_committed(results, name)
    trains_nothing(table1.search, monkeypatch)
    trains_nothing(lambda: table1.published(seeds="0"), monkeypatch)
    trains_nothing(table1.opacus, monkeypatch)
    trains_nothing(lambda: table1.proven(trainers="bp"), monkeypatch)
    lacking = [row for row in load_results("ulr_published")["rows"] if row["seed"] == 0][1:]
    save_results("ulr_published", {"rows": lacking})
    with pytest.raises(AssertionError, match="began again"):
        trains_nothing(lambda: table1.published(seeds="0"), monkeypatch)


@pytest.mark.slow
def test_ulr_widths(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 130)
    take_committed(results, "ulr_search")
    monkeypatch.setattr(table1, "WIDTHS", {"small": [16, 8, 8], "large": [32, 16, 8]})
    monkeypatch.setattr(table1, "COPIES", 2)
    table1.widths(batches="64,128", seeds="0,1")
    found = load_results("ulr_widths")
    assert len(found["rows"]) == 8
    table1.widths(batches="64,128", seeds="0,1")
    assert load_results("ulr_widths") == found
    take_committed(results, "ulr_published")
    _, text = ours("DP-ULR", "Table C1")
    assert text.count("| small | 64 |") == 1, "seeds are averaged"


@pytest.mark.slow
def test_ulr_proven_with_orthogonal_copies(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 40)
    monkeypatch.setattr(table1, "PROVEN_BATCH", 20)
    names = "ulr, 128 orthogonal;bp"
    table1.proven(epsilons="3", seeds="0", trainers=names)
    rows = load_results("ulr_proven")["rows"]
    assert [row["trainer"] for row in rows] == names.split(";")
    assert all(row["guarantees"][0][0] == "proven" for row in rows)
    trains_nothing(lambda: table1.proven(epsilons="3", seeds="0", trainers=names), monkeypatch)
    assert "128 orthogonal" in folder_page("ulr")


def test_a_cell_of_table_1_is_one_of_the_widths_too(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_committed(results, "ulr_published")
    assert not table1.width_rows()  # DP-SGD's part is missing
    take_committed(results, "ulr_opacus")
    found = table1.width_rows()
    assert {(row["width"], row["batch"]) for row in found} == {("small", 64)}
    assert ours("ULR", "Table C1")[0] == "smaller"
    keep_row("ulr_widths", {**found[0], "ulr": 0.0})
    assert table1.width_rows() == found
