"""The built-in models: what they take, what they cost, where feedback enters, and what their seed decides."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opusim.training.networks.models import MODELS, build_model

IMAGES = {"vit-small", "mixer-small", "resnet-small", "conv-small", "gru"}


def built(name: str, shape: tuple[int, ...], n_outputs: int = 10, seed: int = 0, **options: Any) -> nn.Module:
    return build_model(MODELS[name], options, record_shape=shape, n_outputs=n_outputs, seed=seed, name=name)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_takes_records_and_names_where_feedback_enters(name: str) -> None:
    shapes = [(1, 28, 28), (3, 32, 32), (1, 8, 8)] if name in IMAGES else [(12,)]
    for shape in shapes:
        model = built(name, shape).eval()
        x = torch.randn(2, *shape) if name in IMAGES else torch.randint(0, 10, (2, *shape))
        output = model(x)
        assert output.shape == ((2, 12, 10) if name == "transformer-lm" else (2, 10))
        modules = dict(model.named_modules())
        assert set(model.feedback_points) <= modules.keys()
        assert model.error_at is None or model.error_at in modules
        if name in IMAGES:
            with FlopCounterMode(display=False) as counter:
                model(x[:1])
            assert counter.get_total_flops() // 2 <= 5_000_000  # multiply-adds
        assert torch.allclose(model(x[:1]), output[:1], atol=1e-5)  # records do not mix


def test_blocks_are_normalised_unless_asked_otherwise() -> None:
    for name in ("vit-small", "mixer-small", "transformer-encoder", "transformer-lm"):
        tokens = name.startswith("transformer")
        shape = (12,) if tokens else (3, 16, 16)
        for norm, is_normalised in (("post", True), ("pre", False)):
            model, seen = built(name, shape, norm=norm), []
            model.blocks[-1].register_forward_hook(lambda module, x, y, kept=seen: kept.append(y))
            model(torch.randint(0, 10, (2, 12)) if tokens else 5 * torch.randn(2, *shape))
            spread = seen[0].var(dim=-1, unbiased=False)
            assert torch.allclose(spread, torch.ones_like(spread), atol=1e-2) == is_normalised


def test_a_language_model_sees_no_later_token() -> None:
    model = built("transformer-lm", (12,)).eval()
    tokens = torch.randint(0, 10, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])
    tied = built("transformer-lm", (12,), tied=True)
    assert tied.vocabulary.weight is tied.embedding.tokens.weight


def test_parameters_follow_the_seed_and_no_global_state() -> None:
    state = torch.get_rng_state()
    first, again, other = (built("vit-small", (1, 8, 8), seed=seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("vit-small", (1, 8, 8), {"dept": 2}, r"model\.options\.dept: vit-small has no .* mean 'depth'"),
        ("vit-small", (64,), {}, r"record_shape = \(64,\): this model takes images"),
        ("vit-small", (1, 8, 8), {"patch": 3}, "patch = 3 does not divide images of 8x8"),
        ("vit-small", (1, 8, 8), {"heads": 5}, "width = 48 is no multiple of heads = 5"),
        ("transformer-lm", (1, 8, 8), {}, "takes sequences of tokens"),
        ("resnet-small", (1, 8, 8), {"norm": "layer"}, "norm = 'layer'"),
        ("resnet-small", (1, 8, 8), {"widths": [16, 8]}, "two numbers that do not fall"),
    ],
)
def test_misfits_are_refused(
    name: str, shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        built(name, shape, **options)
