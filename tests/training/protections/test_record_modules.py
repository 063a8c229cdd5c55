"""Records of any module: clipped and noised gradients from what a tape has recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from opusim.randomness.streams import SeededStream
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))


def writer(noise_multiplier: float, *, clip: float = 0.5, divisor: float = 8.0) -> RecordGradients:
    return RecordGradients(
        clip_norm=clip, noise_multiplier=noise_multiplier, divisor=divisor, noise=SeededStream(1, "test")
    )


def test_the_sum_of_clipped_records_is_that_of_a_loop_over_records() -> None:
    net, x = conv_net(), torch.randn(6, 1, 6, 6)
    tape, wanted = RecordTape(net, x[:2]), [torch.zeros_like(p) for p in net.parameters()]
    for record in x:
        own = torch.autograd.grad(net(record[None]).square().sum(), list(net.parameters()))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in own))
        for total, gradient in zip(wanted, own, strict=True):
            total += gradient * min(1.0, 0.5 / norm) / 8.0
    private = writer(0.0)
    with tape.recording(len(x)):
        net(x).square().sum().backward()
    private.set_gradients([tape.contributions])
    for parameter, total in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-5, atol=1e-7)
    assert private.batches_written == 1


def test_a_batch_in_parts_adds_noise_once() -> None:
    net, x = conv_net(), torch.randn(7, 1, 6, 6)
    tape, gradients = RecordTape(net, x[:2]), []

    def recorded(size: int) -> Iterator[RecordTape]:
        for part in x.split(size):
            with tape.recording(len(part)):
                net(part).square().sum().backward()
            yield tape

    for size in (7, 3, 1):
        private = writer(1.0)
        private.set_gradients(one.contributions for one in recorded(size))
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        assert private.batches_written == 1
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="parts: is empty"):
        private.set_gradients([])


def test_a_record_that_is_not_finite_adds_nothing() -> None:
    net, x = conv_net(), torch.randn(2, 1, 6, 6)
    tape, private, gradients = RecordTape(net, x), writer(0.0), []
    for batch in (x, torch.cat([x, torch.full_like(x[:1], math.inf)])):
        with tape.recording(len(batch)):
            net(batch).square().sum().backward()
        private.set_gradients([tape.contributions])
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("multiplier", [2.0, pytest.param(1.9, marks=pytest.mark.xfail(strict=True))])
def test_an_empty_batch_takes_noise_of_the_accounted_variance(multiplier: float) -> None:
    net = nn.Sequential(nn.Embedding(50, 200), nn.Linear(200, 10))
    tape, private = RecordTape(net, torch.arange(6).view(2, 3)), writer(multiplier)
    with tape.recording(0):
        pass
    private.set_gradients([tape.contributions])
    noise = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()
    wanted = (2.0 * 0.5 / 8.0) ** 2
    standard_error = wanted * math.sqrt(2 / len(noise))
    assert abs(float(noise.square().mean()) - wanted) < 5 * standard_error
