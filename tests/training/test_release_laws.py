"""The noise of release mode against its law: fresh runs of every entry point, which no seed repeats.

`opusim audit --mechanism` has the same tests of trainers and label protections; see tests/training/attacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    "noise_missing_on_release",
    "noise_halved_on_release",
    "noise_too_small",
    "noise_same_in_every_run",
    "noise_reused_on_release",
)


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
