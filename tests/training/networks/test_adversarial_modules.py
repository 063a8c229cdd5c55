"""Modules that try to let one record change another's contribution: refused, right to the digit, or named on trust.

What is refused is refused in one line before a record is seen. What is accepted is compared with a loop over single
records in float64, and no record may move the clipped sum by more than twice the clip, nor the rows of others. What is
neither must be named in docs/privacy-records.md, and the module really mixes, so that the page is not out of date.
"""

import copy
import ctypes
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opusim.training.networks.record_gradients.followed import rules, tracking
from opusim.training.networks.record_gradients.followed.placement import active_tracker
from opusim.training.networks.record_gradients.followed.tracking import RULES, RowTracker
from opusim.training.networks.record_gradients.tape import RecordTape
from tests.support.private_loops import private_loop
from tests.support.record_models import Runs, draw, ids

pytestmark = pytest.mark.usefixtures("one_thread")
RECORDS = 43  # more than the largest batch of the probe
CLIP = 0.5
Parts = dict[str, nn.Module | Tensor]


X = draw(RECORDS, 4)
WIDE = draw(RECORDS, 99, seed=4)


def loss(output: Tensor) -> Tensor:
    flat = output.flatten(1)
    return (flat * torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype) * 0.3).tanh().sum()


def gradients(tape: RecordTape, *args: Tensor) -> Tensor:
    """The gradient of every record, shape (records, parameters); the clipped sum stands in the parameters."""
    torch.manual_seed(5)
    with tape.recording(len(args[0])):
        loss(tape.model(*args)).backward()
    found = torch.cat([rows.flatten(1) for rows in tape.record_gradients().values()], dim=1)
    tape.clip(CLIP)
    return found


def summed(tape: RecordTape) -> Tensor:
    return torch.cat([p.grad.flatten() for layer in tape.layers for p in layer if p.grad is not None])


def with_outlier(x: Tensor) -> Tensor:
    """The records, the first one exchanged for a huge one."""
    return torch.cat([torch.full_like(x[:1], 1e4 if x.is_floating_point() else 0), x[1:]])


def moved_by_others(tape: RecordTape, x: Tensor) -> float:
    """The largest change of a record's gradient when the first one is exchanged for a huge one, or left out."""
    before = gradients(tape, x)[1:]
    changes = [gradients(tape, with_outlier(x))[1:] - before, gradients(tape, x[1:]) - before]
    return max(float(change.nan_to_num(9e9).abs().max()) for change in changes)


# What is accepted is right


def in_outer_order(z: Callable[[Tensor], Tensor], copies: int = 3) -> Callable[..., Tensor]:
    """Multiplies several copies of the batch, one after the other, by numbers for each row."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x * (1 + n) for n in range(copies)])
        return m.f(y * z(x)).unflatten(0, (copies, -1)).transpose(0, 1).flatten(1)

    return forward


def in_memory(m: Any, x: Tensor) -> Tensor:
    """Writes rows that stand a whole batch apart into zeros, whose rows might be neighbours."""
    z = x.new_zeros(2 * len(x), 4)
    z[:, torch.arange(4)] = torch.cat([x, 2 * x])
    return m.f(z)


def used_twice(m: Any, x: Tensor) -> Tensor:
    y = m.f(x)
    return torch.cat([y.sin(), y * m.f(0.5 * x), y], dim=1)


def weight(*shape: int) -> Callable[[], Parts]:
    return lambda: {"w": nn.Parameter(draw(*shape))}


IDS = ids(RECORDS, 3)
RIGHT: dict[str, tuple[Any, ...]] = {  # a function, its parts and its arguments, if not a linear layer and X
    "rows put in outer order": (lambda m, x: in_memory(m, x).unflatten(0, (2, -1)).transpose(0, 1).flatten(1),),
    "ones for rows in any order": (in_outer_order(lambda x: torch.ones(3 * len(x), 1)),),
    "shape changed in place": (lambda m, x: m.f(x.clone().t_().t_().unsqueeze_(1).squeeze_(1)),),
    "vector for a weight": (lambda m, x: functional.linear(x, m.w)[:, None], weight(4)),
    "padding from the end": (lambda m, i: functional.embedding(i, m.w, padding_idx=-1), weight(5, 3), IDS),
    "tied": (lambda m, i: m.e(i).mean(dim=1).tanh() @ m.e.weight.t(), lambda: {"e": nn.Embedding(5, 3)}, IDS),
    "weights of each record": (
        lambda m, x: torch.bmm(m.f(x).view(-1, 3, 4), x[:, :, None]).flatten(1), lambda: {"f": nn.Linear(4, 12)},
    ),
    "repeated letter of the batch": (lambda m, x: torch.einsum("nk,nk,km->nm", x, x, m.w), weight(4, 3), 0.5 * X),
    "normalised weight": (lambda m, x: m.f(x), lambda: {"f": nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))}),
    "output used twice": (used_twice,),
    "inverse": (lambda m, x: m.f(torch.linalg.inv_ex(x.view(-1, 2, 2) + 9 * torch.eye(2))[0].flatten(1)),),
    "windows of single records": (lambda m, x: m.f(x.flatten().unfold(0, 4, 4)),),
    "one mask for the batch": (lambda m, x: m.f(x * functional.dropout(torch.ones(4), 0.5)),),
    "branch within a record": (lambda m, x: m.f(torch.where((x > 1).any(dim=1, keepdim=True), 2 * x, x)),),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_accepted_is_the_clipped_sum_of_single_records(name: str) -> None:
    function, *more = RIGHT[name]
    parts, args = more[0] if more else dict, (more[1] if len(more) == 2 else X,)
    torch.manual_seed(0)
    model = Runs(function, **parts())
    tape = RecordTape(model, *(each[:3] for each in args))
    rows = gradients(tape, *args).double()
    total, exact = summed(tape).double(), copy.deepcopy(model).double()
    wanted = []
    for i in range(RECORDS):
        exact.zero_grad()
        torch.manual_seed(5)
        single = (a[i : i + 1].double() if a.is_floating_point() else a[i : i + 1] for a in args)
        loss(exact(*single)).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None]))
    alone = torch.stack(wanted)
    assert float((rows - alone).norm() / alone.norm()) < 2e-5
    factors = (CLIP / alone.norm(dim=1, keepdim=True)).clamp(max=1.0)
    assert float((total - (factors * alone).sum(dim=0)).norm()) < 1e-4 * CLIP
    assert moved_by_others(tape, *args) < 1e-5
    gradients(tape, with_outlier(*args))
    assert float((summed(tape).double() - total).norm()) <= 2 * CLIP * (1 + 1e-4)


def test_a_record_that_overflows_in_half_precision_adds_nothing() -> None:
    def half(m: Any, x: Tensor) -> Tensor:
        return m.g(functional.linear(x.half(), m.f.weight.half(), m.f.bias.half()).float())

    tape = RecordTape(Runs(half, f=nn.Linear(4, 3), g=nn.Linear(3, 2)), X[:3])
    gradients(tape, X[1:])
    without, huge = summed(tape).clone(), X.clone()
    huge[0] = 1e30
    gradients(tape, huge)
    torch.testing.assert_close(summed(tape), without, rtol=1e-3, atol=1e-4)  # half has so few digits


# What is refused


class Rolls(Tensor):
    """Tensors whose products are of the neighbours."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            rows = args[0].as_subclass(Tensor)
        return func(rows.roll(1, 0) if "mul" in str(func) else rows, *args[1:], **(kwargs or {}))


SEEN: dict[str, Tensor] = {}


@torch.library.custom_op("opusim_adversary::peek", mutates_args=())
def peek(constant: Tensor) -> Tensor:
    """Return a constant times 2 if the batch that was put aside has a huge number."""
    return constant * (1.0 + float(SEEN["x"].max() > 1e3))


def renames(x: Tensor) -> Tensor:
    """Raise what native interpreters of Python code make of an error."""
    try:
        return 2 * x if bool(x.max() > 1e3) else x
    except ValueError:
        raise RuntimeError("the interpreter failed:\n  in line 1") from None


class Doubles(torch.autograd.Function):
    """The identity, whose backward pass doubles all gradients if one is huge, and hides that it was refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        try:
            return gradient * (1.0 + float(gradient.abs().max() > 1e3))
        except ValueError:
            return gradient


def splits(m: Any, x: Tensor) -> Tensor:
    """Doubles as many columns as the largest number of the batch says."""
    place = (x.detach().abs().amax() > 1e3).long().reshape(1) + 1
    first, rest = x.tensor_split(place, dim=1)
    return m.f(torch.cat([2 * first, rest], dim=1))


def in_python(call: Callable[[Tensor, Callable[..., float]], object]) -> Callable[..., Tensor]:
    def forward(m: Any, x: Tensor) -> Tensor:
        seen: list[float] = []
        call(x.detach().clone(), lambda v, *_: (seen.append(v), v)[1])
        return m.f(x * (2 if max(seen) > 1e3 else 1))

    return forward


def catches(use: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Hides that it was refused."""

    def forward(m: Any, x: Tensor) -> Tensor:
        try:
            return use(m, x)
        except ValueError:
            return m.f(x)

    return forward


def peeks(m: Any, x: Tensor) -> Tensor:
    SEEN["x"] = x.detach()
    return m.f(x * torch.ops.opusim_adversary.peek(m.c))


def imaginary(m: Any, x: Tensor) -> Tensor:
    """Writes the mean of the batch into the last numbers of complex zeros by a view of their parts."""
    z = torch.zeros(4, len(x), dtype=torch.complex64)
    torch.view_as_real(z)[3].copy_(x.detach().mean().expand(len(x), 2))
    return m.f(z.abs().t() + x)


def stash(way: str) -> Callable[..., Tensor]:
    """Multiplies by what an earlier batch, or its backward pass, left outside of the module."""
    kept = types.SimpleNamespace(flag=torch.zeros(1))

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.f(x * (1 + kept.flag))
        if way == "written":
            kept.flag.copy_((x.detach() > 1e3).any())
        elif y.requires_grad:
            y.register_hook(later)
        return y

    def later(gradient: Tensor) -> None:
        if way == "hook":
            kept.flag = (gradient.detach() > 1e3).any().float()
        else:
            kept.flag.copy_((gradient.detach() > 1e3).any())

    return forward


def generator() -> Callable[..., Tensor]:
    """A generator of Python that answers with the mean of the batch before."""

    def answers() -> Iterator[Tensor]:
        last = torch.zeros(4)
        while True:
            x = yield last  # type: ignore[misc]
            last = x.detach().mean(dim=0)

    found: Any = answers()
    next(found)
    return lambda m, x: m.f(x + found.send(x))


def pattern(x: Tensor) -> Tensor:
    z = x.new_zeros(len(x), 3)
    z[:, 0] = 5
    return z.view(-1, 1)


def by_threes(x: Tensor) -> Tensor:
    z = x.new_zeros(3 * len(x), 1)
    z[0::3] = 5
    return z


def unpacked(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0)):
        return m.f(x).sin()


def node_hook(m: Any, x: Tensor) -> Tensor:
    y = m.f(x).sin()
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda given: (given[0] * given[0].norm(),))
    return y


def overwritten_gradient(m: Any, x: Tensor) -> Tensor:
    y = m.f(x)
    if y.requires_grad:
        y.register_hook(turned)
    return y.sin()


def turned(gradient: Tensor) -> None:
    gradient.copy_(gradient.flip(0))


def spectral(m: Any, x: Tensor) -> Tensor:
    return m.f(torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=4, dim=1))


def steps_table() -> Parts:
    """Constants that change behind the largest batch of the probe."""
    return {"f": nn.Linear(4, 3), "c": torch.cat([torch.ones(40), torch.full((60,), 5.0)])}


def constants() -> Parts:
    return {"f": nn.Linear(4, 3), "c": torch.ones(4)}


def shared_weight(m: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(m.f, {"weight": m.f.weight * x.mean()}, (x,))


def attribute_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    last = getattr(m.f.weight, "last", torch.zeros(4))
    m.f.weight.last = x.detach().mean(dim=0)
    return m.f(x + last)


class Scaled(nn.Module):
    """A parametrisation whose weight depends on the batch."""

    x: Tensor | None = None

    def forward(self, weight: Tensor) -> Tensor:
        return weight if self.x is None else weight * (1 + self.x.mean())


def parametrised() -> Parts:
    inner = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(inner, "weight", Scaled())
    return {"f": inner}


def shows_the_weight(m: Any, x: Tensor) -> Tensor:
    m.f.parametrizations.weight[0].x = x.detach()
    return m.f(x)


JOINS, HIDDEN = "combines rows of different records", "tensor that torch did not compute"


def case(
    function: Any, message: str, args: tuple[Tensor, ...] = (X,), parts: Callable[[], Parts] = dict
) -> tuple[Any, str, tuple[Tensor, ...], Callable[[], Parts]]:
    return function, message, args, parts


REFUSED: dict[str, tuple[Any, ...]] = {  # see `case` for what is left out
    # rows that go by their place
    "rolled by a multiple of both batches": (lambda m, x: m.f(x.roll(222, 0)), "roll"),
    "own entry by place": (lambda m, x: m.f(x.diagonal()[:, None].expand(-1, 4)), "diagonal in Runs", (WIDE,)),
    "diagonal behind small batches": (lambda m, x: m.f(x[:, :4] + x.diagonal(-40).sum()), "diagonal in Runs", (WIDE,)),
    "triangle behind small batches": (lambda m, x: m.f(x.t().tril(40).t()), "tril in Runs"),
    "strides along the diagonal": (lambda m, x: m.f(x.as_strided((len(x), 4), (100, 1))), "as_strided in", (WIDE,)),
    "steps along the diagonal": (
        lambda m, x: m.f(x.flatten()[::100].unsqueeze(1).expand(-1, 4)), "slice in Runs moves the rows", (WIDE,),
    ),
    "windows along the diagonal": (lambda m, x: m.f(x.flatten().unfold(0, 4, 100)), "unfold in Runs", (WIDE,)),
    "places that turn back": (lambda m, x: m.f(x[torch.arange(len(x)) % 40]), "index in Runs"),
    "places that overflow": (lambda m, x: m.f(x[torch.arange(len(x)).to(torch.int8).long()]), "index in Runs"),
    # numbers that depend on the batch's size in large batches only
    "place bounded below": (lambda m, x: m.f(x * torch.arange(len(x)).max().clamp(min=40)), "clamp in Runs makes"),
    "table at the batch's size": (lambda m, x: m.f(x * m.c[len(x) - 1]), "select in Runs", (X,), steps_table),
    "table in strides": (
        lambda m, x: m.f(x * m.c.as_strided((len(x), 1), (1, 1))), "as_strided in Runs makes numbers", (X,),
        steps_table,
    ),
    "table in parts": (
        lambda m, x: m.f(x * m.c.split([len(x), 100 - len(x)])[0][:, None]), "makes numbers", (X,), steps_table,
    ),
    "size as a tensor to fill with": (
        lambda m, x: m.f(x.index_fill(1, torch.tensor([0]), torch.tensor(float(len(x))))), "lift_fresh in Runs",
    ),
    "shape as a tensor": (lambda m, x: m.f(x / torch._shape_as_tensor(x)[0]), "makes numbers"),
    # zeros and ones that do not stand for rows in any order
    "zeros with a pattern": (in_outer_order(pattern), JOINS),
    "zeros with steps": (in_outer_order(by_threes), JOINS),
    "ones that are summed up": (in_outer_order(lambda x: torch.ones(len(x), 3).cumsum(1).view(-1, 1)), JOINS),
    "ones that are padded": (
        in_outer_order(lambda x: functional.pad(torch.ones(len(x), 1), (0, 2)).view(-1, 1)), JOINS,
    ),
    "ones times a vector": (in_outer_order(lambda x: (torch.ones(len(x), 3) * draw(3)).view(-1, 1)), JOINS),
    "ones times a matrix": (in_outer_order(lambda x: (torch.ones(len(x), 2) @ draw(2, 3)).view(-1, 1)), JOINS),
    # ways out of what is followed
    "split at a tensor": (splits, "tensor_split in Runs hands numbers"),
    "Python for each number": (in_python(lambda x, look: x.apply_(look)), "apply_ in Runs hands numbers"),
    "Python for each pair": (in_python(lambda x, look: x.map_(x.clone(), look)), "map_ in Runs hands numbers"),
    "own tensor class": (lambda m, x: m.f(x.detach().as_subclass(Rolls) * 2), "mul in Runs"),
    "own operator on a constant": (peeks, "opusim_adversary.peek in Runs is an operator", (X,), constants),
    "refusal under another name": (lambda m, x: m.f(renames(x)), "item .* reads numbers"),
    "refusal caught": (catches(lambda m, x: m.f(x * (1 + float(x.max() > 1e3)))), "item .* reads numbers"),
    "refusal of a use caught": (catches(lambda m, x: m.f(x - x.mean(dim=0))), "mean in Runs reduces over"),
    "numpy caught": (catches(lambda m, x: m.f(x * (1 + int(x.detach().numpy().max() > 1e3)))), "numpy in Runs hands"),
    "refusal caught in the backward pass": (lambda m, x: Doubles.apply(m.f(x)), "backward pass"),
    # memory and what outlasts a pass
    "parts of complex numbers": (imaginary, "mean in Runs reduces over the records"),
    "stash written after it was read": (stash("written"), HIDDEN),
    "stash of a backward pass": (stash("hook"), HIDDEN),
    "stash written by a backward pass": (stash("written hook"), "numbers of the batch into a tensor that it"),
    "generator of Python": (generator(), "mean in Runs reduces over the records"),
    "attribute of a parameter": (attribute_of_a_parameter, HIDDEN),
    # backward passes
    "saved tensors exchanged": (unpacked, "flip in .*backward pass.* moves the rows"),
    "hook of a node": (node_hook, "linalg_vector_norm in .* reduces over the records"),
    "gradient overwritten by a hook": (overwritten_gradient, "flip in .* moves the rows"),
    # weights and products
    "every record times every other": (lambda m, x: m.f((x @ x.t()) @ x), "mm in Runs"),
    "records as channels": (
        lambda m, x: m.f(functional.conv1d(x[None], torch.ones(len(x), 1, 1), groups=len(x))[0]), "convolution",
    ),
    "weight of the batch": (shared_weight, "mean in Runs reduces over the records"),
    "parametrised by the batch": (shows_the_weight, "mean in Scaled .* reduces over", (X,), parametrised),
    "complex weights": (
        spectral, "returns complex numbers", (X,), lambda: {"f": nn.Linear(4, 3), "w": nn.Parameter(draw(3, 2))},
    ),
    "columns by torch.vmap": (lambda m, x: m.f(torch.vmap(lambda c: c.sort().values, 1, 1)(x)), "sort in Runs"),
    "Fourier transform over the batch": (lambda m, x: m.f(torch.fft.fft(x, dim=0).real), "_fft_r2c in Runs"),
    "sparse product": (lambda m, x: m.f(torch.sparse.mm(torch.ones(len(x), len(x)).to_sparse(), x)), "makes a sparse"),
    "inverse with a check": (
        lambda m, x: m.f(torch.linalg.inv(x.view(-1, 2, 2)).flatten(1)),
        r"_linalg_check_errors in Runs.*torch\.linalg\.inv_ex",
    ),
    "batch norm over columns": (lambda m, x: m.f(functional.instance_norm(x.t()[None])[0].t()), "native_batch_norm"),
    "pooled over the batch": (lambda m, x: m.f(functional.avg_pool1d(x.t()[None], 3, 1, 1)[0].t()), "avg_pool2d"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_joins_records_is_refused_in_one_line(name: str) -> None:
    function, message, args, parts = case(*REFUSED[name])
    with pytest.raises(ValueError, match=message) as caught:
        RecordTape(Runs(function, **parts()), *(each[:3] for each in args))
    text = str(caught.value)
    assert text.startswith("model: ")
    assert "\n" not in text


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rolled by a multiple of both batches": lambda patch: patch.setattr(rules, "_moves_along", lambda op: []),
    "diagonal behind small batches": lambda patch: patch.setattr(rules, "_moves_along", lambda op: []),
    "steps along the diagonal": lambda patch: patch.setattr(rules, "_moves_by_place", lambda op, tensors: False),
    "places that turn back": lambda patch: patch.setattr(tracking, "counts_on", lambda op, output: True),
    "ones that are padded": lambda patch: patch.setattr(tracking, "keeps_alike", lambda op: True),
    "split at a tensor": lambda patch: patch.setattr(RowTracker, "require_inside", lambda *args: None),
    "refusal caught": lambda patch: patch.setattr(RowTracker, "require_unrefused", lambda tracker: None),
    "own tensor class": lambda patch: patch.setattr(RowTracker, "_refuse_tensors", lambda *args: None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_modules_without_rules_join_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, _, args, parts = case(*REFUSED[name])
    PLANTED[name](monkeypatch)
    tape = RecordTape(Runs(function, **parts()), *(each[:3] for each in args))
    assert moved_by_others(tape, *args) > 1e-2


def test_planted_fault_rows_put_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: zeros keep the order of their own rows, whatever order the values have."""
    monkeypatch.setitem(RULES, "index_put", lambda op, outputs: op.state(op["self"]))
    tape = RecordTape(Runs(lambda m, x: in_memory(m, x).view(len(x), -1)), X[:3])
    assert moved_by_others(tape, X) > 1e-2


# What is taken on trust is named


def by_a_caught_error(m: Any, x: Tensor) -> Tensor:
    """Looks a record's number up, and takes another factor if one is out of range."""
    try:
        functional.embedding((x[:, 0].abs() * 1e-3).long(), torch.ones(4, 1))
    except IndexError:
        return m.f(2 * x)
    return m.f(x)


def by_count() -> Callable[..., Tensor]:
    calls: list[int] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return m.f(x - x.mean(dim=0) if len(calls) > 8 else x)

    return forward


def by_state_of_a_generator(m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state().clone()
    state[24:64:8] += (x.detach().amax() > 1e3).byte()
    torch.set_rng_state(state)
    return m.f(x * torch.rand(4))


def by_native_memory(m: Any, x: Tensor) -> Tensor:
    numbers = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    return m.f(x * (1.0 + float(max(numbers) > 1e3)))


TRUSTED: dict[str, tuple[Callable[..., Any], str]] = {
    "size of the batch": (lambda m, x: m.f(x - x.mean(dim=0) if len(x) > 40 else x), "the batch's size"),
    "caught error": (by_a_caught_error, "an error that an operator raised and it"),
    "count": (by_count(), "a count of its calls"),
    "state of a generator": (by_state_of_a_generator, "a generator whose state is set to numbers of the batch"),
    "native memory": (by_native_memory, "native code that reads or changes the memory of tensors behind torch"),
    "question": (lambda m, x: m.f(x if active_tracker() else x - x.mean(dim=0)), "because it asks whether it is"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUSTED)
def test_what_is_neither_refused_nor_right_is_named_on_trust(name: str) -> None:
    function, sentence = TRUSTED[name]
    page = Path(__file__).parents[3] / "docs" / "privacy-records.md"
    (trusted,) = (p for p in page.read_text().split("\n\n") if p.startswith("Taken on trust: Python code"))
    assert sentence in trusted
    tape = RecordTape(Runs(function), X[:3])
    assert max(moved_by_others(tape, X) for _ in range(3)) > 1e-2


# Records of a shape that was not seen before


class Centred(nn.Module):
    """Subtracts the mean of the first batch of every length, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.means = nn.Linear(1, 3), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        mean = self.means.setdefault(x.shape[1], x.detach().mean())
        return self.f((x - mean).mean(dim=1, keepdim=True))


def test_what_a_module_keeps_for_a_new_shape_comes_from_invented_records() -> None:
    tape = RecordTape(Centred(), X[:3])
    tape.follow((draw(RECORDS, 6),), {})
    assert moved_by_others(tape, draw(RECORDS, 6)) < 1e-5


@pytest.mark.parametrize("records", [6, 37])
def test_a_batch_as_large_as_one_of_the_probe_may_have_a_new_shape(records: int, tmp_path: Path) -> None:
    module = Runs(lambda m, x: m.f(x).mean(dim=1))
    x, y = draw(records, 5, 4), torch.zeros(records, dtype=torch.int64)
    loader = DataLoader(TensorDataset(x, y), batch_size=records)
    given = module, torch.optim.SGD(module.parameters(), lr=0.1), nn.CrossEntropyLoss(), loader
    with private_loop(tmp_path / "run", given, noise_multiplier=1e-6, max_grad_norm=CLIP) as loop:
        inputs, labels = next(iter(loop.data_loader))
        assert len(inputs) == records
        loop.criterion(module(inputs[:, :3]), labels).backward()
        assert 0 < float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm()) <= CLIP * 1.001
