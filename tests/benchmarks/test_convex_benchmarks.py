"""The benchmarks of the convex trainer at a small size: they resume, and fill their rows of the papers' page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import results_file
from benchmarks.convex import curves, hyperplanes, tuned
from benchmarks.results_file import load_results
from tests.support.paper_data import ours, take_committed, write_cifar10, write_mnist


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
    assert [(c["hyperplanes"], c["noise"]) for c in found["curves"]] == [
        (16, 0),
        (None, 0),
        (16, 5),
        (None, 5),
    ]
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
    assert curves.finished("cifar-10").keys() == {
        (p["row"], p["epsilon"], p["seed"]) for p in found["points"]
    }
    assert ours("Convex", "Figure 3")[0] == "smaller"
