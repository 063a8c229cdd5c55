"""Train twenty ordinary models through a noisy device, each against the control in which only its top learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu

from opusim import FeedbackAlignment, open_device
from opusim.training.feedback.projection import DeviceProjection

SIDE, CLASSES, WIDTH, HEADS = 8, 10, 16, 2
LEVELS, LENGTH = 16, 16  # vocabulary and length of a digit as text
N_TRAIN, BATCH, SIGMA = 1200, 64, 0.5


# Parts


def stack(*activations: nn.Module, norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    """A narrow network of one hidden layer for each activation."""
    layers: list[nn.Module] = []
    fan_in = SIDE * SIDE
    for activation in activations:
        layers += [nn.Linear(fan_in, WIDTH), *([norm(WIDTH)] if norm else []), activation]
        fan_in = WIDTH
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Subclass(nn.Module):
    """Attributes and a forward of its own, as in a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(SIDE * SIDE, WIDTH), nn.ReLU()
        self.fc2, self.act2 = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))


class OwnForward(nn.Module):
    """Two inputs by keyword, functional activations, and a mapping as output."""

    def __init__(self) -> None:
        super().__init__()
        half = SIDE * SIDE // 2
        self.left, self.right = nn.Linear(half, WIDTH), nn.Linear(half, WIDTH)
        self.mixed, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, *, pixels: Tensor, scale: float = 1.0) -> dict[str, Any]:
        upper, lower = pixels.chunk(2, dim=1)
        h = torch.cat([self.left(upper).tanh(), self.right(lower).tanh()], dim=1)
        return {"logits": self.head(self.mixed(h).tanh()) * scale, "width": h.shape[1]}


class Residual(nn.Module):
    """norm(x + f(x))."""

    def __init__(self, f: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.f, self.norm = f, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.f(x))


def dense_block() -> nn.Module:
    return Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.LayerNorm(WIDTH))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut (He et al., 2016), normalised behind the sum."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.layer1, self.layer2 = nn.Sequential(BasicBlock(4, 4, 1)), nn.Sequential(BasicBlock(4, 8, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(2), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(self.stem(x.view(-1, 1, SIDE, SIDE))))
        return self.fc(self.pool(h).flatten(1))


def encoder_layer() -> nn.TransformerEncoderLayer:
    """A post-norm layer of attention and feed-forward."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)


class Encoder(nn.Module):
    """A digit's eight rows are the tokens; `patches` makes them squares of an image, as in a ViT."""

    def __init__(self, patches: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, 4) if patches else None
        self.rows = None if patches else nn.Linear(SIDE, WIDTH)
        self.positions = nn.Parameter(torch.randn(4 if patches else SIDE, WIDTH))
        self.layers = nn.ModuleList(encoder_layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, SIDE, SIDE)
        h = self.patches(image).flatten(2).mT if self.patches is not None else self.rows(image[:, 0])
        h = h + self.positions
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(dim=1))


class MixerBlock(nn.Module):
    """Mixes positions, then channels (Tolstikhin et al., 2021), normalised behind each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(SIDE, SIDE), nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm1(h + gelu(self.tokens(h.mT)).mT)
        return self.norm2(h + gelu(self.channels(h)))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(SIDE, WIDTH), nn.Sequential(MixerBlock(), MixerBlock())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x.view(-1, SIDE, SIDE))).mean(dim=1))


class Language(nn.Module):
    """A decoder that predicts the next level of grey; its vocabulary layer may share the embedding's weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(LEVELS, WIDTH),
            nn.Parameter(torch.randn(LENGTH - 1, WIDTH)),
        )
        self.layers, self.norm = nn.ModuleList(encoder_layer() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.vocabulary = nn.Linear(WIDTH, LEVELS, bias=False)
        if tied:
            nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
            self.vocabulary.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.vocabulary(self.norm(h))


class Bag(nn.Module):
    """Embeddings of levels of grey, one for each pixel, and a small network behind their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LEVELS * LENGTH, 2)
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens + LEVELS * torch.arange(LENGTH)))


class Recurrent(nn.Module):
    """A GRU over a digit's rows; its point lies on the outputs of all rows, of which the head reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(SIDE, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.view(-1, SIDE, SIDE))[0][:, -1])


class Mixed(nn.Module):
    """A body in bfloat16 between parts in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act1 = nn.Linear(SIDE * SIDE, WIDTH), nn.Tanh()
        self.body, self.act2 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.Tanh()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.stem(x)).bfloat16()
        return self.head(self.act2(self.body(h)).float())


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


# The table


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it is trained on, and its feedback points."""

    build: Callable[[], nn.Module]
    task: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 60
    lr: float = 0.01
    by_name: bool = False
    """Whether the model takes a keyword and returns a mapping."""


def tanh_stack(norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    return stack(nn.Tanh(), nn.Tanh(), norm=norm)


def dense_residual() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, WIDTH), dense_block(), dense_block(), nn.Linear(WIDTH, CLASSES)
    )


LANGUAGE = {"points": "layers.*", "error_at": "vocabulary", "encoding": "planes"}
CASES = {
    "module subclass": Case(build=Subclass),
    "nested Sequential": Case(build=lambda: nn.Sequential(tanh_stack()[:2], nn.Sequential(tanh_stack()[2:]))),
    "Flatten": Case(build=lambda: nn.Sequential(nn.Unflatten(1, (SIDE, SIDE)), nn.Flatten(), *tanh_stack())),
    "Dropout": Case(build=lambda: stack(nn.Sequential(nn.Tanh(), nn.Dropout(0.1)), nn.Tanh())),
    "LayerNorm": Case(build=lambda: tanh_stack(nn.LayerNorm)),
    "BatchNorm": Case(build=lambda: tanh_stack(nn.BatchNorm1d)),
    "LeakyReLU": Case(build=lambda: stack(nn.LeakyReLU(), nn.LeakyReLU())),
    "SiLU": Case(build=lambda: stack(nn.SiLU(), nn.SiLU())),
    "Conv2d": Case(build=convolutional, options={"spread": "full"}),
    "residual": Case(build=dense_residual, options={"points": Residual}),
    "ResNet": Case(build=ResNet, options={"points": BasicBlock, "encoding": "planes"}, steps=100, lr=5e-3),
    "ViT": Case(build=lambda: Encoder(patches=True), options={"points": "layers.*"}, steps=100),
    "encoder transformer": Case(build=Encoder, options={"points": "layers.*"}, steps=100),
    "decoder transformer": Case(build=Language, task="text", options=LANGUAGE, steps=100, lr=5e-3),
    "Embedding": Case(
        build=Bag, task="tokens", options={"points": ["embedding", "body.2"], "spread": "full"}
    ),
    "GRU": Case(build=Recurrent, options={"points": "gru"}),
    "Mixer": Case(build=Mixer, options={"points": MixerBlock}),
    "mixed dtypes": Case(build=Mixed),
    "tied weights": Case(
        build=lambda: Language(tied=True), task="text", options=LANGUAGE, steps=100, lr=5e-3
    ),
    "own forward": Case(
        build=OwnForward, options={"points": ["left", "right", "mixed"], "error_at": "head"}, by_name=True
    ),
}


QUICK = {"module subclass", "Conv2d", "residual", "encoder transformer", "Embedding", "GRU", "own forward"}
"""One model of each kind: dense, convolutional, residual, attention, tokens, recurrent, a mapping of its own."""


@cache
def records(task: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets: digits and their classes; levels of grey and the class, or the next level."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels, classes = (
        torch.tensor(digits.data, dtype=torch.float32)[order],
        torch.tensor(digits.target)[order],
    )
    if task == "digits":
        return pixels / 16, classes
    rows = pixels.view(-1, SIDE, SIDE)[:, 2:6:2]
    tokens = (rows.flatten(1) * (LEVELS / 16.01)).long()
    return (tokens, classes) if task == "tokens" else (tokens[:, :-1], tokens[:, 1:])


def losses(case: Case, model: nn.Module, rows: Tensor | slice) -> Tensor:
    """Mean cross-entropy of each of some records."""
    x, y = (part[rows] for part in records(case.task))
    output = model(pixels=x)["logits"] if case.by_name else model(x)
    if y.ndim == 1:
        return cross_entropy(output, y, reduction="none")
    return cross_entropy(output.mT, y, reduction="none").mean(dim=1)


def held_out_losses(case: Case, *, seed: int, learns: bool = True) -> Tensor:
    """Train on the first records and return the loss of each of the others.

    Args:
        case: The model.
        seed: Seed of the initial weights, the batches and the device's noise.
        learns: Whether feedback reaches the points; False is the control.
    """
    torch.manual_seed(seed)
    model = FeedbackAlignment(case.build(), gain=float(learns), **case.options)
    if learns:
        x = records(case.task)[0][:2]
        n_inputs, n_outputs = model.shape(pixels=x) if case.by_name else model.shape(x)
        model.noisy_device = open_device(
            "gaussian", n_inputs=n_inputs, n_outputs=n_outputs, seed=seed, noise={"sigma": SIGMA}
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr)
    for _ in range(case.steps):
        optimizer.zero_grad()
        losses(case, model, torch.randint(0, N_TRAIN, (BATCH,))).mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return losses(case, model, slice(N_TRAIN, None))


def standard_errors(gain: Tensor) -> float:
    """A mean in units of its standard error."""
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_model_beats_the_control_in_which_only_its_top_learns(name: str) -> None:
    """On records that neither saw, by five standard errors over the records."""
    case = CASES[name]
    gain = held_out_losses(case, seed=1, learns=False) - held_out_losses(case, seed=1)
    assert standard_errors(gain) > 5


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_eighteen_models_beat_their_controls_over_seeds() -> None:
    """By five standard errors over five seeds of weights, batches and noise, with the mean over held-out records."""
    ahead = []
    for case in CASES.values():
        gains = [
            (held_out_losses(case, seed=seed, learns=False) - held_out_losses(case, seed=seed)).mean()
            for seed in range(1, 6)
        ]
        ahead.append(standard_errors(torch.stack(gains)))
    assert sum(each > 5 for each in ahead) >= 18, dict(zip(CASES, ahead, strict=True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["module subclass", "GRU"])
def test_planted_fault_feedback_of_another_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails if each record receives its neighbour's feedback, which has the same law."""
    read = DeviceProjection.read
    monkeypatch.setattr(DeviceProjection, "read", lambda self, error: read(self, error).roll(1, dims=0))
    with pytest.raises(AssertionError, match="standard_errors"):
        test_the_model_beats_the_control_in_which_only_its_top_learns(name)


# What is refused, and the remedy that the message names


class TimeFirst(nn.Module):
    """A recurrent network over (time, batch, features) with an output for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(SIDE, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][-1])


class WrittenOut(nn.Module):
    """Two layers written out, whose parameters belong to the model, and a submodule without any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(SIDE, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, CLASSES))
        self.hidden = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden((x @ self.first).tanh()) @ self.second


HIDDEN = {"points": ["left", "right", "mixed"]}
REFUSED = {  # model, shape of its input, options, reason, options that follow the message
    "no blocks": (WrittenOut, (3, SIDE), {}, "finds no repeated block in WrittenOut", {"points": "hidden"}),
    "time first": (
        TimeFirst,
        (5, 3, SIDE),
        {"points": "gru"},
        "point 'gru' has 5 records of 3 positions and the error 3 of 1; give batch_dim",
        {"points": "gru", "batch_dim": 1},
    ),
    "mapping": (OwnForward, (3, SIDE * SIDE), HIDDEN, "the model returns", {**HIDDEN, "error_at": "head"}),
    "late point": (
        tanh_stack,
        (3, SIDE * SIDE),
        {"points": nn.Linear},
        "the error is taken at the output of point '4'; leave it out of points",
        {"points": ["0", "2"]},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_a_remedy_that_works(name: str) -> None:
    build, shape, options, reason, remedy = REFUSED[name]

    def step(options: Mapping[str, Any]) -> nn.Module:
        model = FeedbackAlignment(build(), **options)
        x = torch.rand(shape)
        output = model(pixels=x)["logits"] if isinstance(model.model, OwnForward) else model(x)
        cross_entropy(output, torch.arange(3)).backward()
        return model

    with pytest.raises(ValueError, match=reason):
        step(options)
    assert all(p.grad.any() for p in step(remedy).parameters())
