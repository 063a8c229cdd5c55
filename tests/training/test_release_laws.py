"""Release mode: the noise of fresh runs of every entry point, which no seed repeats, against its law, and the folder.

`opusim audit --mechanism` has the same tests of trainers and label protections; see tests/training/attacks.
Two runs on other data, whose releases are made equal, leave the same files to the last byte, but for who wrote them.
"""

import json
import math
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
from opusim.training.data.samplers import PoissonSampler
from opusim.training.sweeps.tuning import draw_trials
from tests.support.faults import NAMED
from tests.support.faults.base import replaced
from tests.support.releases import RELEASES, alarms, private_steps

SLOW = ("make_private, in parts", "label-release, device", "zo, gaussian", "tune")
MISSED_BEFORE = (
    ("noise_same_in_every_run", "make_private"),
    ("final_noise_missing_on_release", "last-iterate"),
    ("leverage_of_most_records", "label-release"),
)
NOT_SEEN = (
    *(("noise_reused_on_release", name) for name in ("last-iterate", "label-release", "tune")),
    ("noise_too_small", "tune"),
)
"""What is drawn once only, and a fault that takes more scores than two searches have."""
OF_ALL = (
    "noise_missing_on_release", "noise_halved_on_release", "noise_too_small", "noise_same_in_every_run",
    "noise_reused_on_release",
)  # fmt: skip


def fresh_runs(name: str, folder: Path, runs: int = 2) -> np.ndarray:
    """Noise of two or more fresh runs, shape (runs, rows, columns)."""
    return np.stack([RELEASES[name](folder / str(run)) for run in range(runs)])


FAULTY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "missing": lambda runs: 0.0 * runs,
    "halved": lambda runs: 0.5 * runs,
    "the same in two runs": lambda runs: np.stack([runs[0], runs[0]]),
    "drawn once": lambda runs: np.repeat(runs[:, :1], runs.shape[1], axis=1),
    "of a part": lambda runs: runs * (np.arange(runs.shape[2]) < 0.75 * runs.shape[2]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RELEASES]
)
def test_noise_of_releases_has_the_stated_law(name: str, tmp_path: Path) -> None:
    """A false alarm has probability 1e-9; noise that is missing, halved, shared or drawn once is found."""
    runs = fresh_runs(name, tmp_path)
    assert not alarms(runs)
    for fault, spoil in FAULTY.items():
        if fault != "of a part" or runs.shape[2] > 20:  # scores have no parts
            assert alarms(spoil(runs)), fault


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *MISSED_BEFORE,
        *(
            pytest.param(fault, name, marks=pytest.mark.slow)
            for fault in OF_ALL
            for name in RELEASES
            if (fault, name) not in (*MISSED_BEFORE, *NOT_SEEN)
            and name != "label-release, device"  # the device draws its noise
        ),
    ],
)
def test_faults_of_release_mode_are_found(fault: str, name: str, tmp_path: Path) -> None:
    with NAMED[fault].planted():
        # half of the variance in two runs of label-release shows 99 times in 100
        assert alarms(fresh_runs(name, tmp_path, runs=3 if fault == "noise_too_small" else 2))


def secret(batches: list[list[int]], others: list[list[int]], records: int, q: float) -> bool:
    """Whether sizes of batches are binomial (6 standard errors), and two loops share less than half of them."""
    inside = np.array(
        [[[record in batch for record in range(records)] for batch in run] for run in (batches, others)]
    )
    sizes = inside.sum(axis=2) - records * q
    both = (inside[0] & inside[1]).sum()
    variance = records * q * (1 - q)
    return bool(
        abs(inside.mean() - q) < 6 * math.sqrt(q * (1 - q) / inside.size)
        and abs(np.square(sizes).mean() / variance - 1) < 6 * math.sqrt((2 + 1 / variance) / sizes.size)
        and both < inside.sum() / 4
    )


def fixed_seed(sampler: type[PoissonSampler]) -> Callable[..., PoissonSampler]:
    return lambda records, rate, *, seed: sampler(records, rate, seed=1 if seed is None else seed)


@pytest.mark.parametrize(
    ("plant", "sound"),
    [
        (None, True),
        pytest.param(
            lambda: replaced("opusim.training.private_loop.loader:PoissonSampler", fixed_seed),
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_batches_of_a_private_loop_in_release_mode_are_secret(
    plant: Callable[[], AbstractContextManager[None]] | None, sound: bool, tmp_path: Path
) -> None:
    def batches(folder: str) -> list[list[int]]:
        return private_steps(tmp_path / folder)[1]

    if plant is None:
        assert secret(batches("a"), batches("b"), 40, 0.05)
        return
    with plant():
        assert not secret(batches("a"), batches("b"), 40, 0.05)


def _numbers(seeds: list[int | None]) -> np.ndarray:
    choices: dict[str, Any] = {"trainer.clip": ["0.3", "0.6"]}
    return np.array([len(draw_trials(choices, 5.0, seed=seed).trials) for seed in seeds])


def test_the_number_of_trials_of_a_release_is_poisson() -> None:
    """A number of fixed seed, the planted fault, has no variance."""
    counts = _numbers([None] * 1500)
    error = math.sqrt((2 + 1 / 5) / len(counts))
    assert abs(counts.mean() - 5) < 6 * math.sqrt(5 / len(counts))
    assert abs(counts.var() / 5 - 1) < 6 * error
    assert not abs(_numbers([1] * 1500).var() / 5 - 1) < 6 * error


# What a folder holds


RECORDS, FEATURES, CLASSES = 100, 6, 3
SECTIONS: dict[str, dict[str, Any]] = {
    "zo": {
        "epochs": 1, "trainer": {"kind": "zo", "directions": 3, "clip": "joint"},
        "sampler": {"scheme": "poisson", "batch_size": 10}, "protection": {"kind": "record", "noise_multiplier": 2.0},
    },
    "label-release": {"trainer": {"kind": "ridge"}, "protection": {"kind": "label-release", "epsilon": 1.0}},
}  # fmt: skip


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
        "mode": "release", "threads": 1,
        "data": {"n_classes": CLASSES, "validation_fraction": 0.2, "standardise": False}, **SECTIONS[name],
    }  # fmt: skip
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
        ("label-release", ("opusim.training.engine.loop:Engine._end_epoch", _with_accuracy), r"metrics\.jsonl"),
    ],
)  # fmt: skip
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
