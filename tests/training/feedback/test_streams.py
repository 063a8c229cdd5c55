"""Points on branches: whether their outputs are added to a stream that nothing normalises, and what is chosen then."""

from __future__ import annotations

from collections.abc import Callable
from operator import iadd
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.known_models.gpt import GPT, Setting
from opusim import FeedbackAlignment
from tests.support.record_models import Custom

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 8
numbers = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))
Way = Callable[[nn.Module, Tensor], Tensor]


def block(how: Way, *after: nn.Module) -> nn.Module:
    """A branch, and by `how` its way into the stream."""
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    parts = {"norm": nn.LayerNorm(WIDTH), "drop": nn.Dropout(0.1), "branch": nn.Sequential(*layers, *after)}
    return Custom(how, **parts, scale=nn.Parameter(torch.ones(WIDTH)), gate=nn.Linear(WIDTH, WIDTH))


def own_norm(x: Tensor) -> Tensor:
    """A layer norm written out."""
    x = x - x.mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5)


WAYS: dict[str, tuple[Way, bool]] = {
    "pre-norm": (lambda b, x: x + b.branch(b.norm(x)), True),
    "branch first": (lambda b, x: b.branch(b.norm(x)) + x, True),
    "dropout": (lambda b, x: x + b.drop(b.branch(b.norm(x))), True),
    "constant factor": (lambda b, x: torch.add(x, 0.5 * b.branch(b.norm(x))), True),
    "factor of add": (lambda b, x: x.add(b.branch(b.norm(x)), alpha=0.5), True),
    "layer scale": (lambda b, x: x + b.scale * b.branch(b.norm(x)), True),
    "in place": (lambda b, x: iadd(x.clone(), b.branch(b.norm(x))), True),
    "checkpoint": (lambda b, x: checkpoint(lambda x: x + b.branch(b.norm(x)), x, use_reentrant=False), True),
    "two branches": (lambda b, x: x + b.branch(b.norm(x)) + b.gate(b.norm(x)), True),
    "pre-norm, written out": (lambda b, x: x + b.branch(own_norm(x)), True),
    "no norm": (lambda b, x: x + b.branch(x), False),
    "post-norm": (lambda b, x: b.norm(x + b.branch(x)), False),
    "post-norm, two branches": (lambda b, x: b.norm(b.branch(x) + b.gate(x) + x), False),
    "post-norm, written out": (lambda b, x: own_norm(x + b.branch(x)), False),
    "norm of the branch": (lambda b, x: x + b.norm(b.branch(x)), False),
    "bounded": (lambda b, x: x + torch.tanh(b.branch(b.norm(x))), False),
    "no sum": (lambda b, x: b.branch(x), False),
    "bias": (lambda b, x: b.branch(x) + b.scale, False),
}


def stack(how: Way, *after: nn.Module) -> nn.Module:
    blocks = (block(how, *after) for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def learnt(model: FeedbackAlignment, run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    torch.manual_seed(2)
    run(numbers).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def equal(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return all((a is None and b is None) or (a is not None and torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("name", WAYS)
def test_only_a_branch_into_an_unnormalised_stream_is_found(name: str) -> None:
    """By `shape` and by the first pass, whose gradients are those of the same arguments, given."""
    how, found = WAYS[name]
    torch.manual_seed(0)
    model = FeedbackAlignment(stack(how), "?.branch")
    plain = {"error_at": "", "spread": "broadcast", "gain": 0.3 if found else 1.0}
    given = FeedbackAlignment(stack(how), "?.branch", normalised=found, **plain)
    given.load_state_dict(model.state_dict())
    looked = FeedbackAlignment(stack(how), "?.branch")
    looked.shape(numbers)
    gradients = learnt(model, model)
    assert looked.chosen == model.chosen == given.chosen
    assert equal(gradients, learnt(given, given))
    reason = "a point is added to an unnormalised stream" if found else "no point is an unnormalised residual"
    assert reason in repr(model)


def test_a_norm_at_the_end_of_the_branch_bounds_the_stream() -> None:
    model = FeedbackAlignment(stack(WAYS["pre-norm"][0], nn.LayerNorm(WIDTH)), "?.branch")
    learnt(model, model)
    assert model.chosen["normalised"] is False


def test_tensors_are_plain_after_the_first_pass_even_if_it_fails() -> None:
    kept: list[Tensor] = []

    def keeping(block: nn.Module, x: Tensor) -> Tensor:
        kept.append(block.branch(block.norm(x)))
        kept.append(x + kept[-1])
        if fails and len(kept) == 4:
            raise RuntimeError("fails")
        return kept[-1]

    fails, model = True, FeedbackAlignment(stack(keeping), "?.branch")
    with pytest.raises(RuntimeError, match="fails"):
        model(numbers)
    fails = False
    model(numbers)
    assert model.chosen["normalised"] is True
    assert {type(tensor) for tensor in kept} == {Tensor}


class Other(Tensor):
    """A class that computes its products itself, and knows no other class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


def test_a_class_of_tensors_that_knows_no_other_still_runs() -> None:
    offset = torch.ones(WIDTH).as_subclass(Other)
    model = FeedbackAlignment(stack(lambda b, x: x + (b.branch(b.norm(x)) + offset)), "?.branch")
    learnt(model, model)
    assert model.chosen["normalised"] is False  # what such a class returns is not followed


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("part", [pytest.param("whole", marks=pytest.mark.slow), "blocks"])
def test_compiled_passes_choose_by_the_points_alone(part: str) -> None:
    torch.compiler.reset()
    model = FeedbackAlignment(stack(WAYS["pre-norm"][0]), "?.branch")
    run: Callable[[Tensor], Tensor] = model
    if part == "whole":
        run = torch.compile(model, backend="eager")
    else:
        for block in list(model.model)[1:4]:
            block.compile(backend="eager")
    learnt(model, run)
    assert model.chosen["normalised"] is False
    shaped = FeedbackAlignment(stack(WAYS["pre-norm"][0]), "?.branch")
    shaped.shape(numbers)
    assert shaped.chosen["normalised"] is True


@pytest.mark.parametrize("autocast", [False, True])
def test_branches_of_a_known_model_are_found(autocast: bool) -> None:
    setting = Setting(layers=2, heads=2, width=WIDTH, context=6, batch=2, steps=1, dropout=0.1)
    model = FeedbackAlignment(GPT(setting, 5), ("blocks.?.attention", "blocks.?.mlp"))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(torch.randint(0, 5, (2, 6))).float().sum().backward()
    assert model.chosen["normalised"] is True
    assert model.gain == 0.3
