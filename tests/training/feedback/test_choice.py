"""Defaults of FeedbackAlignment suit the model, are told, recorded in runs, and give way to what is given."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from opusim import FeedbackAlignment, training
from opusim.training.feedback.choice import tell
from opusim.training.feedback.config import DfaConfig
from opusim.training.feedback.trainer import feedback_points
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.sequence_models import TransformerEncoder, TransformerLM
from tests.support.record_models import Custom

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, LENGTH, WIDTH = 16, 15, 16
words = torch.randint(0, TOKENS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
pixels = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(2))
numbers = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Gpt(nn.Module):
    """As nanoGPT: small weights, pre-norm blocks, perhaps tied weights or a loss of its own."""

    def __init__(self, *, norm_first: bool = True, tied: bool = False, own_loss: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)  # as many as a layer has outputs
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, **options) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        for matrix in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(matrix, std=0.02)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.own_loss = own_loss

    def forward(self, tokens: Tensor) -> Any:
        h = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.h:
            h = block(h, src_mask=mask, is_causal=True)
        scores = self.lm_head(self.norm(h))
        return (scores, scores.square().mean()) if self.own_loss else scores


def tagger() -> nn.Module:
    """Gives one of as many classes as there are tokens to a whole sequence: no language model."""
    parts = {"embedding": nn.Embedding(TOKENS, WIDTH), "gru": nn.GRU(WIDTH, WIDTH, batch_first=True)}
    parts |= {"second": nn.GRU(WIDTH, WIDTH, batch_first=True), "head": nn.Linear(WIDTH, TOKENS)}
    return Custom(lambda m, x: m.head(m.second(m.gru(m.embedding(x))[0])[0][:, -1]), **parts)


def basic(c_in: int, c_out: int, stride: int, pre: bool) -> nn.Module:
    """A residual block of convolutions, normalised at the end of its branch or, with `pre`, at its start."""
    parts = {"conv": nn.Conv2d(c_in, c_out, 3, stride, 1), "bn": nn.BatchNorm2d(c_in if pre else c_out)}
    parts["shortcut"] = nn.Conv2d(c_in, c_out, 1, stride)
    if pre:
        return Custom(lambda m, x: m.shortcut(x) + m.conv(relu(m.bn(x))), **parts)
    return Custom(lambda m, x: relu(m.bn(m.conv(x)) + m.shortcut(x)), **parts)


def resnet(pre: bool = False) -> nn.Module:
    layer1 = nn.Sequential(*(basic(4, 4, 1, pre) for _ in range(2)))
    parts = {"stem": nn.Conv2d(1, 4, 3, padding=1), "layer1": layer1}
    parts |= {"layer2": nn.Sequential(basic(4, 8, 2, pre), basic(8, 8, 1, pre)), "fc": nn.Linear(8, 3)}
    return Custom(lambda m, x: m.fc(m.layer2(m.layer1(m.stem(x))).mean(dim=(2, 3))), **parts)


def dense(head: bool) -> nn.Module:
    """Residual convolutions whose last block ends the model, or a convolution behind them and a head."""
    blocks = nn.Sequential(basic(1, 4, 1, False), basic(4, 4, 1, False))
    if not head:
        return Custom(lambda m, x: m.blocks(x), blocks=blocks)
    last = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU())
    ways = {"blocks": blocks, "last": last, "fc": nn.Linear(6, 3)}
    return Custom(lambda m, x: m.fc(m.last(m.blocks(x)).mean(dim=(2, 3))), **ways)


def functional() -> nn.Module:
    """Two convolutions and two layers, all else functions, as in torch's first tutorial."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = max_pool2d(relu(m.conv1(x)), 2)
        return m.fc2(relu(m.fc1(max_pool2d(relu(m.conv2(x)), 2).flatten(1))))

    convolutions = {"conv1": nn.Conv2d(1, 3, 3, padding=1), "conv2": nn.Conv2d(3, 5, 3, padding=1)}
    return Custom(forward, **convolutions, fc1=nn.Linear(80, 7), fc2=nn.Linear(7, 3))


def plain() -> nn.Module:
    parts = {"first": nn.Linear(6, 5), "norm": nn.LayerNorm(5), "second": nn.Linear(5, 3)}
    return Custom(lambda m, x: m.second(torch.tanh(m.norm(m.first(x)))), **parts)


def vgg() -> nn.Sequential:
    layers = [nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))


def built_in(kind: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind((LENGTH,), TOKENS, width=WIDTH, depth=3, heads=2, **options)


BLOCKS = ("h.0", "h.1")
DECLARED = ("blocks.0", "blocks.1")
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "pre-norm": (Gpt, words, {"points": BLOCKS, "error_at": "lm_head.input", "normalised": True}),
    "tied": (lambda: Gpt(tied=True), words, {"points": BLOCKS, "error_at": "lm_head.input", "normalised": True}),
    "post-norm": (
        lambda: Gpt(norm_first=False), words, {"points": BLOCKS, "error_at": "lm_head.input", "normalised": False},
    ),
    "own loss": (
        lambda: Gpt(own_loss=True), words, {"points": BLOCKS, "error_at": "lm_head.input", "normalised": True},
    ),
    "no language model": (tagger, words, {"points": ("gru", "second")}),
    "residual convolutions": (resnet, pixels, {"points": ("layer2.1",)}),
    "pre-activation": (lambda: resnet(pre=True), pixels, {"points": ("layer2.1",), "normalised": True}),
    "a convolution behind the blocks": (lambda: dense(head=True), pixels, {"points": ("last.1",)}),
    "blocks at the end": (lambda: dense(head=False), pixels, {"points": ("blocks.0",)}),
    "functional convolutions": (functional, pixels, {"points": ("conv2",), "spread": "full"}),
    "stacked convolutions": (vgg, pixels, {"points": ("4",), "spread": "full"}),
    "functional layers": (plain, numbers, {"points": ("norm",)}),
    "layers": (mlp, numbers, {"points": ("1", "3")}),
    "declared": (built_in(TransformerLM), words, {"points": DECLARED, "error_at": "transform"}),
    "declared pre-norm": (
        built_in(TransformerLM, norm="pre"), words, {"points": DECLARED, "error_at": "transform", "normalised": True},
    ),
    "declared output": (built_in(TransformerEncoder, vocabulary=TOKENS), words, {"points": DECLARED}),
}  # fmt: skip
PLAIN = {"error_at": "", "normalised": False, "spread": "broadcast", "gain": 1.0}


def tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def gradients(build: Callable[[], nn.Module], x: Tensor, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = FeedbackAlignment(build(), **options)
    tensor(model(x)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_chosen_suits_the_model(name: str) -> None:
    """The first pass chooses what `shape` chooses, and the gradients are those of the same arguments, given."""
    build, x, found = MODELS[name]
    wanted = {**PLAIN, **found, "gain": 0.3 if found.get("normalised") else 1.0}
    model = FeedbackAlignment(build())
    tensor(model(x)).sum().backward()
    assert model.chosen == wanted
    looked = FeedbackAlignment(build())
    looked.shape(x[:2])
    assert looked.chosen == wanted
    assert all(map(torch.equal, gradients(build, x), gradients(build, x, **wanted)))


def test_the_error_before_the_vocabulary_layer_is_that_of_the_module_before_it() -> None:
    chosen = gradients(Gpt, words)
    assert all(map(torch.equal, chosen, gradients(Gpt, words, error_at="norm")))
    assert not all(map(torch.equal, chosen, gradients(Gpt, words, error_at="")))
    assert FeedbackAlignment(Gpt()).shape(words) == (WIDTH, WIDTH)


GIVEN = {"points": "h.0", "error_at": "lm_head", "normalised": False, "spread": "full", "gain": 0.5}


@pytest.mark.filterwarnings("ignore:no norm follows")
@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_that_is_given_wins(name: str) -> None:
    value = GIVEN[name]
    model, free = FeedbackAlignment(Gpt(), **{name: value}), FeedbackAlignment(Gpt())
    for each in (model, free):
        tensor(each(words)).sum().backward()
    others = {**free.chosen, "gain": 1.0 if name == "normalised" else 0.3}
    assert model.chosen == {**others, name: (value,) if name == "points" else value}
    line = next(line for line in repr(model).splitlines() if line.strip().startswith(f"{name}="))
    assert "(" not in line.replace("('h.0',)", "")  # no reason
    declared = TransformerLM((LENGTH,), TOKENS, width=WIDTH, depth=3, heads=2)
    assert FeedbackAlignment(declared, ["blocks.1"], error_at="").chosen["error_at"] == ""


def convolutions(*head: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), *head)


POOLED = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.mark.parametrize(("model", "x", "change", "layer"), [
    (convolutions(*POOLED), pixels, {}, "6"),
    (convolutions(*POOLED, nn.LogSoftmax(1)), pixels, {}, "6"),
    (convolutions(*POOLED), pixels, {"gain": 0.0}, None),
    (convolutions(*POOLED), pixels, {"error_at": "5"}, None),
    (convolutions(nn.Flatten(), nn.Linear(8 * 12 * 12, 5)), pixels, {}, None),
    (convolutions(*POOLED[:2], nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)), pixels, {}, None),
    (Gpt(), words, {}, None),
])  # fmt: skip
def test_a_layer_that_may_start_as_gradient_is_told(
    model: Any, x: Any, change: Any, layer: Any, caplog: Any
) -> None:
    aligned = FeedbackAlignment(model, **change)
    assert aligned.unstarted is None  # no sizes yet
    aligned.shape(x)
    assert aligned.unstarted == layer
    tell.cache_clear()
    aligned.tell_choices()
    assert ("; try model.start_from_feedback('6')" in caplog.text) == (layer is not None)
    if layer is not None:
        aligned.start_from_feedback(layer)


def test_a_pass_without_gradients_decides_nothing_that_needs_them() -> None:
    model = FeedbackAlignment(Gpt())
    with torch.inference_mode():
        model.shape(words)
        model(words)
    assert model.chosen["normalised"] is None
    tensor(model(words)).sum().backward()
    assert model.chosen["normalised"] is True


def test_a_place_that_receives_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="'embedding' receives no tensor of real numbers.*name a submodule"):
        FeedbackAlignment(Gpt(), ["h.0"], error_at="embedding.input")(words)
    with pytest.raises(ValueError, match=r"error_at = 'lm_haed\.input' is no submodule; did you mean"):
        FeedbackAlignment(Gpt(), error_at="lm_haed.input")


def sequences(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    x = (np.arange(LENGTH)[None] + np.arange(n)[:, None]) % TOKENS
    return x, (x + 1) % TOKENS


def test_a_run_records_what_was_chosen(tmp_path: Path) -> None:
    config = {"threads": 1, "epochs": 1, "trainer": {"kind": "dfa"}, "sampler": {"batch_size": 20}}
    config["data"] = {"n_classes": TOKENS}
    run = training.train(config, data=sequences(), model=Gpt(), folder=tmp_path / "free")
    stored = json.loads((tmp_path / "free" / "config.json").read_text())["config"]["trainer"]
    wanted = PLAIN | {"points": list(BLOCKS), "error_at": "lm_head.input", "normalised": True, "gain": 0.3}
    assert {name: stored[name] for name in wanted} == wanted
    assert run.config.trainer_as(DfaConfig).points == BLOCKS
    given = {"kind": "dfa", "points": ["h.1"], "error_at": "", "normalised": False, "spread": "full"}
    config["trainer"] = given = {**given, "gain": 1.0}
    with pytest.warns(UserWarning, match="no norm follows"):
        run = training.train(config, data=sequences(), model=Gpt(), folder=tmp_path / "given")
    assert {name: getattr(run.config.trainer, name) for name in given} == {**given, "points": ("h.1",)}


def test_folders_of_earlier_versions_keep_their_points_and_their_error() -> None:
    """They name blocks, no place of the error, and plain feedback."""
    earlier = DfaConfig(points=("blocks",), error_at=None, normalised=False, spread="broadcast")
    for build, x, points in ((Gpt, words, BLOCKS), (resnet, pixels, ("layer1.0", "layer1.1", "layer2.0"))):
        network = AnyModule(build(), n_inputs=1, record_shape=tuple(x.shape[1:]), recipe={})
        feedback = feedback_points(network, earlier)
        assert feedback.chosen == {**PLAIN, "points": points}
