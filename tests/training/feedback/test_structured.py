"""Feedback matrices of random signs and Hadamard transforms: the transform, the law of the entries, their use."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from opusim import FeedbackAlignment, open_device
from training.config.sections import OptimizerConfig
from training.feedback.closed_form import ClosedForm
from training.feedback.config import DfaConfig, TdfaConfig
from training.feedback.projection import BitPlanes, DenseProjection, Encoding, RelativeTernary
from training.feedback.structured import HadamardProjection, digital_projection, hadamard_transform
from training.feedback.trainer import FeedbackTrainer
from training.networks.network import FullyConnected
from training.networks.optimizers import make_optimizer


@pytest.mark.parametrize("order", [1, 2, 64, 128, 256, 1024, 2**15])
def test_the_transform_is_the_product_with_a_hadamard_matrix(order: int) -> None:
    x = torch.randn(3, order, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = hadamard_transform(x)
    some = np.unique(np.linspace(0, order - 1, 40).astype(int))
    if order <= 1024:
        rows = scipy.linalg.hadamard(order)[some]
    else:  # entry (i, j) is (-1)^popcount(i & j)
        rows = 1 - 2 * (np.bitwise_count(some[:, None] & np.arange(order)) % 2).astype(int)
    torch.testing.assert_close(found[:, some], x @ torch.from_numpy(rows).double().t())
    torch.testing.assert_close(hadamard_transform(found), order * x)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="x has 12 columns: must be a power of two; pad it with zeros"):
        hadamard_transform(torch.ones(1, 12))


@pytest.mark.parametrize("shape", [(10, 100), (100, 10), (1, 1), (64, 64)])
def test_a_reading_is_the_product_with_its_columns(shape: tuple[int, int]) -> None:
    """Also with an error of no rows, and with both kinds of encodings: with a constant, and with several frames."""
    error = torch.randn(7, shape[0], generator=torch.Generator().manual_seed(2))
    encodings: list[Encoding | None] = [None, RelativeTernary(0.6), BitPlanes(3)]
    for encoding in encodings:
        projection = HadamardProjection(*shape, 5, encoding=encoding)
        dense = DenseProjection(projection.columns(shape[0]), encoding=encoding)
        torch.testing.assert_close(projection.read(error), dense.read(error), rtol=1e-4, atol=1e-4)
        assert projection.read(error[:0]).shape == (0, shape[1])


def test_columns_of_the_whole_matrix_are_orthogonal() -> None:
    columns = HadamardProjection(256, 256, 3).columns(256).double()
    torch.testing.assert_close(columns @ columns.t(), 256 * torch.eye(256).double(), rtol=0, atol=1e-3)


def test_the_seed_decides_the_matrix() -> None:
    first, same, other = (HadamardProjection(20, 30, seed).columns(20) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_entries_have_mean_zero_and_variance_one_over_the_seeds() -> None:
    """Ten entries of 4,000 seeds: means, variances, and products of pairs and of their squares."""
    seeds = 4000
    entries = torch.stack([HadamardProjection(2, 60, seed).columns(2)[:, :5] for seed in range(seeds)])
    values = entries.double().numpy().reshape(seeds, -1)  # (seeds, 2 inputs of 5 outputs)

    def near(samples: np.ndarray, expected: float) -> bool:
        standard_error = samples.std(axis=0) / np.sqrt(seeds)
        return bool((np.abs(samples.mean(axis=0) - expected) <= 5 * standard_error).all())

    def pairs(samples: np.ndarray) -> np.ndarray:
        first, second = np.triu_indices(samples.shape[1], k=1)
        return samples[:, first] * samples[:, second]

    assert near(values, 0)
    assert near(values**2, 1)
    assert near(pairs(values), 0)
    assert near(pairs(values**2 - 1), 0)
    assert not near((1.2 * values) ** 2, 1)  # planted: another scale
    assert not near(pairs(values + 0.2 * values[:, :1]), 0)  # planted: entries that depend on one another
    swapped = values.copy()
    swapped[:, 1] = -swapped[:, 5]
    assert not near(pairs(swapped**2 - 1), 0)  # planted: magnitudes that repeat, as after two transforms


@pytest.mark.parametrize("options", [DfaConfig(projection="hadamard"), TdfaConfig(projection="hadamard")])
def test_the_closed_form_takes_the_matrix(options: DfaConfig) -> None:
    network = FullyConnected(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))
    trainer = FeedbackTrainer(
        ClosedForm(network, options), make_optimizer(network.parameters, OptimizerConfig())
    )
    trainer.source.start_from_feedback(torch.empty(0))
    columns = HadamardProjection(4, 9, options.feedback_seed).columns(4)
    found = network.linears[1].weight.detach()
    torch.testing.assert_close(found, columns * (found.norm() / columns.norm()))


def test_feedback_points_take_the_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3
    points = FeedbackAlignment(model, ["3"], projection="hadamard", seed=8)
    nn.functional.cross_entropy(points(x), y).backward()
    found = model[2].bias.grad
    points.remove()
    z = model(x)
    error = torch.autograd.grad(nn.functional.cross_entropy(z, y), z)[0]
    signal = HadamardProjection(3, 16, 8).read(error) / 16**0.5
    slope = 1 - model[:4](x).detach().square()
    assert found is not None
    torch.testing.assert_close(found, (signal * slope).sum(dim=0), rtol=1e-4, atol=1e-6)


def test_a_device_has_its_own_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    refusal = "projection = 'hadamard': a device has its own matrix"
    with open_device("ideal", n_inputs=4, n_outputs=9) as device, pytest.raises(ValueError, match=refusal):
        FeedbackAlignment(model, ["1"], device=device, projection="hadamard")


def test_an_unknown_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="projection"):
        digital_projection("fourier", 2, 2, 1, place="cpu", encoding=None)  # type: ignore[arg-type]
