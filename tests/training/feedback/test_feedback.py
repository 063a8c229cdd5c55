"""Compare the signals of the hidden layers with the formulas of the PDFA paper."""

from typing import Literal

import pytest
import torch
from torch import nn

from benchmarks.bare import feedback_trainer
from opusim import open_device
from opusim.devices.base import NoisyDevice
from opusim.encodings import ternarize
from opusim.medium.transmission import Medium
from opusim.randomness.streams import noise_stream
from opusim.training.config.sections import OptimizerConfig
from opusim.training.errors import TrainingDiverged
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import BpConfig, DfaConfig, FeedbackConfig, PdfaConfig, TdfaConfig
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.networks.functions import cross_entropy
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer

WIDTHS = (9, 12, 15, 4)  # inputs, two hidden layers, classes
SIGMA = 0.37


def new_network() -> FullyConnected:
    torch.manual_seed(11)
    layers = nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, 4)
    return FullyConnected(nn.Sequential(*layers))


def device_of(sigma: float = 0.0) -> NoisyDevice:
    return open_device("gaussian", n_inputs=4, n_outputs=27, seed=3, noise={"sigma": sigma})


def trainer_of(
    config: FeedbackConfig, device: NoisyDevice | None = None, *, name: str = "sgd", lr: float = 1e-30
) -> tuple[FullyConnected, FeedbackTrainer]:
    """A trainer of a new network, with a learning rate too small to matter."""
    network, noise = new_network(), noise_stream("experiment", 5, "digital-noise")
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
    network = new_network()
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
    for a, b in zip(found[:4], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class OtherConfig(FeedbackConfig):
    """A feedback that the closed form does not know."""

    kind: Literal["other"] = "other"


def test_an_unknown_feedback_is_refused() -> None:
    network = FullyConnected(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    with pytest.raises(TypeError, match="trainer.kind = 'other' is no feedback; take bp, dfa, tdfa or pdfa"):
        ClosedForm(network, OtherConfig())


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
    output = gradients(PdfaConfig(), sigma=SIGMA)[4:]
    reference = gradients(BpConfig())[4:]
    for a, b in zip(output, reference, strict=True):
        torch.testing.assert_close(a, b)


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


def test_wrong_devices_are_refused() -> None:
    for device, message in (
        (None, "device is missing"),
        (open_device("gaussian", n_inputs=4, n_outputs=26), "n_inputs=4, n_outputs=27"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(PdfaConfig(), device)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "nadam", "radam", "adamax"])
def test_every_optimizer_lowers_the_loss(name: str) -> None:
    _, trainer = trainer_of(DfaConfig(), name=name, lr=0.03)
    losses = [float(trainer.step(*batch(), step=step).loss_sum) for step in range(200)]
    assert losses[-1] < 0.7 * losses[0]
