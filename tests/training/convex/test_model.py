"""Compare the gated model and its objectives with materialised features, autograd and the accountants' constants."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.bare import bare
from opusim import open_device
from opusim.accounting.mechanisms.convex import OBJECTIVES, log_expansion, residual_bound, smoothness
from opusim.training.config import load_config
from opusim.training.convex.trainer import (
    ConvexTrainer,
    GatedNetwork,
    GatedRelu,
    Objective,
    device_hyperplanes,
)

D, P, K, N = 7, 12, 3, 40


def model(*, centre: bool = True, seed: int = 0) -> GatedRelu:
    generator = torch.Generator().manual_seed(seed)
    gated = GatedRelu(D, K, torch.randn(P, D, generator=generator), centre=centre)
    with torch.no_grad():
        gated.weight.copy_(torch.randn(D, P, K, generator=generator))
    return gated


def records(n: int = N, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator) + 0.5, torch.randint(K, (n,), generator=generator)


def materialised(gated: GatedRelu, x: torch.Tensor) -> torch.Tensor:
    """x~ record by record: the gated copies of x, then divided by their own norm; shape (n, d P)."""
    rows = []
    for record in x:
        features = record - record.mean() if gated.centre else record
        copies = [features * float(features @ u >= 0) for u in gated.hyperplanes]
        row = torch.stack(copies, dim=1).flatten()  # (d, P), as the weights
        rows.append(row / row.norm() if row.norm() > 0 else row)
    return torch.stack(rows)


@pytest.mark.parametrize("centre", [True, False])
def test_logits_and_gradients_are_those_of_materialised_features(centre: bool) -> None:
    gated, (x, y) = model(centre=centre), records()
    rows = materialised(gated, x)
    assert torch.allclose(rows.norm(dim=1), torch.ones(N), atol=1e-6)
    torch.testing.assert_close(gated(x), rows @ gated.weight.flatten(0, 1), atol=1e-5, rtol=1e-5)
    batch = gated.gated(x)
    residual = torch.softmax(gated(x), dim=1) - torch.nn.functional.one_hot(y, K)
    closed = (batch.x.t() @ gated.spread(batch, residual)).reshape(D, P, K)
    torch.nn.functional.cross_entropy(gated(x), y, reduction="sum").backward()
    torch.testing.assert_close(closed, gated.weight.grad, atol=1e-5, rtol=1e-5)


def test_norm_of_one_records_gradient_is_the_residuals() -> None:
    gated, (x, y) = model(), records()
    for i in range(N):
        gated.weight.grad = None
        torch.nn.functional.cross_entropy(gated(x[i : i + 1]), y[i : i + 1]).backward()
        residual = torch.softmax(gated(x[i : i + 1]), dim=1) - torch.nn.functional.one_hot(y[i : i + 1], K)
        assert float(gated.weight.grad.norm()) == pytest.approx(float(residual.detach().norm()), rel=1e-5)


def test_a_record_without_features_or_gates_counts_as_zero() -> None:
    gated = model(centre=False)
    batch = gated.gated(torch.zeros(2, D))
    assert torch.equal(batch.scale, torch.zeros(2))
    assert torch.equal(gated(torch.zeros(2, D)), torch.zeros(2, K))
    closed = GatedRelu(D, K, -torch.ones(P, D), centre=False)
    assert torch.equal(closed.gated(torch.ones(1, D)).scale, torch.zeros(1))
    constant = model(centre=True)(torch.full((1, D), 3.0))  # nothing is left once its mean is gone
    assert bool(torch.isfinite(constant).all())


def test_smoothness_is_that_of_a_rank_one_hessian_not_of_a_block() -> None:
    """Lemma 3.2 would allow |x|^2, one gate's share; the largest eigenvalue is |x~|^2 = 1 (squared loss)."""
    gated, (x, _) = model(), records(6)
    for record in x:
        features = gated.gated(record.unsqueeze(0))
        open_gates = int(features.gates.sum())
        vector = materialised(gated, record.unsqueeze(0))[0]
        largest = float(torch.linalg.eigvalsh(torch.outer(vector, vector))[-1])
        one_gate = float((features.x.norm() * features.scale) ** 2)
        assert largest == pytest.approx(1.0, abs=1e-5)
        assert one_gate == pytest.approx(1 / open_gates, rel=1e-5)


def objective(name: str, clip: float | None) -> Objective:
    return Objective(name=name, clip=clip)


def random_logits(n: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 4
    logits = torch.randn(n, classes, generator=generator, dtype=torch.float64) * scale
    return logits, torch.randint(classes, (n,), generator=generator)


CASES = [
    (name, clip)
    for name in OBJECTIVES
    for clip in (0.3, 0.9, None)
    if clip or name not in ("squared", "margin")
]


@pytest.mark.parametrize(("name", "clip"), CASES)
def test_residuals_keep_their_bound(name: str, clip: float | None) -> None:
    logits, labels = random_logits(20_000, 10, 0)
    residual = objective(name, clip).residual(logits, labels)
    bound = residual_bound(name, clip, 10)
    assert float(residual.norm(dim=1).max()) <= bound * (1 + 1e-6)
    largest = float(residual.norm(dim=1).max())
    assert largest > 0.5 * bound  # the bound is about something


def pairs(name: str, clip: float | None, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals and logits, as differences of close and of distant pairs with the same label."""
    logits, labels = random_logits(40_000, classes, 1)
    other = (
        logits
        + random_logits(40_000, classes, 2)[0] * torch.logspace(-3, 1, 40_000, dtype=torch.float64)[:, None]
    )
    mine = objective(name, clip)
    return mine.residual(other, labels) - mine.residual(logits, labels), other - logits


@pytest.mark.parametrize(("name", "clip"), CASES)
@pytest.mark.parametrize("rate_share", [0.1, 0.5, 0.999])
def test_no_step_expands_beyond_its_factor(name: str, clip: float | None, rate_share: float) -> None:
    """In logit space, where features of norm 1 put a step of rate eta."""
    change, distance = pairs(name, clip, 10)
    clipped_softmax = name == "softmax" and clip is not None
    rate = rate_share * 2 / smoothness(name) * (0.5 if clipped_softmax else 1.0)
    factor = math.exp(float(log_expansion(name, clip, 10, np.array([rate]), 0.0)[0]))
    worst = float(((distance - rate * change).norm(dim=1) / distance.norm(dim=1)).max())
    assert worst <= factor * (1 + 1e-9)
    assert (factor > 1) == clipped_softmax


def test_clipped_softmax_expands_at_every_rate() -> None:
    """The counterexample: two logit vectors of one label whose clipped residuals point apart."""
    a, b = (torch.tensor([v], dtype=torch.float64) for v in ((-2.2, 1.1, -0.6), (-2.1, 1.03, -0.64)))
    label, clipped = torch.tensor([0]), objective("softmax", 0.5)
    change = clipped.residual(a, label) - clipped.residual(b, label)
    for rate, expected in ((0.001, 1.0000032), (0.1, 1.00032), (1.0, 1.0033), (3.0, 1.0107)):
        ratio = float((a - b - rate * change).norm() / (a - b).norm())
        assert ratio == pytest.approx(expected, rel=1e-4)
        if rate < 2:
            assert ratio <= math.exp(float(log_expansion("softmax", 0.5, 3, np.array([rate]), 0.0)[0]))


def test_planted_fault_a_rate_beyond_the_smoothness_expands() -> None:
    change, distance = pairs("squared", 0.9, 10)
    assert float(((distance - 2.1 * change).norm(dim=1) / distance.norm(dim=1)).max()) > 1.05


def test_a_residual_that_is_not_finite_counts_as_zero() -> None:
    for name, clip in CASES:
        logits = torch.tensor([[math.nan, 0.0, 1.0], [math.inf, -math.inf, math.nan], [0.1, 0.2, 0.3]])
        residual = objective(name, clip).residual(logits, torch.tensor([0, 1, 2]))
        assert torch.equal(residual[:2], torch.zeros(2, 3))
        assert residual[2].abs().sum() > 0


def new_trainer(
    gated: GatedRelu, objective: Objective, *, divisor: float = 20.0, rate: float = 0.7, regularisation: float = 0.0,
) -> ConvexTrainer:  # fmt: skip
    return bare(
        ConvexTrainer, GatedNetwork(gated),
        load_config({"trainer": {"kind": "convex", "regularisation": regularisation}}),
        optimizer=torch.optim.SGD([gated.weight], lr=rate), objective=objective, divisor=divisor, noise=None,
        noise_std=0.0,
    )  # fmt: skip


def trainer(gated: GatedRelu, *, regularisation: float = 0.0) -> ConvexTrainer:
    return new_trainer(gated, objective("margin", 0.4), regularisation=regularisation)


@pytest.mark.parametrize("n", [N, 1, 0])
def test_a_step_is_that_of_autograd_on_the_huber_loss(n: int) -> None:
    """0.7 off the gradient of (1/b) sum Huber_C(distance to the box) + lambda/2 |v|^2, any batch size."""
    gated, twin = model(), model()
    x, y = records(max(n, 1))
    x, y = x[:n], y[:n]
    trainer(gated, regularisation=0.1).step(x, y, step=0)
    logits = twin(x)
    own = torch.nn.functional.one_hot(y, K).bool()
    distance = torch.where(own, (logits - 1).clamp_max(0), logits.clamp_min(0)).norm(dim=1)
    huber = torch.where(distance < 0.4, distance**2 / 2, 0.4 * (distance - 0.2))
    loss = huber.sum() / 20 + 0.05 * twin.weight.square().sum()
    loss.backward()
    expected = twin.weight - 0.7 * twin.weight.grad
    torch.testing.assert_close(gated.weight.detach(), expected.detach(), atol=1e-5, rtol=1e-5)


def test_hyperplanes_of_a_device_are_its_medium() -> None:
    with open_device("gaussian", n_inputs=30, n_outputs=12, noise={"sigma": 0.5}) as device:
        found = device_hyperplanes(device, readings=25)
        exact = device_hyperplanes(open_device("ideal", n_inputs=30, n_outputs=12).open(), readings=1)
    assert found.shape == exact.shape == (12, 30)
    error = (found - exact).double()
    n, expected = error.numel(), 0.5 / 5
    assert abs(float(error.square().mean()) / expected**2 - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(error.mean())) < 5 * expected / math.sqrt(n)


def test_bad_hyperplanes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hyperplanes has shape \(2, 3\): must be \(P, n_inputs = 4\)"):
        GatedRelu(4, 2, torch.zeros(2, 3))


def parting(
    name: str, clip: float | None, *, rate: float, normalised: bool = True
) -> list[tuple[float, float]]:
    """(distance, bound) after each noiseless step of two trainings that differ in one record of the last batch.

    The bound is the recursion that the accountant covers: z <- c z + 2 C rate / b at the record's batch, c z elsewhere.
    """
    x, y = records(40, seed=5)
    other_x, other_y = x.clone(), y.clone()
    other_x[37], other_y[37] = -x[37], (y[37] + 1) % K
    bound, batch, pairs_of, z = residual_bound(name, clip, K), 10, [], 0.0
    factor = math.exp(float(log_expansion(name, clip, K, np.array([rate]), 0.05)[0]))
    twins = []
    for _ in range(2):
        gated = model(centre=False, seed=3)
        if not normalised:
            gated.gated = lambda rows, gated=gated: replace(  # type: ignore[method-assign]
                GatedRelu.gated(gated, rows), x=rows, scale=torch.ones(len(rows))
            )
            gated.clipped = lambda batch, residual, bound: residual  # type: ignore[method-assign]
        twins.append(new_trainer(gated, objective(name, clip), divisor=10.0, rate=rate, regularisation=0.05))
    for step in range(24):
        part = slice(step % 4 * batch, (step % 4 + 1) * batch)
        for twin, (features, labels) in zip(twins, ((x, y), (other_x, other_y)), strict=True):
            twin.step(features[part], labels[part], step=step)
        z = factor * z + (2 * bound * rate / batch if step % 4 == 3 else 0.0)
        distance = float((twins[0].model.weight - twins[1].model.weight).detach().norm())
        pairs_of.append((distance, z))
    return pairs_of


@pytest.mark.parametrize(("name", "clip"), CASES)
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_neighbours_part_no_faster_than_accounted(name: str, clip: float | None, share: float) -> None:
    rate = share * (2 / (smoothness(name) + 0.05)) * (0.5 if name == "softmax" and clip else 1.0)
    steps = parting(name, clip, rate=rate)
    assert all(distance <= bound * (1 + 1e-5) + 1e-6 for distance, bound in steps)
    assert steps[-1][0] > 0.02 * steps[-1][1]  # the record is felt


def test_planted_fault_records_that_are_not_normalised_part_faster() -> None:
    steps = parting("squared", 0.9, rate=1.8, normalised=False)
    assert any(distance > 2 * bound for distance, bound in steps)


def test_a_step_is_the_one_of_opacus_on_materialised_features() -> None:
    """The clipped sum of softmax gradients, from a library that shares no code with ours."""
    opacus = pytest.importorskip("opacus")
    gated, (x, y), clip, rate = model(), records(), 0.6, 0.7
    linear = torch.nn.Linear(D * P, K, bias=False)
    with torch.no_grad():
        linear.weight.copy_(gated.weight.flatten(0, 1).t())
    rows = materialised(gated, x).requires_grad_()
    reference = opacus.GradSampleModule(linear, loss_reduction="sum")
    torch.nn.functional.cross_entropy(reference(rows), y, reduction="sum").backward()
    samples = linear.weight.grad_sample  # (n, K, D P)
    factors = (clip / samples.flatten(1).norm(dim=1)).clamp(max=1.0)
    assert 0 < int((factors < 1).sum()) < N
    expected = gated.weight.detach() - rate / N * torch.einsum("b,bkf->fk", factors, samples).reshape(D, P, K)
    new_trainer(gated, objective("softmax", clip), divisor=float(N), rate=rate).step(x, y, step=0)
    torch.testing.assert_close(gated.weight.detach(), expected, rtol=1e-5, atol=1e-6)
