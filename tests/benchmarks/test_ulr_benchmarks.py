"""The benchmarks of likelihood ratio training at a small size: they resume, and fill their rows of the papers' page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.results_file import load_results, save_results
from benchmarks.ulr import bound, resnet, table1, variance
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
    assert "proven" in resnet.page_section()
    shutil.rmtree(resnet.FOLDER)
    trains_nothing(lambda: resnet.private(seeds="0"), monkeypatch)
    trains_nothing(lambda: resnet.plain(seeds="0"), monkeypatch)
    assert load_results(resnet.NAME)["rows"] == rows
    assert ours("DP-ULR", "Figure 4")[0] == "smaller"
    before = resnet.left()
    resnet.plain(names="backpropagation")
    resnet.private(forms="DP-SGD")
    assert resnet.left() == before - 4


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
    lacking = [row for row in table1.rows_of("published") if row["seed"] == 0][1:]
    save_results("ulr_published", {"rows": lacking})
    with pytest.raises(AssertionError, match="began again"):
        trains_nothing(lambda: table1.published(seeds="0"), monkeypatch)


def test_variance(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 2)
    monkeypatch.setattr(variance, "BATCH", 8)
    monkeypatch.setattr(variance, "REPEATS", 1)
    variance.variance(records=2)
    assert len(load_results(variance.NAME)["rows"]) == 2 * len(variance.ESTIMATES)
    variance.bias(records=2, passes=3)
    assert len(load_results(variance.BIAS)["rows"]) == 2 * len(variance.SIGMAS)
    assert "antithetic, matched" in variance.page_section()
    assert "| 0.03 |" in variance.page_section()


def test_the_mean_of_products_is_the_square_of_the_mean(seed: int) -> None:
    """The plain square of the mean is too large by the variance over the number of rows: the planted fault."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.full((50,), 0.5, dtype=torch.float64)
    rows = [mean + torch.randn(8, 50, generator=generator, dtype=torch.float64) for _ in range(400)]
    found = torch.tensor([variance.mean_product(part) for part in rows], dtype=torch.float64)
    error = float(found[:, 0].std()) / len(rows) ** 0.5
    assert float(found[:, 0].mean()) == pytest.approx(float(mean @ mean), abs=5 * error)
    spread = 5 / (2 * len(rows)) ** 0.5
    assert 1 - spread < float(found[:, 1].square().mean().sqrt() / found[:, 0].std()) < 1.2 + spread
    plain = torch.stack([part.mean(dim=0).square().sum() for part in rows]).mean()
    assert float(plain - mean @ mean) > 5 * error


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


def test_ulr_proven_with_orthogonal_copies(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 40)
    monkeypatch.setattr(table1, "PROVEN_BATCH", 20)
    names = "ulr, 128 orthogonal;bp"
    table1.proven(epsilons="3", seeds="0", trainers=names)
    rows = load_results("ulr_proven")["rows"]
    assert [row["trainer"] for row in rows] == names.split(";")
    assert all(row["guarantees"][0][0] == "proven" for row in rows)
    trains_nothing(lambda: table1.proven(epsilons="3", seeds="0", trainers=names), monkeypatch)
    assert "128 orthogonal" in table1.proven_section()


def test_signals_of_clipped_records() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    e = torch.tensor([[10.0, 0.0], [0.6, 0.0]], dtype=torch.float64)
    figures = (g * e).sum(dim=1), e.square().sum(dim=1), g.square().sum(dim=1)
    cosine, ratio = bound.signals_compared(*figures, clip=1.0)
    assert cosine == pytest.approx(0.6)
    assert ratio == pytest.approx((1.0 * 0.6 + 0.6 * 0.6) / (1.0 + 0.5))
    assert bound.signals_compared(figures[2], figures[2], figures[2], clip=1.0) == pytest.approx((1.0, 1.0))


def test_an_unbiased_estimate_has_at_most_the_signal_of_its_gradient() -> None:
    """e = z (z g) has mean g and never points against it; without clipping the signals agree, with it they do not."""
    generator = torch.Generator().manual_seed(0)
    n, d = 20_000, 10
    g = torch.zeros(n, d, dtype=torch.float64)
    g[:, 0] = 2.7
    z = torch.randn(n, d, generator=generator, dtype=torch.float64)
    e = z * (z * g).sum(dim=1, keepdim=True)
    figures = (g * e).sum(dim=1), e.square().sum(dim=1), g.square().sum(dim=1)
    error = (
        5 * (2 / n) ** 0.5
    )  # the unclipped signal over |g| is chi-squared with one degree: mean 1, variance 2
    assert bound.signals_compared(*figures, clip=1e9)[1] == pytest.approx(1.0, abs=error)
    for clip in (0.1, 1.0, 2.7, 10.0):
        assert bound.signals_compared(*figures, clip=clip)[1] < 1 - error
    biased = figures[0] * 1.5, figures[1] * 1.5**2, figures[2]  # the planted fault
    assert bound.signals_compared(*biased, clip=1e9)[1] > 1 + error


def test_a_cell_of_table_1_is_one_of_the_widths_too(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_committed(results, "ulr_published")
    assert not table1.width_rows()  # DP-SGD's part is missing
    take_committed(results, "ulr_opacus")
    found = table1.width_rows()
    assert {(row["width"], row["batch"]) for row in found} == {("small", 64)}
    assert table1.widths_left() == 27 - len(found)
    assert ours("ULR", "Table C1")[0] == "smaller"
    table1.keep("widths", {**found[0], "ulr": 0.0}, key=("width", "batch", "seed"))
    assert table1.width_rows() == found
