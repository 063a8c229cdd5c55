"""Which layers of a network `convert` puts on devices, and that each of them is then read from its device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

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
    with pytest.raises(
        ValueError, match=r"weight 'layers\.0\..*weight' multiplies digitally \(_transformer_enc"
    ):
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
    with pytest.raises(
        ValueError, match=r"one group and .*keep this layer digital by giving its name in digital"
    ):
        convert(model, "pcm")
    with convert(model, "pcm", digital=["0", "3"]) as analog:
        assert [type(layer) for layer in analog.model] == [nn.Conv2d, nn.Flatten, DeviceLinear, nn.Linear]
        assert analog(torch.randn(2, 2, 4, 4)).shape == (2, 3)
    noise_aware(model, "pcm", digital=["0", "3"])
    assert [parametrize.is_parametrized(layer) for layer in model] == [False, False, True, False]
    for wrong in (["0", "1"], "3"):
        with pytest.raises(
            ValueError, match=r"digital = '[13]': must be a list of names of layers, from '0', '2'"
        ):
            convert(model, "pcm", digital=wrong)
    with pytest.raises(ValueError, match=r"has no nn.Linear and no nn.Conv2d to put on a device"):
        convert(model, "pcm", digital=["0", "2", "3"])
