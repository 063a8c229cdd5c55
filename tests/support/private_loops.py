"""Small private loops for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.accounting.journal import Journal, read_positioned

Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor], DataLoader[Any]]


def network() -> nn.Module:
    """A network of 8 inputs and 3 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def records(count: int = 60) -> TensorDataset:
    """Features and classes."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def parts(model: nn.Module | None = None, *, count: int = 60, batch_size: int = 12, **loader: Any) -> Parts:
    """What `make_private` is given."""
    module = network() if model is None else model
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    data = DataLoader(records(count), batch_size=batch_size, shuffle=True, **loader)
    return module, optimizer, nn.CrossEntropyLoss(), data


def private_loop(folder: Path, given: Parts | None = None, **options: Any) -> opusim.PrivateTraining:
    """A private loop in a folder, with noise multiplier 1 and clip 1 unless said otherwise."""
    module, optimizer, criterion, loader = parts() if given is None else given
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "target_delta": 1e-5, "seed": 3, **options,
    }  # fmt: skip
    return opusim.make_private(
        module=module, optimizer=optimizer, criterion=criterion, data_loader=loader, folder=folder, **settings
    )


def run_epoch(private: opusim.PrivateTraining, *, steps: int | None = None) -> int:
    """Train on the rest of an epoch, or on some steps; return the number of records seen."""
    model, optimizer, criterion, loader = private
    seen = 0
    for number, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        seen += len(x)
        if number == steps:
            break
    return seen


def rewritten(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Write the ledger with other entries, and with digests that fit them, as a forger may."""
    file = folder / "ledger.jsonl"
    entries, _ = read_positioned(file)
    file.unlink()
    file.with_suffix(".head").unlink()
    journal = Journal(file)
    for entry in change(entries):
        journal.append(entry)
    journal.close()


def unrecorded(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries as opusim 0.2 wrote them."""
    return [{key: value for key, value in entry.items() if key != "enforcement"} for entry in entries]
