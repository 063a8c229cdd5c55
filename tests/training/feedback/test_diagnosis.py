"""Diagnose feedback on one batch: alignment, share shown, signal to noise, frames; nothing else changes."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opusim import FeedbackAlignment, open_device
from opusim.devices.base import NoisyDevice
from opusim.training.feedback.projection import RelativeTernary
from tests.support.record_models import Custom

CLASSES, WIDTH, BATCH = 4, 32, 16
x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
y = torch.arange(BATCH) % CLASSES


def network() -> nn.Sequential:
    """The points are 1 and 4; dropout and batch norm draw and count."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def gaussian(sigma: float = 0.3) -> NoisyDevice:
    return open_device("gaussian", n_inputs=CLASSES, n_outputs=WIDTH, seed=4, noise={"sigma": sigma})


def loss_of(model: nn.Module) -> Tensor:
    return cross_entropy(nn.functional.dropout(model(x), 0.2), y)


@pytest.mark.parametrize("photonic", [False, True])
def test_a_diagnosis_leaves_training_as_it_was(photonic: bool) -> None:
    """Parameters, gradients, buffers, random numbers, and what the next step draws."""
    trained = []
    for diagnosed in (False, True):
        model = FeedbackAlignment(network(), device=gaussian() if photonic else None)
        torch.manual_seed(3)
        loss_of(model).backward()
        before = deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
        if diagnosed:
            model.diagnose(lambda model=model: loss_of(model))
        assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before[1], strict=True))
        loss_of(model).backward()
        trained.append(model)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in trained), strict=True))
    deepcopy(trained[1])  # no output is kept


def test_a_head_that_starts_from_the_feedback_aligns_the_last_point() -> None:
    """B^T in the output layer is what backpropagation would send; the first point is not aligned by it."""
    model = FeedbackAlignment(network(), gain=0.7)
    told = model.diagnose(lambda: loss_of(model))
    before = told.points
    model.shape(x)
    assert "model.start_from_feedback('5')" in repr(model)
    assert "try model.start_from_feedback('5')" in str(told)
    model.start_from_feedback("5")
    assert "start_from_feedback" not in repr(model) + str(model.diagnose(lambda: loss_of(model)))
    assert not model.model[5].bias.any()
    after = model.diagnose(lambda: loss_of(model))
    assert [point.name for point in after.points] == ["1", "4"]
    assert before[1].signal_alignment < 0.9
    assert after.points[1].signal_alignment == pytest.approx(1, abs=1e-6)
    assert after.points[1].update_alignment == pytest.approx(1, abs=1e-6)
    assert after.points[0].signal_alignment < 0.9
    assert after.points[0].signal_to_noise == math.inf
    assert (after.shown, after.rows, after.frames) == (1.0, BATCH, 0)


def test_cosines_are_those_of_the_gradients() -> None:
    """Against gradients of two passes, one with and one without points."""
    model = FeedbackAlignment(network())
    found = model.diagnose(lambda: cross_entropy(model(x), y)).points
    gradients = []
    for _ in range(2):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.remove()
    for point, owned in zip(found, (slice(0, 2), slice(2, 6)), strict=True):
        first, second = (torch.cat([g.flatten() for g in each[owned]]) for each in gradients)
        expected = torch.cosine_similarity(first, second, dim=0)
        assert point.update_alignment == pytest.approx(float(expected), abs=1e-5)
        assert abs(expected) < 0.9


def test_scale_and_change_tell_of_growth_and_of_unused_depth() -> None:
    blocks = [Custom(lambda m, h: h + m.block(h), block=nn.Linear(6, 6, bias=False)) for _ in range(4)]
    for block, weight in zip(blocks, (1.0, 0.0, 3.0, 1.0), strict=True):
        block.block.weight.data = weight * torch.eye(6)
    model = FeedbackAlignment(nn.Sequential(*blocks, nn.Linear(6, 5)), points=["0", "1", "2"])
    h = torch.randn(BATCH, 6)
    points = model.diagnose(lambda: cross_entropy(model(h), y)).points
    rms = float(h.square().mean().sqrt())
    assert [point.scale for point in points] == pytest.approx([2 * rms, 2 * rms, 8 * rms], rel=1e-5)
    assert math.isnan(points[0].change)
    assert [point.change for point in points[1:]] == pytest.approx([0.0, 3.0], abs=1e-6)


def test_a_device_is_asked_once_and_its_noise_is_told() -> None:
    """The signal to noise ratio from many diagnoses, against the power of B e without noise and the noise's."""
    sigma = 0.3
    model = FeedbackAlignment(network(), device=gaussian(sigma), encoding="ternary", threshold=1.0)
    found = []
    for step in range(20):
        model.seek(step)
        found.append(model.diagnose(lambda: cross_entropy(model(x), y)))
        assert found[-1].frames == 2 * BATCH
        assert found[-1].seconds == pytest.approx(model.usage.seconds / model.usage.frames * 2 * BATCH)
    assert model.usage.frames == 2 * 64 + 20 * 2 * BATCH  # B 1 first
    z = model.remove()(x).detach().requires_grad_()
    (e,) = torch.autograd.grad(cross_entropy(z, y), z)
    encoded = RelativeTernary(1.0)(e)
    assert found[0].shown == encoded.shown == pytest.approx(0.25, abs=0.05)  # the entry of the label
    signal = (encoded.frames[0] * encoded.scale + encoded.offset) @ model.noisy_device.matrix().t()
    expected = signal.square().mean() / (sigma * encoded.scale).square().mean()
    ratios = torch.tensor([[point.signal_to_noise**2 for point in each.points] for each in found])
    standard_error = ratios.std(dim=0) / len(found) ** 0.5
    assert ((ratios.mean(dim=0) - expected).abs() < 5 * standard_error + 0.01 * expected).all()
    assert ((1.1 * ratios.mean(dim=0) - expected).abs() > 5 * standard_error).all()


def test_a_loss_of_another_model_is_refused() -> None:
    model, removed, other = FeedbackAlignment(network()), FeedbackAlignment(network()), network()
    removed.remove()
    for asked, run in ((model, other), (removed, removed)):
        with pytest.raises(ValueError, match="no forward pass of the model led to"):
            asked.diagnose(lambda run=run: loss_of(run))
