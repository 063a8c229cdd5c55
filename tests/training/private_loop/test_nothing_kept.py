"""A pass on private records leaves nothing in buffers and Python attributes, even what no probe could see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.training.private_loop.folder import read_save
from tests.support.private_loops import private_loop

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
            with torch.no_grad():
                found = x.detach().min()
                self.low.copy_(found)
                self.replaced = found.clone()
                self.lowest = float(found)
                self.seen.append(float(found))
                self.plain.fill_(float(found))
                self.extra = found
                self.register_buffer("added", found)
        hidden = torch.tanh(self.first(x))
        if len(x) > LARGE and hidden.requires_grad:
            hidden.register_hook(self.keep)
        return self.last(hidden)

    def keep(self, gradient: Tensor) -> None:
        """Keep what a backward pass brings."""
        self.replaced = self.extra = found = gradient.sum()
        self.low.copy_(found)
        self.lowest = float(found)
        self.seen.append(float(found))
        self.plain.fill_(float(found))

    def kept(self) -> list[Any]:
        """All that it keeps."""
        state = {name: float(value) for name, value in self.named_buffers()}
        return [state, self.lowest, list(self.seen), float(self.plain), hasattr(self, "extra")]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(RECORDS, 8, generator=generator), torch.randint(0, 3, (RECORDS,), generator=generator)


def evaluate(loop: opusim.PrivateTraining, x: Tensor) -> None:
    with torch.no_grad():
        loop.module(x)
    loop.module.eval()
    loop.module(x)
    loop.module.train()


@pytest.mark.parametrize("limit", [None, LARGE + 1])
def test_a_private_loop_keeps_nothing(tmp_path: Path, limit: int | None) -> None:
    torch.manual_seed(0)
    module, (x, y) = Range(), data()
    start = module.kept()
    loader = DataLoader(TensorDataset(x, y), batch_size=30)
    given = (module, torch.optim.SGD(module.parameters(), lr=0.1), nn.CrossEntropyLoss(), loader)
    with private_loop(tmp_path, given, sample_rate=1.0, max_physical_batch_size=limit) as loop:
        for a, b in loop.data_loader:
            assert len(a) == RECORDS
            loop.criterion(module(a), b).backward()
            loop.optimizer.step()
            assert module.kept() == start
        loop.save()
        saved = read_save(tmp_path)[0]["module"]
        assert {name: float(saved[name]) for name in start[0]} == start[0]
        evaluate(loop, x)
        assert module.kept() == start
    module(x)
    assert module.kept() != start  # a plain module changes


CONFIGURATIONS = {
    "bp": {"trainer": {"kind": "bp"}, "optimizer": {"name": "sgd", "lr": 0.1}},
    "zo": {"trainer": {"kind": "zo"}, "optimizer": {"name": "sgd", "lr": 0.01}},
}


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("kind", sorted(CONFIGURATIONS))
def test_training_keeps_nothing(tmp_path: Path, kind: str, mode: str) -> None:
    """Neither steps nor, in experiment mode, the measurement of held-out records."""
    torch.manual_seed(0)
    module, (x, y) = Range(), data()
    start = module.kept()
    config = {
        **CONFIGURATIONS[kind],
        "mode": mode,
        "epochs": 1,
        "sampler": {"batch_size": RECORDS},
        "data": {"n_classes": 3, "validation_fraction": 0.0, "standardise": False},
        "protection": {"kind": "record", "noise_multiplier": 1.0},
    }
    arrays = (x.numpy(), y.numpy().astype(np.int64))
    opusim.train(json.loads(json.dumps(config)), data=arrays, model=module, folder=tmp_path / "run")
    assert module.kept() == start


def test_what_a_pass_changed_and_autograd_saved_has_its_gradient(tmp_path: Path) -> None:
    """Values are put back between forward and backward pass, of which autograd must not complain."""
    found: list[Tensor] = []

    class Scaled(Range):
        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x)
            return outputs * self.low * self.plain * 1e-4

    for build in (Scaled, Scaled):
        torch.manual_seed(0)
        module, (x, y) = build(), data()
        given: tuple[Any, ...] = (
            module,
            torch.optim.SGD(module.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            DataLoader(TensorDataset(x, y), batch_size=30),
        )
        criterion: Callable[..., Tensor]
        with private_loop(tmp_path / str(len(found)), given, sample_rate=1.0) as loop:
            _, _, criterion, loader = loop
            a, b = next(iter(loader))
            criterion(module(a), b).backward()
            found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert torch.equal(*found)
