"""No record contributes more than the clip, whatever finite numbers it holds; measured on the sums that are formed."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.bare import bare
from opusim.randomness.streams import SystemStream, noise_stream
from opusim.training.config import load_config
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRelu, Objective
from opusim.training.feedback.closed_form import _add_scaled
from opusim.training.networks.clipping import (
    ball_factors,
    bounded_factors,
    full_precision,
    row_norms,
    sphere_factors,
)
from opusim.training.networks.network import FullyConnected, LayeredNetwork
from opusim.training.protections.amplified_labels import AmplifiedLabels
from opusim.training.protections.base import with_constant
from opusim.training.protections.clipping import Clipping
from opusim.training.protections.record import RecordGradients
from opusim.training.protections.released_model import Metric
from opusim.training.ulr.estimator import ModuleSequence
from opusim.training.zeroth_order.trainer import loss_differences
from tests.support.extreme_records import KINDS, LARGEST, SIZES, SUBNORMAL, extreme
from tests.support.ulr_models import MODELS, Residual

ROUNDING = 1e-5
CLIPS = (1e-12, 1e-3, 1.0, 1e12)


pytestmark = pytest.mark.usefixtures("one_thread")


def images(*modules: nn.Module, channels: int = 1, side: int) -> tuple[nn.Sequential, int]:
    return nn.Sequential(nn.Unflatten(1, (channels, side, side)), *modules), channels * side * side


def layered() -> dict[str, LayeredNetwork]:
    """Networks of every kind of layer; of convolutions with many positions, and with few (Gram matrices)."""
    torch.manual_seed(1)
    found: dict[str, LayeredNetwork] = {
        "feedback": FullyConnected(nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 10))),
        "feedback without bias": FullyConnected(nn.Sequential(nn.Linear(50, 10, bias=False))),
    }
    modules = {
        "wide linear": (nn.Sequential(nn.Linear(20_000, 2)), 20_000),
        "many positions": images(nn.Conv2d(1, 2, 3), channels=1, side=18),
        "few positions": images(nn.Conv2d(8, 16, 3), channels=8, side=4),
        "circular": images(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), side=10),
        "over positions": (nn.Sequential(nn.Unflatten(1, (6, 40)), nn.Linear(40, 30)), 240),
        "layer norm": (nn.Sequential(nn.LayerNorm(9)), 9),
        "residual": (nn.Sequential(Residual(12)), 12),
    }
    modules |= {name: (make(), n) for name, (make, n) in MODELS.items()}
    return found | {name: ModuleSequence(model, n_inputs=n) for name, (model, n) in modules.items()}


def shapes(network: LayeredNetwork) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each layer's signal and input, one record's."""
    if isinstance(network, FullyConnected):
        return [((linear.out_features,), (linear.in_features,)) for linear in network.linears]
    outputs = network.forward(torch.zeros(1, network.n_inputs))  # type: ignore[attr-defined]
    pairs = zip(outputs.values, outputs.inputs, strict=True)
    return [(tuple(v.shape[1:]), tuple(h.shape[1:])) for v, h in pairs]


SILENT: dict[str, Any] = {"noise_multiplier": 0.0, "divisor": 1.0, "noise": SystemStream()}


def shield(clip: float, **others: Any) -> RecordGradients:
    return RecordGradients(clip_norm=clip, **{**SILENT, **others})


def added(network: LayeredNetwork, writer: RecordGradients, deltas: list[Tensor], h: list[Tensor]) -> Tensor:
    """What a batch adds to the gradients, float64, flat."""
    writer.set_gradients([network.contributions(deltas, h)])
    layers = [network.layer_parameters(layer) for layer in range(network.depth)]
    return torch.cat([p.grad.double().flatten() for layer in layers for p in layer])


def records(network: LayeredNetwork, count: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Signals and inputs of single records: every kind and size of either, drawn from the grid of all pairs."""
    cases = list(itertools.product(KINDS, SIZES, KINDS, SIZES))
    random.Random(5).shuffle(cases)
    sides = shapes(network)
    for seed, (signal, size, value, length) in enumerate(cases[:count]):
        yield (
            [extreme(shape, signal, size, seed) for shape, _ in sides],
            [extreme(shape, value, length, seed + 1) for _, shape in sides],
        )


@pytest.mark.parametrize("kind", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("name", list(layered()))
def test_no_record_adds_more_than_the_clip(name: str, kind: Any) -> None:
    stability = {"stability": 1e-6} if kind == "automatic" else {}  # the largest factors
    network, shares = layered()[name], list[float]()
    for number, (deltas, inputs) in enumerate(records(network, 60)):
        clip = CLIPS[number % len(CLIPS)]
        total = added(network, shield(clip, clipping=Clipping(kind=kind, **stability)), deltas, inputs)
        shares.append(float(total.norm()) / clip)
    assert all(map(math.isfinite, shares))
    assert 0.5 < max(shares) <= 1 + ROUNDING


def cancelling(shape: tuple[int, ...], size: float, seed: int) -> Tensor:
    """A signal whose sum over positions is 0 in every channel (convolution) or output (linear), shape (1, *shape)."""
    channels = shape[0] if len(shape) == 3 else shape[-1]
    length = math.prod(shape) // channels
    signal = torch.cat([extreme((length,), "zero-sum", size, 100 * seed + n) for n in range(channels)])
    return (signal if len(shape) == 3 else signal.mT).reshape(1, *shape)


@pytest.mark.parametrize("size", [1e4, 1e8, 1e15, 1e30])
@pytest.mark.parametrize("value", ["constant", "nearly constant", "normal"])
@pytest.mark.parametrize("name", ["many positions", "few positions", "over positions", "circular"])
def test_signals_that_cancel_over_positions_stay_within_the_clip(name: str, value: str, size: float) -> None:
    """The exact gradient of zero-sum signals on a constant input is 0; what float32 adds is only rounding."""
    network = layered()[name]
    for seed in range(4):
        deltas = [cancelling(shape, size, seed) for shape, _ in shapes(network)]
        inputs = [1.1 * extreme(shape, value, 1.0, seed + 1) for _, shape in shapes(network)]
        for clip in (1e-6, 1.0):
            assert float(added(network, shield(clip), deltas, inputs).norm()) <= clip * (1 + ROUNDING)


@pytest.mark.parametrize("name", ["feedback", "many positions", "over positions"])
def test_one_record_does_not_decide_how_others_are_summed(name: str) -> None:
    """Sums of thousands of equal contributions are off by 0.01 to 0.1 C in float32, and right in float64."""
    network, n = layered()[name], 5000 if name == "feedback" else 1000
    generator = torch.Generator().manual_seed(4)
    others = [
        [torch.rand(1, *shape, generator=generator).add(1).repeat(n, *[1] * len(shape)) for shape in side]
        for side in zip(*shapes(network), strict=True)
    ]
    clip, divisor = 1e-12, 3.0
    protection = shield(clip, divisor=divisor)

    def total(value: float) -> Tensor:
        batch = [[torch.cat([rows, torch.full_like(rows[:1], value)]) for rows in side] for side in others]
        return added(network, protection, *batch)

    without, joined = total(0.0), total(1e37)
    single = [[torch.full_like(rows[:1], 1e37) for rows in side] for side in others]
    own = added(network, protection, *single)
    rounding = 2.0**-24 * float(without.norm()) * divisor / clip  # of the sum itself, once
    assert float((joined - without - own).norm()) * divisor / clip <= ROUNDING + 2 * rounding


@pytest.mark.parametrize("operator", [ball_factors, sphere_factors])
def test_one_record_changes_no_scale_of_others(operator: Callable[[Tensor, float], Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(500, 10, generator=generator)
    noise = torch.randn(501, 10, generator=generator)
    for value in (1.0, 3e38):
        batch = torch.cat([rows, torch.full((1, 10), value)])
        factors = operator(batch, 1.0)
        assert torch.equal((batch * factors).float()[:500], rows * operator(rows, 1.0))
        summed = _add_scaled(noise.clone(), batch.clone(), factors)
        assert torch.equal(summed[:500], noise[:500].addcmul(rows, operator(rows, 1.0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", list(layered()))
def test_a_record_that_is_not_finite_adds_exactly_nothing(name: str, value: float) -> None:
    network = layered()[name]
    for place in ("signal", "input"):
        deltas = [torch.ones(1, *shape) for shape, _ in shapes(network)]
        inputs = [torch.ones(1, *shape) for _, shape in shapes(network)]
        (deltas if place == "signal" else inputs)[-1].view(-1)[0] = value
        assert not added(network, shield(1.0), deltas, inputs).any()


def test_ordinary_records_keep_their_gradients() -> None:
    """The bound on what float32 sums lose costs an ordinary record of 256 positions 0.2 % at most."""
    network = layered()["many positions"]
    ((signal, value),) = shapes(network)
    generator = torch.Generator().manual_seed(3)
    delta, h = torch.randn(1, *signal, generator=generator), torch.randn(1, *value, generator=generator)
    assert 0.998 < float(added(network, shield(1e-3), [delta], [h]).norm()) / 1e-3 <= 1 + ROUNDING


@pytest.mark.parametrize("radius", [1e-12, 0.3, 1.0, 27.0, 1e12])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_ball_and_the_sphere_hold_for_every_finite_row(kind: str, radius: float) -> None:
    for seed, size in enumerate(SIZES):
        v = extreme((300,), kind, size, seed)
        norm, ball = float(v.double().norm()), float((v * ball_factors(v, radius)).float().double().norm())
        assert ball <= radius * (1 + 1e-6)
        assert ball == pytest.approx(min(norm, radius), rel=1e-6)
        sphere = (v * sphere_factors(v, radius)).float().double().norm()
        assert float(sphere) == pytest.approx(radius, rel=1e-6)


def gated(features: int = 96, *, centre: bool = True) -> GatedRelu:
    generator = torch.Generator().manual_seed(4)
    return GatedRelu(features, 3, torch.randn(16, features, generator=generator), centre=centre)


def gated_norm(model: GatedRelu, x: Tensor) -> float:
    """|x~| of one record as the products take it, in float64."""
    batch = model.gated(x)
    copies = batch.x.double()[:, :, None] * (batch.gates.double() * batch.scale.double()[:, None])[:, None, :]
    return float(copies.norm())


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_gated_features_have_norm_one_at_most(kind: str, centre: bool) -> None:
    model = gated(centre=centre)
    for seed, size in enumerate(SIZES):
        norm = gated_norm(model, extreme((96,), kind, size, seed))
        assert norm <= 1 + 1e-6
        if kind == "normal" and size > 1e-40:
            assert norm == pytest.approx(1.0, abs=1e-6)


def test_gated_features_of_images_whose_mean_overflows_are_those_of_dim_ones() -> None:
    model = gated()
    x = torch.rand(1, 96, generator=torch.Generator().manual_seed(5))
    bright, dim = model.gated(x * LARGEST), model.gated(x)
    torch.testing.assert_close(bright.x, dim.x, rtol=1e-5, atol=1e-7)
    assert torch.equal(bright.gates, dim.gates)


def moved(model: GatedRelu, objective: Objective, x: Tensor, label: int) -> float:
    """How far one record moves the weights in a step of rate 1 and divisor 1: the norm of its gradient."""
    before = model.weight.detach().double().clone()
    trainer = bare(
        ConvexTrainer, GatedNetwork(model), load_config({"trainer": {"kind": "convex"}}),
        optimizer=torch.optim.SGD([model.weight], lr=1.0), objective=objective, divisor=1.0, noise=None, noise_std=0.0,
    )  # fmt: skip
    trainer.step(x, torch.tensor([label]), step=0)
    change = float((model.weight.detach().double() - before).norm())
    with torch.no_grad():
        model.weight.copy_(before)
    return change


@pytest.mark.parametrize(
    ("name", "clip"), [("margin", 0.5), ("squared", 1e-3), ("softmax", None), ("one-against-rest", None)]
)
def test_no_record_moves_the_convex_model_further_than_its_bound(name: str, clip: float | None) -> None:
    objective = Objective(name=name, clip=clip)
    for kind, (seed, size), centre in itertools.product(KINDS, enumerate(SIZES), (True, False)):
        model, x = gated(centre=centre), extreme((96,), kind, size, seed)
        assert moved(model, objective, x, 1) <= objective.bound(3) * (1 + ROUNDING)


def test_the_size_of_a_batch_turns_no_gates() -> None:
    """Records orthogonal to every hyperplane, as nearly as float32 can hold them."""
    generator = torch.Generator().manual_seed(7)
    hyperplanes = torch.randn(64, 784, generator=generator)
    basis, _ = torch.linalg.qr(hyperplanes.double().T)
    rows = torch.randn(40, 784, generator=generator, dtype=torch.float64)
    x = (rows - (rows @ basis) @ basis.T).float()
    model = GatedRelu(784, 10, hyperplanes, centre=False)
    whole = model.gated(x).gates
    for size in range(1, len(x)):
        assert torch.equal(model.gated(x[:size]).gates, whole[:size])


def test_the_gradient_is_clipped_even_if_the_normalisation_fails() -> None:
    """Features 30 times too long, as a float32 normalisation made them: the step still holds its bound."""
    model, objective = gated(), Objective(name="margin", clip=0.5)
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(6))
    honest = GatedRelu.gated

    def long(rows: Tensor) -> object:
        batch = honest(model, rows)
        return type(batch)(x=30 * batch.x, gates=batch.gates, scale=batch.scale)

    model.gated = long  # type: ignore[method-assign, assignment]
    assert moved(model, objective, x, 1) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_residuals_of_all_finite_logits_keep_their_bound(kind: str) -> None:
    for clip, (seed, size) in itertools.product((1e-12, 0.5, 1e12), enumerate(SIZES)):
        logits, objective = extreme((7,), kind, size, seed), Objective(name="squared", clip=clip)
        assert float(objective.residual(logits, torch.tensor([2])).double().norm()) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_loss_differences_stay_within_the_clip(kind: str) -> None:
    for clip, (seed, size) in itertools.product((1e-38, 0.05, 1e38), enumerate(SIZES)):
        plus, minus = extreme((9,), kind, size, seed)[0], -extreme((9,), kind, size, seed + 1)[0]
        assert float(loss_differences(plus, minus, clip).values.abs().max()) <= clip


FLOOR = 1e-3


def whitened(protection: AmplifiedLabels, network: FullyConnected, public: list[Tensor]) -> float:
    """Norm of the gradients in the geometry P of the noise, by an inverse square root of its own."""
    total = 0.0
    rows = [with_constant(h, bias=True) for h in public]
    scale = float(sum(row.shape[1] for row in rows))
    for linear, row in zip(network.linears, rows, strict=True):
        defined = scale * row.double().t() @ row.double() / len(row)
        defined += FLOOR * defined.diagonal().mean() * torch.eye(len(defined), dtype=torch.float64)
        factor = Metric.of_rows(row, floor=FLOOR, scale=scale).factor  # the sum is formed in float32
        torch.testing.assert_close(factor @ factor.t(), defined, rtol=1e-5, atol=1e-6 * float(defined.max()))
        values, vectors = torch.linalg.eigh(factor @ factor.t())
        gradient = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], dim=1).double()
        total += float(((gradient @ vectors) / values.sqrt()).square().sum())
    return math.sqrt(total)


def test_no_record_adds_more_than_the_clip_in_the_geometry_of_public_features() -> None:
    network = FullyConnected(nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 3)))
    generator = torch.Generator().manual_seed(7)
    # correlated features, whose geometry has a condition of 1e5
    common, *own = (torch.randn(90, n, generator=generator) for n in (1, 30, 8))
    public = [common + 0.01 * each for each in own]

    worst = 0.0
    for number, (deltas, inputs) in enumerate(records(network, 200)):
        clip = CLIPS[number % len(CLIPS)]
        options = {"floor": FLOOR, "reference": public[0], "equalise": False, **SILENT}
        protection = AmplifiedLabels(clip_norm=clip, **options)
        protection.set_gradients([network.contributions(deltas, inputs)], public_inputs=public)
        worst = max(worst, whitened(protection, network, public) / clip)
    assert 0.5 < worst <= 1 + ROUNDING


@pytest.mark.parametrize(
    ("clip", "multiplier", "divisor", "name"),
    [
        (1e-38, 1.0, 1.0, "clip_norm = 1e-38"),
        (1e38, 1.0, 1.0, r"clip_norm = 1e\+38"),
        (1.0, 1.0, 1e38, r"divisor = 1e\+38"),
        (1e-12, 1e-10, 1e12, r"clip_norm \* noise_multiplier / divisor = 1e-34"),
        (1.0, 1e300, 1.0, r"clip_norm \* noise_multiplier = 1e\+300"),
    ],
)
def test_noise_beyond_float32_is_refused(clip: float, multiplier: float, divisor: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        shield(clip, noise_multiplier=multiplier, divisor=divisor)


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("std", [1e-46, 1e-40, 1e39, float("inf"), float("nan"), -1.0])
def test_a_stream_refuses_noise_that_would_vanish_or_overflow(mode: str, std: float) -> None:
    with pytest.raises(ValueError, match="std = .*must be 0 or lie in"):
        noise_stream(mode, 0, "test").add_to(torch.zeros(3), std)


def test_norms_are_exact_where_float32_is_not() -> None:
    constant = torch.full((1, 2_000_000), 1.003)
    assert float(row_norms(constant)) == pytest.approx(float(constant[0, 0]) * 2_000_000**0.5, rel=1e-9)
    for size in (SUBNORMAL, 1e-30, 1e38):
        row = torch.full((1, 64), size)
        assert float(row_norms(row)) == pytest.approx(8 * float(row[0, 0]), rel=1e-12)
    assert row_norms(torch.zeros(0, 5)).shape == (0,)


def test_factors_that_float32_cannot_hold_are_zero() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0, 1e29, 2e30, 1e38, math.inf, math.nan], dtype=torch.float64)
    found = bounded_factors(norms, 1.0)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.5, 1e-29, 0.0, 0.0, 0.0, 0.0], rel=1e-12, abs=0.0)


def test_full_precision_restores_what_it_changes() -> None:
    precision, enabled = torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.backends.cudnn.enabled == enabled
