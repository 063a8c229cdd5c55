"""What docs/private-loops.md says of Opacus, by its installed code, next to what a private loop does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import opusim
from tests.support.private_loops import network, parts, private_loop, records

pytestmark = pytest.mark.filterwarnings("ignore")
cross_entropy = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def opacus_loop(
    module: nn.Module | None = None, loader: DataLoader[Any] | None = None, **options: Any
) -> tuple[opacus.PrivacyEngine, Any, Any, Any]:
    model, optimizer, _, data = parts(module)
    engine = opacus.PrivacyEngine(accountant="rdp")
    found = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data if loader is None else loader,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )
    return engine, *found


def test_the_page_is_about_the_version_that_is_tested() -> None:
    page = Path(__file__).parents[3] / "docs" / "private-loops.md"
    assert f"Opacus {opacus.__version__}" in page.read_text()


def test_opacus_accounts_shuffled_batches_as_poisson() -> None:
    engine, model, optimizer, loader = opacus_loop(poisson_sampling=False)
    for x, y in loader:
        assert len(x) == 12  # fixed batches
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 0.2, 5)]
    with pytest.raises(TypeError, match="poisson_sampling"):
        opusim.make_private(poisson_sampling=False)  # type: ignore[call-arg]


def test_opacus_replaces_a_weighted_sampler_in_silence(tmp_path: Path) -> None:
    loader = DataLoader(records(), batch_size=12, sampler=WeightedRandomSampler([1.0] * 60, 60))
    _, _, _, replaced = opacus_loop(loader=loader)
    assert type(replaced.batch_sampler).__name__ == "UniformWithReplacementSampler"
    with pytest.raises(ValueError, match="WeightedRandomSampler of its own"):
        private_loop(tmp_path, (*parts()[:3], loader))


def test_opacus_takes_its_constants_from_the_number_of_batches(tmp_path: Path) -> None:
    """60 records in batches of 25 are 3 batches: Opacus expects 20 records, a private loop 25."""
    loader = DataLoader(records(), batch_size=25)
    _, _, optimizer, replaced = opacus_loop(loader=loader)
    assert replaced.sample_rate == 1 / 3
    assert optimizer.expected_batch_size == 20
    with private_loop(tmp_path, (*parts()[:3], loader)) as private:
        assert (private.settings.sample_rate, private.settings.batch_size) == (25 / 60, 25)


def test_opacus_loses_a_step_of_an_epoch_to_rounding() -> None:
    loader = DataLoader(records(93), batch_size=1)
    _, _, _, replaced = opacus_loop(loader=loader)
    assert (len(loader), len(replaced)) == (93, 92)


def token_gradient_in_opacus(targets: Tensor) -> Tensor:
    model = nn.Sequential(nn.Linear(3, 5))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    wrapped = opacus.GradSampleModule(model)
    x = torch.linspace(-1, 1, 2 * 4 * 3).view(2, 4, 3)
    cross_entropy(wrapped(x).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    found: Tensor = model[0].weight.grad_sample[0]
    return found


def test_opacus_lets_ignored_tokens_of_one_record_scale_another() -> None:
    targets = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 0]])
    other = targets.clone()
    other[1, 1:] = -100
    before, after = (token_gradient_in_opacus(t) for t in (targets, other))
    torch.testing.assert_close(after, before * 8 / 5)  # the same record, another gradient


def test_opacus_lets_one_broken_record_break_the_sum() -> None:
    x, y = (t.clone() for t in records(12).tensors)
    x[3] = math.nan
    _, model, optimizer, loader = opacus_loop(
        loader=DataLoader(TensorDataset(x, y), batch_size=12), poisson_sampling=False
    )
    for data, labels in loader:
        cross_entropy(model(data), labels).backward()
        optimizer.step()
    assert all(bool(p.isnan().all()) for p in model.parameters())


class Mixing(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Statistics(nn.Module):
    """Keeps a running mean of the records."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.add_(x.mean(dim=0))
        return x


@pytest.mark.parametrize("module", [Mixing, Statistics])
def test_opacus_accepts_modules_that_mix_or_keep_records(tmp_path: Path, module: type[nn.Module]) -> None:
    opacus_loop(nn.Sequential(module(), network()))
    with pytest.raises(ValueError, match="mixes the records|a training pass changes buffer"):
        private_loop(tmp_path, parts(nn.Sequential(module(), network())))


def test_opacus_leaves_raw_gradients_to_other_optimizers() -> None:
    _, model, _, _ = opacus_loop(noise_multiplier=1e-9, max_grad_norm=1e-6)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = records(20).tensors
    before = [p.detach().clone() for p in model.parameters()]
    cross_entropy(model(x), y).backward()
    raw.step()
    assert (
        max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
        > 1e-3
    )


def test_opacus_drops_terms_on_parameters_in_silence() -> None:
    gradients = []
    for penalty in (0.0, 100.0):
        _, model, optimizer, _ = opacus_loop(noise_multiplier=1e-9)
        x, y = records(20).tensors
        loss = cross_entropy(model(x), y) + penalty * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.pre_step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients)


def test_opacus_drops_what_is_done_to_gradients_before_the_step() -> None:
    _, model, optimizer, _ = opacus_loop(noise_multiplier=1e-9)
    x, y = records(20).tensors
    cross_entropy(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    assert any(bool((p.grad != 0).any()) for p in model.parameters())


def test_opacus_does_not_stop_at_its_target() -> None:
    model, optimizer, _, loader = parts()
    engine = opacus.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=1.0,
    )
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    assert engine.get_epsilon(1e-5) > 4.0


def test_opacus_hands_out_parts_of_a_batch_as_iterations() -> None:
    """A scheduler that steps in each iteration then depends on the secret size of the batches."""
    _, _, optimizer, loader = opacus_loop()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    torch.manual_seed(0)
    with manager as split:
        iterations = sum(1 for _ in split)
    assert iterations > len(loader) == 5


def test_opacus_keeps_its_account_in_memory(tmp_path: Path) -> None:
    """What was not saved is forgotten; a private loop's ledger is on disk before the batch is handed out."""
    engine, model, optimizer, loader = opacus_loop()
    file = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sum(steps for _, _, steps in engine.accountant.history) == 5
    restored = opacus.PrivacyEngine(accountant="rdp")
    restored.load_checkpoint(path=file, module=model)
    assert restored.accountant.history == []
    with private_loop(tmp_path / "private") as private:
        next(iter(private.data_loader))
        assert opusim.read_ledger(tmp_path / "private").payments


def test_opacus_wraps_the_module_and_exchanges_batch_norm() -> None:
    _, model, _, _ = opacus_loop()
    assert all(name.startswith("_module.") for name in model.state_dict())
    fixed = opacus.validators.ModuleValidator.fix(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    assert isinstance(fixed[1], nn.GroupNorm)
