"""Wrap a module with feedback points: state dicts, copies, checkpointing, and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from opusim import FeedbackAlignment, open_device
from tests.support.record_models import Custom

WIDTH, CLASSES = 6, 3
Run = Callable[[nn.Module, Tensor], Tensor]
x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
y = torch.arange(8) % CLASSES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h + self.linear(h).tanh())


class Net(nn.Module):
    """Three blocks, of which the first two are points, and a head; `run` calls a block."""

    def __init__(self, run: Run | None = None, together: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.ModuleList(Block() for _ in range(3))  # the name that the wrapper uses as well
        self.head = nn.Linear(WIDTH, CLASSES)
        self.run, self.together = run, together

    def forward(self, h: Tensor) -> Tensor:
        if self.together:  # points inside one checkpointed part
            h = checkpoint(lambda h: self.model[1](self.model[0](h)), h, use_reentrant=False)
            return self.head(self.model[2](h))
        for block in self.model:
            h = block(h) if self.run is None else self.run(block, h)
        return self.head(h)


def gradients(model: nn.Module, owner: nn.Module | None = None) -> dict[str, Tensor]:
    """Gradients of one batch, by the name that the plain model gives them."""
    cross_entropy(model(x), y).backward()
    found = {name: p.grad for name, p in (owner or model).named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(map(torch.equal, first.values(), second.values()))


NESTINGS = {
    "bare": lambda m: m,
    "nested": lambda m: nn.ModuleDict({"stem": nn.Linear(2, 2), "body": m}),
    "parallel": lambda m: nn.ModuleDict({"module": m}),  # as DistributedDataParallel names its part
    "list": lambda m: nn.ModuleList([m]),
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_state_dicts_load_into_the_plain_model_and_back(nest: Callable[[nn.Module], nn.Module]) -> None:
    wrapped, plain = nest(FeedbackAlignment(Net())), nest(Net())
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert wrapped.state_dict()._metadata == plain.state_dict()._metadata
    for source, target in ((wrapped, plain), (plain, wrapped)):
        for value in [*source.parameters(), *source.buffers()]:
            value.data = torch.rand(value.shape).to(value.dtype)
        target.load_state_dict(source.state_dict())
        assert same(source.state_dict(), target.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nothing"):
        wrapped.load_state_dict(plain.state_dict() | {"nothing": torch.zeros(1)})


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_parameters_and_buffers_have_names_of_the_state_dict(nest: Callable[[nn.Module], nn.Module]) -> None:
    """Those of the plain model, in its order, each once; every module keeps a name of its own."""
    wrapped, plain = nest(FeedbackAlignment(Scaled())), nest(Scaled())
    for kind in ("named_parameters", "named_buffers"):
        assert [name for name, _ in getattr(wrapped, kind)()] == [name for name, _ in getattr(plain, kind)()]
        for name, tensor in getattr(wrapped, kind)():
            assert torch.equal(tensor, wrapped.state_dict()[name])
    modules = list(wrapped.modules())
    assert len(dict(wrapped.named_modules())) == len(modules) == len(list(plain.modules())) + 1
    assert next(wrapped.modules()) is wrapped


class Scaled(Net):
    """A model with a parameter and a buffer of its own, besides those of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h * self.scale + self.shift)


def flat() -> nn.Module:
    """A parameter and a buffer next to two layers; no part is named `model`, as the wrapper's is."""
    layers = {"body": nn.Linear(WIDTH, 4), "act": nn.Tanh(), "head": nn.Linear(4, CLASSES)}
    own = {"scale": nn.Parameter(torch.rand(WIDTH)), "shift": torch.rand(WIDTH)}
    return Custom(lambda m, h: m.head(m.act(m.body(h * m.scale + m.shift))), **own, **layers)


def test_functional_calls_take_every_parameter_and_buffer_by_its_name() -> None:
    model, other = FeedbackAlignment(flat()), flat()
    before = model.scale
    given = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(model, given, (x,)), other(x))
    assert model.scale is before  # back in place
    model.scale = other.scale
    assert model.model.scale is other.scale
    assert not model._parameters


def test_keys_that_differ_by_the_wrappers_own_name_stay_apart() -> None:
    def awkward() -> nn.Module:
        inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        return nn.ModuleDict({"model": inner, "0": nn.Linear(2, 2)})

    plain = awkward()
    model = FeedbackAlignment(deepcopy(plain), ["model.1"])
    assert same(model.state_dict(), plain.state_dict())
    model.load_state_dict(awkward().state_dict())
    assert not same(model.state_dict(), plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert same(model.state_dict(), plain.state_dict())


# Copies, and points that are off


def test_a_copy_has_points_of_its_own_and_reads_the_same_device() -> None:
    device = open_device("gaussian", n_inputs=CLASSES, n_outputs=WIDTH, noise={"sigma": 0.1})
    model = FeedbackAlignment(Net(), device=device)
    model(x)
    copied = deepcopy(model)
    assert copied.noisy_device is device
    wanted = {name: gradient.clone() for name, gradient in gradients(model).items()}
    assert all(p.grad is None for p in copied.parameters())
    assert same(gradients(copied), wanted)
    inner = deepcopy(model.model)  # as an average of the weights is kept; its hooks belong to the copy
    for p in inner.parameters():
        p.grad = None
    copied.remove()
    model.zero_grad()
    assert not same(gradients(model.remove()), wanted)
    assert [p.grad is None for p in inner.parameters()] == [True] * len(wanted)


def test_remove_and_backpropagating_give_the_gradients_of_backpropagation() -> None:
    wanted = gradients(Net())
    model = FeedbackAlignment(Net())
    with model.backpropagating():
        assert same(gradients(model, model.model), wanted)
    model.zero_grad()
    assert not same(gradients(model, model.model), wanted)
    plain = FeedbackAlignment(Net()).remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert same(gradients(plain), wanted)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_evaluation_is_the_plain_model(mode: str) -> None:
    plain, model = Net(), FeedbackAlignment(Net())
    if mode == "eval":
        plain.eval(), model.eval()
    modes = {"eval": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[mode]():
        assert torch.equal(model(x), plain(x))
    assert same(model.state_dict(), plain.state_dict())  # running means


def test_the_model_itself_learns_through_its_points() -> None:
    """Frameworks may be given the model; a submodule that is called separately has no point, which is said once."""
    net = Net()
    wanted = gradients(FeedbackAlignment(Net()).model)
    model = FeedbackAlignment(net)
    assert same(gradients(net), wanted)
    with torch.no_grad():
        net.model[0](x)
    with model.backpropagating():
        net.model[0](x)
    with pytest.warns(UserWarning, match=r"'model\.0' runs outside a forward pass of the whole model"):
        assert net.model[0](x).requires_grad
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    assert net.model[0](x).requires_grad  # also after a forward pass that failed
    deepcopy(model)


def test_attributes_of_the_model_are_found_and_its_torch_device() -> None:
    """As loops write `x.to(model.device)`; the noisy device has a name of its own, and may be assigned to either."""
    model = FeedbackAlignment(Net())
    assert model.head is model.model.head
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'tail'"):
        _ = model.tail
    assert model.device == torch.device("cpu")
    assert model.to("meta").device == torch.device("meta")
    assert FeedbackAlignment(nn.Sequential(nn.Tanh()), "0").device == torch.device("cpu")
    device = open_device("ideal", n_inputs=CLASSES, n_outputs=WIDTH)
    model.device = device
    assert model.noisy_device is device
    assert model.device == torch.device("meta")


def checkpointed(use_reentrant: bool) -> Run:
    return lambda block, h: checkpoint(block, h, use_reentrant=use_reentrant)


@pytest.mark.parametrize("point", ["inside", "outside", "around all"])
def test_checkpointing_changes_no_gradient(point: str) -> None:
    """Parts that run again in the backward pass are cut at the same places."""
    runs, wanted = [], gradients(FeedbackAlignment(Net()).model)
    net = Net(run=checkpointed(False) if point == "outside" else None, together=point == "inside")
    net.model[0].linear.register_forward_hook(lambda *_: runs.append(1))
    model = FeedbackAlignment(net)
    if point == "around all":
        cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        assert same({n: p.grad for n, p in net.named_parameters()}, wanted)
    else:
        assert same(gradients(net), wanted)
    assert len(runs) == 2
    deepcopy(model)  # nothing of the pass is kept


@pytest.mark.parametrize("together", [True, False])
def test_backpropagation_through_checkpointed_points(together: bool) -> None:
    wanted = gradients(Net())
    net = Net(run=None if together else checkpointed(False), together=together)
    with FeedbackAlignment(net).backpropagating():
        assert same(gradients(net), wanted)


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    net = Net(run=checkpointed(True))
    model = FeedbackAlignment(net)
    with pytest.raises(ValueError, match=r"'model\.0' computes without gradients.*use_reentrant=False"):
        model(x.clone().requires_grad_())
    net.run = checkpointed(False)  # the remedy
    gradients(model)


# What is refused


def test_a_second_wrapper_is_refused_until_the_first_is_removed() -> None:
    """As in a notebook whose cell runs twice: the first wrapper's points would win."""
    net = Net()
    first = FeedbackAlignment(net)
    for model in (net, first, nn.Sequential(net)):
        with pytest.raises(ValueError, match=r"model has feedback points already; call remove\(\)"):
            FeedbackAlignment(model)
    FeedbackAlignment(first.remove())


@pytest.mark.parametrize(("options", "message"), [
    ({"points": "model.o"}, "points: no submodule is 'model.o'; did you mean 'model.2' or"),
    ({"points": ["model.0", nn.GRU]}, "points: no submodule is GRU; it has model, model.0"),
    ({"points": []}, "points is empty; give names"),
    ({"error_at": "haed"}, "error_at = 'haed' is no submodule; did you mean 'head'"),
    ({"points": "model.1", "error_at": "model.1"}, "'model.1' is a feedback point too; leave it out"),
    ({"rows": 0}, "rows = 0: must be at least 1"),
    ({"rows": "all"}, "rows = 'all': must be one of 'each', 'sum'; or give a number"),
    ({"spread": "wide"}, "spread = 'wide': must be one of"),
    ({"slices": "common"}, "slices = 'common': must be one of"),
    ({"encoding": "binary"}, "encoding = 'binary': must be one of"),
    ({"encoding": "planes", "planes": 0}, r"planes = 0: must be an integer in \[1, 24\]"),
    ({"encoding": "ternary", "threshold": -1.0}, "threshold = -1.0: must be finite and at least 0"),
    ({"gain": -1.0}, "gain = -1.0: must be finite and at least 0"),
    ({"seed": -1}, "seed = -1: must be an integer"),
    ({"points": [3]}, "points holds 3; give names"),
    ({"device": "gaussian"}, r"device.*NoisyDevice.*opusim.open_device\('gaussian'"),
])  # fmt: skip
def test_arguments_are_refused_with_a_remedy(options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FeedbackAlignment(Net(), **options)


def test_points_are_names_patterns_or_classes() -> None:
    for points in (["model.0", "model.1", "model.2"], "model.*", Block, [Block, "model.0"]):
        assert FeedbackAlignment(Net(), points).points == ("model.0", "model.1", "model.2")
    assert FeedbackAlignment(Net(), "model.*.norm").points == ("model.0.norm", "model.1.norm", "model.2.norm")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def test_points_and_error_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"point 'model\.2' does not run before the error is taken"):
        FeedbackAlignment(Net(), ["model.0", "model.2"], error_at="model.1")(x)
    with pytest.raises(ValueError, match="error is taken at the output of point '2'; leave it out of points"):
        FeedbackAlignment(layers(), nn.Linear)(x)
    idle = Net()
    idle.unused = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"error_at = 'unused' did not run in this forward pass"):
        FeedbackAlignment(idle, error_at="unused")(x)

    class Pair(Net):
        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(h), self.head(h)

    with pytest.raises(ValueError, match="the model returns tuple instead of one tensor; name the submodule"):
        FeedbackAlignment(Pair())(x)
    with pytest.raises(ValueError, match=r"error_at = 'head' runs twice in one forward pass"):
        FeedbackAlignment(Pair(), error_at="head")(x)
    z, _ = FeedbackAlignment(Pair(), error_at="model.2")(x)  # the remedy
    cross_entropy(z, y).backward()


def test_a_device_that_is_too_small_is_refused_with_the_size_to_open() -> None:
    small = open_device("ideal", n_inputs=2, n_outputs=50)
    model = FeedbackAlignment(Net(), device=small)
    with pytest.raises(ValueError, match=r"needs 3 and 6; open it with n_inputs=3, n_outputs=6"):
        model(x)
    model.noisy_device = None
    n_inputs, n_outputs = model.shape(x[:2])
    model.noisy_device = open_device("ideal", n_inputs=n_inputs, n_outputs=n_outputs)
    gradients(model)
    assert model.usage.frames > 0
    real = FeedbackAlignment(Net(), device=model.noisy_device, encoding="real")
    with pytest.raises(ValueError, match=r"encoding = 'real' cannot be shown to a device; use 'ternary'"):
        gradients(real)


class Words(nn.Module):
    """Positions in, one vector out; the block runs `times` times."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.times = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), 1

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.times):
            h = self.block(h).tanh()
        return self.head(h.mean(dim=1))


def test_lengths_may_change_unless_each_position_has_outputs_of_its_own() -> None:
    short, long = torch.rand(2, 3, WIDTH), torch.rand(2, 4, WIDTH)
    shared, full = FeedbackAlignment(Words(), "block"), FeedbackAlignment(Words(), "block", spread="full")
    for model in (shared, full):
        model(short)
    shared(long).sum().backward()
    with pytest.raises(ValueError, match="have other sizes than in the first forward pass.*spread"):
        full(long)
    assert full.shape(long) == (CLASSES, 4 * WIDTH)
    full(long).sum().backward()
    shared.model.times = 2
    with pytest.raises(ValueError, match="points run 2 times in this forward pass and ran 1 times"):
        shared(short)


def test_the_start_of_the_output_layer_needs_sizes_and_a_layer_that_fits() -> None:
    model = FeedbackAlignment(Net())
    with pytest.raises(RuntimeError, match=r"not known yet; call shape\(x\) with two records first"):
        model.start_from_feedback(model.head)
    model.shape(x[:2])
    with pytest.raises(ValueError, match=r"linear has weights of shape \(6, 6\).*needs \(3, 6\)"):
        model.start_from_feedback(model.model.model[0].linear)


def test_shape_changes_nothing() -> None:
    model = FeedbackAlignment(Net())
    before, rng = deepcopy(model.state_dict()), torch.get_rng_state()
    model.model.model[1].eval()
    assert model.shape(x) == (CLASSES, WIDTH)
    assert FeedbackAlignment(Net(), slices="own").shape(x) == (CLASSES, 2 * WIDTH)
    assert same(model.state_dict(), before)
    assert [m.training for m in model.model.model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), rng)


def test_no_gain_uses_no_device_and_warns_of_nothing() -> None:
    """The control in which only the top learns shows the device nothing; blocks have gradients of zero."""
    device = open_device("gaussian", n_inputs=CLASSES, n_outputs=64)
    model = FeedbackAlignment(Net(), gain=0, device=device)
    cross_entropy(model(x), y).backward()
    assert device.usage.frames == 0
    assert {bool(parameter.grad.any()) for parameter in model.parameters()} == {True, False}
    with pytest.raises(ValueError, match="gain = 0 sends no feedback"):
        model.diagnose(lambda: cross_entropy(model(x), y))


EXPORTS = {
    "torch.export": lambda model: torch.export.export(model, (x,)),
    "strict torch.export": lambda model: torch.export.export(model, (x,), strict=True),
    "torch.jit.trace": lambda model: torch.jit.trace(model, x),
    "torch.jit.script": torch.jit.script,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_refused_until_the_points_are_removed(name: str) -> None:
    def new() -> FeedbackAlignment:
        return FeedbackAlignment(layers().eval())

    line = rf"{name.removeprefix('strict ')} cannot record feedback points.*plain model, which remove\(\)"
    with torch.no_grad():
        with pytest.raises(Exception, match=line) as caught:
            EXPORTS[name](new())
        if "strict" not in name:  # torch writes lines of its own around that one
            assert caught.type is ValueError
            assert "\n" not in str(caught.value)
            assert EXPORTS[name](new().remove()) is not None


def test_a_model_without_storage_has_a_shape_and_does_not_learn() -> None:
    with torch.device("meta"):
        model, empty = FeedbackAlignment(Net()), torch.zeros(2, WIDTH)
    assert model.shape(empty) == (CLASSES, WIDTH)
    with pytest.raises(ValueError, match=r"on the meta device.*to_empty\(device='cpu'\).*remove\(\)"):
        model(empty)
    model.to_empty(device="cpu").load_state_dict(Net().state_dict())  # the remedy
    gradients(model)


def test_an_error_in_one_of_several_tensors_is_refused() -> None:
    """What the loss takes of the other tensors would send nothing to the blocks before."""
    parts = {"block": nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "top": nn.LSTM(6, 6)}
    net = Custom(lambda m, x: m.top(m.block(x))[1][0], **parts)
    model = FeedbackAlignment(net, ["block"], error_at="top")
    with pytest.raises(ValueError, match="returns several tensors"):
        model(torch.randn(3, 6))
