"""The likelihood ratio estimate: its mean against autograd, its variance reductions, its passes."""

import pytest
import torch
from torch import Tensor, nn

from opusim.randomness.streams import noise_stream
from opusim.training.networks.functions import LOSS_VALUES, LOSSES
from opusim.training.networks.network import LinearJacobian
from opusim.training.ulr.config import Reduction
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from tests.support.ulr_models import MODELS, losses_of, new_network, records, whole_jacobian

SIGMA = 0.4
DRAWS = 20_000
REDUCTIONS: tuple[Reduction, ...] = ("antithetic", "clean-loss", "leave-one-out", "none")


def estimate(
    network: ModuleSequence, x: Tensor, y: Tensor, *, seed: int, reduction: Reduction = "none",
    copies: int | tuple[int, ...] = 1, rows: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Signals of each layer, and its inputs."""
    outputs = network.forward(x)
    losses = losses_of(y)
    signals = Estimator(copies=copies, reduction=reduction, rows_per_pass=rows).signals(
        network, outputs, losses, losses(outputs.output, slice(None))[0],
        noise_stream("experiment", seed, "output-noise"), [SIGMA] * network.depth,
    )  # fmt: skip
    return signals, outputs.inputs


def smoothed_gradient(network: ModuleSequence, layer: int, x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Autograd gradients of L(v + z) with fresh z, one row a draw, shape (draws, parameters of the layer)."""
    jacobian, outputs = network.jacobians[layer], network.forward(x[:1])
    generator = torch.Generator().manual_seed(seed)
    value = jacobian.module(outputs.inputs[layer])
    z = SIGMA * torch.randn(DRAWS, *value.shape[1:], generator=generator)
    noisy = (value.detach() + z).requires_grad_(True)
    h = network.after(layer, noisy)
    for later in range(layer + 1, network.depth):
        h = network.after(later, network.layer(later, h))
    cross_entropy_sum = nn.functional.cross_entropy(h, y[:1].expand(DRAWS), reduction="sum")
    (at_value,) = torch.autograd.grad(cross_entropy_sum, noisy)
    return at_value.flatten(1) @ whole_jacobian(network, layer, outputs.inputs[layer])


def deviation(network: ModuleSequence, layer: int, reduction: Reduction, seed: int) -> float:
    """Largest distance, over parameters, of the estimate's mean from the smoothed gradient, in standard errors."""
    x, y = records(1, network.n_inputs)
    copies = 2 if reduction == "leave-one-out" else 1
    signals, inputs = estimate(
        network, x.expand(DRAWS, -1), y.expand(DRAWS), seed=seed, reduction=reduction, copies=copies
    )
    network.set_gradient(layer, signals[layer], inputs[layer], DRAWS)
    mean = torch.cat([p.grad.flatten() for p in network.layer_parameters(layer)])
    single = signals[layer].flatten(1) @ whole_jacobian(network, layer, inputs[layer][:1])
    reference = smoothed_gradient(network, layer, x, y, seed + 1)
    error = ((single.var(dim=0) + reference.var(dim=0)) / DRAWS).sqrt() + 1e-7
    return float(((mean - reference.mean(dim=0)) / error).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_is_the_gradient_of_the_smoothed_loss(name: str, seed: int) -> None:
    network = new_network(name)
    for layer in range(network.depth):
        assert deviation(network, layer, "none", seed) < 5
        assert deviation(network, layer, "antithetic", seed) < 5


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_keeps_the_mean(reduction: Reduction, seed: int) -> None:
    network = new_network("linear")
    assert deviation(network, 0, reduction, seed) < 5


@pytest.mark.parametrize("fault", ["transposed input", "bias left out", "scale", "baseline of its own copy"])
def test_planted_faults_are_caught(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = new_network("linear")
    right = ModuleSequence.set_gradient

    def wrong(self: ModuleSequence, layer: int, delta: Tensor, h: Tensor, divisor: float) -> None:
        right(self, layer, delta, h.flip(1) if fault == "transposed input" else h, divisor)
        if fault == "bias left out":
            self.layer_parameters(layer)[1].grad.zero_()
        if fault == "scale":
            self.layer_parameters(layer)[0].grad.mul_(1.2)

    if fault == "baseline of its own copy":  # z_k (L_k - mean of all K): too short by (K - 1) / K
        monkeypatch.setattr(ModuleSequence, "set_gradient", lambda *a: right(*a[:-1], a[-1] * 2))
        assert deviation(network, 0, "leave-one-out", seed) > 5
        return
    monkeypatch.setattr(ModuleSequence, "set_gradient", wrong)
    assert isinstance(network.jacobians[0], LinearJacobian)
    assert deviation(network, 0, "antithetic", seed) > 5


@pytest.mark.parametrize("reduction", ["antithetic", "clean-loss", "leave-one-out"])
def test_reductions_lower_the_variance(reduction: Reduction, seed: int) -> None:
    network = new_network("linear")
    x, y = records(1, network.n_inputs)
    many = x.expand(4000, -1), y.expand(4000)
    plain, _ = estimate(network, *many, seed=seed, copies=4)
    reduced, _ = estimate(network, *many, seed=seed, copies=4, reduction=reduction)
    assert float(reduced[0].var(dim=0).sum()) < 0.5 * float(plain[0].var(dim=0).sum())


def test_a_module_has_copies_of_its_own(seed: int) -> None:
    """Noise is drawn module by module, so the first one's estimate is that of as many copies of all."""
    network = new_network("linear")
    x, y = records(9, network.n_inputs)
    one, three = (estimate(network, x, y, seed=seed, copies=k, reduction="antithetic")[0] for k in (1, 3))
    all_three = estimate(network, x, y, seed=seed, copies=(3,) * network.depth, reduction="antithetic")[0]
    own = (3, *(1,) * (network.depth - 1))
    mixed = estimate(network, x, y, seed=seed, copies=own, reduction="antithetic")[0]
    assert all(torch.equal(a, b) for a, b in zip(three, all_three, strict=True))
    assert torch.equal(mixed[0], three[0])
    assert not torch.equal(one[0], three[0])


@pytest.mark.parametrize("name", ["linear", "convolution", "residual block"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_chunking_changes_nothing_but_rounding(name: str, reduction: Reduction, seed: int) -> None:
    network = new_network(name)
    x, y = records(9, network.n_inputs)
    whole, _ = estimate(network, x, y, seed=seed, reduction=reduction, copies=5, rows=10_000)
    for rows in (1, 5, 9, 18, 27, 70, None):
        parts, _ = estimate(network, x, y, seed=seed, reduction=reduction, copies=5, rows=rows)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    other, _ = estimate(network, x, y, seed=seed + 1, reduction=reduction, copies=5)
    assert not torch.allclose(whole[0], other[0], rtol=1e-2)  # the comparison can fail


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_derivatives_are_those_with_them(name: str) -> None:
    output, labels = 3 * torch.randn(50, 7, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 7
    torch.testing.assert_close(LOSS_VALUES[name](output, labels), LOSSES[name](output, labels).per_record)
