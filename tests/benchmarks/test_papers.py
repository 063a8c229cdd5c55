"""The benchmarks of the papers at a small size: they resume, and fill their rows of the papers' page."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import results_file
from benchmarks.convex import curves, hyperplanes, tuned
from benchmarks.convex.curves import ahead_and_behind
from benchmarks.markdown import difference
from benchmarks.pages import folder_page, papers
from benchmarks.pdfa import figure2
from benchmarks.pdfa import table1 as pdfa_table1
from benchmarks.private_accuracy import records
from benchmarks.results_file import keep_row, load_results, save_results
from benchmarks.ulr import resnet, table1
from benchmarks.zeroth_order import ablations, sentences
from benchmarks.zeroth_order.sst2_head import LaplaceSgd
from opusim.description.section import merged
from opusim.randomness.streams import SeededStream
from tests.support.paper_data import ours, take_committed, trains_nothing, write_cifar10, write_mnist


def test_all_commands_together_take_at_most_a_day_and_a_half() -> None:
    commands = {words for items in papers.PAPERS.values() for item in items for words in item.run}
    assert commands == set(papers.COSTS)
    assert sum(papers.COSTS.values()) <= 36


@pytest.mark.slow
def test_the_page_is_written_without_results(results: Path) -> None:
    assert "queued" in papers.papers_page()


def test_differences_are_taken_seed_by_seed_and_told_beyond_two_errors() -> None:
    other = {1.0: [90.0, 90.2], 3.0: [90.0, 90.2], 8.0: [90.0]}  # a standard error of 0.1
    ours = {1.0: [90.2, 90.4], 3.0: [90.5, 90.7], 8.0: [99.0]}  # 1.4 and 3.5 standard errors; one seed
    assert ahead_and_behind(ours, other) == ("3", "none")
    assert ahead_and_behind(other, ours) == ("none", "3")
    assert ahead_and_behind(ours, ours) == ("none", "none")
    assert difference([81.0, 70.0, 62.0], [80.0, 68.0, 59.0]) == "+2.0 ± 0.6"  # 1, 2 and 3
    assert difference([81.0, 70.0], [80.0]) == "-"


@pytest.mark.slow
def test_private_searches(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 500)
    take_committed(results, "convex_accounting")
    monkeypatch.setattr(tuned, "EPSILONS", (4.76,))
    tuned.main(trials=5, seeds="0")
    (found,) = tuned.cells()["mnist", 4.76, 5]
    assert 4.76 < found["epsilon"] <= tuned.whole_epsilon(4.76, 5)
    tuned.main(trials=5, seeds="0")
    assert tuned.cells()["mnist", 4.76, 5] == [found]
    assert "| 6.92 |" in ours("Convex", "Table 1")[1]


@pytest.mark.slow
def test_hyperplanes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 1200)
    monkeypatch.setattr(hyperplanes, "COUNTS", (16,))
    monkeypatch.setattr(hyperplanes, "EPOCHS", 4)
    monkeypatch.setattr(hyperplanes, "PICTURE", results.parent / "hyperplanes.png")
    hyperplanes.main(noise="0", epochs=4, seeds="0")
    assert ours("Convex", "Figure 5")[0] == "queued"
    hyperplanes.main(noise="5", epochs=4, seeds="0")
    found = load_results(hyperplanes.NAME)
    told = [(c["hyperplanes"], c["noise"]) for c in found["curves"]]
    assert told == [(16, 0), (None, 0), (16, 5), (None, 5)]
    hyperplanes.main(noise="0,5", epochs=4, seeds="0")
    assert load_results(hyperplanes.NAME) == found
    hyperplanes.main(noise="0", epochs=4, seeds="0,1")
    assert ours("Convex", "Figure 4")[1].count("±") == 2


@pytest.mark.slow
def test_curves_of_other_data(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 101)
    take_committed(results, "convex")
    monkeypatch.setattr(curves, "EPSILONS", (1.0,))
    monkeypatch.setattr(curves, "ROWS", ("convex, last iterate", "ReLU network, DP-SGD"))
    curves.main(data="cifar-10", seeds="0,1")
    found = load_results(curves.name_of("cifar-10"))
    assert len(found["points"]) == 4
    curves.main(data="cifar-10", seeds="0,1")
    assert load_results(curves.name_of("cifar-10")) == found
    stale = [{**found["points"][0], "point": {"trainer.clip": 9.0}}, *found["points"][1:]]
    results_file.save_results(curves.name_of("cifar-10"), {"data": "cifar-10", "points": stale})
    curves.main(data="cifar-10", seeds="0,1")
    keys = {(p["row"], p["epsilon"], p["seed"]) for p in found["points"]}
    assert curves.finished("cifar-10").keys() == keys
    assert ours("Convex", "Figure 3")[0] == "smaller"


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pdfa_figure2(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 300)
    (results.parent / "MNIST").rename(results.parent / "FashionMNIST")
    monkeypatch.setattr(pdfa_table1, "BASE", {**pdfa_table1.BASE, "epochs": 1})
    for module in (pdfa_table1, figure2):
        monkeypatch.setattr(module, "COLUMNS", ("non-private", "0", "0.2"))
    monkeypatch.setattr(figure2, "SIGMAS", (0.0, 0.2))
    monkeypatch.setattr(pdfa_table1, "SEEDS", (0, 1))
    monkeypatch.setattr(figure2, "PICTURE", results.parent / "figure.png")
    assert ours("Photonic", "Figure 2")[0] == "queued"
    pdfa_table1.main(jobs=1, seeds="0")
    assert ours("Photonic", "Figure 2")[0] == "smaller"
    pdfa_table1.main(jobs=1, seeds="0,1")
    found = load_results(pdfa_table1.NAME)
    assert len(found["runs"]) == 24
    assert len(found["cells"]) == 12
    trains_nothing(lambda: pdfa_table1.main(jobs=1, seeds="0,1"), monkeypatch)
    assert load_results(pdfa_table1.NAME) == found
    figure2.draw()
    assert figure2.PICTURE.exists()


@pytest.mark.slow
def test_the_demo_trains_side_by_side_and_writes_its_report(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "opu.toml", tmp_path / "examples")
    command = [sys.executable, "-m", "benchmarks.pdfa.demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert "pdfa, sigma 30" in shown.stdout
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 10_000


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


@pytest.mark.slow
def test_resnet(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 2)
    small = {"BATCH": 8, "BATCHES": (8,), "NOISES": (1.0,), "EPOCHS": 1, "BEST_EPOCHS": 1}
    for name, value in small.items():
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


def write_sentences(root: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Write n sentences to train and 40 others, with random embeddings."""
    generator = torch.Generator().manual_seed(0)
    (root / "SST2").mkdir()
    monkeypatch.setattr(sentences, "CACHE", root / "cache")
    sentences.CACHE.mkdir()
    for names, count in ((("train",), n), (("dev", "test"), 40)):
        for name in names:
            lines = [f"sentence {number}\t{number % 2}" for number in range(count // len(names))]
            (root / "SST2" / f"{name}.tsv").write_text("\n".join(lines))
        drawn = torch.randn(count, 384, generator=generator).numpy()
        np.save(sentences.CACHE / f"sst2-{'-'.join(names)}.npy", drawn)


@pytest.mark.parametrize("clip", [5.0, 1000.0], ids=["clipped", "not clipped"])
def test_laplace_sgd_moves_by_the_clip_at_most(seed: int, clip: float) -> None:
    """A clip of the 2-norm, the planted fault, leaves a larger 1-norm."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(1, 384, generator=generator), torch.ones(1, dtype=torch.long)
    stream = SeededStream(seed, "central-noise")
    trainer = LaplaceSgd(scale=0.0, clip=clip, divisor=2.0, rate=1.0, stream=stream)
    trainer.step(x, y, step=0)
    moved = torch.cat([part.detach().flatten() for part in trainer.model.parameters()])
    gradient = 0.5 * torch.cat([x[0], torch.ones(1)])
    assert torch.allclose(moved, gradient * min(1.0, clip / float(gradient.abs().sum())) / 2, rtol=1e-5)
    assert float((gradient * min(1.0, 5.0 / float(gradient.norm()))).abs().sum()) > 5.0


def test_laplace_sgd_adds_laplace_noise_of_its_scale(seed: int) -> None:
    """The mean size of Laplace(6) is 6, with that standard deviation; a Gaussian of its variance has another mean."""
    stream = SeededStream(seed, "central-noise")
    trainer = LaplaceSgd(scale=2.0, clip=3.0, divisor=1.0, rate=1.0, stream=stream)
    found = []
    for step in range(50):
        before = trainer.model.linear.weight.detach().clone()
        trainer.step(torch.zeros(0, 384), torch.zeros(0, dtype=torch.long), step=step)
        found.append((trainer.model.linear.weight.detach() - before).flatten())
    sizes = torch.cat(found).double().abs()
    error = 5 * 6.0 / len(sizes) ** 0.5
    assert float(sizes.mean()) == pytest.approx(6.0, abs=error)
    assert abs(6.0 * (4 / math.pi) ** 0.5 - 6.0) > error


@pytest.mark.slow
def test_ablations(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sentences(results.parent, monkeypatch, 300)
    sizes = {"records": 250, "batch": 16, "steps": 40}
    cells = [ablations.Cell(study="records", law=law, **sizes) for law in ("gaussian", "laplace", "dp-sgd")]
    free = ablations.Cell(study="records", law="none", clip=math.inf, **sizes)
    cells.insert(1, free)
    monkeypatch.setattr(ablations, "FREE", free)
    monkeypatch.setattr(ablations, "FREE_RATES", (0.01, 0.1))
    cells += [ablations.Cell(study=study, **sizes) for study in ("clip", "batch", "steps")]
    monkeypatch.setattr(ablations, "CELLS", cells)
    monkeypatch.setattr(ablations, "SEEDS", (0, 1))
    monkeypatch.setattr(ablations, "PICTURE", results.parent / "figure.png")
    ablations.main(study="records")
    assert ours("DP-ZO", "Table 15")[0] == "queued"
    ablations.main()
    found = load_results(ablations.NAME)
    assert len(found["cells"]) == len(cells)
    ablations.main()
    assert load_results(ablations.NAME) == found
    assert ablations.PICTURE.exists()
    for number in (7, 9, 15, 19, 20):
        assert ours("DP-ZO", f"Table {number}")[0] == "smaller"
    for number in (8, 11):
        assert ours("DP-ZO", f"Table {number}")[0] == "queued", "it shows 1,000 records, not 250"
    assert "| 250 |" in ours("DP-ZO", "Figure 6")[1]
