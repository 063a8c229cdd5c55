"""Compare closed-form gradients with autograd, which shares no code with them; clips of activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opusim.training.feedback.closed_form import backpropagated
from opusim.training.networks.clipping import (
    ActivationClipping,
    ball_factors,
    clip_entries,
    offset_entries,
    sphere_factors,
)
from opusim.training.networks.functions import ACTIVATIONS, LOSSES, activation_of
from opusim.training.networks.network import FullyConnected, LayerShape, build_sequential

MODULES = {"tanh": nn.Tanh, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "gelu": nn.GELU, "identity": nn.Identity}


def model(activation: str, *, bias: bool = True, output: str = "identity") -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    layers = [
        LayerShape(n_outputs=7, activation=activation, bias=bias),
        LayerShape(n_outputs=6, activation=activation, bias=bias),
        LayerShape(n_outputs=4, activation=output, bias=bias),
    ]
    return build_sequential(5, layers, generator=generator, gain=2.7).double().float()


def batch(size: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(size, 5, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def require_gradients_of(loss: Tensor, network: FullyConnected, forward: Any, error: Tensor) -> None:
    """Compare the closed form for the error at the last layer with autograd of a loss."""
    expected = torch.autograd.grad(loss, network.parameters)
    for layer, delta in enumerate(backpropagated(network, forward, error)):
        network.set_gradient(layer, delta, forward.inputs[layer], len(error))
    for parameter, gradient in zip(network.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_derivative_equals_autograd(name: str) -> None:
    z = torch.linspace(-4, 4, 101, dtype=torch.float64).requires_grad_()
    h = MODULES[name]()(z)
    (expected,) = torch.autograd.grad(h.sum(), z)
    phi = ACTIVATIONS[name]
    found = phi.multiply(torch.ones_like(z), z.detach(), phi.function(z.detach()))
    torch.testing.assert_close(found, expected)
    low, high = phi.slope_bounds
    assert low <= found.abs().min() + 1e-12
    assert found.abs().max() <= high + 1e-7


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [True, False])
def test_backpropagation_equals_autograd(activation: str, loss: str, bias: bool) -> None:
    net = model(activation, bias=bias, output="identity" if loss == "cross-entropy" else "tanh")
    x, y = batch()
    output = net(x)
    if loss == "cross-entropy":
        value = nn.functional.cross_entropy(output, y)
    else:
        value = 0.5 * (output - nn.functional.one_hot(y, 4)).square().sum(dim=1).mean()
    network = FullyConnected(net)
    forward = network.forward(x)
    result = LOSSES[loss](forward.output, y)
    torch.testing.assert_close(result.per_record.mean(), value)
    error = network.multiply_by_derivative(result.output_gradient, forward, 2, through_clip=True)
    require_gradients_of(value, network, forward, error)


def test_clipped_neurons_equal_autograd() -> None:
    layers = [LayerShape(n_outputs=7, activation="tanh", bias=True, tau_h_max=0.9, tau_h_min=0.2)]
    layers += [LayerShape(n_outputs=4, activation="identity", bias=True)]
    net = build_sequential(5, layers, generator=torch.Generator().manual_seed(5), gain=2.7)
    x, y = batch(50)
    network = FullyConnected(net)
    assert network.layers == layers
    forward = network.forward(x)
    clipped = (forward.activations[0] + 0.2 / 7**0.5).abs() >= 0.9 / 7**0.5
    assert 0.2 < clipped.float().mean() < 0.9, "the test needs neurons on both sides"
    error = LOSSES["cross-entropy"](forward.output, y).output_gradient
    require_gradients_of(nn.functional.cross_entropy(net(x), y), network, forward, error)
    slope = torch.ones_like(forward.pre_activations[0])
    network.multiply_by_derivative(slope, forward, 0, through_clip=False)
    torch.testing.assert_close(slope, 1 - torch.tanh(forward.pre_activations[0]) ** 2)  # eq. 8 keeps phi'


def test_initialisation_is_seeded_and_leaves_global_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = model("tanh"), model("tanh")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    weight = first[0].weight
    assert weight.abs().max() <= 2.7 / 5**0.5
    assert weight.abs().max() > 0.8 * 2.7 / 5**0.5  # 35 uniform draws: below 0.8 with probability 4e-4


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(3, 2), "must be an nn.Sequential"),
        (nn.Sequential(), "holds no nn.Linear"),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout()), "no closed-form layer gradient for Dropout"),
        (nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), "does not follow an nn.Linear"),
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 2)), "takes 4 inputs but layer 1 has 2 outputs"),
        (nn.Sequential(nn.Linear(3, 2).double()), "float32"),
    ],
)
def test_other_models_are_refused_by_name(net: nn.Module, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FullyConnected(net)


def test_approximate_gelu_is_refused() -> None:
    with pytest.raises(TypeError, match="exact form"):
        activation_of(nn.GELU(approximate="tanh"))


# Clips of activations

V = 2.7 * torch.randn(8, 11, generator=torch.Generator().manual_seed(3))


def test_clip_and_offset_are_the_papers_formulas() -> None:
    assert torch.equal(clip_entries(V, 1.3), torch.sign(V) * torch.minimum(V.abs(), torch.tensor(1.3)))
    assert torch.equal(offset_entries(V, 0.25), V + 0.25)
    assert torch.equal(offset_entries(V, 0.0), V)


@pytest.mark.parametrize("factors", [ball_factors, sphere_factors])
@pytest.mark.parametrize("radius", [0.3, 1.0, 27.0])
def test_scale_keeps_zero_rows(factors: Callable[[Tensor, float], Tensor], radius: float) -> None:
    v = torch.zeros(2, 3)
    assert torch.equal(v * factors(v, radius), v)


@pytest.mark.parametrize(
    ("layers", "clipped"), [("all", [0, 1, 2]), ("hidden", [1, 2]), ("feedback", [0, 1]), ("none", [])]
)
def test_which_layers_are_clipped(layers: str, clipped: list[int]) -> None:
    clipping = ActivationClipping(tau_h_max=1.0, layers=layers)
    assert [layer for layer in range(3) if clipping.applies_to(layer, 3)] == clipped


@pytest.mark.parametrize(("width", "root"), [("fan-in", 11**0.5), ("layer", 4**0.5)])
def test_bounds_of_equation_9(width: str, root: float) -> None:
    clipping = ActivationClipping(tau_h_max=1.7, tau_h_min=0.3, width=width)
    expected = (V + 0.3 / root).clamp(-1.7 / root, 1.7 / root)
    torch.testing.assert_close(clipping(V, layer=1, depth=3, n_layer=4), expected)
    assert ActivationClipping(tau_h_min=0.3)(V, layer=0, depth=2, n_layer=4) is V  # without tau_h_max
