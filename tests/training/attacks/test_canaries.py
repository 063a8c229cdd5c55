"""Membership of planted records: coins, scores, and an attack that sees what leaks and nothing else."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.bare import zo_trainer
from opusim.randomness.streams import SeededStream, derive_seed
from opusim.training.config import load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.networks.network import FullyConnected
from opusim.training.zeroth_order.trainer import ScalarRelease
from tests.support.canaries import Canaries, Scores, auc_error, own_features, pooled, record_losses

RECORDS, OTHERS, STEPS = 40, 4, 300


def scores_of(seed: int, noise: float, canaries: Canaries) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(RECORDS, canaries.x.shape[1])
    x[:, :OTHERS] = torch.randn(RECORDS, OTHERS, generator=generator)
    x, y = canaries.joined(x, torch.arange(RECORDS) % 2)
    network = FullyConnected(nn.Sequential(nn.Linear(x.shape[1], 2)))
    for parameter in network.parameters:
        nn.init.zeros_(parameter)
    before = record_losses(network.model, canaries.x, canaries.y)
    config = load_config({"trainer": {"kind": "zo", "perturbation": 0.01}, "optimizer": {"lr": 0.02}})
    stream = SeededStream(seed, "scalar-noise")
    release = ScalarRelease(clip=0.05, divisor=20.0, scale=noise * 0.05, noise=stream)
    trainer = zo_trainer(network, config, release, root=derive_seed(seed, "directions"))
    sampler = make_sampler("poisson", len(x), 20, derive_seed(seed, "batches"))
    for step in range(STEPS):
        index = sampler.indices(step)
        trainer.step(x[index], y[index], step=step)
    return canaries.scores(before, record_losses(network.model, canaries.x, canaries.y))


@pytest.mark.slow
def test_without_noise_members_show_and_with_noise_they_do_not(seed: int) -> None:
    """AUC five standard errors above one half without noise; within five under strong noise."""
    aucs = {}
    for noise in (0.0, 100.0):
        parts = []
        for run in range(40):
            canaries = own_features(OTHERS, 8, size=5.0, n_classes=2, seed=derive_seed(seed, run))
            parts.append(scores_of(derive_seed(seed, "run", run), noise, canaries))
        found = pooled(parts)
        aucs[noise] = (found.auc - 0.5) / auc_error(found)
    assert aucs[0.0] > 5
    assert abs(aucs[100.0]) < 5


def test_coins_are_fair_and_independent(seed: int) -> None:
    """Frequencies and pair products within five standard errors; fixed halves, the planted fault, are not."""
    drawn = (own_features(3, 8, size=1.0, n_classes=2, seed=seed + k) for k in range(4000))
    inside = np.stack([canaries.inside.numpy() for canaries in drawn])
    signs = 2.0 * inside - 1
    assert (abs(signs.mean(axis=0)) < 5 / np.sqrt(4000)).all()
    assert abs((signs[:, 0] * signs[:, 1]).mean()) < 5 / np.sqrt(4000)
    assert np.var(inside.sum(axis=1)) == pytest.approx(2.0, abs=5 * 2 * np.sqrt(2 / 4000))
    halves = np.argsort(np.random.default_rng(seed).random((4000, 8)), axis=1) < 4
    products = (2.0 * halves[:, 0] - 1) * (2.0 * halves[:, 1] - 1)
    assert abs(products.mean()) > 5 / np.sqrt(4000)


def test_canaries_are_alone_with_their_feature() -> None:
    canaries = own_features(5, 3, size=2.7, n_classes=2, seed=0)
    assert canaries.x.shape == (3, 8)
    assert torch.equal(canaries.x[:, 5:], 2.7 * torch.eye(3))
    x, y = canaries.joined(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    assert len(x) == len(y) == 4 + int(canaries.inside.sum())


def test_scores_are_split_by_coin() -> None:
    canaries = Canaries(x=torch.zeros(3, 1), y=torch.zeros(3), inside=torch.tensor([True, False, True]))
    found = canaries.scores(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.5, 1.5, 0.0]))
    assert found.first.tolist() == [0.5, 2.0]
    assert found.second.tolist() == [-0.5]
    assert found.auc == 1.0
    assert pooled([found, found]).auc == 1.0


def test_the_error_of_the_area_is_that_of_ranks(seed: int) -> None:
    """Against the spread of areas of scores of one law."""
    draws = np.random.default_rng(seed).normal(size=(4000, 50))
    areas = [Scores(first=own[:30], second=own[30:]).auc for own in draws]
    error = auc_error(Scores(first=np.zeros(30), second=np.zeros(20)))
    assert np.std(areas) == pytest.approx(error, rel=5 / np.sqrt(2 * 4000))
