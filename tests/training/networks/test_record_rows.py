"""Gradients of single records that are formed: their numbers, their norms, and the clip of their sum."""

import itertools
import math
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
from tests.support.extreme_records import KINDS, SIZES, extreme
from tests.support.record_models import Custom

ROUNDING = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
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


@pytest.fixture(autouse=True)
def formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form gradients whatever their sizes."""
    monkeypatch.setattr(sums, "_GRAM_SHARE", math.inf)


def recorded(model: nn.Module, x: Tensor, signal: Tensor) -> RecordTape:
    """A batch whose outputs receive the given gradient."""
    tape = RecordTape(model, torch.randn(3, *x.shape[1:], generator=torch.Generator().manual_seed(1)))
    with tape.recording(len(x)):
        (model(x) * signal).sum().backward()
    return tape


def batch(name: str, records: int, *, seed: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and the gradients at its outputs."""
    model, shape = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, *shape, generator=generator)
    return model, x, torch.randn(model(x).shape, generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_gradients_of_a_loop_over_records(name: str) -> None:
    model, x, signal = batch(name, 5)
    found = recorded(model, x, signal).record_gradients()
    for i in range(len(x)):
        output = model(x[i : i + 1])
        wanted = torch.autograd.grad(output, list(model.parameters()), signal[i : i + 1])
        for rows, gradient in zip(found.values(), wanted, strict=True):
            torch.testing.assert_close(rows[i], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("value", [1.0, 3e38, 1e-45, math.nan])
@pytest.mark.parametrize("name", MODELS)
def test_no_record_moves_a_bit_of_the_rows_of_others(name: str, value: float) -> None:
    model, x, signal = batch(name, 6)
    before = recorded(model, x, signal).record_gradients()
    x[2], signal[2] = value, value
    after = recorded(model, x, signal).record_gradients()
    others = [0, 1, 3, 4, 5]
    assert all(torch.equal(before[key][others], after[key][others]) for key in before)


def largest_share(name: str, count: int) -> float:
    """The largest contribution of one record of extreme numbers over the clip."""
    model, x, signal = batch(name, 1)
    cases = list(itertools.product(KINDS, SIZES, KINDS, SIZES))
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(3))[:count]
    worst = 0.0
    tape = RecordTape(model, x)
    for number, case in enumerate(order):
        kind, size, other, length = cases[case]
        h = extreme(tuple(x.shape[1:]), kind, size, number)
        delta = extreme(tuple(signal.shape[1:]), other, length, number + 1)
        bound = (1e-12, 1e-3, 1.0, 1e12)[number % 4]
        with tape.recording(1):
            (model(h) * delta).sum().backward()
        tape.clip(bound)
        total = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        worst = max(worst, float(total.norm()) / bound)
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_no_record_adds_more_than_the_clip(name: str) -> None:
    assert 0.5 < largest_share(name, 60) <= 1 + ROUNDING


def test_planted_fault_a_bias_left_out_of_the_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of = sums._Formed.parts_of
    monkeypatch.setattr(sums._Formed, "parts_of", lambda found: [parts[:1] for parts in parts_of(found)])
    assert largest_share("linear", 60) > 2


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_a_huge_record_among_small_ones_moves_their_sum_by_no_more_than_the_clip(name: str) -> None:
    model, x, signal = batch(name, 6)
    for value in (1e-38, 1e15, 3e38):
        sums = []
        for own in (0.0, value):
            x[5], signal[5] = own, min(own, 1e3)
            recorded(model, x, signal).clip(1e-3)
            sums.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        rounding = 6 * 64 * 2.0**-24 * len(sums[0]) ** 0.5
        assert float((sums[1] - sums[0]).norm()) <= 1e-3 * (1 + rounding)


def test_rows_of_a_batch_in_parts_give_the_same_sum_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, signal = batch("convolution", 8)
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


def test_planted_fault_statistics_of_another_record_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, signal = batch("group norm", 5)
    wanted = recorded(model, x, signal).record_gradients()
    keep = GroupNormUse.__init__

    def rolled(use: GroupNormUse, call: Call, *facts: Any, **others: Any) -> None:
        call.statistics = tuple(values.roll(1, 0) for values in call.statistics or ())
        keep(use, call, *facts, **others)

    monkeypatch.setattr(GroupNormUse, "__init__", rolled)
    found = recorded(model, x, signal).record_gradients()
    assert not torch.allclose(found["weight"], wanted["weight"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["strided", "autocast", "keywords"])
def test_other_group_norms_run_as_torch_runs_them(kind: str) -> None:
    model, x, _ = batch("group norm", 4)

    def run(values: Tensor) -> Tensor:
        if kind == "keywords":
            return functional.group_norm(
                num_groups=2, weight=model.weight, bias=model.bias, input=values, eps=1e-3
            )
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
