"""Which layers of a network `convert` puts on devices, and that each of them is then read from its device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from opusim.crossbar import conversion
from opusim.crossbar.conversion import convert
from opusim.crossbar.layers import DeviceLinear
from opusim.crossbar.noise_aware import noise_aware


def frames_of_encoder() -> list[int]:
    """Return the frames that each layer of a transformer on devices shows for 2 padded records of 3 tokens."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with convert(model, "pcm", digital=["layers.*.self_attn"]) as analog, torch.no_grad():
        before = [layer.device.usage.frames for layer in analog.layers]
        analog(torch.randn(2, 3, 16), src_key_padding_mask=padding)
        return [layer.device.usage.frames - n for layer, n in zip(analog.layers, before, strict=True)]


def test_a_transformer_in_evaluation_reads_every_device() -> None:
    assert all(frames >= 2 * 3 for frames in frames_of_encoder())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_kernel_of_a_transformer_would_read_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_without_fused_kernels", lambda model: None)
    with pytest.raises(ValueError, match=r"weight 'layers\.0\..*weight' multiplies digitally"):
        frames_of_encoder()
    monkeypatch.setattr(conversion.DeviceModel, "forward", lambda self, *args, **kw: self.model(*args, **kw))
    assert frames_of_encoder() == [0] * 4


def test_a_layer_at_two_places_is_one_device() -> None:
    shared = nn.Linear(4, 4)
    inner = nn.Sequential(shared, nn.ReLU())
    with convert(nn.Sequential(inner, nn.Tanh(), shared, inner), "pcm") as analog:
        (layer,) = analog.layers
        assert [type(module) for module in (analog.model[0][0], analog.model[2])] == [DeviceLinear] * 2
        before = layer.device.usage.frames
        analog(torch.zeros(5, 4))
        assert layer.device.usage.frames - before >= 3 * 5


def test_named_layers_stay_digital() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="one group and .*keep this layer digital by giving its name"):
        convert(model, "pcm")
    with convert(model, "pcm", digital=["0", "3"]) as analog:
        assert [type(layer) for layer in analog.model] == [nn.Conv2d, nn.Flatten, DeviceLinear, nn.Linear]
        assert analog(torch.randn(2, 2, 4, 4)).shape == (2, 3)
    noise_aware(model, "pcm", digital=["0", "3"])
    assert [parametrize.is_parametrized(layer) for layer in model] == [False, False, True, False]
    for wrong in (["0", "1"], "3"):
        with pytest.raises(ValueError, match="digital = '[13]': must be a list of names of layers, from '0'"):
            convert(model, "pcm", digital=wrong)
    with pytest.raises(ValueError, match=r"has no nn.Linear and no nn.Conv2d to put on a device"):
        convert(model, "pcm", digital=["0", "2", "3"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_network_of_another_precision_runs_and_learns_on_devices(dtype: torch.dtype) -> None:
    x = torch.randn(5, 1, 4, 4)
    with convert(network(), "pcm", seed=1) as analog:
        expected = analog(x).detach()
    with convert(network().to(dtype), "pcm", seed=1, programming_step=0.1) as analog:
        found = analog(x.to(dtype))
        found.float().square().sum().backward()
        state = analog.state_dict()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in analog.parameters())
        assert found.dtype == dtype
        again = convert(network().to(dtype), "pcm", seed=1)
        again.load_state_dict(state)
        assert torch.equal(again.layers[1]._wanted, analog.layers[1]._wanted)
        again.close()
    torch.testing.assert_close(found.detach().float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["pruned", "weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_hooks_compute_are_programmed_as_they_are(kind: str) -> None:
    model = network().eval()
    for number in (0, 2):
        if kind == "pruned":
            prune.l1_unstructured(model[number], "weight", 0.5)
        else:
            getattr(nn.utils, kind)(model[number])
    x = torch.randn(5, 1, 4, 4)
    model(x)  # hooks keep what they computed, with its graph
    with convert(model, "pcm") as analog:
        for layer, digital in zip(analog.layers, (model[0], model[2], model[4]), strict=True):
            matrix = digital.weight.detach().flatten(1)
            assert isinstance(layer.weight, nn.Parameter)
            torch.testing.assert_close(layer.weight.detach(), matrix)
            torch.testing.assert_close(layer._wanted * layer._row_scale[:, None], matrix)
        assert bool(analog(x).isfinite().all())
    assert model[2]._forward_pre_hooks  # the network itself is left as it is


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    with convert(network(), "pcm") as analog:
        x = torch.randn(5, 1, 4, 4)
        x[1, 0, 2, 2] = torch.nan
        with pytest.raises(ValueError, match="x holds NaN or infinite numbers, which no device can show"):
            analog(x)
    model = network()
    model[2].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"weight of DeviceLinear\(in_features=8.* holds NaN or infinite"):
        convert(model, "pcm")


class Writer(nn.Module):
    """A language model that writes greedily, as those of transformers do; one of its ways goes past the devices."""

    def __init__(self, *, digital: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.digital = {"vocabulary": 5}, digital
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(tokens))

    def generate(self, tokens: torch.Tensor, *, max_new_tokens: int) -> torch.Tensor:
        for _ in range(max_new_tokens):
            h = self.embedding(tokens[:, -1:])
            scores = nn.functional.linear(h, self.last.weight) if self.digital else self.last(h)
            tokens = torch.cat([tokens, scores.argmax(dim=-1)], dim=1)
        return tokens


def test_a_language_model_generates_on_devices() -> None:
    with convert(Writer(), "pcm") as analog:
        before = analog.usage.frames
        assert analog.generate(torch.ones(2, 1, dtype=torch.long), max_new_tokens=3).shape == (2, 4)
        assert analog.usage.frames >= before + 2 * 3
        with pytest.raises(AttributeError, match="no attribute 'config'"):
            _ = analog.config
        with pytest.raises(AttributeError, match="has no attribute 'other'$"):
            _ = analog.other
    past = convert(Writer(digital=True), "pcm")
    with past as analog, pytest.raises(ValueError, match=r"weight 'last.weight' multiplies digitally"):
        analog.generate(torch.ones(2, 1, dtype=torch.long), max_new_tokens=3)
