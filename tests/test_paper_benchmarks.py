"""The long commands of docs/papers.md run from end to end at a small size, resume, and fill their rows."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks import results_file
from benchmarks.convex import curves, hyperplanes, tuned
from benchmarks.pages import papers
from benchmarks.pdfa import figure2, readings
from benchmarks.pdfa import table1 as pdfa_table1
from benchmarks.private_accuracy import cifar, records
from benchmarks.results_file import load_results
from benchmarks.ulr import bound, resnet, table1, variance
from benchmarks.zeroth_order import ablations, joint_clip, sentences
from benchmarks.zeroth_order.sst2_head import Head, LaplaceSgd
from opusim.medium.directions import Direction
from opusim.randomness.streams import SeededStream, derive_seed
from tests.support.image_files import write_archive, write_labelled_images
from training.config import load_config
from training.config.reading import merged
from training.data import from_arrays
from training.data.formats import CLASSES
from training.data.synthetic_images import random_shapes
from training.networks.base import ModuleNetwork
from training.zeroth_order.trainer import ScalarRelease, ZoTrainer

COMMITTED = results_file.FOLDER


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, which the commands fill; they run in, and read data from, a folder of their own."""
    monkeypatch.setattr(results_file, "FOLDER", tmp_path / "results")
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def write_mnist(root: Path, n: int) -> None:
    """Write the digits of scikit-learn, enlarged, under MNIST's names: n to train and 50 to test."""
    digits = load_digits()
    images = np.pad(digits.images.repeat(3, axis=1).repeat(3, axis=2) * 15, ((0, 0), (2, 2), (2, 2)))
    parts = {
        "train": (images[:n], digits.target[:n]),
        "t10k": (images[n : n + 50], digits.target[n : n + 50]),
    }
    write_labelled_images(root / "MNIST" / "raw", parts)


def write_cifar10(root: Path, n: int) -> None:
    """Write pictures of one colour a class: n a class to train and 2 to test."""
    members = {}
    for label, name in enumerate(CLASSES):
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), (25 * label, 100, 250 - 25 * label)).save(buffer, "JPEG")
        for part, count in (("train", n), ("test", 2)):
            members |= {f"{part}/{name}/{number:04}.jpg": buffer.getvalue() for number in range(count)}
    write_archive(root, members)


def take_committed(results: Path, name: str) -> None:
    """Copy results that a command reads its settings from."""
    results.mkdir(exist_ok=True)
    shutil.copy(COMMITTED / f"{name}.json", results)


def ours(paper: str, item: str) -> tuple[str, str]:
    """Return the state of a row of docs/papers.md, and what it shows of ours."""
    (found,) = (
        each
        for title, items in papers.PAPERS.items()
        if paper in title
        for each in items
        if each.name == item
    )
    now = found.now()
    return now.state, now.shown


def trains_nothing(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a command again: it must find every run finished, and change no figure."""

    def begin(*_: object, **__: object) -> None:
        raise AssertionError("a finished run began again")

    with monkeypatch.context() as patch:
        patch.setattr("opusim.train", begin)
        run()


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
    trains_nothing(lambda: resnet.private(seeds="0"), monkeypatch)
    assert load_results(resnet.NAME)["rows"] == rows
    assert ours("DP-ULR", "Figure 4")[0] == "smaller"
    before = resnet.left()
    resnet.plain(names="backpropagation")
    resnet.private(forms="DP-SGD")
    assert resnet.left() == before - 4


def test_resnet_search(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(results.parent, 2)
    monkeypatch.setattr(resnet, "BATCH", 2)
    monkeypatch.setattr(resnet, "BATCHES", (2,))
    resnet.search(seeds="100")
    found = load_results(resnet.SEARCHED)["rows"]
    assert [row["value"] for row in found] == list(resnet.SEARCHES)
    trains_nothing(lambda: resnet.search(seeds="100"), monkeypatch)
    assert load_results(resnet.SEARCHED)["rows"] == found


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
    assert text.count("small, batch 64") == 1, "seeds are averaged"


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


def test_private_searches(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 500)
    take_committed(results, "convex_accounting")
    monkeypatch.setattr(tuned, "EPSILONS", (4.76,))
    before = tuned.left("mnist")
    tuned.main(trials=5, seeds="0")
    (found,) = tuned.cells()["mnist", 4.76, 5]
    assert 4.76 < found["epsilon"] <= tuned.whole_epsilon(4.76, 5)
    assert tuned.left("mnist") == before - 1
    tuned.main(trials=5, seeds="0")
    assert tuned.cells()["mnist", 4.76, 5] == [found]
    assert "| mnist | 4.76 | 5 |" in tuned.page_table()
    assert "at 6.92" in ours("Convex", "Table 1")[1]


def test_hyperplanes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 1200)
    monkeypatch.setattr(hyperplanes, "COUNTS", (16,))
    monkeypatch.setattr(hyperplanes, "EPOCHS", 4)
    monkeypatch.setattr(hyperplanes, "PICTURE", results.parent / "hyperplanes.png")
    hyperplanes.main(noise="0", epochs=4, seeds="0")
    assert ours("Convex", "Figure 5")[0] == "queued"
    hyperplanes.main(noise="5", epochs=4, seeds="0")
    found = load_results(hyperplanes.NAME)
    assert [(c["hyperplanes"], c["noise"]) for c in found["curves"]] == [
        (16, 0),
        (None, 0),
        (16, 5),
        (None, 5),
    ]
    hyperplanes.main(noise="0,5", epochs=4, seeds="0")
    assert load_results(hyperplanes.NAME) == found
    hyperplanes.main(noise="0", epochs=4, seeds="0,1")
    assert hyperplanes.left(0.0) == 2  # of the third seed
    (line,) = [
        line for line in hyperplanes.page_table().splitlines() if line.startswith("| convex | 16 | 0 |")
    ]
    assert "| 2 |" in line
    assert line.count("±") == 3


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
    assert curves.finished("cifar-10").keys() == {
        (p["row"], p["epsilon"], p["seed"]) for p in found["points"]
    }
    assert "2 seeds" in curves.page_table()
    state, text = ours("Convex", "Figure 3")
    assert (state, text.count("2 more trainings of the command not done")) == ("smaller", 1)  # the third seed


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
    pdfa_table1.main(jobs=1)
    found = load_results(pdfa_table1.NAME)
    assert len(found["runs"]) == 24
    assert len(found["cells"]) == 12
    trains_nothing(lambda: pdfa_table1.main(jobs=1), monkeypatch)
    assert load_results(pdfa_table1.NAME) == found
    figure2.draw()
    assert figure2.PICTURE.exists()
    assert ours("Photonic", "Figure 2")[0] == "repeated"
    assert "photonic DFA | 0.2 |" in figure2.page_section()


def test_pdfa_readings(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(results.parent, 300)
    (results.parent / "MNIST").rename(results.parent / "FashionMNIST")
    monkeypatch.setattr(pdfa_table1, "BASE", {**pdfa_table1.BASE, "epochs": 1})
    monkeypatch.setattr(readings, "COLUMNS", ("0.2",))
    monkeypatch.setattr(readings, "SEEDS", (0, 1))
    readings.main(jobs=1)
    assert len(load_results(readings.NAME)["rows"]) == 2 * 2 * len(readings.READINGS)
    trains_nothing(lambda: readings.main(jobs=1), monkeypatch)
    assert readings.largest_move() > 0.0
    assert "| eqs. 8 and 9 to the letter |" in readings.page_section()


def test_joint_clip(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sentences(results.parent, monkeypatch, 1100)
    sizes = {"SGD_SIZES": (2, 64), "ZO_SIZES": (4, 16), "SEEDS": (0, 1), "PILOTS": (100,), "PUBLIC": 70}
    for name, value in {**sizes, "RATES": (0.1, 0.3)}.items():
        monkeypatch.setattr(joint_clip, name, value)
    monkeypatch.setattr(joint_clip, "embed", lambda texts: torch.eye(384)[: len(texts)])
    joint_clip.measure(epsilons="4")
    found = load_results(joint_clip.NAME)
    assert len(found["cells"]) == len(joint_clip.PLANS)
    joint_clip.measure(epsilons="4")
    assert load_results(joint_clip.NAME) == found
    assert joint_clip.page_section().count("| 4 |") == len(joint_clip.PLANS)


@pytest.mark.parametrize("clip", [0.05, 10.0])
def test_a_step_of_the_linear_head_is_the_trainers(clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(5, 4, generator=generator), torch.arange(5) % 2
    head = Head(4)
    options = {"kind": "zo", "directions": 6, "perturbation": joint_clip.PHI}
    config = load_config({"trainer": options, "optimizer": {"lr": 0.7}})
    release = ScalarRelease(clip=clip, divisor=3.0, joint=True)
    trainer = ZoTrainer(ModuleNetwork(head, 4), config.trainer, config.optimizer, release, root=7)
    trainer.step(x, y, step=0)
    z = torch.zeros(6, 5)
    for number, row in enumerate(z):
        direction = Direction(derive_seed(7, "direction", 0, number))
        direction.add_to(row[:4], 0, 1.0)
        direction.add_to(row[4:], 1, 1.0)
    with_one = torch.cat([x, torch.ones(5, 1)], dim=1)
    update = joint_clip.zo_update(torch.zeros(5), with_one, y, z, torch.zeros(6), clip=clip, divisor=3.0)
    moved = torch.cat([head.linear.weight.detach()[0], head.linear.bias.detach()])
    torch.testing.assert_close(moved, -0.7 * update, rtol=1e-3, atol=1e-4)


def test_many_jointly_clipped_directions_give_clipped_gradients() -> None:
    """Within five standard errors of the mean of 100 updates of 200 directions; clipped to half, the planted fault,
    they do not agree. E |Z g| is below sqrt(n) |g| by 1 / (4 n) of it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.arange(40) % 2
    gradients = (0.5 - y.float())[:, None] * x  # at weight 0
    clipped = gradients * (1 / gradients.norm(dim=1, keepdim=True).clamp_min(1.0))
    for factor, agrees in ((1.0, True), (0.5, False)):
        clip = 2 * joint_clip.PHI * math.sqrt(200) * factor
        updates = torch.stack(
            [
                joint_clip.zo_update(
                    torch.zeros(5), x, y, torch.randn(200, 5, generator=generator), torch.zeros(200),
                    clip=clip, divisor=40.0,
                )
                for _ in range(100)
            ]
        )  # fmt: skip
        error = updates.std(dim=0) / math.sqrt(len(updates))
        gap = (updates.mean(dim=0) - clipped.mean(dim=0)).abs()
        assert bool((gap < 5 * error + clipped.mean(dim=0).abs().max() / 400).all()) is agrees


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
    trainer = LaplaceSgd(
        scale=2.0, clip=3.0, divisor=1.0, rate=1.0, stream=SeededStream(seed, "central-noise")
    )
    found = []
    for step in range(50):
        before = trainer.model.linear.weight.detach().clone()
        trainer.step(torch.zeros(0, 384), torch.zeros(0, dtype=torch.long), step=step)
        found.append((trainer.model.linear.weight.detach() - before).flatten())
    sizes = torch.cat(found).double().abs()
    error = 5 * 6.0 / len(sizes) ** 0.5
    assert float(sizes.mean()) == pytest.approx(6.0, abs=error)
    assert abs(6.0 * (4 / math.pi) ** 0.5 - 6.0) > error


def test_ablations(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sentences(results.parent, monkeypatch, 300)
    sizes = {"records": 250, "batch": 16, "steps": 40}
    cells = [
        ablations.Cell(study="records", law=law, **sizes) for law in ("gaussian", "none", "laplace", "dp-sgd")
    ]
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
    assert "laplace" in ablations.page_section()
    assert ablations.PICTURE.exists()
    for number in (7, 9, 15, 19, 20):
        assert ours("DP-ZO", f"Table {number}")[0] == "smaller"
    for number in (8, 11):
        assert ours("DP-ZO", f"Table {number}")[0] == "queued", "it shows 1,000 records, not 250"
    assert "n = 250" in ours("DP-ZO", "Figure 6")[1]


def test_a_row_of_private_accuracy_takes_more_seeds_later(results: Path) -> None:
    write_mnist(results.parent, 60)
    name = "fashion-mnist, convolutions, DP-SGD"
    small = {"epochs": 1, "data": {"name": "mnist"}, "sampler": {"batch_size": 16}}
    row = replace(records.ROWS[name], config=merged(records.ROWS[name].config, small), epsilons=(3.0,))
    table = replace(records.TABLE, rows={name: row}, folder=results.parent / "runs")
    table.measure(jobs=1, seeds="0")
    assert "(one seed)" in records.page_section()
    table.measure(jobs=1, seeds="1")
    first = load_results(records.NAME)["runs"]
    assert "(one seed)" not in records.page_section()
    table.measure(jobs=1, seeds="2")
    found = load_results(records.NAME)["runs"]
    assert [run["seed"] for run in found] == [0, 1, 2]
    assert found[:2] == first
    assert {run["status"] for run in found} == {"proven"}


def test_a_second_encoding_on_the_same_blocks_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs on the grid of the first one would say nothing of what the first one cost."""
    images = random_shapes((3, 32, 32), 40)
    data = from_arrays(images, np.arange(40) % 2, n_classes=2, validation_fraction=0.0, split_seed=0)
    original = data.train.x

    def change(again: torch.Tensor, before: torch.Tensor) -> float:
        return (again - before).square().mean().sqrt().item()

    monkeypatch.setattr(cifar, "ASIDE", 16)  # whole blocks, of halved colours too
    once = cifar.encoded_again(data, original)
    aligned = change(cifar.encoded_again(data, once), once)
    monkeypatch.setattr(cifar, "ASIDE", 4)
    aside = change(cifar.encoded_again(data, once), once)
    assert aligned < 0.6 * aside < aside < change(once, original)


def test_all_commands_together_take_at_most_a_day() -> None:
    commands = {words for items in papers.PAPERS.values() for item in items for words in item.run}
    assert commands == set(papers.COSTS)
    assert sum(papers.COSTS.values()) <= 24


def test_the_page_is_written_without_results(results: Path) -> None:
    assert "queued" in papers.papers_page()
