"""The probe for modules that mix records: what it finds, what it accepts, and what it leaves unchanged."""

import pickle
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from opusim import training
from opusim.training.networks.record_gradients.probe import require_separate_outputs
from opusim.training.networks.record_independence import require_forgetful, runs_torch_only, same
from tests.support.record_models import Custom
from tests.support.ulr_models import MODELS, Residual

N_INPUTS = 6


def rows(n: int = 40) -> Tensor:
    return torch.randn(n, N_INPUTS, generator=torch.Generator().manual_seed(1))


class Function(nn.Module):
    """A module without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def zero_branch() -> nn.Module:
    """x + weight (mean of the batch), the weight 0 at first."""
    weight = nn.Parameter(torch.zeros(N_INPUTS))
    return Custom(lambda m, x: x + m.weight * x.nan_to_num().clamp(-1, 1).mean(dim=0), weight=weight)


def batch_attention() -> nn.Module:
    """Attention whose first axis, positions to torch, is the batch."""
    attention = nn.MultiheadAttention(N_INPUTS, 2)
    return Custom(lambda m, x: m.attention(*[x[:, None]] * 3)[0][:, 0], attention=attention)


def largest(x: Tensor) -> Tensor:
    """A scale for the whole batch, as dynamic quantisation has it."""
    scale = x.nan_to_num().abs().max().clamp_min(1e-9)
    return (x / scale * 127).round() * scale / 127


MIXING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(N_INPUTS),
    "batch norm of no mode": lambda: Function(lambda x: functional.batch_norm(x, None, None, training=True)),
    "zero-initialised branch": zero_branch,
    "attention over the batch": batch_attention,
    "scale of the batch": lambda: Function(largest),
    "batches of 32 and more": lambda: Function(lambda x: x if len(x) < 32 else x - x.mean(dim=0)),
}


def around(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(N_INPUTS, N_INPUTS), module, nn.Linear(N_INPUTS, 3)).eval()


@pytest.mark.parametrize("name", list(MIXING))
def test_a_module_that_mixes_records_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="model: .*[A-Za-z1]+ '1.*mixes the records|mixes the records.* in"):
        require_separate_outputs(around(MIXING[name]()), rows())


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_batch_statistics_in_training_mode_are_found_behind_weights_of_zero(weight: float) -> None:
    """Not by the type of the module: a subclass of nothing that torch knows."""

    def normalised(m: nn.Module, x: Tensor) -> Tensor:
        return m.weight * (x - x.mean(dim=0)) / x.std(dim=0) if m.training else x

    own = Custom(normalised, weight=nn.Parameter(torch.full((N_INPUTS,), weight)))
    require_separate_outputs(around(own), rows())
    with pytest.raises(ValueError, match="mean in Custom '1' reduces over the records"):
        require_separate_outputs(around(own).train(), rows())


@pytest.mark.parametrize("name", list(MODELS))
def test_modules_that_treat_records_apart_pass(name: str) -> None:
    make, n_inputs = MODELS[name]
    require_separate_outputs(make().eval(), torch.randn(40, n_inputs))


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(2, N_INPUTS), nn.LayerNorm(N_INPUTS), nn.Dropout(0.5), Residual(N_INPUTS), Function(torch.round),
        Function(lambda x: (x > 0).float()), Function(torch.log), Function(lambda x: x + torch.randn(x.shape)),
        Function(lambda x: x.argmax(dim=1, keepdim=True).expand(-1, N_INPUTS).float()),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
@pytest.mark.parametrize("n", [1, 3, 40])
def test_other_modules_pass(module: nn.Module, n: int) -> None:
    require_separate_outputs(around(module), rows(n))


def test_a_module_of_token_numbers_passes() -> None:
    model = [Function(lambda x: x.long()), nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, 3)]
    tokens = torch.randint(9, (40, N_INPUTS)).float()
    require_separate_outputs(nn.Sequential(*model).eval(), tokens)
    with pytest.raises(ValueError, match="mixes"):
        require_separate_outputs(nn.Sequential(*model, Function(largest)).eval(), tokens)


def test_a_module_may_draw_from_torch_s_generator_only() -> None:
    source = torch.Generator().manual_seed(4)
    own = Function(lambda x: x + torch.randn(x.shape, generator=source))
    with pytest.raises(ValueError, match="randn in Function '1' draws .* draw from torch's generator"):
        require_separate_outputs(around(own), rows())
    mixing = Function(lambda x: x + 0.01 * x.mean() + torch.randn(x.shape))
    with pytest.raises(ValueError, match="mean in Function '1' reduces over the records"):
        require_separate_outputs(around(mixing), rows())


def test_the_probe_leaves_no_trace() -> None:
    def drawing(m: nn.Module, x: Tensor) -> Tensor:
        np.random.normal()
        random.random()
        return m.seen * x + torch.zeros_like(x).bernoulli_(0.5)

    model = around(Custom(drawing, seen=torch.ones(N_INPUTS)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    data = rows()
    require_separate_outputs(model, data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()
    assert torch.equal(data, rows())
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


def train(folder: Path, kind: str, model: nn.Module, x: Tensor | None = None, **changes: Any) -> None:
    """A run that protects records, at a rate that moves next to nothing."""
    config = {
        "epochs": 1, "threads": 1, "trainer": {"kind": kind}, "data": {"n_classes": 3}, "optimizer": {"lr": 1e-6},
        "sampler": {"scheme": "poisson", "batch_size": 16}, "protection": {"kind": "record", "noise_multiplier": 1.0},
    }  # fmt: skip
    data = rows(60) if x is None else x, torch.arange(60) % 3
    training.train(config | changes, data=data, model=model, folder=folder / "run")


@pytest.mark.parametrize("name", ["batch norm", "zero-initialised branch"])
@pytest.mark.parametrize("kind", ["bp", "zo", "ulr"])
def test_protected_runs_refuse_models_that_mix_records(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match="mixes the records"):
        train(tmp_path, kind, around(MIXING[name]()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["zo", "ulr"])
def test_runs_without_protection_take_them_as_before(tmp_path: Path, kind: str) -> None:
    train(tmp_path, kind, around(zero_branch()), protection={"kind": "none"})


class Shifted(nn.Module):
    """x plus a shift that is set to minus the mean of the first batch, as ActNorm does; also, or only, in training."""

    def __init__(self, *, training_only: bool, trained: bool) -> None:
        super().__init__()
        self.training_only, shift = training_only, torch.zeros(N_INPUTS)
        if trained:
            self.shift = nn.Parameter(shift)
        else:
            self.register_buffer("shift", shift)
        self.register_buffer("is_set", torch.tensor(False))
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(x) and not self.is_set and (self.training or not self.training_only):
            self.shift.data.copy_(-x.detach().mean(dim=0))
            self.values.append(self.shift.detach().clone())
            self.is_set.fill_(True)
        return x + self.shift


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("training_only", [True, False])
@pytest.mark.parametrize("kind", ["bp", "zo", "ulr"])
def test_no_private_record_sets_state(tmp_path: Path, kind: str, training_only: bool, trained: bool) -> None:
    layer = Shifted(training_only=training_only, trained=trained)
    train(tmp_path, kind, around(layer), rows(60) + 100.0)
    # those of N(0, 1), not of the records
    assert all(float(value.abs().max()) < 10 for value in layer.values)


def tokens(*, trained: bool) -> nn.Module:
    """Means of the embeddings of |x|, rounded down; each pass shortens the rows of its tokens to norm 0.1."""
    return Custom(
        lambda m, x: m.embedding(x.nan_to_num().abs().long().clamp(max=39)).mean(dim=1),
        embedding=nn.Embedding(40, N_INPUTS, max_norm=0.1).requires_grad_(trained),
    )


def keeping() -> nn.Module:
    """The identity, which keeps the largest number of all records in a buffer."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.largest = torch.maximum(m.largest, x.detach().abs().max())
        return x

    return Custom(forward, largest=torch.zeros(()))


UNMOVED = [("zo", tokens(trained=True)), ("bp", tokens(trained=False)), ("zo", keeping()), ("bp", keeping())]


@pytest.mark.parametrize(("kind", "layer"), UNMOVED)
def test_what_the_probe_s_records_cannot_move_is_refused(tmp_path: Path, kind: str, layer: nn.Module) -> None:
    """Tokens that no invented record has, and numbers beyond theirs, would show in the released model."""
    with pytest.raises(ValueError, match="a forward pass changes '.*(embedding.weight|largest)'"):
        train(tmp_path, kind, around(layer), 30 + rows(60).abs())


def drawing(path: Path) -> nn.Module:
    """Drops records' features as torch's generator says, and writes draws of numpy, Python and torch into a file.

    Attributes and variables are put back after every pass.
    """

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with open(path, "a") as file:
            file.write(f"{np.random.random()} {random.random()} {float(torch.rand(()))}\n")
        return x * (torch.rand(x.shape) < 0.5)

    return Custom(forward)


@pytest.mark.parametrize("kind", ["zo", "ulr"])
def test_a_release_draws_for_modules_from_the_system(tmp_path: Path, kind: str) -> None:
    """Draws go by places in the batch: under a known seed one record more would change what all others add."""
    last, states = [], []
    for number in range(2):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        layer = drawing(tmp_path / f"drawn {number}")
        train(tmp_path / f"{number}", kind, around(layer), mode="release")
        last.append((tmp_path / f"drawn {number}").read_text().splitlines()[-1].split())
        states.append(torch.get_rng_state())
    assert all(first != second for first, second in zip(*last, strict=True))
    assert torch.equal(*states)


class Attributed(nn.Module):
    """The identity, which keeps something of a batch in a Python attribute: no output shows it yet."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.mean, self.calls = way, torch.zeros(N_INPUTS), 0
        self.queue: deque[Tensor] = deque(maxlen=64)
        self.kept: dict[str, Tensor] = {}
        self.helper = Function(torch.sin)
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(dim=0)
        self.calls += 1
        if self.way == "running mean":
            self.mean = 0.999 * self.mean + 0.001 * mean
        elif self.way == "queue":
            self.queue.append(mean)
        elif self.way == "table":
            self.kept[str(float(mean.sum()))] = mean
        elif self.way == "largest":
            self.last = torch.maximum(self.last, x.detach().abs().max())
        elif self.way == "variable of the file":
            LOG.append(float(mean.sum()))
        elif self.way == "what every batch overwrites":
            self.last, self.kept["mean"] = x.detach(), mean
        return x - self.mean if self.calls > 10_000 else x


LOG: list[float] = []
REMEMBERS = ("running mean", "queue", "table", "largest", "variable of the file", "hook")


OF_BP = [("bp", way) for way in REMEMBERS]


def remembering(way: str) -> nn.Sequential:
    model, seen = around(Attributed(way)), list[float]()
    if way == "hook":
        model.register_forward_hook(lambda module, x, y: seen.append(float(y.detach().sum())))
    return model


@pytest.mark.parametrize(("kind", "way"), [("zo", "running mean"), ("ulr", "running mean"), *OF_BP])
def test_attributes_that_outlast_a_batch_are_refused(tmp_path: Path, kind: str, way: str) -> None:
    read = way in ("table", "variable of the file", "hook")
    message = "reads numbers of the batch into Python" if read else "depends on earlier batches"
    with pytest.raises(ValueError, match=message):
        train(tmp_path, kind, remembering(way))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", [*REMEMBERS, "what every batch overwrites"])
def test_a_look_at_attributes_leaves_them_as_they_were(way: str) -> None:
    model = remembering(way)
    before = pickle.dumps([dict(vars(model[1])), LOG])
    refused = pytest.raises(ValueError, match="earlier batches") if way in REMEMBERS else nullcontext()
    with refused:
        require_forgetful(model, lambda index, factor: model(factor * rows()[index]))
    assert pickle.dumps([dict(vars(model[1])), LOG]) == before


def with_attribute(name: str, value: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        linear = nn.Linear(N_INPUTS, 3)
        setattr(linear, name, value)
        return linear

    return build


def with_hook(register: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        linear = nn.Linear(N_INPUTS, 3)
        getattr(linear, register)(lambda *_: None)
        return linear

    return build


OWN_CODE: dict[str, Callable[[], nn.Module]] = {
    "hook": with_hook("register_forward_hook"),
    "pre-hook": with_hook("register_forward_pre_hook"),
    "function among the attributes": lambda: nn.TransformerEncoderLayer(4, 1, activation=lambda x: x),
    "function in a list": with_attribute("functions", [len]),
    "table among the attributes": with_attribute("table", {}),
    "own forward": with_attribute("forward", lambda input: input),
    "own class of parameters": with_attribute("weight", type("Own", (nn.Parameter,), {})(torch.ones(3, N_INPUTS))),
    "own class": lambda: type("Own", (nn.Linear,), {"__module__": __name__})(3, 3),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(N_INPUTS, 3)),
    "recorder of torch": torch.ao.quantization.RecordingObserver,
}  # fmt: skip
"""Modules of torch, with code that a user brought."""


@pytest.mark.parametrize("way", OWN_CODE)
def test_modules_with_code_of_others_are_tried(way: str) -> None:
    assert runs_torch_only(nn.Linear(N_INPUTS, 3))
    assert not runs_torch_only(nn.Sequential(nn.Tanh(), OWN_CODE[way]()))


def test_a_hook_on_all_modules_is_code_of_others() -> None:
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not runs_torch_only(nn.Linear(2, 2))
    assert runs_torch_only(nn.Linear(2, 2))


@pytest.mark.parametrize("replaced", [lambda self, x: x, partial(max, 0)], ids=["function", "object"])
def test_a_replaced_method_of_torch_is_foreign(monkeypatch: pytest.MonkeyPatch, replaced: object) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", replaced)
    assert not runs_torch_only(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_method_that_transformers_adds_is_no_code_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "smart_apply", lambda self, x: x, raising=False)
    assert runs_torch_only(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    monkeypatch.setattr(nn.Module, "other_apply", lambda self, x: x, raising=False)
    assert not runs_torch_only(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_class_that_only_claims_to_be_of_torch_is_code_of_others() -> None:
    claims = type("ReLU", (nn.ReLU,), {"__module__": nn.ReLU.__module__})
    assert claims.__module__ == nn.ReLU.__module__
    assert not runs_torch_only(claims())


@pytest.mark.parametrize("number", [0.0, 1.0, torch.finfo(torch.float32).max])
def test_a_number_that_becomes_infinite_or_nan_has_changed(number: float) -> None:
    before = torch.tensor([1.0, number])
    assert same(before, before.clone())
    for later in (torch.nan, torch.inf):
        after = torch.tensor([1.0, later])
        assert not same(before, after)
        assert same(after, after.clone())
