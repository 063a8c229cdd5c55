"""Algorithm 1 as published: its controller, its remedies, and its noise against the paper's covariance."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.errors import ConfigError
from opusim.randomness.streams import noise_stream
from opusim.training.networks.functions import LOSS_VALUES
from opusim.training.ulr.config import UlrConfig
from opusim.training.ulr.estimator import ModuleSequence, parameter_estimates
from opusim.training.ulr.trainer import PublishedUpdate, completing_noise
from tests.support.ulr_models import losses_of, new_network, records

OPTIONS = UlrConfig(
    form="published", copies=3, sigma=0.7, target_std=2.0, clip_norm=0.5, remedy="extra-noise"
)
DIVISOR = 11.0


def update_of(network: ModuleSequence, seed: int = 3, **changes: Any) -> PublishedUpdate:
    noise, extra = (noise_stream("experiment", seed, name) for name in ("output-noise", "extra-noise"))
    return PublishedUpdate(network, OPTIONS.model_copy(update=changes), DIVISOR, noise=noise, extra=extra)


def step(network: ModuleSequence, seed: int = 3, **changes: Any) -> list[Tensor]:
    """Gradients of one published step."""
    update = update_of(network, seed, **changes)
    x, y = records(9, network.n_inputs)
    outputs, losses = network.forward(x), losses_of(y)
    used = update.set_gradients(outputs, losses, losses(outputs.output, slice(None))[0])
    assert bool(used.all())
    return [parameter.grad.clone() for parameter in network.parameters]


@pytest.mark.parametrize("rows", [4, 30])
def test_completing_noise_has_the_covariance_of_the_appendix(rows: int, seed: int) -> None:
    """E n n^T = level^2 I - R^T R, negative eigenvalues raised to 0, from either Gram matrix; 5 SE an entry."""
    generator = torch.Generator().manual_seed(seed)
    root = 0.6 * torch.randn(rows, 6, generator=generator) / rows**0.5
    root[:, 0] *= 10  # one direction has more noise than asked for
    n = 200_000
    noise = completing_noise(torch.randn(n, 6, generator=generator), root, 1.3).double()
    exact = root.double()
    values, vectors = torch.linalg.eigh(1.3**2 * torch.eye(6, dtype=torch.float64) - exact.T @ exact)
    assert float(values[0]) < 0
    expected = (vectors * values.clamp_min(0)) @ vectors.T
    products = noise[:, :, None] * noise[:, None, :]
    error = products.std(dim=0) / n**0.5 + 1e-9
    assert float(((products.mean(dim=0) - expected) / error).abs().max()) < 5
    isotropic = 1.3**2 * torch.eye(6, dtype=torch.float64)  # planted: no part taken off
    assert float(((products.mean(dim=0) - isotropic) / error).abs().max()) > 5


def test_a_decomposition_that_fails_is_taken_up_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    root = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    normals = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    expected = completing_noise(normals, root, 1.3)

    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr("torch.linalg.eigh", fails)
    torch.testing.assert_close(completing_noise(normals, root, 1.3), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_each_module_is_clipped_apart_and_the_sum_divided(name: str) -> None:
    """Without extra noise every module's sum stays within batch x C / N_B; a small clip is reached."""
    network = new_network(name)
    step(network, clip_norm=1e-3, target_std=1e-9)
    for layer in range(network.depth):
        total = torch.cat([p.grad.flatten() for p in network.layer_parameters(layer)])
        assert 0 < float(total.norm()) <= 9 * 1e-3 / DIVISOR * (1 + 1e-4)


def test_the_extra_noise_reaches_every_parameter_and_repeats_by_seed() -> None:
    network = new_network("convolution")
    first, again, other = (step(network, seed, target_std=50.0) for seed in (3, 3, 4))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert (a != c).all()


def test_the_controller_follows_equation_8() -> None:
    """sigma^2 = min(limit^2, smallest eigenvalue / (K C^2 sigma_0^2)) at a module whose batch has full rank."""
    network = new_network("linear")
    x, y = records(40, network.n_inputs)
    outputs, losses = network.forward(x), losses_of(y)
    clean = losses(outputs.output, slice(None))[0]
    update = update_of(network, sigma=1e9, remedy="none")
    inputs = torch.cat([x, torch.ones(40, 1)], dim=1).double()
    covariance = torch.einsum("b,bi,bj->ij", clean.double() ** 2, inputs, inputs)
    expected = (float(torch.linalg.eigvalsh(covariance)[0]) / (3 * 0.25 * 4)) ** 0.5
    found = list[float]()

    def signals(*given: Any) -> list[Tensor]:
        found.extend(given[-1])
        return [torch.zeros_like(value) for value in outputs.values]

    update._estimator = SimpleNamespace(signals=signals)  # type: ignore[assignment]
    update.set_gradients(outputs, losses, clean)
    assert found[0] == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_full_rank_is_named() -> None:
    network = new_network("linear over positions")  # 9 records of 4 positions: full rank; one record is not
    x, y = records(1, 12)
    x[0, 3:] = x[0, :3].repeat(3)
    outputs, losses = network.forward(x), losses_of(y)
    update = update_of(network, remedy="none")
    with pytest.raises(NoGuarantee, match="layer 1: Assumption 1 .* rank 1 of 4 .*trainer.remedy"):
        update.set_gradients(outputs, losses, losses(outputs.output, slice(None))[0])


def test_modules_without_a_covariance_need_the_other_remedy() -> None:
    with pytest.raises(ValueError, match="layer 1: .*use trainer.remedy = 'parameters'"):
        step(new_network("residual block"))
    step(new_network("residual block"), remedy="parameters")


@pytest.mark.parametrize("name", ["linear", "residual block"])
def test_noise_on_the_parameters_estimates_the_smoothed_gradient(name: str, seed: int) -> None:
    """One record repeated: the mean of the estimates against autograd through moved parameters, within 5 SE."""
    network, n, sigma = new_network(name), 20_000, 0.3
    x, y = records(1, network.n_inputs)
    many = x.expand(n, -1)
    outputs = network.forward(many)
    found = parameter_estimates(
        network, 0, outputs.inputs[0], losses_of(y.expand(n)), noise_stream("experiment", seed, "z"), sigma, 1
    )
    estimates = torch.cat([rows for rows, _ in found])
    named = dict(network.jacobians[0].module.named_parameters())
    generator = torch.Generator().manual_seed(seed)

    def loss(moved: dict[str, Tensor]) -> Tensor:
        value = torch.func.functional_call(network.jacobians[0].module, moved, (x,))
        for later in range(network.depth):
            value = network.layer(later, value) if later else value
            value = network.after(later, value)
        return LOSS_VALUES["cross-entropy"](value, y)[0]

    drawn = {k: sigma * torch.randn(4000, *p.shape, generator=generator) for k, p in named.items()}
    moves = {k: p.detach() + drawn[k] for k, p in named.items()}
    gradients = torch.func.vmap(torch.func.grad(loss))(moves)
    reference = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).detach()
    error = (estimates.var(dim=0) / n + reference.var(dim=0) / 4000).sqrt() + 1e-6
    distance = (estimates.mean(dim=0) - reference.mean(dim=0)).abs() / error
    assert float(distance.max()) < 5
    planted = (3 * estimates.mean(dim=0) - reference.mean(dim=0)).abs() / error
    assert float(planted.max()) > 5


def test_a_published_run_learns_and_claims(tmp_path: Path) -> None:
    labels = np.arange(600) % 3
    data = 4.0 * np.eye(3, 8)[labels] + np.random.default_rng(1).normal(size=(600, 8)), labels
    config = {
        "epochs": 8, "threads": 1, "model": {"hidden": [16], "activation": "gelu"},
        "optimizer": {"name": "adam", "lr": 0.01},
        "sampler": {"scheme": "poisson-min-batch", "batch_size": 100, "min_batch_size": 90},
        "trainer": {"kind": "ulr", "form": "published", "copies": 4, "sigma": 1.0, "target_std": 4.0},
    }  # fmt: skip
    run = training.train(config, data=data, folder=tmp_path / "run")
    assert run.evaluate(*data)["accuracy"] > 0.9
    none, claimed = run.guarantees
    assert (none.status, claimed.status) == ("none", "claimed")
    protected = {**config, "protection": {"kind": "record", "epsilon": 3.0}}
    with pytest.raises(ConfigError, match="published', which brings its own noise"):
        training.train(protected, data=data, folder=tmp_path / "b")
