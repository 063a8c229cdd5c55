"""Compare closed-form gradients, of every kind of module, with autograd, which shares no code; clips of activations."""

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
    measured,
    offset_entries,
    resolved,
    sphere_factors,
)
from opusim.training.networks.contributions import uses
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.networks.functions import ACTIVATIONS, LOSSES, activation_of
from opusim.training.networks.network import (
    ConvolutionJacobian,
    FullyConnected,
    Jacobian,
    LayerShape,
    LinearJacobian,
    build_sequential,
    jacobian_of,
)
from opusim.training.ulr.estimator import ModuleSequence
from tests.support.ulr_models import MODELS, new_network, records

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


# J_i^T delta_i of every kind of module


def by_autograd(network: ModuleSequence, layer: int, delta: Tensor, h: Tensor) -> list[list[Tensor]]:
    """One record at a time: the gradient of <delta_i, v_i> for every parameter."""
    jacobian = network.jacobians[layer]
    return [
        list(torch.autograd.grad((jacobian.module(x[None])[0] * d).sum(), jacobian.parameters))
        for d, x in zip(delta, h, strict=True)
    ]


def signals(network: ModuleSequence, n: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    outputs = network.forward(records(n, network.n_inputs)[0])
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(v.shape, generator=generator) for v in outputs.values], outputs.inputs


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_equal_autograd_record_by_record(name: str) -> None:
    network = new_network(name)
    deltas, inputs = signals(network)
    for layer, (delta, h) in enumerate(zip(deltas, inputs, strict=True)):
        expected = by_autograd(network, layer, delta, h)
        squares = torch.stack([sum(g.square().sum() for g in record) for record in expected])
        found = network.jacobians[layer].contributions(delta, h).squared_norms()[0]
        torch.testing.assert_close(found, squares.double(), rtol=1e-4, atol=1e-5)
        network.set_gradient(layer, delta, h, 3.7)
        for number, parameter in enumerate(network.layer_parameters(layer)):
            total = sum(record[number] for record in expected) / 3.7
            torch.testing.assert_close(parameter.grad, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_factor_rows_give_the_covariance_of_the_gradient(name: str) -> None:
    """J^T J = I (x) sum_p u_p u_p^T: its trace and its largest eigenvalue against the Jacobian itself."""
    network = new_network(name)
    outputs = network.forward(records(1, network.n_inputs)[0])
    for layer, jacobian in enumerate(network.jacobians):
        h = outputs.inputs[layer]
        rows = jacobian.factor_rows(h)
        if rows is None:
            assert type(jacobian) in (Jacobian, ConvolutionJacobian)
            continue
        value = outputs.values[layer]
        units = torch.eye(value.numel()).view(-1, *value.shape[1:])
        found = by_autograd(network, layer, units, h.expand(len(units), *h.shape[1:]))
        full = torch.stack([torch.cat([g.flatten() for g in record]) for record in found])
        expected = torch.linalg.matrix_norm(full, ord=2)
        torch.testing.assert_close(torch.linalg.matrix_norm(rows[0], ord=2), expected, rtol=1e-4, atol=1e-5)
        outputs_alike = full.square().sum() / rows[0].square().sum()
        assert float(outputs_alike) == pytest.approx(network.layer_parameters(layer)[0].shape[0], rel=1e-4)


def test_closed_forms_are_taken_where_there_are_some() -> None:
    assert isinstance(jacobian_of(nn.Linear(2, 3)), LinearJacobian)
    assert isinstance(jacobian_of(nn.Conv2d(1, 2, 3)), ConvolutionJacobian)
    assert type(jacobian_of(nn.Conv2d(1, 2, 3, padding_mode="circular", padding=1))) is Jacobian
    assert type(jacobian_of(nn.LayerNorm(4))) is Jacobian


@pytest.mark.parametrize("positions", [1, 40])
def test_both_ways_to_a_norm_agree(positions: int) -> None:
    """Few positions take the Gram matrices, many the product; both against sums of outer products."""
    generator = torch.Generator().manual_seed(3)
    signal = torch.randn(5, 6, positions, generator=generator)
    patch = torch.randn(5, 7, positions, generator=generator)
    wanted = (signal @ patch.mT).double().flatten(1).norm(dim=1)
    use = LinearUse(signal.mT, patch.mT, nn.Parameter(torch.zeros(6, 7)))
    s, u = (side.double() for side in use.pairs(slice(None)))
    for found in (measured(use.sums(slice(None)))[0], uses.measured_by_gram(s, u)):
        torch.testing.assert_close(found.norms.double(), wanted, rtol=1e-5, atol=1e-6)
    whole = Contributions([([use.weight], [use])], 5).squared_norms()[0].sqrt()
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)


POSITIONS, SCALES = 20, {"numbers whose squares vanish": 2.0**-70, "large numbers": 2.0**40}


def columns(kind: str) -> tuple[Tensor, Tensor]:
    """Signals and inputs of 16 records as columns, shapes (16, 1, 128, P) and (16, 1, 785, P)."""
    generator = torch.Generator().manual_seed(8)
    s, u = (torch.randn(16, 1, n, POSITIONS, generator=generator) for n in (128, 785))
    if kind == "positions that cancel":  # alike but for signs and last digits
        s = s[..., :1] * torch.tensor([1.0, -1.0]).repeat(POSITIONS // 2) * (1 + 1e-6 * s)
        u = u[..., :1] * (1 + 1e-6 * u)
    return s * SCALES.get(kind, 1.0), u


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("kind", ["random", "positions that cancel", *SCALES])
def test_norms_by_gram_matrices_are_bounds(kind: str, precise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 sums of outer products; float32 products that leave no room for rounding are no bounds."""
    monkeypatch.setattr(uses, "_GRAM_RAISES", 0.0 if precise else uses._GRAM_RAISES)
    s, u = columns(kind)
    exact = torch.einsum("ngap,ngbp->nab", s.double(), u.double()).flatten(1).norm(dim=1)
    found = resolved([uses.measured_by_gram(s, u)])[0]
    assert bool((found >= exact).all())
    if kind in ("random", "large numbers"):
        assert float((found / exact).max()) < 1 + (1e-6 if precise else 2.0**-9)
    plain = ((s.mT @ s).double() * (u.mT @ u).double()).sum(dim=(-3, -2, -1)).clamp_min(0).sqrt()
    assert bool((plain < exact).any())  # the planted fault


def test_records_are_taken_in_parts_without_changing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("convolution", "residual block"):
        network = new_network(name)
        deltas, inputs = signals(network)
        found = []
        for limit in (2**24, 1):
            monkeypatch.setattr(uses, "_NUMBERS_LIMIT", limit)
            found.append(network.jacobians[0].contributions(deltas[0], inputs[0]).squared_norms())
        torch.testing.assert_close(*found, rtol=1e-6, atol=0.0)


def test_models_that_cannot_be_trained_so_are_named() -> None:
    shared, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    norms = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=own), nn.Linear(4, 3))
        for own in (True, False)
    ]
    for model, error, message in (
        (nn.Linear(4, 3), TypeError, "must be an nn.Sequential"),
        (nn.Sequential(nn.Tanh()), ValueError, "no module with parameters"),
        (nn.Sequential(shared, nn.Tanh(), shared), ValueError, "layer 2 shares parameters"),
        (nn.Sequential(frozen, nn.Linear(4, 3)), ValueError, "layer 1 is frozen"),
        (nn.Sequential(nn.Linear(4, 3).double()), ValueError, "dtype torch.float64"),
        *((model, TypeError, "BatchNorm1d .*mixes the records") for model in norms),
    ):
        with pytest.raises(error, match=message):
            ModuleSequence(model, n_inputs=4)
