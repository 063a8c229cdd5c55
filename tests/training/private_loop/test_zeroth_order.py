"""A private loop whose optimizer is `ZerothOrder`: the steps of `opusim train zo`, paid for, stated and resumed."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.mechanisms.records import STANDARDISED
from opusim.accounting.mechanisms.zeroth_order import ZEROTH_ORDER_GAUSSIAN
from opusim.randomness.streams import noise_stream
from opusim.training.attacks.one_run.audit import audit_private_folder
from opusim.training.config import load_config
from opusim.training.data.samplers import make_sampler
from opusim.training.private_loop import start
from opusim.training.private_loop.module import MeasuredModule
from opusim.training.zeroth_order.optimizer import ZerothOrder
from opusim.training.zeroth_order.trainer import ZoTrainer
from tests.support.private_loops import network, parts, private_loop, records
from tests.support.record_models import Custom

CLIP, PHI = 0.01, 1e-2
Losses = Callable[..., Tensor]


def loop_of(
    folder: Path, *, lr: float = 0.1, rank: int | None = None, model: nn.Module | None = None,
    loader: DataLoader[Any] | None = None, criterion: Losses | None = None, **options: Any,
) -> opusim.PrivateTraining:  # fmt: skip
    module, _, cross_entropy, plain = parts(model)
    optimizer = ZerothOrder(module, lr=lr, directions=4, rank=rank, perturbation=PHI, seed=5)
    given = module, optimizer, criterion or cross_entropy, loader or plain
    return private_loop(folder, given, **{"max_grad_norm": CLIP, **options})


def losses_of(private: opusim.PrivateTraining) -> Losses:
    return lambda x, y: private.criterion(private.module(x), y)


def run(private: opusim.PrivateTraining, steps: int) -> Tensor:
    losses, optimizer, last = losses_of(private), private.optimizer, private.step + steps
    while private.step < last:
        for batch in itertools.islice(private.data_loader, last - private.step):
            optimizer.step(losses, *batch)
    return flat(private.module)


def flat(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach()


def like_train(folder: Path, data: TensorDataset, *, rank: int | None, steps: int) -> opusim.PrivateTraining:
    """A loop on the records, the batches and the noise of the run of `opusim.train` with seed 5."""
    config = load_config(run_config(rank))
    private = loop_of(folder, rank=rank, loader=DataLoader(data, batch_size=12))
    private.data_loader.sampler = make_sampler("poisson", 60, 12, config.seed_for("sampler"))
    measured = private._private
    assert isinstance(measured, MeasuredModule)
    noise = noise_stream("experiment", config.seed_for("scalar-noise"), "scalar-noise")
    measured._release = replace(measured._release, noise=noise)
    run(private, steps)
    return private


def run_config(rank: int | None) -> dict[str, Any]:
    return {
        "seed": 5, "epochs": 2, "loss": "cross-entropy", "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": 12}, "optimizer": {"lr": 0.1, "schedule": "constant"},
        "trainer": {"kind": "zo", "perturbation": PHI, "directions": 4, "clip": "joint", "rank": rank},
        "protection": {"kind": "record", "noise_multiplier": 1.0, "clip_norm": CLIP, "delta": 1e-5},
    }  # fmt: skip


RANKS = pytest.mark.parametrize("rank", [None, 1])


@RANKS
def test_a_loop_is_a_run_of_train(tmp_path: Path, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches, directions and noise move the parameters alike; others, the planted fault, do not."""
    x, y, model = torch.zeros(60, 8), torch.zeros(60, dtype=torch.int64), network()
    step = ZoTrainer.step

    def noting(trainer: ZoTrainer, own: Tensor, classes: Tensor, *, records: Tensor, **given: Any) -> Any:
        x[records], y[records] = own, classes  # a run takes its records in an order of its own
        return step(trainer, own, classes, records=records, **given)

    monkeypatch.setattr(ZoTrainer, "step", noting)
    found = opusim.train(run_config(rank), data=records().tensors, model=model, folder=tmp_path / "run")
    private = like_train(tmp_path / "loop", TensorDataset(x, y), rank=rank, steps=10)
    moved = (flat(model) - flat(network())).norm()
    assert (flat(private.module) - flat(model)).norm() < 1e-3 * moved
    assert private.epsilon == pytest.approx(found.guarantees[0].epsilon)
    other = loop_of(tmp_path / "other", rank=rank, model=network())
    assert (run(other, 10) - flat(model)).norm() > 0.1 * moved  # other batches and noise


def sums_until_record_0(folder: Path, *, scaled: float, fixed: bool, fault: bool = False) -> Tensor:
    """Return the noised sums of steps at a learning rate of 0, up to the first whose batch holds record 0."""
    loader = parts()[3]
    loader.dataset.tensors[0][0] *= scaled  # type: ignore[attr-defined]
    private = loop_of(folder, lr=0.0, loader=loader, noise_multiplier=1e-6, fixed_batches=fixed)
    optimizer, measured, found = private.optimizer, private._private, list[Tensor]()
    assert isinstance(measured, MeasuredModule)
    if fault:
        measured._release = replace(measured._release, clip=1e3)
    for step, batch in enumerate(private.data_loader):
        optimizer.measure(losses_of(private), *batch)
        found.append(optimizer._sums.clone())
        optimizer.step()
        if 0 in private.data_loader.sampler.indices(step).tolist():
            break
    return torch.stack(found)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_record_moves_the_sums_of_a_step_by_at_most_the_clip(tmp_path: Path, fixed: bool) -> None:
    """By C, in Euclidean norm, so that one in another's place moves them by 2 C; without the clip, the planted fault,
    by more. Steps without the record are as they were."""
    changed = {}
    for fault in (False, True):
        options = {"fixed": fixed, "fault": fault}
        plain = sums_until_record_0(tmp_path / f"{fault}", scaled=1.0, **options)
        huge = sums_until_record_0(tmp_path / f"{fault}, huge", scaled=1e3, **options)
        changed[fault] = (plain - huge).norm(dim=1)
        assert bool((changed[fault][:-1] < 1e-6).all())
    assert 0.1 * CLIP < float(changed[False][-1]) <= 2 * CLIP + 1e-6
    assert float(changed[True][-1]) > 4 * CLIP


def test_a_loop_states_what_it_releases_and_stops_at_its_budget(tmp_path: Path) -> None:
    options = {"noise_multiplier": None, "target_epsilon": 2.0, "epochs": 1}
    private = loop_of(tmp_path, max_grad_norm=1.0, **options)
    run(private, 5)
    assert 1.9 < private.epsilon <= 2.0
    (guarantee,) = private.statement().guarantees
    assert guarantee.is_proven
    assert "jointly clipped to 1, Gaussian noise" in guarantee.mechanism
    assert "4 directions" in guarantee.mechanism
    stated = {one.text: one.holds for one in guarantee.assumptions}
    assert all(stated[text] for text in ZEROTH_ORDER_GAUSSIAN.checked_by_code if text != STANDARDISED)
    with pytest.warns(UserWarning, match="budget"):
        assert not list(private.data_loader)


@RANKS
def test_a_resumed_loop_repeats_an_uninterrupted_one_to_the_bit(tmp_path: Path, rank: int | None) -> None:
    whole = run(loop_of(tmp_path / "whole", rank=rank, model=network()), 8)
    first = loop_of(tmp_path / "loop", rank=rank, model=network())
    run(first, 3)
    first.save()
    first.close()
    second = loop_of(tmp_path / "loop", rank=rank, model=network(), resume=True)
    assert torch.equal(run(second, 5), whole)
    assert second.epsilon > 0


def test_batches_of_a_step_add_up(tmp_path: Path) -> None:
    """A step after two batches moves the parameters by the mean of their noised sums, once."""
    private = loop_of(tmp_path / "loop")
    losses, optimizer, sums = losses_of(private), private.optimizer, list[Tensor]()
    before = flat(private.module)
    for batch in itertools.islice(private.data_loader, 2):
        optimizer.zero_grad()
        optimizer.measure(losses, *batch)
        sums.append(optimizer._sums.clone())
    optimizer.zero_grad()
    for each in sums:
        optimizer.add(each, 12)
    assert optimizer._records == 24
    assert (flat(private.module) - before).abs().max() < 1e-6
    optimizer.step()
    assert (flat(private.module) - before).abs().max() > 1e-4


def test_an_empty_batch_takes_its_noisy_step(tmp_path: Path) -> None:
    private = loop_of(tmp_path, loader=parts(batch_size=1)[3])
    for batch in private.data_loader:
        before = flat(private.module)
        private.optimizer.step(losses_of(private), *batch)
        if not len(batch[0]):
            break
    assert not len(batch[0])
    assert (flat(private.module) - before).abs().max() > 1e-4


def test_large_batches_run_in_parts(tmp_path: Path) -> None:
    whole = run(loop_of(tmp_path / "whole", model=network()), 3)
    parted = run(loop_of(tmp_path / "parts", model=network(), max_physical_batch_size=4), 3)
    assert torch.allclose(whole, parted, atol=1e-5)


def test_parameters_do_not_tell_in_how_many_parts_a_batch_ran(tmp_path: Path) -> None:
    """Moving them to a side and back rounds them: without steps, they are the same to the bit."""
    loops = [loop_of(tmp_path / f"{size}", lr=0.0, max_physical_batch_size=size) for size in (None, 4)]
    assert torch.equal(*(run(loop, 3) for loop in loops))


def test_rows_of_other_shapes_are_followed(tmp_path: Path) -> None:
    """A module that takes any number of tokens meets a new one in the loop."""
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(9, 6), "head": nn.Linear(6, 3)}
    module = Custom(lambda m, x: m.head(m.embed(x).mean(dim=1)), **parts)
    data = [(torch.arange(3 + n % 3) % 9, n % 3) for n in range(30)]

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
        return x, torch.tensor([row[1] for row in rows])

    loader = DataLoader(data, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    run(loop_of(tmp_path, rank=1, model=module, loader=loader), 15)


# What a loop may not do


def test_what_is_not_private_is_refused(tmp_path: Path) -> None:
    private = loop_of(tmp_path / "loop")
    module, optimizer, criterion, loader = private
    losses = losses_of(private)
    with pytest.raises(RuntimeError, match="no batch at hand"):
        optimizer.measure(losses, torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64))
    x, y = next(iter(loader))
    plain, other = (
        nn.CrossEntropyLoss(reduction="none"),
        "must return what the criterion of make_private returned",
    )
    measured: list[tuple[Losses, Tensor, str]] = [
        (lambda x, y: plain(module(x), y), x, other),
        (lambda x, y: criterion(module(x), y) - criterion(module(x), y).mean(), x, other),
        (lambda x, y: criterion(module(x) - module(x).mean(dim=0), y), x, other),
        (losses, x[1:], f"was given {len(x) - 1} rows"),
        (lambda x, y: criterion(module(x[:1]), y), x, "no row for each of the"),
    ]
    for own, rows, message in measured:
        with pytest.raises(ValueError, match=message):
            optimizer.measure(own, rows, y[-len(rows) :])
    with pytest.raises(RuntimeError, match="gradient that is not private"):
        plain(module(x), y).sum().backward()
    optimizer.step(losses, x, y)
    with pytest.raises(RuntimeError, match="was called before on the batch"):
        optimizer.measure(losses, x, y)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        optimizer.step()
    private.close()
    assert optimizer.private is None
    assert float(optimizer.step(lambda x, y: plain(module(x), y), x, y)) > 0  # plain again


def test_training_mode_within_a_measured_pass_is_refused(tmp_path: Path) -> None:
    """Frozen batch statistics would become those of the batch, which mix its records."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3))
    private = loop_of(tmp_path / "loop", model=module)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        module.train()
        return private.criterion(module(x), y)

    batch = next(iter(private.data_loader))
    with pytest.raises(RuntimeError, match="is in training mode now"):
        private.optimizer.step(losses, *batch)
    private.optimizer.step(losses_of(private), *batch)


@RANKS
def test_rows_of_a_filled_batch_in_another_order_are_refused(tmp_path: Path, rank: int | None) -> None:
    """Else a record whose copies fill the batch would count several times."""
    private = loop_of(tmp_path / "loop", rank=rank, fixed_batches=True)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return private.criterion(private.module(x.flip(0)), y.flip(0))

    batch = next(iter(private.data_loader))
    with pytest.raises(ValueError, match="rows of the loader's batch in another order"):
        private.optimizer.step(losses, *batch)
    private.optimizer.step(losses_of(private), *batch)


def test_a_loop_that_cannot_start_gives_the_module_back(tmp_path: Path) -> None:
    class Refusing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 3 and not self.training:
                raise AssertionError("three records")
            return super().forward(x)

    module = Refusing(8, 3)
    with pytest.raises(AssertionError, match="three records"):
        loop_of(tmp_path / "loop", rank=1, model=module)
    module(torch.ones(2, 8)).sum().backward()
    assert module.weight.grad is not None


def test_a_group_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was made after the optimizer, as make_private makes it under torchrun."""
    module = network()
    optimizer = ZerothOrder(module, lr=0.1)
    monkeypatch.setattr(start, "Ranks", lambda: SimpleNamespace(world=2))
    with pytest.raises(ValueError, match="ZerothOrder trains in one process"):
        start._require_measurable(optimizer, module, clipping="flat", user_ids=None)


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"user_ids": [1] * 60, "records_per_user": 2}, "user_ids: ZerothOrder protects single records"),
        ({"clipping": "automatic"}, "clips a record's loss differences jointly"),
        ({"model": nn.Sequential(nn.Linear(8, 3), nn.Softmax(dim=0))}, "mixes"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            loop_of(tmp_path, **options)
    with pytest.raises(ValueError, match="is a ZerothOrder of another module"):
        private_loop(tmp_path, (network(), ZerothOrder(network(), lr=0.1), *parts()[2:]))


def test_losses_that_are_not_finite_count_as_the_bound(tmp_path: Path) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) / 0.0

    assert bool(torch.isfinite(run(loop_of(tmp_path, criterion=broken), 3)).all())


@RANKS
def test_a_pass_leaves_nothing_in_the_module(tmp_path: Path, rank: int | None) -> None:
    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach().clone()
            return super().forward(x)

    torch.manual_seed(0)
    module = Keeping(8, 3)
    private = loop_of(tmp_path / "loop", rank=rank, model=module)
    before = module.last.clone()
    run(private, 2)
    assert torch.equal(module.last, before)


def test_audits_that_plant_gradients_are_refused(tmp_path: Path) -> None:
    private = loop_of(tmp_path / "loop")
    run(private, 1)
    with pytest.raises(TypeError, match="its optimizer is ZerothOrder, and this audit plants gradients"):
        private.wrap_writer(lambda writer: writer)
    private.close()
    with pytest.raises(NoGuarantee, match="its optimizer is ZerothOrder, and this audit plants gradients"):
        audit_private_folder(tmp_path / "loop")
