"""The benchmarks of private accuracy at a small size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.private_accuracy import cifar, records
from benchmarks.results_file import load_results
from opusim.description.section import merged
from opusim.training.data import from_arrays
from opusim.training.data.public_maps import random_shapes
from tests.support.paper_data import write_mnist


def test_a_row_of_private_accuracy_takes_more_seeds_later(results: Path) -> None:
    write_mnist(results.parent, 60)
    name = "fashion-mnist, convolutions, DP-SGD"
    small = {"epochs": 1, "data": {"name": "mnist"}, "sampler": {"batch_size": 16}}
    row = replace(records.ROWS[name], config=merged(records.ROWS[name].config, small), epsilons=(3.0,))
    table = replace(records.TABLE, rows={name: row}, folder=results.parent / "runs")
    table.measure(jobs=1, seeds="0")
    assert "(one seed)" in records.page_section()
    table.measure(jobs=1, seeds="1")
    first = load_results(records.NAME)["runs"]
    assert "(one seed)" not in records.page_section()
    table.measure(jobs=1, seeds="2")
    found = load_results(records.NAME)["runs"]
    assert [run["seed"] for run in found] == [0, 1, 2]
    assert found[:2] == first
    assert {run["status"] for run in found} == {"proven"}


def test_a_second_encoding_on_the_same_blocks_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs on the grid of the first one would say nothing of what the first one cost."""
    images = random_shapes((3, 32, 32), 40)
    data = from_arrays(images, np.arange(40) % 2, n_classes=2, validation_fraction=0.0, split_seed=0)
    original = data.train.x

    def change(again: torch.Tensor, before: torch.Tensor) -> float:
        return (again - before).square().mean().sqrt().item()

    monkeypatch.setattr(cifar, "ASIDE", 16)  # whole blocks, of halved colours too
    once = cifar.encoded_again(data, original)
    aligned = change(cifar.encoded_again(data, once), once)
    monkeypatch.setattr(cifar, "ASIDE", 4)
    aside = change(cifar.encoded_again(data, once), once)
    assert aligned < 0.6 * aside < aside < change(once, original)
