"""Gradients of single records, or of groups, against loops, and clips that hold whatever a record holds."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from opusim.training.networks import clipping
from opusim.training.networks.clipping import norm_bounds, row_norms
from opusim.training.networks.contributions import sums, uses
from opusim.training.networks.record_gradients.calls import Call
from opusim.training.networks.record_gradients.layers import GroupNormUse
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.networks.sequence_models import encoder_block
from tests.support.extreme_records import KINDS, SIZES, extreme
from tests.support.record_models import CASES, Custom, features, make

RECORDS = 6
ROUNDING = 1e-5

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:LSTM with")]


def loss(output: Tensor) -> Tensor:
    """A sum over records with a gradient at every output."""
    flat = output.flatten(1)
    weights = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * weights).tanh().sum()


def record(tape: RecordTape, model: nn.Module, x: Tensor, of: Callable[..., Tensor] = loss) -> RecordTape:
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
    return norm({name: found[name].double() - expected[name] for name in expected}) / norm(expected)


GRAM = [
    "linear over positions", "convolution in 1d", "convolution in 2d", "tied decoder", "decoder", "padded embedding",
    "convolution used twice", "gru",
]  # fmt: skip
"""Cases with uses whose norms come from Gram matrices if gradients are large."""
FORMED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 4), (6, 5)),
    "linear without bias": (nn.Linear(5, 4, bias=False), (6, 5)),
    "convolution": (nn.Conv2d(3, 16, 3, padding=1), (3, 8, 8)),
    "wide convolution": (nn.Conv2d(16, 16, 3, bias=False), (16, 8, 8)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (4, 7, 7)),
    "stride": (nn.Conv2d(5, 7, (3, 2), stride=(2, 1), padding=(1, 0)), (5, 9, 8)),
    "dilation": (nn.Conv2d(3, 4, 3, dilation=2, padding=2), (3, 8, 8)),
    "in 1d": (nn.Conv1d(2, 3, 3), (2, 40)),
    "in 3d": (nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "group norm": (nn.GroupNorm(2, 6), (6, 5, 4)),
}
"""Layers whose gradients of single records may be formed, and the shape of a record."""


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take norms as usual, or, whatever the sizes, from Gram matrices or from gradients that are formed."""
    if request.param != "usual":
        monkeypatch.setattr(sums, "_GRAM_SHARE", 0.0 if request.param == "gram" else math.inf)
    if request.param == "gram":
        monkeypatch.setattr(uses, "_GRAM_COST", 0)
    return str(request.param)


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form gradients whatever their sizes."""
    monkeypatch.setattr(sums, "_GRAM_SHARE", math.inf)


def ways(**names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test by ways and, for each, the names of models."""
    cases = [(name, way) for way, own in names.items() for name in own]
    return pytest.mark.parametrize(("name", "way"), cases, indirect=["way"])


@pytest.mark.parametrize("card", [False, True], ids=["CPU", "GPU"])
@ways(usual=CASES, gram=GRAM, formed=FORMED)
def test_gradients_norms_and_the_clipped_sum_are_those_of_a_loop_over_records(
    name: str, way: str, card: bool, request: pytest.FixtureRequest
) -> None:
    """The loop runs on the CPU."""
    place = request.getfixturevalue("gpu") if card else torch.device("cpu")
    model, batch = one_layer(name, way) if way == "formed" else make(name)
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


def one_layer(name: str, way: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A single module, whose input and signal are what the test says."""
    if way == "formed":
        return FORMED[name][0], features(*FORMED[name][1])
    single = {
        "linear": (nn.Linear(20, 10), features(20)),
        "linear over positions": (nn.Linear(40, 30), features(6, 40)),
        "convolution in 1d": (nn.Conv1d(2, 3, 3), features(2, 40)),
        "normalisation": (nn.LayerNorm(9), features(4, 9)),
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return single[name] if name in single else make(name)


def shares(name: str, count: int, way: str) -> list[float]:
    """The contributions of single records of extreme numbers over C; of several parameters at once."""
    model, batch = one_layer(name, way)
    tape, found = RecordTape(model, batch(3)), []
    shapes = batch(1).shape[1:], model(batch(1)).shape[1:]
    for number, (value, length, kind, size) in enumerate(grid(count, seed=5)):
        bound = (1e-12, 1e-3, 1.0, 1e12)[number % 4]
        x = extreme(tuple(shapes[0]), value, length, number)
        signal = extreme(tuple(shapes[1]), kind, size, number + 1)
        record(tape, model, x, lambda y, signal=signal: (y * signal).sum())
        left_out = tape.clip(bound)
        total = norm(gradients(model))
        assert total == 0 or not left_out
        found.append(total / bound)
    return found


def grid(count: int, seed: int) -> list[tuple[str, float, str, float]]:
    """Kinds and sizes of inputs and signals, drawn from all pairs."""
    every = list(itertools.product(KINDS, SIZES, KINDS, SIZES))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    return [every[n] for n in order[:count]]


@ways(usual=EXTREME, gram=EXTREME, formed=FORMED)
def test_no_record_adds_more_than_the_clip(name: str, way: str) -> None:
    found = shares(name, 60 if way == "formed" else 30, way)
    assert all(map(math.isfinite, found))
    assert 0.5 < max(found) <= 1 + ROUNDING


TOKENS = ["padded embedding", "tied decoder"]


@ways(usual=TOKENS, gram=TOKENS)
def test_no_record_of_tokens_adds_more_than_the_clip(name: str, way: str) -> None:
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


# Gradients that are formed


def recorded(model: nn.Module, x: Tensor, signal: Tensor) -> RecordTape:
    few = torch.randn(3, *x.shape[1:], generator=torch.Generator().manual_seed(1))
    return record(RecordTape(model, few), model, x, lambda y: (y * signal).sum())


def signalled(name: str, records: int) -> tuple[nn.Module, Tensor, Tensor]:
    model, shape = FORMED[name]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(records, *shape, generator=generator)
    return model, x, torch.randn(model(x).shape, generator=generator)


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("value", [1.0, 3e38, 1e-45, math.nan])
@pytest.mark.parametrize("name", FORMED)
def test_no_record_moves_a_bit_of_the_rows_of_others(name: str, value: float) -> None:
    model, x, signal = signalled(name, 6)
    before = recorded(model, x, signal).record_gradients()
    x[2], signal[2] = value, value
    after = recorded(model, x, signal).record_gradients()
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(before[key][others], after[key][others]) for key in before)


@pytest.mark.usefixtures("formed")
def test_planted_fault_a_bias_left_out_of_a_formed_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of = sums._Formed.parts_of
    monkeypatch.setattr(sums._Formed, "parts_of", lambda found: [parts[:1] for parts in parts_of(found)])
    assert max(shares("linear", 60, "formed")) > 2


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_a_huge_record_among_small_ones_moves_their_sum_by_no_more_than_the_clip(name: str) -> None:
    model, x, signal = signalled(name, 6)
    for value in (1e-38, 1e15, 3e38):
        sums = []
        for own in (0.0, value):
            x[5], signal[5] = own, min(own, 1e3)
            recorded(model, x, signal).clip(1e-3)
            sums.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        rounding = 6 * 64 * 2.0**-24 * len(sums[0]) ** 0.5
        assert float((sums[1] - sums[0]).norm()) <= 1e-3 * (1 + rounding)


@pytest.mark.usefixtures("formed")
def test_rows_of_a_batch_in_parts_give_the_same_sum_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, signal = signalled("convolution", 8)
    found = []
    for limit in (2**24, 2**16):
        monkeypatch.setattr(uses, "_NUMBERS_LIMIT", limit)
        tape = recorded(model, x, signal)
        norms = tape.squared_norms()
        (layer,) = tape.contributions._layers
        assert isinstance(layer, sums._Formed)
        assert len(layer._kept) == (1 if limit == 2**24 else 8 // len(layer._kept[0][0]))
        tape.clip(0.1)
        found.append((norms, [p.grad.clone() for p in model.parameters()]))
    (norms, whole), (others, parts) = found
    torch.testing.assert_close(norms, others, rtol=1e-6, atol=0.0)
    for first, second in zip(whole, parts, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6 * float(first.abs().max()))


@pytest.mark.parametrize("n", [1, 10, 784, 1600, 1601, 70_001])
@pytest.mark.parametrize("kind", list(KINDS))
def test_bounds_on_norms_of_long_rows_hold_and_are_tight(kind: str, n: int) -> None:
    rows = torch.cat([extreme((n,), kind, size, seed) for seed, size in enumerate(SIZES)])
    exact, found = row_norms(rows), norm_bounds(rows)
    held = exact < 2.0**60
    assert held.any()
    assert (found >= exact * (1 - 1e-12)).all()
    assert (found <= exact * (1 + 1e-4) + n**0.5 * 2.0**-61)[held].all()
    assert found[~held].isinf().all()
    for i in range(len(rows)):
        assert torch.equal(norm_bounds(rows[i : i + 1]), found[i : i + 1])


def test_planted_fault_squares_that_vanish_in_float32_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.full((2, 2000), 1e-30)
    assert (norm_bounds(rows) >= row_norms(rows) * (1 - 1e-12)).all()
    monkeypatch.setattr(clipping, "_VANISHED", 0.0)
    assert (norm_bounds(rows) < row_norms(rows)).all()


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_group_norm_keeps_its_statistics_and_returns_the_bits_of_torch(offset: float) -> None:
    generator = torch.Generator().manual_seed(5)
    model = nn.GroupNorm(2, 6)
    x = offset + torch.randn(5, 6, 7, 3, generator=generator)
    signal = torch.randn(x.shape, generator=generator)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    (model(inputs[0]) * signal).sum().backward()
    tape = RecordTape(model, x[:3])
    recorder = tape.begin(len(x))
    with recorder:
        output = model(inputs[1])
        (output * signal).sum().backward()
    (call,) = recorder.calls
    assert call.statistics is not None
    assert torch.equal(output, model(x))
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    model.zero_grad()
    tape.end(recorder)
    normalised = functional.group_norm(x.double(), 2)
    wanted = (signal.double() * normalised).sum(dim=(2, 3))
    found = tape.record_gradients()
    rounding = 8 * 42 * 2.0**-24 * float(1 + x.abs().max())  # x cancels against the mean of 21 numbers
    torch.testing.assert_close(found["weight"].double(), wanted, rtol=0.0, atol=rounding)
    torch.testing.assert_close(found["bias"], signal.sum(dim=(2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("formed")
def test_planted_fault_statistics_of_another_record_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, signal = signalled("group norm", 5)
    wanted = recorded(model, x, signal).record_gradients()
    keep = GroupNormUse.__init__

    def rolled(use: GroupNormUse, call: Call, *facts: Any, **others: Any) -> None:
        call.statistics = tuple(values.roll(1, 0) for values in call.statistics or ())
        keep(use, call, *facts, **others)

    monkeypatch.setattr(GroupNormUse, "__init__", rolled)
    found = recorded(model, x, signal).record_gradients()
    assert not torch.allclose(found["weight"], wanted["weight"], rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("formed")
@pytest.mark.parametrize("kind", ["strided", "autocast", "keywords"])
def test_other_group_norms_run_as_torch_runs_them(kind: str) -> None:
    model, x, _ = signalled("group norm", 4)

    def run(values: Tensor) -> Tensor:
        if kind == "keywords":
            named = {"weight": model.weight, "bias": model.bias, "input": values}
            return functional.group_norm(num_groups=2, eps=1e-3, **named)
        with torch.autocast("cpu", torch.bfloat16, kind == "autocast"):
            return model(values)

    if kind == "strided":
        x = x.transpose(2, 3)
    wanted = run(x)
    tape = RecordTape(Custom(lambda m, x: run(x), inner=model), x[:3])
    with tape.recording(len(x)):
        output = tape.model(x)
        output.float().square().sum().backward()
    assert torch.equal(output, wanted)
    found = tape.record_gradients()
    for name, rows in found.items():
        assert rows.isfinite().all(), name


# Groups of records that count as one, such as those of a user

GROUPS, EACH = 4, 3
FAST = (
    "linear", "convolution in 2d", "bare parameters", "tied decoder", "residual network", "projected lstm, time first",
)  # fmt: skip
"""Cases with the records in other dimensions, with copies of a parameter for each record, and with kept statistics."""
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *OTHERS])
def test_the_norm_and_the_clip_of_a_group_are_those_of_its_records_sum(name: str) -> None:
    torch.manual_seed(0)
    build, records = CASES[name]
    model, x = build(), records(GROUPS * EACH)
    tape = RecordTape(model, x)
    signal = torch.randn_like(model(x))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient(rows: slice) -> Tensor:
        own = (model(x[rows]) * signal[rows]).sum()
        found = torch.autograd.grad(own, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([each.double().flatten() for each in found])

    wanted = torch.stack([gradient(slice(n, n + EACH)) for n in range(0, len(x), EACH)])
    norms = wanted.norm(dim=1)
    recorder = tape.begin(GROUPS, EACH)
    with recorder:
        (model(x) * signal).sum().backward()
    tape.end(recorder)
    torch.testing.assert_close(tape.squared_norms().sum(dim=0).sqrt(), norms, rtol=2e-2, atol=1e-6)
    bound = float(norms.median())
    tape.clip(bound)
    found = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    clipped = (wanted * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    assert float((found - clipped).norm()) < 0.02 * float(clipped.norm())
    apart = torch.stack([gradient(slice(n, n + 1)) for n in range(len(x))]).norm(dim=1)
    assert not torch.allclose(apart.view(GROUPS, EACH).sum(dim=1), norms, rtol=2e-2)
