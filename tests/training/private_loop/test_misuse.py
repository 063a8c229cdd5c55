"""What a loop may do wrong is refused, or releases nothing that was not noised."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import opusim
from opusim.training import Clipping
from tests.support.private_loops import network, parts, private_loop, records, run_epoch
from tests.support.record_models import Custom

cross_entropy = nn.functional.cross_entropy
Loop = opusim.PrivateTraining


@pytest.fixture
def private(tmp_path: Path) -> Any:
    with private_loop(tmp_path) as loop:
        yield loop


def batch_of(loop: Loop) -> Any:
    return next(iter(loop.data_loader))


def no_gradient(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


def learn(loop: Loop, x: Tensor, y: Tensor, *more: Any) -> None:
    """One backward pass as it should be, or with further arguments of the criterion."""
    loop.criterion(loop.module(x), y, *more).backward()


def outputs_changed_in_place(loop: Loop, x: Tensor, y: Tensor) -> None:
    outputs = loop.module(x)
    with torch.no_grad():
        outputs -= outputs.mean(dim=0)
    loop.criterion(outputs, y).backward()


def backward_twice(loop: Loop, x: Tensor, y: Tensor) -> None:
    loss = loop.criterion(loop.module(x), y)
    loss.backward(retain_graph=True)
    loop.optimizer.step()
    loss.backward()


def a_loss_of_an_earlier_batch(loop: Loop) -> None:
    losses = []
    for x, y in loop.data_loader:
        losses.append(loop.criterion(loop.module(x), y))
        losses[0].backward(retain_graph=True)


def a_factor_that_depends_on_the_batch(loop: Loop) -> None:
    for x, y in loop.data_loader:
        (loop.criterion(loop.module(x), y) * (1 + len(x))).backward()


def a_batch_left_out(loop: Loop) -> None:
    for x, y in loop.data_loader:
        if len(x) <= 10:
            learn(loop, x, y)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


def mean_subtracted(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (centred(args[0]), *args[1:])


def a_forward_hook_added_before_backward(loop: Loop, x: Tensor, y: Tensor) -> None:
    loss = loop.criterion(loop.module(x), y)
    loop.module[1].register_forward_hook(lambda m, args, out: centred(out))
    loss.backward()


def a_hook_on_all_modules(loop: Loop) -> None:
    with nn.modules.module.register_module_forward_pre_hook(mean_subtracted):
        batch_of(loop)


class Centred(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return centred(x)


def changed(change: Callable[[nn.Module], object]) -> Callable[[Loop], object]:
    """The module is changed before a batch is drawn."""
    return lambda loop: (change(loop.module), batch_of(loop))


def with_batch(use: Callable[[Loop, Tensor, Tensor], object]) -> Callable[[Loop], object]:
    return lambda loop: use(loop, *batch_of(loop))


ONLY = "learns through the criterion of make_private only"
NO_BATCH = "the module ran without a batch"
SECOND = "without a new backward pass"
PARAMETERS = "its parameters that learn changed"
HOOKS = "register hooks before make_private"
DIFFERENT = "rows of the loader's batch in different orders"
OF_BATCH: dict[str, tuple[Callable[[Loop, Tensor, Tensor], object], str]] = {
    "another criterion": (lambda loop, x, y: cross_entropy(loop.module(x), y).backward(), ONLY),
    "outputs mixed before": (lambda loop, x, y: loop.criterion(centred(loop.module(x)), y).backward(), ONLY),
    "a term": (lambda loop, x, y: (loop.criterion(h := loop.module(x), y) + h.square().mean()).backward(), ONLY),
    "a second loss of the batch": (
        lambda loop, x, y: (learn(loop, x, y), learn(loop, x, y)),
        "the module ran again on a batch whose gradients were written",
    ),
    "evaluation mode": (lambda loop, x, y: cross_entropy(loop.module.eval()(x), y).backward(), "evaluation mode"),
    "other rows": (lambda loop, x, y: learn(loop, x[1:], y[1:]), r"the module ran on \d+ rows, but the loader's batch"),
    "compiled later": (lambda loop, x, y: torch.compile(loop.module, backend="eager")(x).sum().backward(), "compiled"),
    "a submodule by itself": (lambda loop, x, y: loop.module[0](x).square().mean().backward(), "a part of it ran"),
    "a penalty on the parameters": (
        lambda loop, x, y: (
            loop.criterion(loop.module(x), y) + sum(p.square().sum() for p in loop.module.parameters())
        ).backward(),
        "a gradient that is not private reached a parameter",
    ),
    "a gradient scaler": (
        lambda loop, x, y: torch.amp.GradScaler("cpu").scale(loop.criterion(loop.module(x), y)).backward(),
        "as a GradScaler does, .* take torch.bfloat16",
    ),
    "targets of other records": (
        lambda loop, x, y: loop.criterion(loop.module(x), y[1:]), r"argument of shape \(\d+,\) has no row for each",
    ),
    "a step without backward": (lambda loop, x, y: loop.optimizer.step(), SECOND),
    "a second step": (lambda loop, x, y: (learn(loop, x, y), loop.optimizer.step(), loop.optimizer.step()), SECOND),
    "a parameter frozen later": (
        lambda loop, x, y: (loop.module[0].bias.requires_grad_(False), learn(loop, x, y)), PARAMETERS,
    ),
    "a forward pre-hook added later": (
        lambda loop, x, y: (loop.module[1].register_forward_pre_hook(mean_subtracted), learn(loop, x, y)), HOOKS,
    ),
    "the size of the batch as an argument": (
        lambda loop, x, y: learn(loop, x, y, len(x)), r"criterion: an argument is the number \d+, which may come",
    ),
    "a statistic of the batch as an argument": (
        lambda loop, x, y: learn(loop, x, y, y.float().mean()), r"argument of shape \(\) has no row for each",
    ),
    "another parameter in the optimizer": (
        lambda loop, x, y: (
            loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
            learn(loop, x, y),
            loop.optimizer.step(),
        ),
        "parameters that are not the module's",
    ),
    "saved within a step": (lambda loop, x, y: (learn(loop, x, y), loop.save()), "is under way"),
    "outputs changed in place": (outputs_changed_in_place, ONLY),
    "a forward hook added before backward": (a_forward_hook_added_before_backward, HOOKS),
    "backward twice": (backward_twice, "whose gradients were released once; .* for a GAN, give the real and"),
}  # fmt: skip
ORDERS: dict[str, tuple[Callable[[Loop, Tensor, Tensor], object], str | None]] = {
    "inputs": (lambda loop, x, y: learn(loop, x.flip(0), y), DIFFERENT),
    "flattened inputs": (
        lambda loop, x, y: learn(loop, x.flip(0).view(len(x), 2, 4).flatten(1), y),
        DIFFERENT,
    ),
    "targets": (lambda loop, x, y: learn(loop, x, y.flip(0)), DIFFERENT),
    "further targets": (lambda loop, x, y: learn(loop, x, y, y.flip(0)), DIFFERENT),
    "all alike": (lambda loop, x, y: learn(loop, x.flip(0), y.flip(0)), None),
    "none": (lambda loop, x, y: learn(loop, x.clone(), y.clone()), None),
    "other targets": (lambda loop, x, y: learn(loop, x, y.neg().abs()), None),
}
"""Rows of a batch in another order: what the loop does, and the refusal."""
REFUSED: dict[str, tuple[Callable[[Loop], object], str]] = {
    **{name: (with_batch(use), message) for name, (use, message) in OF_BATCH.items()},
    "a loss of an earlier batch": (a_loss_of_an_earlier_batch, "belongs to a batch that is over"),
    "records of another loader": (lambda loop: learn(loop, *records(40).tensors), NO_BATCH),
    "before any batch": (lambda loop: learn(loop, *records(12).tensors), NO_BATCH),
    "a factor that depends on the batch": (a_factor_that_depends_on_the_batch, "multiply it by the same constant"),
    "a batch left out": (a_batch_left_out, "left without a backward pass"),
    "parameters exchanged later": (changed(lambda m: m.__setitem__(2, nn.Linear(6, 3))), PARAMETERS),
    "a backward hook added later": (
        changed(lambda m: m[1].register_full_backward_hook(lambda m, into, out: (into[0] * 0.5,))), HOOKS,
    ),

    "a hook on all modules": (a_hook_on_all_modules, HOOKS),
    "a hook on a parameter": (
        changed(lambda m: m[0].weight.register_hook(lambda gradient: 2 * gradient)),
        "parameter '0.weight' has a gradient hook",
    ),
    "a part exchanged later": (changed(lambda m: m.__setitem__(1, nn.Softmax(dim=0))), r"part '1' \(Softmax\) is new"),
    "a function given later": (changed(lambda m: setattr(m[1], "forward", centred)), "another class or forward"),
    "a class given later": (changed(lambda m: setattr(m[1], "__class__", Centred)), "another class or forward"),
    "used after close": (lambda loop: (loop.close(), batch_of(loop)), "the private loop is closed"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("fixed", [False, True])
def test_orders_of_rows_that_differ_are_refused(tmp_path: Path, name: str, fixed: bool) -> None:
    """A loss of two records would let one enter two clipped terms; targets of regression, so that their rows differ."""
    use, message = ORDERS[name]
    model, optimizer, _, _ = parts()
    x = records().tensors[0]
    loader = DataLoader(TensorDataset(x, x[:, :3].square()), batch_size=30)
    given = model, optimizer, lambda found, y, *more: (found - y - sum(more)).square().mean(), loader
    with private_loop(tmp_path, given, fixed_batches=fixed) as private:
        if message is None and (not fixed or name != "all alike"):
            with_batch(use)(private)
            return
        with pytest.raises(ValueError, match="another order" if fixed and "targets" not in name else message):
            with_batch(use)(private)


def test_classes_in_another_order_are_refused_if_they_tell_it(tmp_path: Path) -> None:
    """Two classes may have the same counts by chance: a rule of the loop's own, such as 1 - y, is not refused."""
    for count, message in ((2, None), (12, DIFFERENT)):
        model, optimizer, criterion, _ = parts(nn.Linear(8, count))
        loader = DataLoader(TensorDataset(torch.randn(60, 8), torch.arange(60) % count), batch_size=60)
        given = model, optimizer, criterion, loader
        with private_loop(tmp_path / str(count), given, fixed_batches=False) as private:
            x, y = batch_of(private)
            if message is None:
                learn(private, x, count - 1 - y)
                continue
            with pytest.raises(ValueError, match=message):
                learn(private, x, y.flip(0))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(private: Loop, name: str) -> None:
    misuse, message = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError), match=message) as caught:
        misuse(private)
    assert "\n" not in str(caught.value)


def test_no_raw_gradient_is_left_behind(private: Loop) -> None:
    for name in ("another criterion", "evaluation mode", "records of another loader"):
        with pytest.raises(RuntimeError):
            REFUSED[name][0](private)
        private.module.train()
        assert no_gradient(private.module)


QUIET: dict[str, Any] = {"noise_multiplier": 1e-9, "max_grad_norm": 1e-6}
"""A tiny clip and no noise to speak of: all that is private is tiny."""


def test_another_optimizer_sees_private_gradients_only(tmp_path: Path) -> None:
    with private_loop(tmp_path, **QUIET) as loop:
        other = torch.optim.SGD(loop.module.parameters(), lr=1.0)
        before = parameters_to_vector(loop.module.parameters()).detach()
        x, y = batch_of(loop)
        loss = loop.criterion(loop.module(x), y)
        other.step()
        loss.backward()
        other.step()
        moved = parameters_to_vector(loop.module.parameters()).detach() - before
        assert 0 < float(moved.abs().max()) < 1e-5


def test_gradients_of_earlier_training_are_dropped(tmp_path: Path) -> None:
    given = parts()
    x, y = records().tensors
    cross_entropy(given[0](x), y).backward()
    with private_loop(tmp_path, given, **QUIET) as loop:
        learn(loop, *batch_of(loop))
        assert max(float(p.grad.abs().max()) for p in loop.module.parameters()) < 1e-5


def test_evaluation_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    """Validation between forward and backward, in every mode, leaves the same parameters."""
    validation, labels = records(33).tensors
    found = []
    for evaluates in (False, True):
        with private_loop(tmp_path / str(evaluates)) as loop:
            model, optimizer, criterion, loader = loop
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                if evaluates:
                    with torch.no_grad():
                        model(x)
                        criterion(model(validation), labels)
                    criterion(model.eval()(validation), labels)
                    model.train()(validation)  # a training pass without a backward pass
                loss.backward()
                optimizer.step()
            found.append(parameters_to_vector(model.parameters()))
    assert torch.equal(*found)


def test_clipping_scaling_and_accumulation_work_on_private_gradients(private: Loop) -> None:
    model, optimizer, criterion, loader = private
    seen: list[Tensor] = []
    for number, (x, y) in enumerate(loader, start=1):
        (criterion(model(x), y) / 2).backward()
        seen.append(model[0].weight.grad.clone())
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert float(model[0].weight.grad.norm()) <= 0.0101
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert not torch.equal(seen[0], seen[1])  # the second batch was added to the first


def test_parameters_without_an_optimizer_are_named(tmp_path: Path) -> None:
    """The clip is over all that ask for gradients, so that those of the head alone would move less."""
    model, _, criterion, loader = parts()
    given = (model, torch.optim.SGD(model[2].parameters(), lr=0.5), criterion, loader)
    message = r"leaves out 2 of the 4 parameters .*'0.weight'; 72% .* call requires_grad_\(False\) on those"
    with pytest.warns(UserWarning, match=message), private_loop(tmp_path / "all", given):
        pass
    model[0].requires_grad_(False)
    private_loop(tmp_path / "head", given).close()  # without a warning, which would be an error


def test_hooks_may_come_and_go_between_batches(private: Loop) -> None:
    """Such as those that collect features in an evaluation."""
    seen: list[int] = []
    for x, y in private.data_loader:
        handle = private.module[1].register_forward_hook(lambda module, args, out: seen.append(len(out)))
        with torch.no_grad():
            private.module.eval()(x)
        handle.remove()
        private.module.train()
        learn(private, x, y)
        private.optimizer.step()
    assert len(seen) == len(private.data_loader)


def test_copies_are_plain_modules(private: Loop, tmp_path: Path) -> None:
    x, y = records(5).tensors
    for plain in (copy.deepcopy(private.module), pickle.loads(pickle.dumps(private.module))):
        cross_entropy(plain(x), y).backward()
        assert not no_gradient(plain)
    private.close()
    cross_entropy(private.module(x), y).backward()
    assert not no_gradient(private.module)


def test_mixed_precision_is_that_of_the_forward_pass(tmp_path: Path) -> None:
    """Outputs in bfloat16, private gradients in float32, close to those in float32."""
    gradients = []
    for enabled in (False, True):
        with private_loop(tmp_path / str(enabled), noise_multiplier=1e-9, max_grad_norm=100.0) as loop:
            x, y = batch_of(loop)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                outputs = loop.module(x)
                loss = loop.criterion(outputs, y)
            loss.backward()
            assert outputs.dtype == (torch.bfloat16 if enabled else torch.float32)
            gradients.append(loop.module[0].weight.grad)
    full, half = gradients
    assert 0 < float((full - half).norm() / full.norm()) < 0.05


class Weighted(nn.Linear):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x) * weight[:, None]


def test_a_module_of_several_arguments_names_the_remedy(tmp_path: Path) -> None:
    given = parts(Weighted(8, 3))
    with pytest.raises(ValueError, match="missing a required argument: 'weight'.* give example_inputs"):
        private_loop(tmp_path, given)
    with private_loop(tmp_path, given, example_inputs=(torch.randn(3, 8), torch.ones(3))) as loop:
        x, y = batch_of(loop)
        loop.criterion(loop.module(x, torch.ones(len(x))), y).backward()
        assert not no_gradient(loop.module)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


Record = dataclasses.make_dataclass("Record", ["x", "y"])


def collated(kind: Any) -> Callable[[list[Any]], Any]:
    return lambda found: kind(torch.stack([x for x, _ in found]), torch.stack([y for _, y in found]))


def test_batches_may_be_named_tuples(tmp_path: Path) -> None:
    with private_loop(tmp_path, parts(collate_fn=collated(Point))) as loop:
        for batch in loop.data_loader:
            loop.criterion(loop.module(batch.x), batch.y).backward()
            loop.optimizer.step()
            assert isinstance(batch, Point)


class Last(nn.Module):
    """A recurrent network whose last output of each record is taken by its length, or whose records are packed."""

    def __init__(self, *, packs: bool = False) -> None:
        super().__init__()
        self.cells, self.last, self.packs = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 3), packs

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            found = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.last(self.cells(found)[1][-1])
        return self.last(self.cells(x)[0][torch.arange(len(x)), lengths - 1])


def test_packed_sequences_name_what_takes_their_place(tmp_path: Path) -> None:
    remedy = "packed sequence, .* give padded sequences .* last output by its length"
    packed = parts(collate_fn=lambda found: (pack_sequence([x[None] for x, _ in found]), found[0][1]))
    with pytest.raises(ValueError, match=f"module: an argument is a {remedy}"):
        private_loop(tmp_path, packed)
    example = (torch.randn(3, 2, 8), torch.tensor([2, 1, 2]))
    with pytest.raises(ValueError, match=f"a recurrent layer takes a {remedy}"):
        private_loop(tmp_path, parts(Last(packs=True)), example_inputs=example)
    with private_loop(tmp_path, parts(Last()), example_inputs=example) as loop:
        x, y = batch_of(loop)
        loop.criterion(loop.module(torch.stack([x, x], dim=1), 1 + y % 2), y).backward()
        assert not no_gradient(loop.module)


def test_a_gan_gives_real_and_generated_records_to_one_call(tmp_path: Path) -> None:
    """The release is the clipped sum of d/dw of both terms, and the generator learns through a frozen critic."""
    module = Custom(lambda m, real, generated: (m.net(real), m.net(generated)), net=nn.Linear(8, 1))
    softplus, generator = nn.functional.softplus, nn.Linear(2, 8)

    def loss(real: Tensor, generated: Tensor) -> Tensor:
        return softplus(-real).mean() + softplus(generated).mean()

    given = (module, torch.optim.SGD(module.parameters(), lr=0.1), loss, parts()[3])
    example = (torch.randn(3, 8), torch.randn(3, 8))
    options = {"noise_multiplier": 1e-6, "max_grad_norm": 1e3, "example_inputs": example}
    with private_loop(tmp_path, given, **options) as loop:
        x, _ = batch_of(loop)
        made = generator(torch.randn(len(x), 2))
        loop.criterion(*loop.module(x, made.detach())).backward()
        found = module.net.weight.grad.clone()
        real, fake = module.net(x).detach(), module.net(made).detach()
        wanted = (fake.sigmoid() * made - (-real).sigmoid() * x).sum(dim=0) / 12
        torch.testing.assert_close(found[0], wanted.detach(), atol=1e-3, rtol=1e-3)
        loop.optimizer.step()
        module.requires_grad_(False)
        softplus(-module.net(made)).mean().backward()
        module.requires_grad_(True)
        assert generator.weight.grad is not None
        assert torch.equal(module.net.weight.grad, found)


@pytest.mark.filterwarnings("ignore")
def test_what_opacus_prepared_is_refused_by_name(tmp_path: Path) -> None:
    opacus = pytest.importorskip("opacus")
    engine = opacus.PrivacyEngine()
    module, optimizer, criterion, loader = parts()
    prepared = engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **QUIET)
    for given, message in (
        ((prepared[0], optimizer, criterion, loader), r"module is a .* module.to_standard_module\(\)"),
        ((network(), prepared[1], criterion, loader), "optimizer is a .*optimizer.original_optimizer"),
        ((network(), optimizer, criterion, prepared[2]), "data_loader is a .* from before PrivacyEngine"),
    ):
        with pytest.raises(ValueError, match=message):
            private_loop(tmp_path, given)
    with pytest.raises(ValueError, match="module has hooks of Opacus; take them off by to_standard_module"):
        private_loop(tmp_path, (module, optimizer, criterion, loader))
    plain = prepared[0].to_standard_module()
    private_loop(tmp_path, (plain, prepared[1].original_optimizer, criterion, loader)).close()


def test_a_batch_memory_manager_names_its_argument(private: Loop) -> None:
    manager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
    with (
        pytest.raises(AttributeError, match="give max_physical_batch_size to make_private and iterate over"),
        manager(data_loader=private.data_loader, max_physical_batch_size=4, optimizer=private.optimizer),
    ):
        pass
    assert not hasattr(private.data_loader, "batch_sampler")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(records())


def but(place: int, value: Any) -> Any:
    """What `make_private` is given, except for one part."""
    found: list[Any] = list(parts())
    return (*found[:place], value, *found[place + 1 :])


def loaded(data: Any, **options: Any) -> Any:
    return but(3, DataLoader(data, **options))


def optimized(make: Callable[..., Any]) -> Any:
    """What `make_private` is given, with an optimizer that is made of the module's parameters."""
    module = network()
    return (module, make(module.parameters()), *parts()[2:])


SEVERAL = "of 2; give one optimizer with a group for each of them"
UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "double": (lambda: parts(network().double()), "train in torch.float32"),
    "evaluation mode": (lambda: parts(network().eval()), "call module.train"),
    "compiled": (lambda: parts(torch.compile(network(), backend="eager")), "compiled"),
    "parallel": (lambda: parts(nn.DataParallel(network())), "give the plain module"),
    "LBFGS": (lambda: optimized(torch.optim.LBFGS), "optimizer is LBFGS, which runs the module several times"),
    "list of optimizers": (lambda: optimized(lambda p: [torch.optim.SGD(p)] * 2), f"got a list {SEVERAL}"),
    "dict of optimizers": (
        lambda: optimized(lambda p: dict.fromkeys("ab", torch.optim.SGD(p))), f"got a dict {SEVERAL}",
    ),
    "criterion with parameters": (lambda: but(2, nn.Linear(3, 1)), "criterion has parameters that learn"),
    "no criterion": (lambda: but(2, None), "must be a function"),
    "stream": (lambda: loaded(Stream(), batch_size=4), "reads a stream"),
    "no batches": (lambda: loaded(records(), batch_size=None), "batches in a way of its own"),
    "weights": (
        lambda: loaded(records(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 60, 60)),
        "WeightedRandomSampler of its own",
    ),
    "too few records": (lambda: loaded(records(5), batch_size=6), "exceeds the 5 records"),
    "no loader": (lambda: but(3, records()), "must be a torch.utils.data.DataLoader"),
    "own class of batches": (lambda: parts(collate_fn=collated(Record)), "returns a Record, whose rows .* or a"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_parts_are_refused(tmp_path: Path, name: str) -> None:
    given, message = UNFIT[name]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        private_loop(tmp_path, given())
    assert "\n" not in str(caught.value)
    private_loop(tmp_path).close()  # the folder is still free


def test_a_plain_batch_sampler_is_replaced(tmp_path: Path) -> None:
    sampler = BatchSampler(SequentialSampler(range(60)), 5, False)
    private_loop(tmp_path, loaded(records(), batch_sampler=sampler)).close()


def test_a_refused_module_is_left_plain(tmp_path: Path) -> None:
    given = parts()
    with pytest.raises(ValueError, match="noise_multiplier"):
        private_loop(tmp_path, given, noise_multiplier=-1.0)
    with private_loop(tmp_path, given), pytest.raises(ValueError, match="in a private loop already"):
        private_loop(tmp_path / "second", given)


@pytest.mark.parametrize("seedable", [True, False])
def test_a_loader_that_accelerate_has_prepared_is_taken(tmp_path: Path, seedable: bool) -> None:
    """As the Hugging Face Trainer does; only its sampler without replacement."""
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
    model, optimizer, criterion, loader = parts()
    prepared = accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)
    assert (type(prepared.batch_sampler.sampler) is not RandomSampler) == seedable
    with private_loop(tmp_path, (model, optimizer, criterion, prepared)) as private:
        assert run_epoch(private) != 60  # each record at random, so not all of them once
        assert private.step == 5
        assert (private.settings.sample_rate, private.settings.batch_size) == (0.2, 12)
    sampler = accelerate.data_loader.SeedableRandomSampler(records(), replacement=True)
    same_name = type("SeedableRandomSampler", (RandomSampler,), {})(records())
    for other in (sampler, same_name):
        with pytest.raises(ValueError, match="SeedableRandomSampler of its own"):
            private_loop(tmp_path / "other", loaded(records(), batch_size=12, sampler=other))


PAIRS: dict[str, Any] = {"user_ids": [n // 2 for n in range(60)], "records_per_user": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": None}, "noise_multiplier is missing"),
        ({"noise_multiplier": None, "target_epsilon": 3.0}, "noise_multiplier is missing"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0: must be finite and above 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0"),
        ({"target_delta": 1.0}, "target_delta = 1.0"),
        ({"epochs": 0}, "epochs = 0"),
        ({"mode": "release"}, "seed = 3"),
        ({"relation": "replace_one"}, "relation = 'replace_one'"),
        ({"sample_rate": 1.5}, "sample_rate = 1.5"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size = 0"),
        ({"user_ids": PAIRS["user_ids"]}, "records_per_user is missing and user_ids is given"),
        ({"records_per_user": 3}, "user_ids is missing and records_per_user is given"),
        ({**PAIRS, "records_per_user": 0}, "records_per_user = 0"),
        ({**PAIRS, "user_ids": [1] * 9}, "has 9 IDs for 60 records"),
        ({**PAIRS, "max_physical_batch_size": 2}, "must hold the 3 records of a user"),
        ({**PAIRS, "user_ids": ["one person"] * 60}, "exceeds the 1 users"),
        ({**PAIRS, "relation": "add_or_remove_one"}, "needs sample_rate"),
        ({"clipping": "medium"}, "clipping = 'medium'"),
        ({"max_grad_norm": [1.0, 2.0]}, "layer_norms = .* not for 'flat'"),
        ({"max_grad_norm": [1.0], "clipping": "per_layer"}, "has 1 norms, and the module has 2 layers"),
        ({"max_grad_norm": [1.0, -1.0], "clipping": "per_layer"}, "layer_norms"),
        ({"clipping": Clipping(kind="per_layer", layer_norms=(1.0, 2.0))}, "follows from layer_norms"),
    ],
    ids=lambda one: ", ".join(one) if isinstance(one, dict) else "",
)
def test_wrong_numbers_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        private_loop(tmp_path, **options)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over counted tokens, which mixes the records of a batch."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


@pytest.mark.parametrize("maps", [True, False])
def test_a_mean_over_counted_tokens_belongs_to_single_records(tmp_path: Path, maps: bool) -> None:
    """Another record's number of counted tokens must not change the gradient of a record."""
    targets = torch.randint(0, 5, (30, 4))
    targets[1:, 1:] = -100
    data = TensorDataset(torch.randint(0, 9, (30, 4)), targets)
    gradients = []
    for joined in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = (model, optimizer, token_loss, DataLoader(data, batch_size=30))
        options = {"noise_multiplier": 1e-9, "max_grad_norm": 100.0, "sample_rate": 1.0}
        with private_loop(tmp_path / f"{maps}-{joined}", given, **options) as loop:
            loop.criterion._vmap = maps
            x, y = batch_of(loop)
            loop.criterion(model(x), y).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        data = TensorDataset(*(torch.cat([t, t]) for t in data.tensors))
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-4, atol=1e-6)
    x, y = (t[:30] for t in data.tensors)

    def gradient(loss: Tensor) -> Tensor:
        return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))

    single = gradient(sum(token_loss(model(x[i : i + 1]), y[i : i + 1]) for i in range(30)))
    torch.testing.assert_close(gradients[0] * 30, single, rtol=1e-4, atol=1e-5)
    mixed = gradient(token_loss(model(x), y))
    assert not torch.allclose(mixed, gradients[0], rtol=1e-2)  # what a mean over the batch would give


def test_a_criterion_with_memory_is_refused_in_one_line(tmp_path: Path) -> None:
    class Remembers(nn.Module):
        mean: Any = 0.0

        def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + outputs.mean(dim=0)
            return cross_entropy(outputs - self.mean, y)

    model, optimizer, _, loader = parts()
    with (
        private_loop(tmp_path, (model, optimizer, Remembers(), loader)) as private,
        pytest.raises(ValueError, match="criterion: uses a tensor that it kept .* arguments alone$"),
    ):
        run_epoch(private)
