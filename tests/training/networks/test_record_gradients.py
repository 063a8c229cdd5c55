"""Gradients of single records against loops over records, and clips that hold whatever a record holds."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opusim.training.networks.contributions import sums, uses
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.sequence_models import encoder_block
from tests.support.extreme_records import KINDS, SIZES, extreme
from tests.support.record_models import CASES, Custom, features, make

RECORDS = 6
ROUNDING = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


def loss(output: Tensor) -> Tensor:
    """A sum over records with a gradient at every output."""
    flat = output.flatten(1)
    weights = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * weights).tanh().sum()


def record(
    tape: RecordTape, model: nn.Module, x: Tensor, of: Callable[[Tensor], Tensor] = loss
) -> RecordTape:
    with tape.recording(len(x)):
        of(model(x)).backward()
    return tape


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained(model).items()}


def looped(model: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    """Each record's gradient by a pass of its own, in float64."""
    model, found = copy.deepcopy(model).double(), []
    for i in range(len(x)):
        model.zero_grad()
        row = x[i : i + 1]
        loss(model(row.double() if row.is_floating_point() else row)).backward()
        found.append(gradients(model))
    return found


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([part.double().flatten() for part in gradient.values()]).norm())


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative distance of two gradients."""
    return norm({name: found[name].double() - expected[name] for name in expected}) / norm(expected)


GRAM = [
    "linear over positions", "convolution in 1d", "convolution in 2d", "tied decoder", "decoder", "padded embedding",
    "convolution used twice", "gru",
]  # fmt: skip
"""Cases with uses whose norms come from Gram matrices if gradients are large."""


@pytest.fixture
def gram(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take Gram matrices whatever the sizes if the parameter asks for it."""
    if request.param:
        monkeypatch.setattr(sums, "_GRAM_SHARE", 0.0)
        monkeypatch.setattr(uses, "_GRAM_COST", 0)


@pytest.mark.parametrize("card", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize(
    ("name", "gram"), [(name, False) for name in CASES] + [(name, True) for name in GRAM], indirect=["gram"]
)
@pytest.mark.usefixtures("gram")
def test_gradients_norms_and_the_clipped_sum_are_those_of_a_loop_over_records(
    name: str, card: bool, request: pytest.FixtureRequest
) -> None:
    """The loop runs on the CPU."""
    place = request.getfixturevalue("gpu") if card else torch.device("cpu")
    model, batch = make(name)
    few, x = batch(3), batch(RECORDS)
    each = looped(model, x)
    norms = torch.tensor([norm(gradient) for gradient in each], dtype=torch.float64)
    bound = 0.99 * float(norms.median())
    model.to(place)
    tape = record(RecordTape(model, few.to(place)), model, x.to(place))
    bounds = tape.squared_norms().sum(dim=0).sqrt().cpu()
    raised = 1e-3 if tape.several_uses else 1e-4  # by 2^-14 of the products' magnitudes
    assert ((bounds / norms > 1 - 1e-6) & (bounds / norms < 1 + raised)).all()
    assert tape.clip(bound, divisor=3.0) == 0
    factors = [min(1.0, bound / norm(own)) / 3.0 for own in each]
    expected = {key: sum(f * own[key] for f, own in zip(factors, each, strict=True)) for key in each[0]}
    assert distance(on_cpu(gradients(model)), expected) < raised
    found = tape.record_gradients()
    for i, gradient in enumerate(each):
        assert distance(on_cpu({key: rows[i] for key, rows in found.items()}), gradient) < 1e-5


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


OPACUS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear over positions": CASES["linear over positions"],
    "normalisation": (
        lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4), nn.RMSNorm(4), nn.GroupNorm(3, 3)),
        features(3, 4),
    ),
    "decoder": (
        lambda: nn.Sequential(
            nn.Embedding(11, 8),
            encoder_block(8, 2, 2, norm="pre", causal=True),
            encoder_block(8, 2, 2, norm="post", causal=True),
            nn.Linear(8, 11),
        ),
        CASES["tied decoder"][1],
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", list(OPACUS))
def test_records_have_the_gradients_of_opacus(name: str) -> None:
    opacus = pytest.importorskip("opacus")
    build, batch = OPACUS[name]
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model, x = build(), batch(RECORDS)
    reference = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    loss(reference(x.clone().requires_grad_() if x.is_floating_point() else x)).backward()
    tape = record(RecordTape(model, x[:3]), model, x)
    samples = {key.removeprefix("_module."): p.grad_sample for key, p in reference.named_parameters()}
    found = tape.record_gradients()
    for key, rows in samples.items():
        torch.testing.assert_close(found[key], rows, rtol=1e-5, atol=1e-5 * float(rows.abs().max()))
    norms = torch.stack([rows.double().flatten(1).norm(dim=1) for rows in samples.values()]).norm(dim=0)
    torch.testing.assert_close(tape.squared_norms().sum(dim=0).sqrt(), norms, rtol=1e-4, atol=0.0)


# Clips hold

EXTREME = [
    "linear", "linear over positions", "convolution in 1d", "convolution in 3d", "normalisation",
    "linear used twice", "convolution used twice", "attention", "bare parameters", "gru", "weight norm",
]  # fmt: skip


def one_layer(name: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A single module, whose input and signal are what the test says."""
    single = {
        "linear": (nn.Linear(20, 10), features(20)),
        "linear over positions": (nn.Linear(40, 30), features(6, 40)),
        "convolution in 1d": (nn.Conv1d(2, 3, 3), features(2, 40)),
        "normalisation": (nn.LayerNorm(9), features(4, 9)),
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return single[name] if name in single else make(name)


def shares(name: str, count: int, cases: list[tuple[str, float, str, float]]) -> list[float]:
    """The contributions of single records of extreme numbers over C; of several parameters at once."""
    model, batch = one_layer(name)
    tape, found = RecordTape(model, batch(3)), []
    shapes = batch(1).shape[1:], model(batch(1)).shape[1:]
    for number, (value, length, kind, size) in enumerate(cases[:count]):
        bound = (1e-12, 1e-3, 1.0, 1e12)[number % 4]
        x = extreme(tuple(shapes[0]), value, length, number)
        signal = extreme(tuple(shapes[1]), kind, size, number + 1)
        record(tape, model, x, lambda y, signal=signal: (y * signal).sum())
        left_out = tape.clip(bound)
        total = norm(gradients(model))
        assert math.isfinite(total)
        assert total == 0 or not left_out
        found.append(total / bound)
    return found


def grid(count: int, seed: int) -> list[tuple[str, float, str, float]]:
    """Kinds and sizes of inputs and signals, drawn from all pairs."""
    every = list(itertools.product(KINDS, SIZES, KINDS, SIZES))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    return [every[n] for n in order[:count]]


@pytest.mark.parametrize("gram", [False, True], indirect=True)
@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.usefixtures("gram")
def test_no_record_adds_more_than_the_clip(name: str) -> None:
    found = shares(name, 30, grid(30, seed=5))
    assert 0.5 < max(found) <= 1 + ROUNDING


@pytest.mark.parametrize("gram", [False, True], indirect=True)
@pytest.mark.parametrize("name", ["padded embedding", "tied decoder"])
@pytest.mark.usefixtures("gram")
def test_no_record_of_tokens_adds_more_than_the_clip(name: str) -> None:
    model, batch = make(name)
    tape = RecordTape(model, batch(3))
    shape = tuple(model(batch(1)).shape[1:])
    for number, (kind, size) in enumerate(itertools.product(KINDS, SIZES[::2])):
        x, signal = batch(number + 1)[:1], extreme(shape, kind, size, number)
        if number % 2:
            x = torch.full_like(x, 3)  # all signals add up at one token
        record(tape, model, x, lambda y, signal=signal: (y * signal).sum())
        tape.clip(1e-3)
        assert norm(gradients(model)) <= 1e-3 * (1 + ROUNDING)


@pytest.mark.parametrize("name", ["linear", "convolution in 2d", "tied decoder", "gru", "bare parameters"])
def test_one_record_does_not_decide_how_others_are_measured(name: str) -> None:
    """Another way to measure, chosen by one record or by the number of records, would move all factors."""
    model, batch = make(name)
    tape, x = RecordTape(model, batch(3)), batch(40)
    expected = record(tape, model, x).squared_norms()
    for last in (x[:1], x[:1] * 1e30 if x.is_floating_point() else x[1:2]):
        found = record(tape, model, torch.cat([x, last])).squared_norms()[:, :40]
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-12 * float(expected.max()))


def largest_share(model: nn.Module, batch: Callable[[int], Tensor], *, scale: float) -> float:
    """A record's contribution over the clip; its biases, or both uses of its weight, are nearly all of it."""
    tape, x = RecordTape(model, batch(3)), batch(1)
    record(tape, model, x * scale if x.is_floating_point() else x).clip(1e-3)
    return norm(gradients(model)) / 1e-3


def test_planted_fault_a_bias_left_out_of_the_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    assert largest_share(model, features(4), scale=1e-3) <= 1 + ROUNDING

    parts_of = uses.LinearUse.parts_of
    monkeypatch.setattr(uses.LinearUse, "parts_of", lambda found: [parts[:1] for parts in parts_of(found)])
    assert largest_share(model, features(4), scale=1e-3) > 10


def test_planted_fault_uses_of_a_weight_added_as_squares_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same use adds twice the gradient; the root of two squares is only 1.41 times the gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Custom(lambda m, x: m.f(x) + m.f(x), f=nn.Linear(40, 30))
    assert largest_share(model, features(40), scale=1.0) <= 1 + ROUNDING

    def apart(layer: Any) -> list[Any]:
        use, halves = layer.uses[0], (slice(0, 1), slice(1, 2))
        single = [uses.LinearUse(use.delta[:, half], use.h[:, half], *layer.wrt) for half in halves]
        return [part for own in single for parts in own.parts_of([own]) for part in parts]

    monkeypatch.setattr(sums._Joint, "parts_of", lambda layers: [apart(layer) for layer in layers])
    assert largest_share(model, features(40), scale=1.0) == pytest.approx(2**0.5, rel=1e-3)


# What is refused


def test_a_penalty_is_refused_in_the_step() -> None:
    model: nn.Module = nn.Linear(4, 3)
    x = features(4)(RECORDS)
    tape = RecordTape(model, x)

    def penalised(output: Tensor) -> Tensor:
        return loss(output) + model.weight.square().sum()

    with pytest.raises(ValueError, match="single records cannot be told apart|not seen"):
        record(tape, model, x, penalised)


def test_inputs_overwritten_before_the_backward_pass_are_refused() -> None:
    model = Custom(lambda m, x: m.f(x) + x.zero_(), f=nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="modified in place"):
        RecordTape(model, features(4)(RECORDS))


def test_other_records_than_those_of_the_probe_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    tape = RecordTape(model, features(4)(2))
    with pytest.raises(ValueError, match="not seen"):
        record(tape, model, features(5, 4)(RECORDS))


def test_dropout_between_modules_is_the_records_own() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    x = features(4)(RECORDS)
    tape = RecordTape(model, x)
    torch.manual_seed(9)
    record(tape, model, x)
    tape.clip(1e6)
    found = gradients(model)
    model.zero_grad()
    torch.manual_seed(9)
    loss(model(x)).backward()
    assert distance(found, {key: value.double() for key, value in gradients(model).items()}) < 1e-6


@pytest.mark.parametrize("name", ["tied decoder", "bare parameters", "gru"])
def test_mixed_precision_keeps_the_clip(name: str) -> None:
    model, batch = make(name)
    x = batch(RECORDS)
    with torch.autocast("cpu", torch.bfloat16):
        tape = RecordTape(model, batch(3))
        record(tape, model, x, lambda y: loss(y.float())).clip(1e6)
        found = gradients(model)
        record(tape, model, x[:1], lambda y: loss(y.float())).clip(1e-3)
        assert norm(gradients(model)) == pytest.approx(1e-3, rel=1e-3)
        assert norm(gradients(model)) <= 1e-3 * (1 + ROUNDING)
        model.zero_grad()
        loss(model(x).float()).backward()
    assert distance(found, {key: value.double() for key, value in gradients(model).items()}) < 0.02
