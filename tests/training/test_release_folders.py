"""What a release folder holds of the data: the releases, and nothing else.

Two runs on other data, whose releases are made equal, leave the same files to the last byte, but for who wrote them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opusim import training
from opusim.randomness.rounded import ExactNoise
from tests.support.faults.base import replaced

RECORDS, FEATURES, CLASSES = 100, 6, 3
SECTIONS: dict[str, dict[str, Any]] = {
    "zo": {
        "epochs": 1,
        "trainer": {"kind": "zo", "directions": 3, "clip": "joint"},
        "sampler": {"scheme": "poisson", "batch_size": 10},
        "protection": {"kind": "record", "noise_multiplier": 2.0},
    },
    "label-release": {"trainer": {"kind": "ridge"}, "protection": {"kind": "label-release", "epsilon": 1.0}},
}


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a run by name; a checkpoint without the number of the file that it is sealed to, and its digest."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "lock":  # names a process and a time
            content = path.read_bytes()
            if path.suffix == ".safetensors" and path.parent.name == "checkpoints":
                length = int.from_bytes(content[:8], "little")
                header = json.loads(content[8 : 8 + length])
                facts = json.loads(header["__metadata__"]["opusim"])
                del facts["seal"]["inode"], facts["digest"]
                content = json.dumps([facts, {**header, "__metadata__": 0}]).encode() + content[8 + length :]
            found[str(path.relative_to(folder))] = content
    return found


def _released(name: str, folder: Path, *, other: bool) -> dict[str, bytes]:
    """The files of a run on one of two data sets: all labels differ, and records where these are protected."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    y = generator.integers(CLASSES, size=RECORDS)
    if other:
        x, y = (3 * x + 1 if name == "zo" else x), (y + 1) % CLASSES
    torch.manual_seed(0)
    model = None if name == "label-release" else nn.Sequential(nn.Linear(FEATURES, CLASSES))
    config = {
        "mode": "release",
        "threads": 1,
        "data": {"n_classes": CLASSES, "validation_fraction": 0.2, "standardise": False},
        **SECTIONS[name],
    }
    training.train(config, data=(x, y), model=model, folder=folder)
    return _files(folder)


def _with_the_sums(function: Callable[..., Any]) -> Callable[..., Any]:
    """The planted fault: a step log whose learning rate follows the noiseless sums."""

    def entry(self: Any, seeds: Any, sums: Any, noise: Any) -> Any:
        group = self.optimizer.param_groups[0]
        before, group["lr"] = group["lr"], group["lr"] * (1 + 1e-3 * sums[0])
        try:
            return function(self, seeds, sums, noise)
        finally:
            group["lr"] = before

    return entry


def _with_accuracy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The planted fault: figures of training and of held-out records stay in a release."""

    def measured(self: Any, *arguments: Any, **options: Any) -> Any:
        private, self._private = self._private, False
        try:
            return function(self, *arguments, **options)
        finally:
            self._private = private

    return measured


@pytest.mark.parametrize(
    ("name", "plant", "changed"),
    [
        ("zo", None, ""),
        ("label-release", None, ""),
        pytest.param(
            "zo",
            ("opusim.training.zeroth_order.trainer:ZoTrainer._entry", _with_the_sums),
            r"steps\.zo",
            marks=pytest.mark.slow,
        ),
        (
            "label-release",
            ("opusim.training.engine.loop:Engine._end_epoch", _with_accuracy),
            r"metrics\.jsonl",
        ),
    ],
)
def test_a_folder_depends_on_the_data_by_its_releases_only(
    name: str, plant: tuple[str, Any] | None, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(noise: ExactNoise, values: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, values.numel(), dtype=torch.float64).reshape(values.shape)

    monkeypatch.setattr(ExactNoise, "added_to", constant)
    monkeypatch.setattr(secrets, "randbits", lambda _: 5)  # the directions' public seed
    context: AbstractContextManager[None] = nullcontext() if plant is None else replaced(*plant)
    with context:
        first, second = (_released(name, tmp_path / str(other), other=other) for other in (False, True))
    assert first.keys() == second.keys()
    different = sorted(file for file in first if first[file] != second[file])
    assert different == [] if plant is None else any(re.search(changed, file) for file in different)
