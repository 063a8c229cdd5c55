"""The benchmarks of zeroth order at a small size: they resume, fill their rows of the papers' page, and step right."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bare import zo_trainer
from benchmarks.results_file import load_results
from benchmarks.zeroth_order import ablations, joint_clip, sentences
from benchmarks.zeroth_order.sst2_head import Head, LaplaceSgd
from opusim.medium.transmission import Direction
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config import load_config
from opusim.training.networks.any_module import AnyModule
from opusim.training.zeroth_order.trainer import ScalarRelease
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
    trainer = zo_trainer(AnyModule(head, n_inputs=4), config, release, root=7)
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
    assert "laplace" in ablations.page_section()
    assert ablations.PICTURE.exists()
    for number in (7, 9, 15, 19, 20):
        assert ours("DP-ZO", f"Table {number}")[0] == "smaller"
    for number in (8, 11):
        assert ours("DP-ZO", f"Table {number}")[0] == "queued", "it shows 1,000 records, not 250"
    assert "| 250 |" in ours("DP-ZO", "Figure 6")[1]
