"""Find the blocks of ordinary models, and warn about residual streams that nothing normalises."""

import pytest
import torch
from torch import nn

from opusim import FeedbackAlignment
from opusim.training.feedback.choice import find_blocks
from tests.support.record_models import Custom

WIDTH = 8


class Declared(nn.Module):
    feedback_points = ("stem",)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


def layer(kind: type[nn.Module] = nn.TransformerEncoderLayer, norm_first: bool = False) -> nn.Module:
    return kind(WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first)


def encoder(n_layers: int = 3) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(), n_layers, enable_nested_tensor=False)


MLP = (
    nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid(),
)  # fmt: skip
MODELS = {
    "mlp in parts": (nn.Sequential(nn.Sequential(*MLP[:3]), nn.Sequential(*MLP[3:])), ["0.2", "1.2"]),
    "encoder": (encoder(), ["layers.0", "layers.1"]),
    "encoder and decoder": (
        nn.Transformer(WIDTH, 2, 2, 2, 8, custom_encoder=encoder(2)),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
    "more decoder layers": (
        nn.Transformer(WIDTH, 2, 2, 3, 8, custom_encoder=encoder(2)),
        ["decoder.layers.0", "decoder.layers.1"],
    ),
    "declared": (Declared(), ["stem"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found(name: str) -> None:
    model, expected = MODELS[name]
    assert list(find_blocks(model)) == expected
    assert FeedbackAlignment(model, "blocks").points == tuple(expected)


@pytest.mark.parametrize(
    "model", [nn.GRU(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Tanh())]
)
def test_a_model_without_blocks_is_refused_with_a_remedy(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="finds no repeated block in (GRU|Sequential)"):
        FeedbackAlignment(model)


@pytest.mark.slow  # the import takes seconds
def test_blocks_of_transformers_are_found() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": 1}
    gpt = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, **sizes)
    assert find_blocks(transformers.GPT2LMHeadModel(gpt)) == ("transformer.h.0", "transformer.h.1")
    sizes = {"num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}
    bert = transformers.BertConfig(num_hidden_layers=3, hidden_size=8, **sizes)
    blocks = find_blocks(transformers.BertForSequenceClassification(bert))
    assert blocks == ("bert.encoder.layer.0", "bert.encoder.layer.1")


def stream(block: nn.Module, last: nn.Module) -> nn.Module:
    """A stem, two blocks and a head; the first block is the point."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, last, nn.Linear(WIDTH, 3))


def residual(*after: nn.Module) -> nn.Module:
    """x + f(x), and what follows the sum."""
    parts = {"f": nn.Linear(WIDTH, WIDTH), "after": nn.Sequential(*after)}
    return Custom(lambda m, x: m.after(x + m.f(x)), **parts)


def affine() -> nn.Module:
    """A linear layer written out; its bias is no residual."""
    parts = {"w": nn.Parameter(torch.eye(WIDTH)), "b": nn.Parameter(torch.zeros(WIDTH))}
    return Custom(lambda m, x: x @ m.w + m.b, **parts)


STREAMS = {
    "pre-norm": (lambda: layer(norm_first=True), True),
    "no norm": (residual, True),
    "relu of the sum": (lambda: residual(nn.ReLU()), True),
    "dropout of the sum": (lambda: residual(nn.Dropout(0.1)), True),
    "post-norm": (layer, False),
    "norm after the sum": (lambda: residual(nn.LayerNorm(WIDTH)), False),
    "bounded": (lambda: residual(nn.Tanh()), False),
    "multilayer perceptron": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), False),
    "written out": (affine, False),
}


@pytest.mark.parametrize("name", STREAMS)
def test_only_a_stream_that_nothing_normalises_is_warned_about(name: str) -> None:
    """Once: in the first forward pass that learns."""
    make, warned = STREAMS[name]
    x = torch.randn(2, 5, WIDTH)
    model = FeedbackAlignment(stream(make(), make()), "1", normalised=False)
    with torch.no_grad():
        model(x)
    if warned:
        with pytest.warns(UserWarning, match="no norm follows the residual sum at feedback points '1'"):
            model(x)
    model(x)  # a warning is an error here
