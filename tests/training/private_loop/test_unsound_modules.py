"""Modules and arguments with which one record could tell of others, refused before a step is paid for.

A pass on private records leaves nothing in buffers and Python attributes, even what no probe could see.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import opusim
from opusim.training.private_loop.folder import read_save
from tests.support.private_loops import private_loop, records
from tests.support.record_models import Custom, backward


class Kept(nn.Module):
    """A linear layer with a buffer that each training pass changes, or another way to tell of records."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, frozen = way, nn.Linear(4, 3), way == "frozen, max_norm"
        self.embedding = nn.Embedding(9, 4, max_norm=0.5 if frozen else None).requires_grad_(not frozen)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("histogram", torch.zeros(9))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 4), or tokens of shape (batch, 4)."""
        if self.way == "largest":
            self.calls.copy_(torch.maximum(self.calls, x.detach().abs().max()))
        if self.way == "seen tokens":
            self.histogram[x.flatten()] = 1.0
        if self.way == "log":
            self.seen.append(x.detach().mean())

        if self.way.startswith("first") and len(x) and not self.calls:  # as ActNorm takes its initial values
            kept = self.linear.bias.data if self.way == "first, parameter" else self.histogram
            kept[:3].copy_(x.detach().mean(dim=0)[:3])
            self.calls.fill_(1.0)
        if x.dtype == torch.int64:
            h = self.embedding(x).mean(dim=1)
            x = h - h.mean(dim=0) if self.way == "mixes" else h
        y = self.linear(x)
        return y.T.contiguous() if self.way == "records last" else y


def private(module: nn.Module, x: Tensor, folder: Path, *, labels: Tensor | None = None, **more: Any) -> Any:
    """A private loop; `criterion`, `batch_size` and `collate_fn` may be others."""
    y = torch.zeros(len(x), dtype=torch.int64) if labels is None else labels
    loader = {"batch_size": more.pop("batch_size", 10), "collate_fn": more.pop("collate_fn", None)}
    criterion = more.pop("criterion", nn.CrossEntropyLoss())
    data = DataLoader(more.pop("data", TensorDataset(x, y)), **loader)
    given = module, torch.optim.SGD(module.parameters(), lr=0.1), criterion, data
    return private_loop(folder, given, **more)


def gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


GENERATOR = torch.Generator().manual_seed(5)
NUMBERS = torch.randn(40, 4, generator=GENERATOR)
TOKENS = torch.randint(9, (40, 4), generator=GENERATOR)


@pytest.mark.parametrize(
    ("way", "x", "message"),
    [
        ("log", NUMBERS, "'Kept.seen[^']*' depends on earlier batches"),
        ("largest", NUMBERS, "a training pass changes buffer 'calls'"),
        ("seen tokens", TOKENS, "a training pass changes buffer 'histogram'"),
        ("frozen, max_norm", TOKENS, "a forward pass changes 'embedding.weight'"),
        ("records last", NUMBERS, "records must come first; transpose it in the module|no tensor with a row"),
        ("mixes", TOKENS, "mixes the records"),
        ("mixes", TOKENS[:1].expand(40, 4), "mixes the records"),
    ],
)
def test_unsound_modules_are_refused(way: str, x: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        private(Kept(way), x, tmp_path)
    assert "\n" not in str(caught.value)


class Sequences(nn.Module):
    """A recurrent network over sequences of shape (batch, 7, 4), and another way to place records."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.cell = nn.GRU(4, 3, batch_first=way != "reads time first")

    def forward(self, x: Tensor) -> Any:
        outputs, _ = self.cell(x)
        ways: dict[str, Callable[[], Any]] = {
            "time first": lambda: outputs.transpose(0, 1).contiguous(),
            "positions as rows": lambda: outputs.flatten(0, 1),
            "twice": lambda: torch.cat([outputs, outputs]),
            "length of the batch": lambda: outputs[:, : len(x)],
            "one value for all": lambda: (outputs, outputs.square().mean()),
            "by number of records": lambda: (outputs,) * len(x),
            "hidden state": lambda: self.cell(x),
        }
        return ways.get(self.way, lambda: outputs)()


SEQUENCES = torch.randn(40, 7, 4, generator=GENERATOR)


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("reads time first", "unbind in GRU 'cell' does not run in batches of every size"),
        ("time first", r"shape \(7, 7, 3\) for 7 records and \(7, 5, 3\) for 5: records must come first|no"),
        ("positions as rows", r"shape \(49, 3\) for 7 records and \(35, 3\) for 5|no tensor"),
        ("twice", "no tensor with a row for each record"),
        ("length of the batch", "in another dimension|has shape|records must come first"),
        ("by number of records", "returns 7 tensors for 7 records and 5 for 5|number of outputs"),
        ("hidden state", r"shape \(1, 7, 3\) for 7 records and \(1, 5, 3\) for 5: records must come first"),
    ],
)
def test_outputs_without_rows_are_refused(way: str, message: str, count: int, tmp_path: Path) -> None:
    """Also if only two records are given, and if a sequence is as long as a batch of the probe."""
    with pytest.raises(ValueError, match=message) as caught:
        private(Sequences(way), SEQUENCES, tmp_path, example_inputs=[SEQUENCES[:count]])
    assert "\n" not in str(caught.value)


def test_criteria_may_return_values_by_position_and_take_no_output_of_all_records(tmp_path: Path) -> None:
    """The loss of a record is the mean of what the criterion returns for it."""
    x, y, found = SEQUENCES, torch.randint(3, (40, 7)), []
    for reduction in ("none", "mean"):
        torch.manual_seed(4)
        module = Sequences("one value for all")
        loss = nn.CrossEntropyLoss(reduction=reduction)
        options = {
            "criterion": lambda out, y, loss=loss: loss(out.transpose(1, 2), y),
            "noise_multiplier": 1e-9,
        }
        with private(module, x, tmp_path / reduction, labels=y, **options) as loop:
            inputs, labels = next(iter(loop.data_loader))
            outputs, of_all = module(inputs)
            with pytest.raises(ValueError, match=r"of shape \(\) has no row for each of the \d+ records"):
                loop.criterion(outputs, of_all)
            with pytest.raises(RuntimeError, match="learns through the criterion of make_private only"):
                (loop.criterion(outputs, labels) + of_all).backward()
            loop.criterion(outputs, labels).backward()
            found.append(gradient(module))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


MeanSubtracted = backward("MeanSubtracted", lambda gradient: gradient - gradient.mean(dim=0))


def test_what_reaches_a_feedback_point_is_probed_without_the_device(tmp_path: Path) -> None:
    """Mixing in a point's block is found; the device is read in steps only."""

    def aligned(part: nn.Module) -> opusim.FeedbackAlignment:
        net = nn.Sequential(nn.Linear(4, 5), nn.Sequential(part, nn.Tanh()), nn.Linear(5, 3))
        return opusim.FeedbackAlignment(net, ["1"], device=device, encoding="stochastic")

    device = opusim.open_device("gaussian", n_inputs=3, n_outputs=5)
    sound = aligned(nn.Identity())
    private(sound, NUMBERS, tmp_path / "sound").close()
    assert sound.noisy_device is device
    assert device.usage.frames == 0
    mixing = Custom(lambda m, x: x + m.scale * MeanSubtracted.apply(x), scale=nn.Parameter(torch.ones(())))
    with pytest.raises(ValueError, match="mean in .*MeanSubtractedBackward reduces over the records"):
        private(aligned(mixing), NUMBERS, tmp_path / "mixing")


@pytest.mark.parametrize("limit", [None, 2])
def test_arguments_of_no_record_are_refused(tmp_path: Path, limit: int | None) -> None:
    """They may be computed from all records of a batch, such as its mean or its size."""
    module = Custom(lambda m, x, weights: m.linear(x * weights), linear=nn.Linear(4, 3))
    options: dict[str, Any] = {"max_physical_batch_size": limit}
    for given in (torch.ones(4), torch.ones(()), 0.5, 6, np.float64(0.5)):
        with pytest.raises(ValueError, match="has no row for each of the 6 records|is the number") as caught:
            private(module, NUMBERS, tmp_path, example_inputs=[NUMBERS[:6], given], **options)
        assert "build" in str(caught.value)
    example = [NUMBERS[:6], torch.ones(6, 4)]
    with private(module, NUMBERS, tmp_path, example_inputs=example) as loop:
        x, y = next(iter(loop.data_loader))
        for given, message in ((x.mean(dim=0), "has no row"), (len(x), "is the number")):
            with pytest.raises(ValueError, match=message):
                loop.module(x, given)
        loop.criterion(loop.module(x, torch.ones_like(x)), y).backward()


def test_a_penalty_inside_the_criterion_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)

    def penalised(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels) + module.weight.square().sum()

    with private(module, NUMBERS, tmp_path, criterion=penalised) as loop:
        inputs, labels = next(iter(loop.data_loader))
        with pytest.raises(ValueError, match="criterion: uses parameters of the module, such as a penalty"):
            loop.criterion(module(inputs), labels)


class Turned(TensorDataset):
    """Records whose signs a transform draws."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tensors[0][index] * torch.randn(4).sign(), index % 3


@pytest.mark.parametrize("limit", [None, 16])
@pytest.mark.parametrize("way", ["dropout", "codes", "transform"])
def test_a_release_draws_nothing_from_a_known_seed(way: str, limit: int | None, tmp_path: Path) -> None:
    """Draws go by places in the batch: under a known seed one record more would change what all others add."""
    found = []
    options = {"mode": "release", "seed": None, "noise_multiplier": 1e-9, "max_physical_batch_size": limit}
    for number in range(2):
        torch.manual_seed(0)
        part = nn.Dropout(0.5) if way == "dropout" else nn.Identity()
        module: nn.Module = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), part, nn.Linear(64, 3))
        if way == "codes":
            module = opusim.FeedbackAlignment(module, "1", encoding="stochastic")
        torch.manual_seed(1)
        data = Turned(NUMBERS) if way == "transform" else TensorDataset(NUMBERS, torch.arange(40) % 3)
        with private(module, NUMBERS, tmp_path / f"{number}", data=data, batch_size=40, **options) as loop:
            x, y = next(iter(loop.data_loader))
            state = torch.get_rng_state()
            loop.criterion(module(x), y).backward()
            assert torch.equal(state, torch.get_rng_state())
            found.append(gradient(module))
    assert float((found[0] - found[1]).norm()) > 1e-3


@pytest.mark.parametrize("way", ["first, parameter", "first, buffer"])
def test_no_record_sets_what_a_module_keeps_of_its_first_pass(way: str, tmp_path: Path) -> None:
    """Initial values come from invented records, whatever the loader holds."""
    found = []
    for number, offset in enumerate((0.0, 100.0)):
        torch.manual_seed(2)
        module = Kept(way)
        with private(module, NUMBERS + offset, tmp_path / f"{number}"):
            assert float(module.calls) == 1
            found.append(torch.cat([module.linear.bias.detach(), module.histogram]))
    assert torch.equal(*found)


def mixed(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Mixup, in half of the batches."""
    x, y = default_collate(records)
    share = float(torch.rand(())) * float(torch.rand(()) < 0.5)
    return (1 - share) * x + share * x.roll(1, 0), y


def in_order(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Draws for every record, and more often for larger ones; takes nothing from others."""
    x, y = default_collate(records)
    kept = torch.stack([torch.rand(int(4 + row.abs().sum()))[:4] < 0.8 for row in x])
    return x * kept, y


def test_a_collate_function_that_mixes_records_is_refused(tmp_path: Path) -> None:
    """Another record may not change a record's row; draws that another record only shifts may."""
    for collate in (mixed, in_order, default_collate):
        refused = pytest.raises(ValueError, match="mixes records") if collate is mixed else nullcontext()
        with refused:
            private(nn.Linear(4, 3), NUMBERS, tmp_path / collate.__name__, collate_fn=collate).close()


def test_frozen_batch_statistics_stay_frozen(tmp_path: Path) -> None:
    """module.train() at the start of an epoch would put them to use, and one record into every other."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))
    net[1].eval()
    mean = net[1].running_mean.clone()
    with private(net, NUMBERS, tmp_path) as loop:
        module, optimizer, criterion, loader = loop
        for x, y in loader:
            module.train()
            with pytest.raises(RuntimeError, match=r"'1' \(BatchNorm1d\) is in training mode now"):
                module(x)
            module[1].eval()
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
    assert torch.equal(net[1].running_mean, mean)


# Nothing is kept


RECORDS, LARGE = 60, 40
"""Batches above the second number are unlike those of a probe: Python's look at their size is not followed."""


class Range(nn.Module):
    """Keeps the range of its inputs in a buffer, an attribute, a list and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("low", torch.tensor(-100.0))
        self.register_buffer("replaced", torch.tensor(-100.0))
        self.lowest, self.seen, self.plain = -100.0, [-100.0], torch.tensor([-100.0])

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > LARGE:
            self.keep(x.detach().min())
            self.register_buffer("added", x.detach().min())
        hidden = torch.tanh(self.first(x))
        if len(x) > LARGE and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.keep(gradient.sum()))
        return self.last(hidden)

    def keep(self, found: Tensor) -> None:
        self.replaced = self.extra = found.clone()
        self.low.copy_(found)
        self.lowest = float(found)
        self.seen.append(float(found))
        self.plain.fill_(float(found))

    def kept(self) -> list[Any]:
        state = {name: float(value) for name, value in self.named_buffers()}
        return [state, self.lowest, list(self.seen), float(self.plain), hasattr(self, "extra")]


X, Y = records(RECORDS).tensors


@pytest.mark.parametrize("limit", [None, LARGE + 1])
def test_a_private_loop_keeps_nothing(tmp_path: Path, limit: int | None) -> None:
    module = Range()
    start = module.kept()
    options = {"sample_rate": 1.0, "max_physical_batch_size": limit}
    with private(module, X, tmp_path, labels=Y, **options) as loop:
        for a, b in loop.data_loader:
            assert len(a) == RECORDS
            loop.criterion(module(a), b).backward()
            loop.optimizer.step()
            assert module.kept() == start
        loop.save()
        saved = read_save(tmp_path)[0]["module"]
        assert {name: float(saved[name]) for name in start[0]} == start[0]
        with torch.no_grad():
            module(X)
        module.eval()(X)
        module.train()
        assert module.kept() == start
    module(X)
    assert module.kept() != start  # a plain module changes


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("kind", ["bp", "zo"])
def test_training_keeps_nothing(tmp_path: Path, kind: str, mode: str) -> None:
    """Neither steps nor, in experiment mode, the measurement of held-out records."""
    module = Range()
    start = module.kept()
    config = {
        "trainer": {"kind": kind}, "optimizer": {"name": "sgd", "lr": 0.01}, "mode": mode, "epochs": 1,
        "data": {"n_classes": 3, "validation_fraction": 0.0, "standardise": False},
        "sampler": {"batch_size": RECORDS}, "protection": {"kind": "record", "noise_multiplier": 1.0},
    }  # fmt: skip
    opusim.train(config, data=(X.numpy(), Y.numpy()), model=module, folder=tmp_path / "run")
    assert module.kept() == start


def test_what_a_pass_changed_and_autograd_saved_has_its_gradient(tmp_path: Path) -> None:
    """Values are put back between forward and backward pass, of which autograd must not complain."""
    found: list[Tensor] = []

    class Scaled(Range):
        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x)
            return outputs * self.low * self.plain * 1e-4

    for name in "ab":
        torch.manual_seed(0)
        module = Scaled()
        with private(module, X, tmp_path / name, labels=Y, sample_rate=1.0) as loop:
            a, b = next(iter(loop.data_loader))
            loop.criterion(module(a), b).backward()
            found.append(gradient(module))
    assert torch.equal(*found)
