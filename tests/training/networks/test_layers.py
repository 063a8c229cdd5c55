"""Compare J_i^T delta_i of every kind of module with per-record gradients by autograd."""

import pytest
import torch
from torch import Tensor, nn

from opusim.training.networks.clipping import measured, resolved
from opusim.training.networks.contributions import uses
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.networks.network import ConvolutionJacobian, Jacobian, LinearJacobian, jacobian_of
from opusim.training.ulr.estimator import ModuleSequence
from tests.support.ulr_models import MODELS, new_network, records


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
def test_norms_by_gram_matrices_are_bounds_in_any_precision(
    kind: str, precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
