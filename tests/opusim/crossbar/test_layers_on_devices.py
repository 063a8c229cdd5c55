"""Layers whose product runs on a device: forward, straight-through backward, drift, programming and noise injection."""

import io
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from opusim import load_description, open_device
from opusim.crossbar.conversion import DeviceModel, convert, noise_aware
from opusim.crossbar.device import CrossbarDevice
from opusim.crossbar.layers import DeviceConv2d, DeviceLinear
from opusim.crossbar.programmable import ProgrammableDevice
from opusim.errors import CapabilityMissing, ConfigError
from opusim.files import to_toml
from tests.opusim.common import EXACT, refuses

SURE = 5.0


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    convolution = nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    linear = nn.Linear(5 * 4 * 6, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), *linear)


def batch() -> torch.Tensor:
    return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(2))


def test_a_network_on_an_exact_crossbar_is_the_network_with_its_gradients() -> None:
    model = network()
    with convert(model, "pcm", crossbar=EXACT) as analog:
        assert [type(analog.model[k]) for k in (0, 3, 5)] == [DeviceConv2d, DeviceLinear, DeviceLinear]
        assert torch.allclose(analog(batch()), model(batch()), atol=2e-3)  # weights are multiples of 2^-14
        assert analog.usage.programmings == 3
        assert analog.usage.frames == 4 * 4 * 6 + 2 * 4 + 3 * 64
        tokens = analog.model[3](torch.randn(2, 9, 120))
        assert tokens.shape == (2, 9, 7)
    assert all(not layer.device.is_open for layer in analog.layers)
    # Gradients at an exact device are those of the digital network.
    model = network()
    with convert(model, "pcm", crossbar=EXACT) as analog:
        for net in (model, analog):
            x = batch().requires_grad_()
            net(x).square().sum().backward()
            net.seen = x.grad
        layers = (model[0], analog.model[0].product), (model[3], analog.model[3]), (model[5], analog.model[5])
        pairs = [(one.weight.grad.flatten(1), other.weight.grad) for one, other in layers]
        pairs += [(one.bias.grad, other.bias.grad) for one, other in layers[:2]]
        for digital, found in [(model.seen, analog.seen), *pairs]:
            assert torch.allclose(digital, found, atol=5e-3 * float(digital.abs().max()))
            assert not torch.allclose(digital, 1.05 * found, atol=5e-3 * float(digital.abs().max()))


def test_chips_follow_from_the_seed_and_differ_by_layer() -> None:
    with convert(network(), "pcm", seed=1) as one, convert(network(), "pcm", seed=1) as same:
        assert torch.equal(one(batch()), same(batch()))
        with convert(network(), "pcm", seed=2) as other:
            assert not torch.equal(one(batch()), other(batch()))
        seeds = {layer.device.description.medium.seed for layer in one.layers}
        assert len(seeds) == 3


def test_compensation_gives_back_what_drift_takes() -> None:
    """A year takes half of the conductance; the mean output is compensated and single weights are not."""
    torch.manual_seed(1)
    layer = nn.Linear(300, 200, bias=False)
    x = torch.rand(50, 300)
    expected = layer(x).detach()
    ratios = {}
    for compensate in (True, False):
        with convert(layer, "pcm", compensate_drift=compensate) as analog:
            analog.wait(365.25 * 86400.0)
            found = analog(x).detach()
            ratios[compensate] = float((found * expected).sum() / expected.square().sum())
    assert abs(ratios[True] - 1) < 0.1
    assert ratios[False] < 0.6


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """What a state holds, extra states included."""
    state = model.state_dict().values()
    return [each for value in state for each in (value.values() if isinstance(value, dict) else [value])]


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_state_dict_holds_what_the_devices_hold(mode: str) -> None:
    """Loaded on chips that were opened anew, the next reading, look and programming are those of the saved network."""
    x, file = batch(), io.BytesIO()
    with convert(network(), "pcm", seed=1, mode=mode, programming_step=0.1) as analog, torch.no_grad():
        analog.wait(3600.0)
        analog.compensate(x)
        analog.layers[0].weight.add_(0.01)  # less than a programming step: digital and held weights differ
        torch.save(analog.state_dict(), file)
        file.seek(0)
        with convert(network(seed=2), "pcm", seed=1, mode=mode, programming_step=0.1) as loaded:
            loaded.load_state_dict(torch.load(file, weights_only=True))
            for act in (lambda net: None, lambda net: net.wait(3600.0), DeviceModel.program):
                act(analog), act(loaded)
                pairs = list(zip(analog.layers, loaded.layers, strict=True))
                assert all(torch.equal(one.device.matrix(), other.device.matrix()) for one, other in pairs)
                assert torch.equal(analog(x), loaded(x)) is (mode == "experiment")
                if mode == "experiment":
                    states = zip(tensors_of(analog), tensors_of(loaded), strict=True)
                    assert all(torch.equal(*pair) for pair in states)


def test_a_state_is_for_its_own_chip_and_digital_weights_load_without_one() -> None:
    with convert(network(), "pcm", seed=1) as analog, convert(network(), "pcm", seed=2) as other:
        for target in (other, other.model):
            with pytest.raises(ConfigError, match="medium.seed: is that of another chip"):
                target.load_state_dict((analog if target is other else analog.model).state_dict())
        held = other.model[3].device.matrix()
        digital = {key: each for key, each in analog.state_dict().items() if not key.endswith("_extra_state")}
        other.load_state_dict(digital)
        assert torch.equal(other.model[3].weight, analog.model[3].weight)
        assert torch.equal(other.model[3].device.matrix(), held)


def test_a_device_of_another_package_is_programmed_again() -> None:
    """Without a state of its own, the matrix is written again and the same time passes; noise of programming is new."""
    with open_device("pcm", n_inputs=6, n_outputs=4) as device:
        matrix = torch.rand(4, 6) * 2 - 1
        device.program(matrix)
        device.wait(60.0)
        state = ProgrammableDevice.held_state(device)
        before = device.usage.programmings
        ProgrammableDevice.restore(device, matrix, state)
        assert (device.elapsed_s, device.usage.programmings) == (60.0, before + 1)
        assert float((device.matrix() - matrix).abs().max()) < 0.5


def test_corrections_end_with_the_conductances_of_their_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is programmed again, gains and offsets of outputs would correct errors that are gone."""
    x = batch()
    for same in (True, False):
        with convert(network(), "pcm", seed=1) as analog, torch.no_grad():
            analog.compensate(x)
            state = analog.state_dict()
            if not same:
                monkeypatch.setattr(CrossbarDevice, "restore", ProgrammableDevice.restore)
            analog.load_state_dict(state)
            assert all(bool(layer._row_offset.any()) is same for layer in analog.layers)
            gains = [layer._gain for layer in analog.layers]
            analog.program()
            assert all(gain != layer._gain for gain, layer in zip(gains, analog.layers, strict=True))


def test_inputs_correct_gain_and_offset_of_every_output() -> None:
    """Positive inputs make offsets of the errors of a row; new inputs show what the corrections take away."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 20))
    known, fresh = torch.rand(200, 2, 8, 8), torch.rand(200, 2, 8, 8)
    wanted = model(fresh).detach()
    with convert(model, "reram", seed=3) as analog, torch.no_grad():
        analog.wait(86400.0)
        before = float((analog(fresh) - wanted).square().mean())
        frames = analog.usage.frames
        analog.compensate(known)
        assert analog.usage.frames - frames == 200 * (36 + 1)
        after = float((analog(fresh) - wanted).square().mean())
        assert after < before / 3
        layer = analog.layers[1]
        wrong = layer._row_offset.clone()
        layer._row_offset = -wrong  # the planted fault: the offset's sign
        assert float((analog(fresh) - wanted).square().mean()) > before / 3
        analog.program()
        assert not layer._row_offset.any()
    with convert(model, "pcm", crossbar=EXACT) as analog, torch.no_grad():
        analog.compensate(known)
        assert torch.allclose(analog(fresh), wanted, atol=2e-3)
        assert all(torch.allclose(one._row_gain, torch.ones(1), atol=2e-3) for one in analog.layers)


def test_training_in_place_programs_when_a_weight_has_moved_a_step() -> None:
    torch.manual_seed(1)
    with convert(nn.Linear(6, 4), "reram", programming_step=0.05) as analog:
        (layer,) = analog.layers
        x, matrix = torch.randn(5, 6), layer.device.require("matrix").matrix()
        analog.train()
        analog(x)
        assert analog.usage.programmings == 1
        scale = layer.weight.detach().abs().amax(1, keepdim=True)
        with torch.no_grad():
            layer.weight[0, 0] += 0.04 * scale[0, 0] * (-1 if layer.weight[0, 0] > 0 else 1)
        analog(x)
        assert analog.usage.programmings == 1
        assert torch.equal(layer.device.require("matrix").matrix(), matrix)
        with torch.no_grad():
            layer.weight[0, 0] *= 0.5
            layer.weight[0] *= 0.8
        analog.eval()(x)
        assert analog.usage.programmings == 2
        with torch.no_grad():
            layer.weight[1] *= 0.8
        analog.wait(1.0)  # the weights that relax are the present ones
        assert analog.usage.programmings == 3
        analog.program()
        assert analog.usage.programmings == 4


@pytest.mark.parametrize("kind", ["number", "device"])
def test_injected_noise_has_the_stated_spread_in_training_only(kind: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(200, 150)
    clean, noise = layer.weight.detach().clone(), 0.07 if kind == "number" else "pcm"
    noise_aware(layer, noise, seed=3)
    layer.eval()
    assert torch.equal(layer.weight, clean)
    layer.train()
    one, other = layer.weight.detach().clone(), layer.weight.detach().clone()
    assert not torch.equal(one, other)
    scale = clean.abs().amax(1, keepdim=True)
    mean, std = clean / scale, torch.full_like(clean, 0.07)
    if kind == "device":
        with open_device("pcm", n_inputs=200, n_outputs=150) as device:
            found, std = device.weight_moments(clean / scale, 0.0)
        factor = float((mean * mean).sum() / (mean * found).sum())
        mean, std = found * factor, std * factor
    ratio = ((one / scale - mean) / std).square()
    error = math.sqrt(2 / ratio.numel())
    assert abs(float(ratio.mean()) - 1) <= SURE * error < abs(1.06 * float(ratio.mean()) - 1)
    layer(torch.ones(1, 200)).sum().backward()
    assert layer.parametrizations["weight"].original.grad is not None
    with convert(layer, "pcm", crossbar=EXACT) as analog:
        assert torch.equal(analog.layers[0].weight, clean)
        assert torch.allclose(analog(torch.ones(1, 200)), layer.eval()(torch.ones(1, 200)), atol=2e-2)
    again = weight_norm(nn.Linear(5, 4))
    with convert(nn.Sequential(layer, again), "pcm", crossbar=EXACT) as analog:
        assert torch.equal(analog.layers[1].weight, again.weight)
    assert not torch.equal(layer.train().weight, clean)  # the model that was converted is left as it is


@pytest.mark.parametrize("name", ["pcm", "hermes", "reram"])
def test_injected_weights_of_a_time_are_those_of_chips_at_that_time(name: str) -> None:
    """Mean and spread of each of four weights over 50,000 devices, drift compensated; the fault leaves the mean out."""
    day, rows, values = 86_400.0, 500, torch.tensor([1.0, -0.6, 0.05, 0.01])
    layer = nn.Linear(400, rows)
    with torch.no_grad():
        layer.weight.copy_(values.repeat(rows, 100))
    with open_device(name, n_inputs=400, n_outputs=rows) as device:
        device.require("program").program(layer.weight.detach())
        held = device.require("wait").wait(day).double()
    wanted = layer.weight.detach().double()
    held *= (wanted * wanted).sum() / (wanted * held).sum()
    noise_aware(layer, name, after_s=day, seed=7).train()
    drawn = layer.weight.detach().double()
    for number, value in enumerate(values.tolist()):
        chips, draws = (each[:, number::4].flatten() for each in (held, drawn))
        error = float(chips.std()) * math.sqrt(2 / chips.numel())
        found = abs(float(draws.mean() - chips.mean()))
        assert found <= SURE * error + 0.01 * abs(value)  # 1 %: what the law of the moments leaves out
        assert abs(float(draws.std() / chips.std()) - 1) < (0.02 if value >= 1 or value < 0 else 0.35)
        if value == 0.05:
            assert abs(float(draws.mean() - chips.mean()) + float(draws.mean()) - value) > SURE * error


def test_the_gradient_of_injected_noise_reaches_the_largest_weight_of_a_row() -> None:
    """It is the sum of the row's relative noise times its inputs; all other weights have that of the clean product."""
    torch.manual_seed(1)
    layer = noise_aware(nn.Linear(30, 4), 0.1, seed=5).train()
    original, x = layer.parametrizations["weight"].original, torch.randn(1, 30)
    weight = layer.weight
    (weight @ x[0]).sum().backward()
    scale, largest = original.detach().abs().max(1)
    noise = ((weight - original).detach() @ x[0]) / scale
    expected = x.repeat(4, 1)
    rows = torch.arange(4)
    expected[rows, largest] += noise * original.detach()[rows, largest].sign()
    assert torch.allclose(original.grad, expected, atol=1e-5)


def test_injected_output_noise_is_that_of_a_device_for_small_inputs(tmp_path: Path) -> None:
    """Linear layers and convolutions in training mode; a device without noise of weights leaves that of outputs."""
    torch.manual_seed(1)
    quiet = load_description("pcm", {"crossbar": dict.fromkeys(("programming_us", "drift", "low_frequency"))})
    (tmp_path / "quiet.toml").write_text(to_toml(quiet.dump()))
    step, output = 10 / 127, 0.04
    for layer, x in (
        (nn.Linear(600, 50), torch.randn(400, 600)),
        (nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), torch.randn(40, 2, 8, 8)),
    ):
        clean = layer(x).detach()
        weights = layer.weight.detach().flatten(1)
        noise_aware(layer, tmp_path / "quiet.toml", seed=2)
        assert torch.equal(layer.eval()(x), clean)
        found = (layer.train()(x).detach() - clean).double()
        tiles, largest = 1, x.abs().amax(1, keepdim=True)
        scale = weights.abs().amax(1)
        if isinstance(layer, nn.Linear):
            tiles = 2
        else:
            patches = nn.functional.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1)).abs().amax(1)
            largest, scale = patches.reshape(len(x), 1, *clean.shape[2:]), scale[:, None, None]
        std = scale * largest * math.sqrt(tiles * (output**2 + step**2 / 12))
        ratio = (found / std).square()
        error = math.sqrt(2 / ratio.numel())
        assert abs(float(ratio.mean()) - 1) <= SURE * error < abs(1.2 * float(ratio.mean()) - 1)


def test_limited_weights_stay_limited_on_the_device_and_keep_their_gradient() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(300, 4)
    with torch.no_grad():
        layer.weight[0, 0] = 1.0
    noise_aware(layer, 0.05, clip=2.0)
    std = layer.parametrizations["weight"].original.detach().std(dim=1, correction=0)
    assert torch.allclose(layer.eval().weight.detach().abs().amax(1)[:1], 2 * std[:1])
    layer(torch.ones(1, 300)).sum().backward()
    gradient = layer.parametrizations["weight"].original.grad
    assert torch.equal(gradient, torch.ones(4, 300))
    noise = (layer.train().weight - layer.eval().weight).detach()
    assert abs(float(noise[0].std() / (0.05 * 2 * std[0])) - 1) < SURE / math.sqrt(2 * 300)
    with convert(layer, "pcm", crossbar=EXACT) as analog:
        assert torch.equal(analog.layers[0].weight, layer.eval().weight)
    refuses(ValueError, r"clip = 0", noise_aware, nn.Linear(2, 2), 0.1, clip=0.0)


def test_noise_keeps_rows_of_equal_weights_and_what_is_no_number_and_types() -> None:
    one, equal = nn.Linear(1, 4), nn.Linear(300, 2)
    nn.init.constant_(equal.weight, 0.1)
    for layer in (one, equal):
        before = layer.weight.detach().clone()
        assert torch.equal(noise_aware(layer, 0.1, clip=2.0).eval().weight, before)
    layer = noise_aware(nn.Linear(3, 2), "pcm").train()
    with torch.no_grad():
        layer.parametrizations["weight"].original[0, 0] = torch.nan
    assert bool(layer(torch.ones(1, 3)).isnan().all())
    layer = noise_aware(nn.Linear(3, 2, dtype=torch.bfloat16), "pcm", clip=2.0).train()
    assert layer(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_digital_layers_stay_digital_and_every_parameter_is_converted() -> None:
    """torch's attention reads the weights of its projection itself, so a device there would never be used."""
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    noise_aware(model, 0.1, digital=["self_attn"])
    assert not parametrize.is_parametrized(model.self_attn.out_proj)
    weight_norm(model.self_attn.out_proj)
    with convert(model, "pcm", crossbar=EXACT, digital=["self_attn"]) as analog:
        assert len(analog.layers) == 2
        assert type(analog.model.self_attn.out_proj) is type(nn.MultiheadAttention(4, 2).out_proj)
    layer = parametrize.register_parametrization(nn.Linear(3, 2), "bias", nn.Tanh())
    bias = layer.bias.detach().clone()
    with convert(noise_aware(layer, 0.1), "pcm", crossbar=EXACT) as analog:
        assert torch.equal(analog.layers[0].bias, bias)


def test_autocast_changes_neither_readings_nor_gradients_beyond_the_type_of_inputs() -> None:
    torch.manual_seed(1)
    with convert(nn.Linear(6, 4), "pcm", crossbar=EXACT) as analog:
        x = torch.randn(5, 6).bfloat16().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            readings = analog.layers[0].read(x)
            loss = analog(x).float().sum()
        loss.backward()
        assert torch.equal(readings, analog.layers[0].read(x))
        assert x.grad.dtype == torch.bfloat16
        expected = x.detach().float().sum(0).expand(4, 6)
        assert torch.allclose(analog.layers[0].weight.grad, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            device = open_device("gaussian", n_inputs=6, n_outputs=4)
            assert device.project(x.detach().sign()).dtype == torch.float32


def test_what_cannot_run_on_a_device_is_refused() -> None:
    noisy = noise_aware(nn.Sequential(nn.Linear(2, 2)), 0.1)
    refuses(ValueError, "model: layer '0' is noise-aware already", noise_aware, noisy, 0.1)
    pruned = nn.Sequential(nn.Linear(2, 2))
    prune.l1_unstructured(pruned[0], "weight", amount=1)
    refuses(ValueError, r"layer '0', .*prune.remove\(layer, 'weight'\)", noise_aware, pruned, 0.1)
    prune.remove(pruned[0], "weight")
    assert noise_aware(pruned, 0.1) is pruned
    same = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 2, 3, padding="same"))
    refuses(ValueError, r"padding=same.*: a device takes one group", noise_aware, same, "pcm")
    assert not parametrize.is_parametrized(same[0])
    assert noise_aware(same, 0.1) is same
    refuses(ValueError, "after_s = 3: a number does not", noise_aware, nn.Linear(2, 2), 0.1, after_s=3.0)
    refuses(ValueError, r"model = ReLU: has no nn.Linear", noise_aware, nn.ReLU(), 0.1)
    refuses(ValueError, r"noise = -0.1", noise_aware, nn.Linear(2, 2), -0.1)
    refuses(ConfigError, r"'gaussian' tells no programming noise", noise_aware, nn.Linear(2, 2), "gaussian")
    refuses(CapabilityMissing, "lacks the capability 'program'; hermes", convert, nn.Linear(2, 2), "gaussian")
    with convert(nn.Linear(20_000, 1), "pcm") as analog:  # two chips, of 16,384 inputs at most
        assert analog(torch.ones(1, 20_000)).shape == (1, 1)
    with open_device("pcm", n_inputs=3, n_outputs=2) as device:
        refuses(ConfigError, "layer's size", DeviceLinear, nn.Linear(2, 2), device)
    refuses(TypeError, "model = 'net': must be Module, not str", convert, "net", "pcm")


def test_an_empty_batch_passes_and_corrects_nothing() -> None:
    """Poisson sampling draws one now and then."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    none = torch.zeros(0, 1, 4, 4)
    with convert(network, "pcm", programming_step=0.1) as analog:
        y = analog(none)
        assert y.shape == network(none).shape == (0, 3)
        y.sum().backward()
        assert all(not parameter.grad.any() for parameter in analog.parameters())
        refuses(ValueError, "inputs = 0: must be at least 1; give records", analog.compensate, none)


def test_inputs_that_meet_the_bound_of_the_converter_are_read_again_at_half_their_size() -> None:
    """A product of 300 ones is 300 and the converter shows 10; six halvings reach 640."""
    layer = nn.Linear(300, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    noiseless = {**EXACT, "converter": {"adc_bits": 12, "adc_bound": 10.0}}
    with convert(layer, "pcm", crossbar=noiseless, compensate_drift=False) as analog:
        x = torch.stack([torch.ones(300), torch.cat([torch.ones(4), torch.zeros(296)])])
        before = analog.usage.frames
        y = analog(x)
        assert analog.usage.frames - before == 2 + 5  # 300 / 2^5 is below 10; the other row is read once
        assert torch.allclose(y[:, 0], torch.tensor([150.0, 2.0]), rtol=1e-2)
        (device,) = (each.device for each in analog.layers)
        clipped = device.require("multiply").multiply(x)
        assert torch.allclose(clipped[:, 0], torch.tensor([10.0, 4.0]), rtol=1e-2)
        assert device.saturated.tolist() == [True, False]
