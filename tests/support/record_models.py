"""Small models with every way to use a parameter, and batches of records for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def backward(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """The identity as a function of autograd of that name, whose backward pass changes the gradient."""
    forward, backward = staticmethod(lambda ctx, x: x.clone()), staticmethod(lambda ctx, g: change(g))
    methods = {"forward": forward, "backward": backward}
    return type(name, (torch.autograd.Function,), methods)


VOCABULARY = 11


class Custom(nn.Module):
    """A module of a function of itself and the arguments, with the given parts; plain tensors are buffers."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


class Runs(Custom):
    """The same with a linear layer of 4 inputs, `f`, if no part is given."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__(function, **(parts or {"f": nn.Linear(4, 3)}))


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, below: int = 5) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(2))


class Decoder(nn.Module):
    """A causal transformer; the vocabulary layer shares the embedding's matrix as a module, by a function, or not."""

    def __init__(self, tied: str = "module") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.tied = tied
        if tied != "function":
            self.head = nn.Linear(8, VOCABULARY)
        if tied == "module":
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        h = self.layer(h, src_mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device))
        return functional.linear(h, self.tokens.weight) if self.tied == "function" else self.head(h)


class Bottleneck(nn.Module):
    """A residual block with group norms, as in a ResNet."""

    def __init__(self, *, inplace: bool = True) -> None:
        super().__init__()
        self.inplace = inplace
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.first(x)), inplace=self.inplace)
        return functional.relu(x + self.norm2(self.second(h)))


def _steps(model: Custom, x: Tensor) -> Tensor:
    """A recurrent cell, step by step."""
    state = None
    for t in range(x.shape[1]):
        state = model.cell(x[:, t], state)
    return model.head(state)


def _bare(model: Custom, x: Tensor) -> Tensor:
    """A class token, positions, a scale and a matrix without modules of their own."""
    stream = torch.cat([model.token.expand(len(x), -1, -1), x + model.positions[:, :5]], dim=1)
    return (model.scale * stream) @ model.matrix.exp().t()


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _frozen() -> nn.Module:
    """Biases and a head on frozen weights."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    return model


def residual_network(*, inplace: bool = True) -> nn.Module:
    block = Bottleneck(inplace=inplace)
    return nn.Sequential(nn.Conv2d(2, 4, 3), block, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def features(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def tokens(n: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (n, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), features(4)),
    "linear over positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), features(6, 4)),
    "convolution in 1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Tanh(),
            nn.Conv1d(4, 3, 2, stride=2, dilation=2, bias=False),
        ),
        features(2, 9),
    ),
    "convolution in 2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, (2, 3), stride=(2, 1), padding=(1, 0)),
        ),
        features(2, 6, 7),
    ),
    "convolution in 3d": (lambda: nn.Conv3d(2, 3, 2), features(2, 3, 4, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 2), features(2, 3, 4)),
    "normalisation": (
        lambda: nn.Sequential(
            nn.LayerNorm((3, 4)), nn.Linear(4, 4), nn.RMSNorm(4), nn.PReLU(), nn.GroupNorm(3, 3),
            nn.InstanceNorm1d(3, affine=True),
        ),
        features(3, 4),
    ),
    "residual network": (lambda: residual_network(), features(2, 6, 6)),
    "gru": (lambda: Custom(lambda m, x: m.cell(x)[0], cell=nn.GRU(4, 3, batch_first=True)), features(5, 4)),
    "rnn, with dropout switched off": (
        lambda: Custom(
            lambda m, x: m.cell(x)[1].transpose(0, 1),
            cell=nn.RNN(4, 3, 2, nonlinearity="relu", bias=False, dropout=0.5, batch_first=True),
        ).eval(),
        features(5, 4),
    ),
    "projected lstm, time first": (
        lambda: Custom(
            lambda m, x: m.cell(x.transpose(0, 1))[0].transpose(0, 1),
            cell=nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2),
        ),
        features(5, 4),
    ),
    "recurrent cell": (lambda: Custom(_steps, cell=nn.GRUCell(4, 3), head=nn.Linear(3, 2)), features(5, 4)),
    "attention": (
        lambda: Custom(
            lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2, batch_first=True)
        ),
        features(5, 4),
    ),
    "cross attention": (
        lambda: Custom(
            lambda m, x: m.attention(x, x[:, :2], x[:, :2], need_weights=False)[0],
            attention=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
        ),
        features(5, 4),
    ),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True), 2,
            enable_nested_tensor=False,
        ),
        features(5, 4),
    ),
    "tied decoder": (lambda: Decoder("module"), tokens),
    "decoder tied by a function": (lambda: Decoder("function"), tokens),
    "decoder": (lambda: Decoder("no"), tokens),
    "padded embedding": (lambda: nn.Embedding(VOCABULARY, 3, padding_idx=0), tokens),
    "linear used twice": (lambda: Custom(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Linear(4, 4)), features(4)),
    "convolution used twice": (
        lambda: Custom(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Conv2d(2, 2, 3, padding=1)),
        features(2, 4, 4),
    ),
    "bare parameters": (
        lambda: Custom(
            _bare, scale=_parameter(4), token=_parameter(1, 1, 4), positions=_parameter(1, 7, 4),
            matrix=_parameter(3, 4),
        ),
        features(5, 4),
    ),
    "scalar gate": (
        lambda: Custom(lambda m, x: x + m.gate * m.f(x), gate=_parameter(), f=nn.Linear(4, 4)),
        features(5, 4),
    ),
    "in place": (
        lambda: Custom(
            lambda m, x: x.clone().mul_(m.scale).add_(m.shift), scale=_parameter(4), shift=_parameter(4)
        ),
        features(5, 4),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), features(4)),
    "merged positions": (
        lambda: Custom(lambda m, x: m.f(x.flatten(0, 1)).unflatten(0, (len(x), -1)), f=nn.Linear(4, 3)),
        features(5, 4),
    ),
    "bilinear": (lambda: Custom(lambda m, x: m.f(x, x), f=nn.Bilinear(4, 4, 3)), features(4)),
    "unused layer": (
        lambda: Custom(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3)), features(4),
    ),
    "frozen weights": (_frozen, features(4)),
}  # fmt: skip


def make(name: str, seed: int = 1) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return a model with fixed parameters, and a function that makes a batch."""
    build, batch = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()

    def records(n: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed + n)
            return batch(n)

    return model, records
