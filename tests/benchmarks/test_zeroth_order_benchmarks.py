"""The benchmarks of zeroth order at a small size: they resume, fill their rows of the papers' page, and step right."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.results_file import load_results
from benchmarks.zeroth_order import ablations, sentences
from benchmarks.zeroth_order.sst2_head import LaplaceSgd
from opusim.randomness.streams import SeededStream
from tests.support.paper_data import ours


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
