"""Every weight matrix goes to a device, which is then read, or is named as digital; compiled networks are taken."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize, prune

from opusim import OpticalLayer, convert, noise_aware, open_device
from opusim.crossbar import conversion
from opusim.crossbar.conversion import digital_names
from opusim.crossbar.layers import DeviceLinear, DeviceTransposedLinear
from tests.opusim.common import EXACT, refuses

x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


class Own(nn.Module):  # a linear layer and another part, which need not be used
    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Plain(nn.Linear):
    pass


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


LEFT: dict[str, Callable[[], nn.Module | nn.Parameter]] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(6, 2),
    "LSTM": lambda: nn.LSTM(6, 6),
    "GRUCell": lambda: nn.GRUCell(6, 6),
    "Conv1d": lambda: nn.Conv1d(2, 3, 2),
    "Conv3d": lambda: nn.Conv3d(2, 3, 2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(2, 3, 2),
    "Bilinear": lambda: nn.Bilinear(2, 2, 2),
    "Scaled": lambda: Scaled(6, 6),
    "parameter of Own": lambda: nn.Parameter(torch.ones(6, 6)),
    "Conv1d of a parametrized weight": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2)),
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_weight_matrix_that_no_device_takes_is_refused_until_it_is_named(kind: str) -> None:
    model = Own(part=LEFT[kind]())
    shown = kind.partition(" of a ")[0]
    refuses(ValueError, rf"1 of 2 layers.* 'part' \({shown}\).*digital=\['part'\]", convert, model, "pcm")
    refuses(ValueError, "1 of 2 layers", noise_aware, model, 0.1)
    assert digital_names(model) == ("part",)
    with convert(model, "pcm", digital=["part"]) as analog:
        placed = {each.name: each.device for each in analog.placement}
        assert placed.pop("layer") == "pcm"
        assert set(placed.values()) == {None}


def test_what_multiplies_nothing_needs_no_name_and_subclasses_are_converted() -> None:
    model = Own(words=nn.Embedding(5, 6), norm=nn.LayerNorm((2, 6)), batch=nn.BatchNorm1d(6))
    with convert(model, "pcm") as analog:
        found = [tuple(each) for each in analog.placement]
        assert found[:2] == [("layer", "Linear", 42, "pcm"), ("words", "Embedding", 30, None)]
        assert found[2:] == [("norm", "LayerNorm", 24, None), ("batch", "BatchNorm1d", 12, None)]
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with convert(model, "pcm") as analog:
        for train in (True, False):
            analog.train(train)(torch.randn(2, 1, 3, 3)).sum().backward()
    with convert(nn.Sequential(Plain(6, 4), nn.Tanh()), "pcm", crossbar=EXACT) as analog:
        assert isinstance(analog.model[0], DeviceLinear)
    refuses(ValueError, r"'part' \(LazyLinear\).*; run", convert, Own(part=nn.LazyLinear(3)), "pcm")


def test_names_of_modules_and_patterns_keep_layers_digital() -> None:
    model = nn.Sequential(*(Own(memory=nn.LSTM(6, 6)) for _ in range(8)))
    refuses(ValueError, r"8 of 16 layers.*'5\.memory' \(LSTM\), \.\.\.; accept", convert, model, "pcm")
    for digital, devices in ((["*.memory"], 8), (["*.memory", "0", "1.*"], 6)):
        with convert(model, "pcm", digital=digital) as analog:
            assert len(analog.layers) == devices
    refuses(ValueError, r"digital = 'memory': .*'0\.layer'", convert, model, "pcm", digital=["memory"])
    model = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 3))
    refuses(ValueError, "one group and .*keep this layer digital by giving its name", convert, model, "pcm")
    with convert(model, "pcm", digital=["0", "3"]) as analog:
        assert [type(layer) for layer in analog.model] == [nn.Conv2d, nn.Flatten, DeviceLinear, nn.Linear]
        assert analog(torch.randn(2, 2, 4, 4)).shape == (2, 3)
    noise_aware(model, "pcm", digital=["0", "3"])
    assert [parametrize.is_parametrized(layer) for layer in model] == [False, False, True, False]
    for wrong in (["0", "1"], "3"):
        refuses(ValueError, "digital = '[13]': must be a list of names", convert, model, "pcm", digital=wrong)
    refuses(ValueError, "has no nn.Linear and no nn.Conv2d", convert, model, "pcm", digital=["0", "2", "3"])


def functional(weight: Callable[[Own], Tensor]) -> Own:
    class Functional(Own):
        def forward(self, x: Tensor) -> Tensor:
            return linear(self.layer(x), weight(self))

    return Functional(words=nn.Embedding(5, 6))


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (lambda own: own.layer.weight, "layer.weight"),
        (lambda own: own.words.weight, "words.weight"),
        (lambda own: own.words.weight.double().float(), "words.weight"),
    ],
)
def test_a_functional_product_with_a_weight_is_refused(weight: Callable[[Own], Tensor], name: str) -> None:
    model = functional(weight)
    with convert(model, "pcm") as analog:
        for _ in range(2):
            refuses(ValueError, rf"weight '{name}' multiplies digitally.*digital=\['{name}'\]", analog, x)
    with convert(model, "pcm", digital=[name]) as analog:
        assert len(analog.layers) == 1
        assert analog(x).isfinite().all()


def test_every_matrix_of_gpt2_is_on_a_device() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 6}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(10).view(2, 5)
    with convert(model, "pcm", crossbar=EXACT) as analog, torch.no_grad():
        assert sum(isinstance(m, DeviceTransposedLinear) for m in analog.modules()) == 4
        digital = "transformer.wte transformer.wpe transformer.h.0.ln_1 transformer.h.0.ln_2 transformer.ln_f"
        assert [each.name for each in analog.placement if each.device is None] == digital.split()
        before = [layer.device.usage.frames for layer in analog.layers]
        found, wanted = analog(tokens).logits, model(tokens).logits
        after = [layer.device.usage.frames for layer in analog.layers]
        assert min(now - then for now, then in zip(after, before, strict=True)) >= 2 * 5
        assert torch.allclose(found, wanted, atol=1e-5)
        model.load_state_dict(analog.model.state_dict(), strict=False)
        assert torch.equal(model(tokens).logits, wanted)
    refuses(ValueError, r"'transformer\.h\.0\.attn\.c_attn' is a Conv1D", noise_aware, model, 0.1)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def part_compiled(model: nn.Sequential) -> nn.Sequential:
    model[2] = torch.compile(model[2], backend="aot_eager")
    model[0].compile(backend="aot_eager")
    return model


def whole_compiled(model: nn.Sequential) -> Callable[..., Tensor]:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("prepare", [whole_compiled, part_compiled])
def test_a_compiled_network_is_converted(prepare: Callable[[nn.Module], nn.Module]) -> None:
    torch.compiler.reset()
    with convert(network(), "pcm", seed=1) as plain, convert(prepare(network()), "pcm", seed=1) as analog:
        assert torch.equal(analog(x), plain(x))
        assert [each.device.usage for each in analog.layers] == [each.device.usage for each in plain.layers]


def test_converted_networks_and_optical_layers_are_compiled() -> None:
    torch.compiler.reset()
    with convert(network(), "pcm", seed=1) as plain, convert(network(), "pcm", seed=1) as analog:
        run = torch.compile(analog, backend="aot_eager")
        for _ in range(2):
            found, wanted = run(x), plain(x)
            assert torch.equal(found, wanted)
            found.sum().backward()
            wanted.sum().backward()
        pairs = zip(analog.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs)
    window = {"n_inputs": 6, "n_outputs": 4, "seed": 2}
    layers = [OpticalLayer(open_device("gaussian", **window), threshold=0.0) for _ in "ab"]
    assert torch.equal(torch.compile(layers[0], backend="aot_eager")(x), layers[1](x))


def convolutional(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2))


def without_devices(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}


def test_states_of_digital_and_of_converted_networks_load_into_each_other() -> None:
    source, images = convolutional(1), torch.randn(3, 1, 3, 3)
    exact = {"crossbar": EXACT}
    other = convert(convolutional(2), "pcm", **exact, seed=1)
    with convert(source, "pcm", **exact) as analog, other:
        state, bare = source.state_dict(), without_devices(analog.model)
        for target, given in ((other, state), (other.model, state), (other.model, bare)):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            target.load_state_dict(given)
            loaded = without_devices(other.model)
            assert loaded.keys() == source.state_dict().keys()
            assert all(torch.equal(loaded[key], value) for key, value in source.state_dict().items())
        digital = convolutional(3)
        digital.load_state_dict(without_devices(analog.model))
        assert torch.equal(digital(images), source(images))


def test_keys_of_earlier_saves_are_read() -> None:
    with convert(convolutional(1), "pcm", seed=1) as analog:
        state = analog.state_dict()
        weight = state.pop("model.0.weight")
        earlier = {**state, "model.0.product.weight": weight.flatten(1)}
        earlier["model.0.product.bias"] = earlier.pop("model.0.bias")
        with convert(convolutional(2), "pcm", seed=1) as loaded:
            loaded.load_state_dict(earlier)
            images = torch.randn(3, 1, 3, 3)
            for each in (analog, loaded):
                each.seek(9)
            assert torch.equal(loaded(images), analog(images))


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
    refuses(ValueError, r"weight 'layers\.0\..*weight' multiplies digitally", frames_of_encoder)
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


def convolutional_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_network_of_another_precision_runs_and_learns_on_devices(dtype: torch.dtype) -> None:
    x = torch.randn(5, 1, 4, 4)
    with convert(convolutional_network(), "pcm", seed=1) as analog:
        expected = analog(x).detach()
    with convert(convolutional_network().to(dtype), "pcm", seed=1, programming_step=0.1) as analog:
        found = analog(x.to(dtype))
        found.float().square().sum().backward()
        state = analog.state_dict()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in analog.parameters())
        assert found.dtype == dtype
        again = convert(convolutional_network().to(dtype), "pcm", seed=1)
        again.load_state_dict(state)
        assert torch.equal(again.layers[1]._wanted, analog.layers[1]._wanted)
        again.close()
    torch.testing.assert_close(found.detach().float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["pruned", "weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_hooks_compute_are_programmed_as_they_are(kind: str) -> None:
    model = convolutional_network().eval()
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
    with convert(convolutional_network(), "pcm") as analog:
        x = torch.randn(5, 1, 4, 4)
        x[1, 0, 2, 2] = torch.nan
        refuses(ValueError, "x holds NaN or infinite numbers, which no device can show", analog, x)
    model = convolutional_network()
    model[2].weight.data[0, 0] = torch.inf
    refuses(ValueError, r"weight of DeviceLinear\(.* holds NaN or infinite", convert, model, "pcm")


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
        refuses(AttributeError, "no attribute 'config'", lambda: analog.config)
        refuses(AttributeError, "has no attribute 'other'$", lambda: analog.other)
    with convert(Writer(digital=True), "pcm") as analog:
        tokens, told = torch.ones(2, 1, dtype=torch.long), "weight 'last.weight' multiplies digitally"
        refuses(ValueError, told, lambda: analog.generate(tokens, max_new_tokens=3))
