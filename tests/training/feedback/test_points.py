"""Compare the gradients at feedback points with autograd, with loops and with the closed form of MLPs."""

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opusim import FeedbackAlignment, open_device
from opusim.devices.base import NoisyDevice
from opusim.medium import Medium
from tests.support.record_models import Custom

SEED = 20210603
N, P, C, CLASSES = 3, 5, 8, 4


def leaf(*shape: int) -> nn.Module:
    """Returns its parameter, whose gradient is then what the point receives."""
    return Custom(lambda m: m.values.clone(), values=nn.Parameter(torch.randn(shape)))


def toy(point: tuple[int, ...], error: tuple[int, ...]) -> nn.Module:
    """Two points and an output that do not depend on each other, so that each gradient is read off on its own."""
    parts = {"first": leaf(*point), "second": leaf(*point), "out": leaf(*error)}
    return Custom(lambda m: (m.first(), m.second(), m.out())[-1], **parts)


def feedback(point: Any, e: Tensor, device: NoisyDevice | None = None, **options: Any) -> tuple[Tensor, ...]:
    """What the two points receive if the error is e."""
    model = FeedbackAlignment(toy(point, tuple(e.shape)), ["first", "second"], device=device, **options)
    (model() * e).sum().backward()
    torch.testing.assert_close(model.out.values.grad, e, rtol=0, atol=0)  # the true gradient
    return model.first.values.grad, model.second.values.grad


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(n_outputs: int) -> Tensor:
    return Medium(CLASSES, n_outputs, SEED).dense().t()  # B, (n_outputs, CLASSES)


def device(n_outputs: int, *, sigma: float = 0.0, kind: str = "gaussian") -> NoisyDevice:
    noise = {} if kind == "ideal" else {"noise": {"sigma": sigma}}
    return open_device(kind, n_inputs=CLASSES, n_outputs=n_outputs, seed=5, **noise)


def attention() -> nn.Module:
    """A post-norm block of attention and a feed-forward layer."""
    parts = {"attention": nn.MultiheadAttention(C, 2, batch_first=True), "norm": nn.LayerNorm(C)}
    return Custom(lambda m, h: m.norm(h + m.attention(h, h, h, need_weights=False)[0]), **parts)


def transformer() -> nn.Sequential:
    """Three blocks; the points are blocks 1 and 2."""
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(6, C), *(attention() for _ in range(3)), nn.Linear(C, CLASSES))


@pytest.mark.parametrize("slices", ["own", "shared"])
def test_blocks_learn_from_the_projected_error_and_the_rest_from_the_true_one(slices: str) -> None:
    """Each block's gradient written out with torch.autograd.grad; behind the last point it is backpropagation's."""
    plain, x, y = transformer(), normal(N, P, 6), torch.arange(N * P) % CLASSES
    expected: dict[str, Tensor] = {}
    h, stream = x, []
    for module in plain:
        h = module(h)
        stream.append(h)
        if len(stream) in (2, 3):
            h = h.detach()
    z = h.detach().requires_grad_()
    (e,) = torch.autograd.grad(cross_entropy(z.flatten(0, 1), y), z)
    b = matrix(2 * C).t()  # (CLASSES, 2 C)
    second = slice(C, 2 * C) if slices == "own" else slice(0, C)
    signals = {1: e @ b[:, :C] / C**0.5, 2: e @ b[:, second] / C**0.5, 4: e}
    for part, signal in signals.items():
        named = {n: p for n, p in plain.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(stream[part], list(named.values()), signal, allow_unused=True)
        expected |= {n: g for n, g in zip(named, grads, strict=True) if g is not None}
    model = FeedbackAlignment(transformer(), slices=slices)
    assert model.points == ("1", "2")
    cross_entropy(model(x).flatten(0, 1), y).backward()
    found = {name: p.grad for name, p in model.model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    cross_entropy(plain(x).flatten(0, 1), y).backward()
    for name, parameter in plain.named_parameters():
        same = torch.allclose(parameter.grad, found[name], rtol=1e-4, atol=1e-8)
        assert same == name.startswith(("3.", "4.")), name


# Which rows reach which positions

EACH, SUM, LAST = {"rows": "each"}, {"rows": "sum"}, {"channel_dim": -1}
BROADCAST, FULL = {"spread": "broadcast"}, {"spread": "full"}
LAYOUTS = {
    "records": ((N, C), (N, CLASSES), EACH, "nc", "nk"),
    "tokens": ((N, P, C), (N, P, CLASSES), EACH, "npc", "npk"),
    "tokens, summed": ((N, P, C), (N, P, CLASSES), SUM, "npc", "npk"),
    "tokens, summed, full": ((N, P, C), (N, P, CLASSES), SUM | FULL, "npc", "npk"),
    "time first": ((P, N, C), (P, N, CLASSES), SUM | {"batch_dim": 1}, "pnc", "pnk"),
    "pooled": ((N, P, C), (N, CLASSES), BROADCAST, "npc", "nk"),
    "pooled, full": ((N, P, C), (N, CLASSES), FULL, "npc", "nk"),
    "image": ((N, C, 2, 3), (N, CLASSES), BROADCAST, "nchw", "nk"),
    "image, full": ((N, C, 2, 3), (N, CLASSES), FULL, "nchw", "nk"),
    "image, channels last": ((N, 2, 3, C), (N, CLASSES), FULL | LAST, "nhwc", "nk"),
    "segmented image": ((N, C, 2, 3), (N, CLASSES, 2, 3), EACH, "nchw", "nkhw"),
    "sequence, channels second": ((N, C, P), (N, CLASSES), {"channel_dim": 1}, "ncp", "nk"),
    "other length": ((N, 7, C), (N, P, CLASSES), EACH, "npc", "nqk"),
    "one vector": ((N, C), (N, P, CLASSES), EACH, "nc", "nqk"),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("slices", ["own", "shared"])
def test_positions_receive_what_plain_loops_give(case: str, slices: str) -> None:
    point, error, options, dims, error_dims = LAYOUTS[case]
    e = normal(*error)
    found = feedback(point, e, slices=slices, gain=0.3, **options)
    size = dict(zip(dims, point, strict=True))
    places = [d for d in dims if d not in "nc"]
    positions = list(product(*(range(size[d]) for d in places)))
    one_to_one = options.get("rows") != "sum" and len(dims) == len(error_dims) and "q" not in error_dims
    full = options.get("spread") == "full"
    width = C * (len(positions) if full else 1)
    b = matrix(2 * width)
    for number, signal in enumerate(found):
        offset = width * number if slices == "own" else 0
        for n, (place, position) in product(range(N), enumerate(positions)):
            here = {"n": n, **dict(zip(places, position, strict=True))}
            if one_to_one:
                row, divisor = e[tuple(here.get(d, slice(None)) for d in error_dims)], C
            else:
                row = e.movedim((error_dims.index("n"), error_dims.index("k")), (0, -1))[n]
                row, divisor = row.reshape(-1, CLASSES).sum(dim=0), C * len(positions)
            start = offset + (place * C if full else 0)
            expected = 0.3 * b[start : start + C] @ row / divisor**0.5
            at = signal[tuple(here.get(d, slice(None)) for d in dims)]
            torch.testing.assert_close(at, expected, rtol=1e-4, atol=1e-6)


def test_tokens_may_be_flattened_into_records() -> None:
    e = normal(N, P, CLASSES)
    expected = feedback((N, P, C), e)[0]
    torch.testing.assert_close(feedback((N * P, C), e)[0], expected.flatten(0, 1))
    torch.testing.assert_close(feedback((N, P, C), e.flatten(0, 1))[0], expected)


@pytest.mark.parametrize(("point", "error", "batch_dim", "message"), [
    ((P, N, C), (N, P), 0, "point 'first' has 5 records of 3 positions and the error 3 of 5"),
    ((P, N, C), (P * N,), 1, "in one dimension, and batch_dim says"),
    ((P * N, C), (P, N), 1, "in one dimension, and batch_dim says"),
])  # fmt: skip
def test_rows_of_other_order_are_refused(point: Any, error: Any, batch_dim: int, message: str) -> None:
    """As many rows, of (time, batch) and of (batch, time)."""
    with pytest.raises(ValueError, match=message):
        feedback(point, normal(*error, CLASSES), batch_dim=batch_dim)


def test_drawn_positions_stand_for_all() -> None:
    """k of P positions receive P / k of their feedback, the others nothing; all records draw the same."""
    e = normal(N, P, CLASSES)
    full = feedback((N, P, C), e)[0]
    part = feedback((N, P, C), e, rows=2)[0]
    drawn = part.abs().sum(dim=(0, 2)).nonzero().flatten()
    assert len(drawn) == 2
    torch.testing.assert_close(part[:, drawn], full[:, drawn] * P / 2)
    pooled = feedback((N, C), e, rows=2)[0]
    torch.testing.assert_close(pooled, full[:, drawn].sum(dim=1) * P / 2)
    torch.testing.assert_close(feedback((N, P, C), e, rows=P)[0], full)


def test_every_step_draws_its_own_positions() -> None:
    model = FeedbackAlignment(toy((N, P, C), (N, P, CLASSES)), ["first"], rows=1)
    seen = set()
    for _ in range(40):  # misses a position in 1 of 1,500 draws of 40
        model.first.values.grad = None
        model().sum().backward()
        seen |= set(model.first.values.grad.abs().sum(dim=(0, 2)).nonzero().flatten().tolist())
    assert seen == set(range(P))


@pytest.mark.parametrize(
    ("point", "error"), [((1, 20_000), (1,)), ((1, 50, 400), (1,)), ((1, 50, 400), (1, 50))]
)
def test_feedback_has_the_norm_of_the_error_in_expectation(point: tuple, error: tuple) -> None:
    """norm(f)^2 / norm(e)^2 is chi-square over its degrees of freedom: 20,000, or 400 where positions share a row."""
    e = normal(*error, CLASSES)
    for spread in ("full", "broadcast") if len(error) == 1 else ("broadcast",):
        found = feedback(point, e, spread=spread, gain=1.7)[0]
        free = 20_000 if spread == "full" or len(point) == 2 else 400
        # with a row each, positions share 400 rows of B: the variance is at most that of one row
        ratio = float(found.square().sum() / e.square().sum()) / 1.7**2
        assert abs(ratio - 1) < 5 * (2 / free) ** 0.5


def test_normalised_feedback_passes_through_the_jacobian_of_a_layer_norm() -> None:
    """As autograd computes it, for the point's output."""
    e = normal(N, P, CLASSES)
    model = FeedbackAlignment(toy((N, P, C), (N, P, CLASSES)), ["first"], normalised=True)
    (model() * e).sum().backward()
    h = model.first.values.detach().requires_grad_()
    signal = e @ matrix(C).t() / C**0.5
    (expected,) = torch.autograd.grad(nn.functional.layer_norm(h, (C,)), h, signal)
    torch.testing.assert_close(model.first.values.grad, expected, rtol=1e-4, atol=1e-6)


# The scale of the error


@pytest.mark.parametrize("encoding", ["ternary", "stochastic", "planes", "sign"])
def test_a_scaled_loss_scales_the_gradients(encoding: str) -> None:
    """Exactly, by a power of two, noise included: a batch mean, gradient accumulation and GradScaler lose nothing."""
    e = normal(6, CLASSES)
    wanted = feedback((6, C), e, device(C, sigma=0.4), encoding=encoding)[0]
    assert wanted.norm() > 0.1
    for factor in (2.0**-40, 2.0**16):
        found = feedback((6, C), e * factor, device(C, sigma=0.4), encoding=encoding)[0]
        torch.testing.assert_close(found, wanted * factor, rtol=0, atol=0)


def test_an_infinite_error_makes_gradients_that_are_not_finite() -> None:
    """GradScaler skips such a step; the other records are projected as ever."""
    e = normal(N, CLASSES)
    wanted = feedback((N, C), e, device(C), encoding="ternary")[0]
    e[1, 2] = torch.inf
    model = FeedbackAlignment(toy((N, C), (N, CLASSES)), ["first"], device=device(C), encoding="ternary")
    (model() * e).sum().backward()
    assert not model.first.values.grad[1].isfinite().any()
    torch.testing.assert_close(model.first.values.grad[::2], wanted[::2])


def test_rows_of_zeros_are_not_shown() -> None:
    """Padding costs no frames and receives no noise. A ternary vector takes two frames."""
    e = normal(N, P, CLASSES)
    e[:, 3:] = 0
    photonic = device(C, sigma=0.4)
    found = feedback((N, P, C), e, photonic)[0]
    assert photonic.usage.frames == ONES + 2 * N * 3
    assert not found[:, 3:].any()
    assert found[:, :3].all()
    feedback((N, P, C), torch.zeros_like(e), photonic)
    assert photonic.usage.frames == 2 * ONES + 2 * N * 3


ONES = 2 * 64
"""Frames in which B 1 is measured before the first step, for codes with a constant."""


@pytest.mark.parametrize(("options", "frames"), [
    ({}, ONES + 2 * N * P),
    ({"rows": "sum"}, ONES + 2 * N),
    ({"rows": 2}, ONES + 4 * N),
    ({"encoding": "planes", "planes": 3}, 6 * N * P),
    ({"encoding": "ternary"}, ONES + 2 * N * P),
])  # fmt: skip
def test_rows_set_the_frames_of_a_step(options: dict, frames: int) -> None:
    photonic = device(C)
    feedback((N, P, C), normal(N, P, CLASSES), photonic, **options)
    assert photonic.usage.frames == frames


def test_steps_have_noise_of_their_own_and_a_repeated_step_repeats_it() -> None:
    model = FeedbackAlignment(toy((N, C), (N, CLASSES)), ["first"], device=device(C, sigma=1.0))
    found = []
    for step in (None, None, 0, 1):
        if step is not None:
            model.seek(step)
        model.first.values.grad = None
        (model() * normal(N, CLASSES)).sum().backward()
        found.append(model.first.values.grad)
    assert [torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 3))] == [False, True, True]


def test_a_larger_device_and_a_mixed_type_change_nothing() -> None:
    e = normal(N, CLASSES)
    wide = open_device("ideal", n_inputs=9, n_outputs=50)
    wanted = feedback((N, C), e, device(2 * C, kind="ideal"), slices="own")
    torch.testing.assert_close(feedback((N, C), e, wide, slices="own"), wanted)
    half = toy((N, C), (N, CLASSES))
    half.first.bfloat16()
    model = FeedbackAlignment(half, ["first"])
    (model() * e).sum().backward()
    assert model.first.values.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.first.values.grad, feedback((N, C), e)[0].bfloat16())


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    x, y = normal(8, 9), torch.arange(8) % CLASSES
    layers = nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, CLASSES)
    parts = FeedbackAlignment(nn.Sequential(*layers))
    whole = deepcopy(parts)
    cross_entropy(whole(x), y).backward()
    for piece in (slice(0, 4), slice(4, 8)):
        (cross_entropy(parts(x[piece]), y[piece]) / 2).backward()
    torch.testing.assert_close([p.grad for p in parts.parameters()], [p.grad for p in whole.parameters()])


def test_a_point_that_runs_twice_receives_feedback_for_each_call() -> None:
    """Weight sharing over depth: the sum of both calls' gradients, each from its slice."""
    torch.manual_seed(3)
    parts = {"cell": nn.Linear(C, C), "head": nn.Linear(C, CLASSES)}
    net = Custom(lambda m, x: m.head(m.cell(m.cell(x).tanh()).tanh()), **parts)
    x, y = normal(N, C), torch.arange(N)
    model = FeedbackAlignment(net, ["cell"], slices="own")
    cross_entropy(model(x), y).backward()
    z = model(x).detach().requires_grad_()
    (e,) = torch.autograd.grad(cross_entropy(z, y), z)
    with torch.no_grad():
        inputs = (x, net.cell(x).tanh())
    b = matrix(2 * C)
    parts = zip((0, C), inputs, strict=True)
    expected = sum((e @ b[start : start + C].t() / C**0.5).t() @ h for start, h in parts)
    torch.testing.assert_close(net.cell.weight.grad, expected, rtol=1e-5, atol=1e-7)
