"""Send the error in bit planes through a device, and start the output layer from the feedback."""

from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import nn

from benchmarks.bare import feedback_trainer
from opusim import open_device
from opusim.devices.base import NoisyDevice
from opusim.encodings import bit_planes, ternarize
from opusim.training.config.kinds import TRAINERS
from opusim.training.config.sections import OptimizerConfig
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.projection import (
    AbsoluteTernary,
    BitPlanes,
    DenseProjection,
    DeviceProjection,
    Encoding,
    RelativeTernary,
    StochasticTernary,
)
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer

CLASSES, OUTPUTS, SIGMA, BATCH = 4, 30, 0.37, 9


def device_of(seed: int = 3, sigma: float = SIGMA, n_outputs: int = OUTPUTS) -> NoisyDevice:
    return open_device("gaussian", n_inputs=CLASSES, n_outputs=n_outputs, seed=seed, noise={"sigma": sigma})


def errors(batch: int = BATCH) -> torch.Tensor:
    """Errors of very different size, one of them zero."""
    generator = torch.Generator().manual_seed(2)
    error = torch.randn(batch, CLASSES, generator=generator) * torch.logspace(-3, 0, batch)[:, None]
    error[batch // 2] = 0
    return error


@pytest.mark.parametrize("planes", [1, 2, 5])
def test_planes_are_the_weighted_sum_of_one_reading_for_each(planes: int) -> None:
    """The readings of the same step, taken one by one from a second device of the same seed."""
    error = errors()
    first, second = device_of(), device_of()
    found = DeviceProjection(first, encoding=BitPlanes(planes)).read(error)
    scale = error.abs().amax(dim=1, keepdim=True)
    digits, weights = bit_planes(torch.where(scale > 0, error / scale, 0.0), planes)
    readings = second.project(digits.reshape(planes * BATCH, CLASSES)).view(planes, BATCH, OUTPUTS)
    expected = scale * sum(weight * reading for weight, reading in zip(weights, readings, strict=True))
    torch.testing.assert_close(found, expected)
    assert first.usage.frames == 2 * planes * BATCH
    assert not found[BATCH // 2].any()


def test_without_noise_planes_project_the_error_itself() -> None:
    error = errors()
    exact = error @ device_of().matrix().t()
    for planes in (3, 12):
        found = DeviceProjection(device_of(sigma=0.0), encoding=BitPlanes(planes)).read(error)
        largest = error.abs().amax(dim=1, keepdim=True) * 2.0**-planes
        bound = largest * device_of().matrix().abs().sum(dim=1) + 1e-5
        assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    "encoding", [AbsoluteTernary(0.1), RelativeTernary(0.6), BitPlanes(1), BitPlanes(3), BitPlanes(8)]
)
def test_the_reported_noise_is_the_measured_one(encoding: Encoding, seed: int) -> None:
    """Root mean square over records that share max|e| against noise_std, five standard errors; 5 % off is caught."""
    n = 2000
    row = torch.tensor([[0.9, -0.2, -0.5, -0.2]]) * 0.7
    error = row.expand(n, CLASSES)
    projection = DeviceProjection(device_of(seed=seed % 2**31), encoding=encoding)
    silent = DeviceProjection(device_of(sigma=0.0), encoding=encoding)
    assert torch.equal(device_of(seed=seed % 2**31).matrix(), device_of(sigma=0.0).matrix())
    noise = (projection.read(error) - silent.read(error)).double()
    reported = float(projection.noise_power(error))
    assert reported == pytest.approx(float(projection.noise_std(error)) ** 2, rel=1e-5)  # rows of one scale
    standard_error = reported * (2 / noise.numel()) ** 0.5
    assert abs(float(noise.square().mean()) - reported) < 5 * standard_error
    assert abs(float((0.95 * noise).square().mean()) - reported) > 5 * standard_error
    assert abs(float(noise.mean())) < norm.isf(norm.sf(5.0)) * (reported / noise.numel()) ** 0.5


@pytest.mark.parametrize("threshold", [0.0, 0.6, 1.2])
def test_ternary_rows_have_the_least_squares_factor_and_constant(threshold: float) -> None:
    """e = s t + c 1 with lstsq of every row; a row whose t is constant leaves the constant to t."""
    error = torch.randn(50, 10, generator=torch.Generator().manual_seed(4)) + 0.3
    encoded = RelativeTernary(threshold)(error)
    for row, t, s, c in zip(error, encoded.frames[0], encoded.scale, encoded.offset, strict=True):
        assert torch.equal(t, ternarize(row, threshold * float(row.square().mean().sqrt())))
        design = torch.stack([t, torch.ones(10)], dim=1).double()
        expected = torch.linalg.lstsq(design, row[:, None].double()).solution.flatten().float()
        torch.testing.assert_close(torch.cat([s, c]), expected, rtol=1e-4, atol=1e-5)
    constant = RelativeTernary(0.5)(torch.tensor([[3.0], [-0.5]]))  # one output: the device is shown it
    assert torch.equal(constant.scale, torch.tensor([[3.0], [0.5]]))
    assert not constant.offset.any()


@pytest.mark.parametrize("n", [2, 3, 10, 500])
def test_the_error_of_a_uniform_guess_is_shown_exactly(n: int) -> None:
    """Of many entries one is shown, and the constant is that of all others."""
    error = torch.full((n, n), 1 / n) - torch.eye(n)
    encoded = RelativeTernary(0.6)(error)
    torch.testing.assert_close(encoded.scale * encoded.frames[0] + encoded.offset, error, rtol=0, atol=1e-6)


def test_the_constant_is_projected_by_the_measured_sum_of_columns() -> None:
    """Digitally and through a device of more inputs than the error has entries."""
    error = errors()
    encoded = RelativeTernary(0.6)(error)
    shown = encoded.scale * encoded.frames[0] + encoded.offset
    wide = open_device("gaussian", n_inputs=CLASSES + 3, n_outputs=OUTPUTS, seed=3, noise={"sigma": 0.0})
    matrix = wide.matrix()[:, :CLASSES].t()
    for projection in (
        DenseProjection(matrix, encoding=RelativeTernary(0.6)),
        DeviceProjection(wide, encoding=RelativeTernary(0.6), n_inputs=CLASSES),
    ):
        torch.testing.assert_close(projection.read(error), shown @ matrix, rtol=1e-4, atol=1e-5)


def test_the_stochastic_code_has_the_error_as_its_mean(seed: int) -> None:
    """Mean of s t over draws against e, five standard errors; the deterministic code misses it by far."""
    n = 4000
    row = torch.tensor([0.9, -0.05, -0.6, -0.25])
    error = row.expand(n, CLASSES)
    encoding = StochasticTernary(seed)
    encoding.seek(3)
    encoded = encoding(error)
    shown = encoded.scale * encoded.frames[0] + encoded.offset
    rest = (row - row.median()).abs()
    variance = rest * (rest.max() - rest)
    bound = 5 * (variance / n).sqrt() + 1e-6
    assert bool(((shown.mean(dim=0) - row).abs() <= bound).all())
    fixed = RelativeTernary(0.6)(error)
    missed = (fixed.decoded(fixed.frames[0]).mean(dim=0) - row).abs()
    assert bool((missed > bound).any())


def test_stochastic_codes_repeat_with_their_step() -> None:
    """A resumed run shows what the stopped one would have; batches of one step, and steps, differ."""
    error, encoding, again = errors(), StochasticTernary(5), StochasticTernary(5)
    encoding.seek(7)
    again.seek(7)
    first, second = encoding(error).frames, encoding(error).frames
    assert torch.equal(again(error).frames, first)
    again.seek(8)
    assert not torch.equal(first, second)
    assert not torch.equal(again(error).frames, first)
    assert set(first.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_the_reported_noise_is_a_mean_over_records() -> None:
    projection = DeviceProjection(device_of(), encoding=BitPlanes(4))
    error = errors()
    each = torch.stack([projection.noise_std(row[None]) for row in error])
    torch.testing.assert_close(projection.noise_std(error), each.mean())


def network_of(*widths: int) -> FullyConnected:
    torch.manual_seed(11)
    modules: list[nn.Module] = []
    for fan_in, width in zip((9, *widths), (*widths, CLASSES), strict=True):
        modules += [nn.Linear(fan_in, width), nn.Tanh()]
    return FullyConnected(nn.Sequential(*modules[:-1]))


def trainer_of(
    network: FullyConnected, kind: str, device: NoisyDevice | None = None, **options: float
) -> FeedbackTrainer:
    config = TRAINERS.validated({"kind": kind, **options})
    optimizer = make_optimizer(network.parameters, OptimizerConfig(lr=1e-30))
    return feedback_trainer(ClosedForm(network, config, device=device), optimizer)


def first_update(network: FullyConnected, trainer: FeedbackTrainer) -> list[torch.Tensor]:
    """Gradients of each layer."""
    trainer.step(*batch(), step=0)
    return [network.gradients(layer).clone() for layer in range(network.depth)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(20, 9, generator=generator), torch.randint(0, CLASSES, (20,), generator=generator)


@pytest.mark.parametrize("widths", [(12,), (12, 15)])
@pytest.mark.parametrize("gain", [1.0, 2.7])
def test_from_feedback_the_last_hidden_signal_is_backpropagations(widths: Any, gain: float) -> None:
    """With one hidden layer the whole first update is; with two, that of the last hidden layer. Not without it."""
    network = network_of(*widths)
    trainer = trainer_of(network, "dfa", gain=gain)
    random = first_update(network, trainer), first_update(network, trainer_of(network, "bp"))
    assert not torch.allclose(random[0][-2], random[1][-2], rtol=0.1)
    trainer.source.start_from_feedback(torch.empty(0))
    assert not network.linears[-1].bias.any()
    found, expected = first_update(network, trainer), first_update(network, trainer_of(network, "bp"))
    for layer in range(len(widths) - 1, network.depth):
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-4, atol=1e-6)
    if len(widths) > 1:
        assert not torch.allclose(found[0], expected[0], rtol=0.1)


def test_a_noisy_devices_columns_are_means_of_readings(seed: int) -> None:
    """64 readings of each column: within five standard errors over the family, and not the matrix itself."""
    network = network_of(12)
    device = device_of(seed=seed % 2**31, n_outputs=12)
    trainer_of(network, "pdfa", device=device).source.start_from_feedback(torch.empty(0))
    off = network.linears[-1].weight.detach() * 12**0.5 - device.matrix().t()
    standard_error = SIGMA / 64**0.5
    assert float(off.abs().max()) < standard_error * norm.isf(norm.sf(5.0) / off.numel())
    assert float(off.double().std()) == pytest.approx(standard_error, rel=5 / (2 * off.numel()) ** 0.5)


@pytest.mark.parametrize(("kind", "widths"), [("bp", (12,)), ("dfa", ())])
def test_without_feedback_matrix_or_hidden_layer_it_is_refused(kind: str, widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="model.initial_output = 'feedback' needs.*has none; use 'random'"):
        trainer_of(network_of(*widths), kind).source.start_from_feedback(torch.empty(0))
