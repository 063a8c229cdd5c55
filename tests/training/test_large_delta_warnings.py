"""A private loop and a run say at the start that delta is above 0.1 / records; a hidden number is never told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.accounting.explanation import LARGE_DELTA

N = 40


def started(folder: Path, about: str = LARGE_DELTA, **options: Any) -> list[str]:
    """The warnings about delta, or about something else, of a new private loop on 40 records."""
    module = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(N, 3), torch.zeros(N, dtype=torch.int64))
    settings: dict[str, Any] = {
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(data, batch_size=10),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "seed": 1,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opusim.make_private(module=module, folder=folder, **settings | options).close()
    return [str(one.message) for one in caught if about in str(one.message)]


def test_a_private_loop_warns_once_and_above_a_tenth_of_one_over_n(tmp_path: Path) -> None:
    assert started(tmp_path / "small", target_delta=0.1 / N) == []
    (line,) = started(tmp_path / "large", target_delta=0.1)
    assert line.startswith("delta = 0.1 with 40 records (0.1 / records is 0.0025): ")


def test_a_hidden_number_is_not_told(tmp_path: Path) -> None:
    hidden = {"relation": "add_or_remove_one", "sample_rate": 0.1}
    (line,) = started(tmp_path / "typed", target_delta=0.1, **hidden)
    assert line.startswith("delta = 0.1 with 100 records (0.1 / records is 0.001): ")  # 10 / 0.1, not 40


@pytest.mark.parametrize(("rate", "of_run", "count"), [(0.12, 0.3, 1), (0.13, 0.5, 0)])
def test_batches_that_never_fill_are_told(tmp_path: Path, rate: float, of_run: float, count: int) -> None:
    """40 records at q = 0.12 are 4.8 in a batch of 10, and 1,294 at 0.3 are 388; a hidden number is not told."""
    found = started(tmp_path / "public", "batches never fill", sample_rate=rate, target_delta=1e-5)
    assert len(found) == count
    assert all("4.8 are expected in one and its sum is divided by 10" in line for line in found)
    hidden = {"relation": "add_or_remove_one", "sample_rate": rate, "target_delta": 1e-5}
    assert started(tmp_path / "hidden", "batches never fill", **hidden) == []
    config = {
        "epochs": 1,
        "protection": {"kind": "record", "noise_multiplier": 1.0, "divisor": 1000.0},
        "sampler": {"sampling_probability": of_run},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opusim.train(config, folder=tmp_path / "run")
    assert sum("batches never fill" in str(one.message) for one in caught) == count


@pytest.mark.parametrize(("delta", "count"), [(0.1, 1), (1e-5, 0)])
def test_a_run_warns(tmp_path: Path, delta: float, count: int) -> None:
    config = {
        "epochs": 1,
        "protection": {"kind": "record", "noise_multiplier": 1.0, "delta": delta},
        "sampler": {"scheme": "poisson"},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opusim.train(config, folder=tmp_path / "run")
    assert sum(LARGE_DELTA in str(one.message) for one in caught) == count
