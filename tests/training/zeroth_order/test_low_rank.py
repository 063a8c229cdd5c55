"""Directions of low rank: their law, both sides of many in one pass, exact moves, runs, and the optimizer."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.bare import zo_trainer
from opusim import training
from opusim.medium.transmission import Direction
from opusim.randomness.streams import derive_seed
from opusim.training.config import load_config
from opusim.training.errors import RunFolderError, RunInterrupted, TrainingDiverged
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.network import FullyConnected
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.zeroth_order.at_once import TwoSides, Uncovered
from opusim.training.zeroth_order.optimizer import ZerothOrder
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, StepEntry, factors
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent, LogHeader, mark_file, replay
from opusim.training.zeroth_order.trainer import ScalarRelease
from tests.support.record_models import Custom
from tests.support.zeroth_order import require_mean_move

SEEDS = (5, 6, 7)


class Conv1D(nn.Module):
    """Multiplies flat rows by torch.addmm, as GPT-2 in transformers does."""

    def __init__(self, n_outputs: int, n_inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_inputs, n_outputs) / 4)
        self.bias = nn.Parameter(torch.randn(n_outputs) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Norm(nn.Module):
    """Multiplies by its weight, as norms in transformers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(self.weight.dtype)


class Counted(nn.Linear):
    """Notes how many rows it multiplies."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return super().forward(x)


class Tokens(nn.Module):
    """Four tokens of a record: embeddings with positions, a norm, a flat product, a tied head; a frozen bottom."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(40, 12), nn.Embedding(4, 12)
        self.bottom = nn.Sequential(Counted(12, 12), nn.Tanh())
        self.shift = nn.Parameter(torch.randn(1, 4, 12) / 4)
        self.norm, self.flat, self.layer_norm = Norm(12), Conv1D(12, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.embed.weight
        if frozen:
            for part in (self.embed, self.places, self.bottom):
                part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bottom(self.embed(x.long()) + self.places(torch.arange(4)[None]))
        h = self.layer_norm(h + self.flat(self.norm(h + self.shift)))
        return self.head(h)[:, -1, :3]


class Product(nn.Module):
    """Uses its weight in a way that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def sides_of(model: nn.Module, x: torch.Tensor, rank: int = 2, rows: int = 12) -> TwoSides:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    perturbation = InPlacePerturbation(trained, perturbation=1e-2, rank=rank)
    sides = TwoSides(model.eval(), perturbation, rows=rows)
    sides.probe(model, (x,))
    return sides


def stacked(sides: TwoSides, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.stack(pair) for pair in sides.pairs(SEEDS, model, (x,))])


def test_entries_are_uncorrelated_of_variance_one_and_kurtosis_3_plus_6_over_r() -> None:
    """Within five standard errors of means over matrices; the kurtosis of full directions, 3, is the planted fault."""
    directions = [Direction(seed) for seed in range(1000)]
    for rank in (1, 4):
        left, right = factors(directions, 0, (6, 5), rank)
        z = ((left.mT @ right) / math.sqrt(rank)).flatten(1).double()
        for powers, expected in ((z.square(), 1.0), (z**4, 3 + 6 / rank), (z[:, :1] * z[:, 1:], 0.0)):
            means = powers.mean(dim=1)  # of a matrix; matrices are independent
            error = 5 * float(means.std()) / math.sqrt(len(directions))
            assert abs(float(means.mean()) - expected) < error
        assert abs((z**4).mean() - 3) > 5 * float((z**4).mean(dim=1).std()) / math.sqrt(len(directions))


def test_the_mean_of_many_moves_is_the_gradient(seed: int) -> None:
    """Coordinate by coordinate, five standard errors; the opposite sign, the planted fault, is far off."""
    torch.manual_seed(0)
    network = FullyConnected(nn.Sequential(nn.Linear(6, 4)))
    trainer_options = {"kind": "zo", "rank": 1, "directions": 12, "perturbation": 1e-2}
    config = load_config({"loss": "squared-error", "trainer": trainer_options, "optimizer": {"lr": 0.1}})
    trainer = zo_trainer(network, config, ScalarRelease(clip=None, divisor=1.0), root=7)
    assert trainer.sides.at_once
    x, y = torch.randn(1, 6, generator=torch.Generator().manual_seed(seed)), torch.tensor([1])
    require_mean_move(trainer, network, x, y, steps=100)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(("make", "tokens", "shared"), [
    (perceptron, False, False),
    (lambda: Tokens(frozen=False), True, False),
    (lambda: Tokens(frozen=True), True, True),
])  # fmt: skip
def test_at_once_is_one_after_another(make: Callable, tokens: bool, shared: bool, rank: int) -> None:
    """To float error, in passes that do not hold all directions; other directions, the planted fault, are far off."""
    torch.manual_seed(0)
    model = make()
    x = torch.randint(0, 40, (2, 4)).float() if tokens else torch.randn(2, 6)
    sides = sides_of(model, x, rank=rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if shared:
        Counted.calls.clear()
    assert sides.at_once, sides.reason
    together = stacked(sides, model, x)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    if shared:  # what no direction moves is evaluated once
        assert Counted.calls == [2]
    sides.at_once = False
    one_by_one = stacked(sides, model, x)
    signal = float((one_by_one[:, 0] - one_by_one[:, 1]).abs().max())
    assert float((together - one_by_one).abs().max()) < 1e-5 < 1e-3 * signal
    assert float((together.roll(1, 0) - one_by_one).abs().max()) > 0.1 * signal


def test_a_record_has_the_same_losses_in_any_batch() -> None:
    """Alone, among others and in another place, to float error."""
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(4, 6)
    sides = sides_of(model, x)
    among, moved = stacked(sides, model, x), stacked(sides, model, x.flip(0)).flip(2)
    alone = stacked(sides, model, x[2:3])
    assert torch.allclose(among, moved, atol=1e-6)
    assert torch.allclose(among[:, :, 2:3], alone, atol=1e-6)


def test_what_no_rule_covers_goes_one_after_another() -> None:
    """A function without a rule, a part of a weight, inputs that belong to no record, a weight that torch hides."""

    class Part(Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x[:, :3], self.weight[:3])

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 3), nn.Linear(1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(torch.arange(12.0)[:, None]).mean(dim=0)

    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.other = nn.Parameter(torch.ones(3))

    attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    wrapped = nn.Sequential(nn.Unflatten(1, (1, 6)), attention, nn.Flatten())
    found = {}
    for model in (Product(), Part(), Constant(), Unused(), wrapped):
        sides = sides_of(model, torch.randn(2, 6))
        assert not sides.at_once
        found[type(model).__name__] = sides.reason
    assert "matmul has no rule" in found["Product"]
    assert "do not belong to records" in found["Constant"]
    assert "leaves out trained tensors" in found["Unused"]
    assert "multi_head_attention" in found["Sequential"] or "encoder_layer" in found["Sequential"]
    assert found["Part"]


def test_a_function_that_only_some_records_reach_ends_the_step_and_moves_nothing() -> None:
    class Sometimes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.abs().max()) > 100:
                return x @ self.weight.T
            return super().forward(x)

    model, x = Sometimes(6, 3, bias=False), torch.randn(2, 6)
    sides, before = sides_of(model, x), model.weight.detach().clone()
    stacked(sides, model, x)
    with pytest.raises(Uncovered, match="makes another tensor of a trained one"):
        stacked(sides, model, 1000 * x)
    assert torch.equal(model.weight, before)


def test_moves_are_exact_in_any_order_of_the_directions() -> None:
    """To the bit; sums in float32, the planted fault, depend on the order."""
    generator = np.random.default_rng(0)
    seeds, scalars = [int(s) for s in generator.integers(2**60, size=50)], generator.normal(size=50)
    moved, careless = [], []
    for order in (np.arange(50), generator.permutation(50)):
        tensor = torch.ones(30, 20)
        own, values = tuple(seeds[n] for n in order), tuple(float(scalars[n]) for n in order)
        InPlacePerturbation([tensor], perturbation=1e-3, rank=3).update(
            StepEntry.rounded(rate=0.1, seeds=own, scalars=values)
        )
        moved.append(tensor)
        left, right = factors([Direction(one) for one in own], 0, (30, 20), 3)
        scaled = left * torch.tensor(values)[:, None, None] * (-0.1 / 50 / math.sqrt(3))
        careless.append(1 + sum(a.T @ b for a, b in zip(scaled, right, strict=True)))
    assert torch.equal(moved[0], moved[1])
    assert torch.allclose(moved[0], careless[0], atol=1e-6)
    assert not torch.equal(careless[0], careless[1])


CONFIG = {
    "epochs": 2, "threads": 1, "seed": 3, "loss": "cross-entropy",
    "data": {"n_classes": 3, "validation_fraction": 0.1}, "sampler": {"scheme": "poisson", "batch_size": 10},
    "trainer": {"kind": "zo", "rank": 1, "directions": 5, "clip": "joint", "settle_every": 4},
    "optimizer": {"lr": 0.05, "weight_decay": 0.01}, "protection": {"kind": "record", "noise_multiplier": 2.0},
}  # fmt: skip


def records(x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(100, 6)) if x is None else x, np.arange(100) % 3


def run(
    folder: Path, model: nn.Module, x: np.ndarray | None = None, watcher: training.Callback | None = None
) -> training.Run:
    return training.train(CONFIG, data=records(x), model=model, folder=folder, watcher=watcher)


@pytest.mark.parametrize(("make", "at_once"), [(perceptron, True), (Product, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_is_replayed_to_the_bit(
    tmp_path: Path, make: Callable[[], nn.Module], at_once: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model: nn.Module = make()
    if dtype is torch.bfloat16:
        model = Custom(lambda m, x: m.inner(x.to(dtype)), inner=model.to(dtype))
    if at_once:
        trained = run(tmp_path / "run", model)
    else:
        with pytest.warns(UserWarning, match="trainer.rank = 1: directions are evaluated one after another"):
            trained = run(tmp_path / "run", model)
    again = replay(tmp_path / "run")
    assert (again.steps, again.arrived) == (18, True)
    header = LogContent.read(tmp_path / "run" / LOG_FILE).header
    assert (header.rank, header.at_once) == (1, at_once)
    state = read_checkpoint(list_checkpoints(trained.folder.path / "checkpoints")[-1]).tensors
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in again.tensors.items())


def test_a_log_of_full_directions_is_written_as_before() -> None:
    header = LogHeader(
        root=1, perturbation=0.1, directions=1, weight_decay=0.0, settle_every=1, tensors=[], base=""
    )
    assert b"rank" not in header.to_bytes()


def test_a_run_resumes_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c_at: type) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return perceptron()

    run(tmp_path / "whole", model())
    with pytest.raises(RunInterrupted):
        run(tmp_path / "run", model(), watcher=ctrl_c_at(7))

    def refuse(*args: object, **kwargs: object) -> None:
        raise Uncovered("torch has changed")

    with monkeypatch.context() as patched:
        patched.setattr("opusim.training.zeroth_order.at_once.BothSides.perturbed", refuse)
        with (
            pytest.warns(UserWarning, match="torch has changed"),
            pytest.raises(RunFolderError, match="no longer allows: torch has changed; resume with the"),
        ):
            training.train(data=records(), model=model(), folder=tmp_path / "run", resume=True)
    training.train(data=records(), model=model(), folder=tmp_path / "run", resume=True)
    assert replay(tmp_path / "run").digest == replay(tmp_path / "whole").digest


def test_directions_follow_from_the_root_and_the_step_whatever_the_records_are(tmp_path: Path) -> None:
    """Losses that are NaN among them: no seed is drawn again, and each step has one set of directions."""
    bad, _ = records()
    bad[::2] = 3e38  # the variance in the norm is infinite
    torch.manual_seed(0)
    run(tmp_path / "good", perceptron())
    with pytest.raises(TrainingDiverged):  # at the end of the first epoch
        run(tmp_path / "bad", perceptron(), bad)
    mark_file(tmp_path / "bad" / LOG_FILE).unlink()  # it counts the steps of the last checkpoint, none
    good, found = (LogContent.read(tmp_path / name / LOG_FILE) for name in ("good", "bad"))
    assert len(found.entries) == 9
    for step, entry in enumerate(found.entries):
        assert entry.seeds == good.entries[step].seeds
        assert entry.seeds == tuple(derive_seed(good.header.root, "direction", step, j) for j in range(5))
        assert entry.scalars != good.entries[step].scalars
        assert all(math.isfinite(scalar) for scalar in entry.scalars)


def test_one_record_moves_a_steps_sums_by_at_most_the_joint_clip_at_once() -> None:
    """Whatever it holds, with another record in the batch; without the joint clip, the planted fault, by more."""
    sums = {}
    for joint in (True, False):
        for bad in (None, math.nan, 1e30, -3.0):
            torch.manual_seed(0)
            network = AnyModule(perceptron(), n_inputs=6, only_trained=True)
            options = {"kind": "zo", "rank": 1, "directions": 20, "perturbation": 0.5}
            config = load_config({"loss": "cross-entropy", "trainer": options, "optimizer": {"lr": 0.1}})
            release = ScalarRelease(clip=0.05, divisor=1.0, joint=joint)
            trainer = zo_trainer(network, config, release, root=7)
            x = torch.ones(1, 6) if bad is None else torch.stack([torch.ones(6), torch.full((6,), bad)])
            sums[joint, bad] = trainer._measured(SEEDS * 5, x, torch.zeros(len(x), dtype=torch.int64))[:15]
    for joint, holds in ((True, True), (False, False)):
        moves = [float((sums[joint, bad] - sums[joint, None]).norm()) for bad in (1e30, -3.0)]
        assert (max(moves) <= 0.05 * (1 + 1e-6)) is holds
    assert float((sums[True, math.nan] - sums[True, None]).norm()) <= 0.05


def losses_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, y: nn.functional.cross_entropy(model(x).float(), y, reduction="none")


def moved_by(batches: list[slice], *, rank: int | None, closure: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    model, x, y = perceptron(), torch.randn(8, 6), torch.arange(8) % 3
    optimizer = ZerothOrder(model, lr=0.1, directions=4, rank=rank, weight_decay=0.1)
    for rows in batches:
        if closure:
            optimizer.measure(lambda rows=rows: losses_of(model)(x[rows], y[rows]))
        else:
            optimizer.measure(losses_of(model), x[rows], y[rows])
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_batches_of_a_step_add_up() -> None:
    """Two halves are the whole batch, with full directions too; one half, the planted fault, is not."""
    halves = [slice(0, 4), slice(4, 8)]
    for rank in (None, 1):
        whole = moved_by([slice(0, 8)], rank=rank)
        assert torch.allclose(moved_by(halves, rank=rank), whole, atol=2e-5)
        assert not torch.allclose(moved_by(halves[:1], rank=rank), whole, atol=2e-3)
    with pytest.warns(UserWarning, match="losses are called without a batch"):
        alone = moved_by(halves, rank=1, closure=True)
    assert torch.allclose(alone, whole, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 1])
def test_the_optimizer_learns_without_a_graph(rank: int | None, dtype: torch.dtype) -> None:
    """Nothing is saved for a backward pass; the loss of an evaluated mean falls; modes and schedulers are as given."""
    torch.manual_seed(0)
    model = perceptron().to(dtype).train()
    x = torch.randn(60, 6)
    y = x[:, :3].argmax(dim=1)
    losses = losses_of(model)
    optimizer = ZerothOrder(model, lr=0.1, directions=8, rank=rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("something was saved for a backward pass")

    first = float(losses(x.to(dtype), y).detach().mean())
    with torch.autograd.graph.saved_tensors_hooks(saved, saved):
        for _ in range(30):
            loss = optimizer.step(losses, x.to(dtype), y)
            schedule.step()
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert float(losses(x.to(dtype), y).detach().mean()) < first - 0.1


def test_frozen_weights_of_eight_bits_stay_and_low_rank_updates_on_them_learn() -> None:
    class Quantised(nn.Module):
        """A weight of 8 bits with a scale for each output, and an update of rank two."""

        def __init__(self) -> None:
            super().__init__()
            weight = torch.randn(16, 6)
            self.register_buffer("scale", weight.abs().amax(dim=1) / 127)
            whole = (weight / self.scale[:, None]).round().to(torch.int8)
            self.weight = nn.Parameter(whole, requires_grad=False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frozen = nn.functional.linear(x, self.weight.float() * self.scale[:, None])
            return frozen + self.up(self.down(x))

    torch.manual_seed(0)
    model = nn.Sequential(Quantised(), nn.Tanh(), nn.Linear(16, 3))
    kept = model[0].weight.clone()
    x = torch.randn(60, 6)
    y = x[:, :3].argmax(dim=1)
    optimizer = ZerothOrder(model, lr=0.2, directions=8, rank=1)
    seen = [float(optimizer.step(losses_of(model), x, y)) for _ in range(40)]
    assert torch.equal(model[0].weight, kept)
    assert seen[-1] < seen[0] - 0.2


def test_a_saved_optimizer_continues_with_the_next_directions() -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(8, 6), torch.arange(8) % 3, perceptron()
    optimizer = ZerothOrder(model, lr=0.1, directions=4, rank=1, seed=9)
    optimizer.step(losses_of(model), x, y)
    other = perceptron()
    other.load_state_dict(model.state_dict())
    resumed = ZerothOrder(other, lr=0.1, directions=4, rank=1)
    resumed.load_state_dict(optimizer.state_dict())
    optimizer.step(losses_of(model), x, y)
    resumed.step(losses_of(other), x, y)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_records_that_mix_are_evaluated_one_direction_after_another() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = super().forward(x)
            return outputs - outputs.mean(dim=0)

    model = Mixing(6, 3)
    optimizer = ZerothOrder(model, lr=0.1, directions=4, rank=1)
    with pytest.warns(UserWarning, match="depends on other records"):
        optimizer.step(losses_of(model), torch.randn(8, 6), torch.arange(8) % 3)


def test_what_the_optimizer_refuses() -> None:
    model, x, y = perceptron(), torch.randn(8, 6), torch.arange(8) % 3
    optimizer = ZerothOrder(model, lr=0.1, rank=1)
    with pytest.raises(RuntimeError, match="nothing was measured; give losses and a batch"):
        optimizer.step()
    with pytest.raises(ValueError, match="losses: must return the loss of each record"):
        optimizer.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    optimizer.step(losses_of(model), x, y)
    with pytest.raises(ValueError, match="rank = 9: must be an integer in"):
        ZerothOrder(model, lr=0.1, rank=9)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        ZerothOrder(perceptron().requires_grad_(False), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("protection", [{"kind": "none"}, {"kind": "record", "noise_multiplier": 1.0}])
@pytest.mark.parametrize("lora", [None, 2])
@pytest.mark.parametrize(("kind", "target"), [("gpt2", "c_attn"), ("opt", "q_proj"), ("bert", "query")])
def test_language_models_are_evaluated_at_once(
    tmp_path: Path, kind: str, target: str, lora: int | None, protection: dict
) -> None:
    """Whole models and low-rank updates of three families, plain and private, replayed to the bit."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.support.tiny_language import LABELS, TEXTS, make

    lines = [f"{text}\t{label}\n" for text, label in zip(TEXTS * 6, LABELS * 6, strict=True)]
    (tmp_path / "texts.tsv").write_text("".join(lines))
    language = {
        "model": str(make(tmp_path, kind)),
        "text": str(tmp_path / "texts.tsv"),
        "prompt": "{text} It was {mask}" if kind == "bert" else "{text} It was",
        **({"lora_rank": lora, "lora_targets": [target]} if lora else {}),
    }
    config = {
        "epochs": 1, "threads": 1, "data": {"validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": 6},
        "trainer": {"kind": "zo", "rank": 1, "directions": 4, "language": language}, "protection": protection,
    }  # fmt: skip
    training.train(config, folder=tmp_path / "run")
    assert LogContent.read(tmp_path / "run" / LOG_FILE).header.at_once
    assert replay(tmp_path / "run").arrived
