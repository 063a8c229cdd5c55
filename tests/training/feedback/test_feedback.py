"""Signals of hidden layers against the PDFA paper's formulas, the error in codes, and a start from the feedback."""

from typing import Any, Literal

import pytest
import torch
from scipy.stats import norm
from torch import nn

from benchmarks.bare import feedback_trainer
from opusim import open_device
from opusim.devices.base import NoisyDevice
from opusim.encodings import bit_planes, ternarize
from opusim.medium.transmission import Medium
from opusim.randomness.streams import noise_stream
from opusim.training.config.sections import OptimizerConfig
from opusim.training.errors import TrainingDiverged
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import BpConfig, DfaConfig, FeedbackConfig, PdfaConfig, TdfaConfig
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
from opusim.training.networks.functions import cross_entropy
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer

WIDTHS = (9, 12, 15, 4)  # inputs, two hidden layers, classes
CLASSES, OUTPUTS, SIGMA, BATCH = 4, 27, 0.37, 9


def network_of(*widths: int) -> FullyConnected:
    torch.manual_seed(11)
    modules: list[nn.Module] = []
    for fan_in, width in zip((9, *widths), (*widths, CLASSES), strict=True):
        modules += [nn.Linear(fan_in, width), nn.Tanh()]
    return FullyConnected(nn.Sequential(*modules[:-1]))


def device_of(sigma: float = SIGMA, *, seed: int = 3, n_outputs: int = OUTPUTS) -> NoisyDevice:
    return open_device("gaussian", n_inputs=CLASSES, n_outputs=n_outputs, seed=seed, noise={"sigma": sigma})


def trainer_of(
    config: FeedbackConfig, device: NoisyDevice | None = None, *, network: FullyConnected | None = None,
    name: str = "sgd", lr: float = 1e-30,
) -> tuple[FullyConnected, FeedbackTrainer]:  # fmt: skip
    """A trainer with a learning rate too small to matter, of a network of two hidden layers if none is given."""
    network, noise = network or network_of(12, 15), noise_stream("experiment", 5, "digital-noise")
    optimizer = make_optimizer(network.parameters, OptimizerConfig(name=name, lr=lr))
    return network, feedback_trainer(ClosedForm(network, config, device=device, noise=noise), optimizer)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(20, 9, generator=generator), torch.randint(0, 4, (20,), generator=generator)


def gradients(config: FeedbackConfig, *, sigma: float = 0.0, step: int = 0) -> list[torch.Tensor]:
    """Gradients of one step."""
    network, trainer = trainer_of(config, device_of(sigma))
    trainer.step(*batch(), step=step, observe=True)
    return [parameter.grad.clone() for parameter in network.parameters]


def written_out(
    *, ternary: bool, tau_b: float | None = None, noise: torch.Tensor | None = None, tau_h: float | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Eq. 8 record by record and layer by layer, with plain loops."""
    network = network_of(12, 15)
    x, y = batch()
    forward = network.forward(x)
    error = cross_entropy(forward.output, y).output_gradient
    matrix = Medium(4, 27, DfaConfig().feedback_seed).dense().t()  # B, (27, 4)
    expected = []
    for layer, (start, stop) in enumerate(((0, 12), (12, 27))):
        weight, bias = torch.zeros(WIDTHS[layer + 1], WIDTHS[layer]), torch.zeros(WIDTHS[layer + 1])
        for i in range(len(x)):
            e = ternarize(error[i : i + 1], 0.15)[0] if ternary else error[i]
            signal = matrix[start:stop] @ e / (stop - start) ** 0.5
            if tau_b is not None and signal.norm() > tau_b:
                signal = tau_b * signal / signal.norm()
            if noise is not None:
                signal = signal + noise[i, start:stop]
            delta = signal * (1 - torch.tanh(forward.pre_activations[layer][i]) ** 2)
            h = forward.inputs[layer][i]
            if tau_h is not None:
                h = h.clamp(-tau_h / len(h) ** 0.5, tau_h / len(h) ** 0.5)
            weight += torch.outer(delta, h) / len(x)
            bias += delta / len(x)
        expected += [weight, bias]
    return expected


def assert_hidden_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found[:4], expected, rtol=1e-4, atol=1e-6)


class OtherConfig(FeedbackConfig):
    """A feedback that the closed form does not know."""

    kind: Literal["other"] = "other"


@pytest.mark.parametrize("config", [DfaConfig(), TdfaConfig()], ids=["dfa is equation 4", "tdfa ternarizes"])
def test_hidden_layers_learn_from_the_projected_error(config: FeedbackConfig) -> None:
    assert_hidden_close(gradients(config), written_out(ternary=config.kind == "tdfa"))


@pytest.mark.parametrize("encoding", ["ternary", "planes"])
def test_pdfa_on_a_noiseless_device_equals_tdfa_bit_for_bit(encoding: Literal["ternary", "planes"]) -> None:
    photonic, digital = gradients(PdfaConfig(encoding=encoding)), gradients(TdfaConfig(encoding=encoding))
    assert all(torch.equal(a, b) for a, b in zip(photonic, digital, strict=True))


def test_tdfa_shows_what_its_encoding_says() -> None:
    ternary, planes = gradients(TdfaConfig()), gradients(TdfaConfig(encoding="planes", planes=12))
    exact = gradients(DfaConfig())
    torch.testing.assert_close(planes[0], exact[0], rtol=1e-2, atol=1e-4)
    assert not torch.allclose(ternary[0], exact[0], rtol=1e-2, atol=1e-4)


def test_published_order_scales_then_adds_digital_noise() -> None:
    config = TdfaConfig(order="published", tau_b=0.3, sigma=SIGMA, tau_h_max=0.8)
    stream = noise_stream("experiment", 5, "digital-noise")
    stream.seek(2)
    noise = SIGMA * stream.normal((20, 27))
    expected = written_out(ternary=True, tau_b=0.3, noise=noise, tau_h=0.8)
    assert_hidden_close(gradients(config, step=2), expected)


def test_published_order_scales_the_noisy_reading_then_draws() -> None:
    """The second noise does not shrink with the reading: that is what the order is about."""
    config = PdfaConfig(order="published", tau_b=1e-6)
    found = gradients(config, sigma=SIGMA)
    device = device_of(SIGMA)
    device.project(torch.zeros(20, 4))  # the reading comes first
    noise = device.draw((20, 27))
    assert_hidden_close(found, written_out(ternary=True, tau_b=1e-6, noise=noise))


def test_planted_fault_noise_before_the_scale_is_caught() -> None:
    noise, hardware = device_of(SIGMA).draw((20, 27)), gradients(PdfaConfig(), sigma=SIGMA)
    with pytest.raises(AssertionError):
        assert_hidden_close(hardware, written_out(ternary=True, tau_b=0.3, noise=noise))


def test_layers_get_disjoint_slices() -> None:
    """Noise of one reading, seen through both layers' bias gradients, is uncorrelated between them."""
    network, trainer = trainer_of(PdfaConfig(), device_of(50.0))
    pairs = []
    for step in range(400):
        trainer.step(*batch(), step=step)
        pairs.append(torch.stack([network.linears[0].bias.grad[0], network.linears[1].bias.grad[0]]))
    correlation = torch.corrcoef(torch.stack(pairs).t())[0, 1]
    assert correlation.abs() < 5 / 400**0.5


def test_a_repeated_step_repeats_its_noise_and_another_does_not() -> None:
    config = PdfaConfig()
    first, again, other = (gradients(config, sigma=SIGMA, step=step) for step in (4, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_output_layer_learns_from_the_error_itself() -> None:
    torch.testing.assert_close(gradients(PdfaConfig(), sigma=SIGMA)[4:], gradients(BpConfig())[4:])


def test_diagnostics_of_backpropagation_are_perfect_alignment() -> None:
    record = trainer_of(BpConfig())[1].step(*batch(), step=0, observe=True)
    assert record.diagnostics["alignment"] == pytest.approx([1.0] * 3, abs=1e-6)


def test_reported_noise_norm_is_the_realised_one() -> None:
    """The expected norm of a reading's noise against readings of zero error, within 1 % (n = 4000 rows)."""
    device = device_of(SIGMA)
    _, trainer = trainer_of(PdfaConfig(), device)
    reported = trainer.step(*batch(), step=0, observe=True).diagnostics["noise_norm"]
    realised = device.draw((4000, 27)).split([12, 15], dim=1)
    for value, noise, width in zip(reported, realised, (12, 15), strict=True):
        mean_square = (noise / width**0.5).square().sum(dim=1)
        standard_error = float(mean_square.std() / 4000**0.5)
        assert abs(float(mean_square.mean()) - value**2) < 5 * standard_error


def test_nan_in_the_error_stops_before_the_update() -> None:
    network, trainer = trainer_of(DfaConfig(), lr=0.1)
    x, y = batch()
    x[3, 2] = float("nan")
    before = [parameter.detach().clone() for parameter in network.parameters]
    with pytest.raises(TrainingDiverged, match="step 7.*NaN or infinite.*optimizer.lr"):
        trainer.step(x, y, step=7)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters, strict=True))


def test_an_empty_batch_moves_nothing() -> None:
    network, trainer = trainer_of(PdfaConfig(), device_of(), lr=0.1)
    before = [parameter.detach().clone() for parameter in network.parameters]
    record = trainer.step(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), step=0, observe=True)
    assert record.n_records == 0
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters, strict=True))


@pytest.mark.parametrize(("config", "n_outputs", "error", "message"), [
    (PdfaConfig(), None, ValueError, "device is missing"),
    (PdfaConfig(), 26, ValueError, "n_inputs=4, n_outputs=27"),
    (OtherConfig(), 27, TypeError, "trainer.kind = 'other' is no feedback; take bp, dfa, tdfa or pdfa"),
])  # fmt: skip
def test_wrong_feedback_is_refused(config: Any, n_outputs: int | None, error: Any, message: str) -> None:
    device = None if n_outputs is None else device_of(n_outputs=n_outputs)
    with pytest.raises(error, match=message):
        trainer_of(config, device)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "nadam", "radam", "adamax"])
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    _, trainer = trainer_of(DfaConfig(), name=name, lr=0.03)
    losses = [float(trainer.step(*batch(), step=step).loss_sum) for step in range(200)]
    assert losses[-1] < 0.7 * losses[0]


# Codes of the error, and a start from the feedback


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
    code = RelativeTernary(0.6)
    optical = DeviceProjection(wide, encoding=code, n_inputs=CLASSES)
    for projection in (DenseProjection(matrix, encoding=code), optical):
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


def first_update(network: FullyConnected, config: FeedbackConfig) -> list[torch.Tensor]:
    """Gradients of each layer."""
    trainer_of(config, network=network)[1].step(*batch(), step=0)
    return [network.gradients(layer).clone() for layer in range(network.depth)]


def start(network: FullyConnected, config: FeedbackConfig, device: NoisyDevice | None = None) -> None:
    trainer_of(config, device, network=network)[1].source.start_from_feedback(torch.empty(0))


@pytest.mark.parametrize("widths", [(12,), (12, 15)])
@pytest.mark.parametrize("gain", [1.0, 2.7])
def test_from_feedback_the_last_hidden_signal_is_backpropagations(widths: Any, gain: float) -> None:
    """With one hidden layer the whole first update is; with two, that of the last hidden layer. Not without it."""
    network, config = network_of(*widths), DfaConfig(gain=gain)
    random = first_update(network, config), first_update(network, BpConfig())
    assert not torch.allclose(random[0][-2], random[1][-2], rtol=0.1)
    start(network, config)
    assert not network.linears[-1].bias.any()
    found, expected = first_update(network, config), first_update(network, BpConfig())
    last = len(widths) - 1
    torch.testing.assert_close(found[last:], expected[last:], rtol=1e-4, atol=1e-6)
    if last:
        assert not torch.allclose(found[0], expected[0], rtol=0.1)


def test_a_noisy_devices_columns_are_means_of_readings(seed: int) -> None:
    """64 readings of each column: within five standard errors over the family, and not the matrix itself."""
    network = network_of(12)
    device = device_of(seed=seed % 2**31, n_outputs=12)
    start(network, PdfaConfig(), device)
    off = network.linears[-1].weight.detach() * 12**0.5 - device.matrix().t()
    standard_error = SIGMA / 64**0.5
    assert float(off.abs().max()) < standard_error * norm.isf(norm.sf(5.0) / off.numel())
    assert float(off.double().std()) == pytest.approx(standard_error, rel=5 / (2 * off.numel()) ** 0.5)


@pytest.mark.parametrize(("config", "widths"), [(BpConfig(), (12,)), (DfaConfig(), ())])
def test_without_feedback_matrix_or_hidden_layer_it_is_refused(config: Any, widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="model.initial_output = 'feedback' needs.*has none; use 'random'"):
        start(network_of(*widths), config)
