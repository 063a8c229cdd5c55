"""Private loops of several real gloo processes: equal to one process, one noise, one ledger, refusals, kills."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opusim
from tests.support.private_ranks import N_RECORDS, NOISE
from tests.support.shared_checks import (
    ROOT,
    SURE,
    deviations,
    do,
    require_kills_are_paid,
    selected,
    steps_of,
    with_marks,
)

SAME = ["plain=2", "feedback=2"]
MORE = [
    "plain=2+1", "plain=3", "plain=1+2", "plain=2+3", "plain=3+2", "in parts=2", "in parts=3", "feedback=3",
    "feedback=2+1", "in parts=2+1", "fixed=2+1", "users=2", "users=3+2", "adaptive=2+1",
]  # fmt: skip
ALIKE = ["budget", "wrapped", "other starts", "feedback in parts", "release=2+2"]
NOISES = ["noise", "noise in release"]
FAULTS = ["noise of both", "noise over own divisor"]
STEPS = 100
REFUSED = {
    "seed": "ValueError: seed = 1: process 1 of 2 was given this, and process 0 0; make the same call",
    "shards": "ValueError: data_loader: process 1 of 2 was given another one than process 0; make the same call",
    "device of one": "ValueError: device 'gaussian' is shared by 1 processes, and 2 train together; call init_process",
    "data parallel": "ValueError: module 'DistributedDataParallel' is a DistributedDataParallel, which would average",
}
ENDED = {
    "damaged record": ("KeyError: 'a damaged record'",) * 2,
    "full disk": ("OSError: [Errno 28] No space left on device",) * 2,
    "another loop": (
        "RuntimeError: process 0 asks for the batch of step 4, and process 1 iterates over the loader of step 4;",
        "RuntimeError: process 1 iterates over the loader of step 4, and process 0 asks for the batch of step 4;",
    ),
    "backward twice": ("RuntimeError: backward: was called before on the batch of step 3",) * 2,
    "another rate": ("RuntimeError: parameter '0.weight' has norm",) * 2,
    "own error": ("ProcessLost: process 0 of 2: another process ended", "ZeroDivisionError: of the loop"),
}
NIGHTLY = (
    *("feedback=1", "feedback=2", "wrapped", "other starts", "feedback in parts", "noise"),
    *("noise over own divisor", "own batches", "shards", "device of one"),
    *("damaged record", "another loop", "backward twice", "another rate"),
)
"""What is done only where slow tests are selected; another of its kind is done in every run of the tests."""


def ones(names: list[str]) -> list[str]:
    return sorted({f"{name.partition('=')[0]}=1" for name in names})


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loops")
    names = [*ones(SAME), *SAME, *ALIKE, *NOISES, *FAULTS, "batches", "own batches", *REFUSED, *ENDED]
    do("private_ranks", str(path), *selected(request, names, NIGHTLY))
    return path


def found(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / f"{name}.{rank}.pt")
    return content


def steps_paid(folder: Path) -> int:
    return sum(payment.steps for payment in opusim.read_ledger(folder).payments)


def require_same(folder: Path, name: str) -> None:
    """The parameters, the steps, the batches and the ledger of one process, up to rounding.

    Sums of several processes differ in their last bits, which now and then move a released number by a grid step:
    0.5 / 3 of 2^-10 in a parameter here, or 0.5 / 60 of 2^-5.
    """
    key, _, processes = name.partition("=")
    one, many = found(folder, f"{key}=1"), found(folder, name)
    moved = float((one["end"] - one["start"]).abs().max())
    assert float((one["end"] - many["end"]).abs().max()) < 2e-3 < 2e-2 * moved
    assert (one["step"], one["epsilon"]) == (many["step"], many["epsilon"])
    assert steps_paid(folder / f"{key}=1") == steps_paid(folder / name) == one["step"]
    if "+" not in processes:
        shares = [steps_of(folder / f"{name}.{rank}.steps") for rank in range(int(processes))]
        joined = [(rows[0][0], [n for _, part in rows for n in part]) for rows in zip(*shares, strict=True)]
        assert [(step, records) for step, records in steps_of(folder / f"{key}=1.0.steps")] == joined


@pytest.mark.parametrize("name", with_marks(SAME, NIGHTLY))
def test_several_processes_train_as_one(folder: Path, name: str) -> None:
    require_same(folder, name)


@pytest.mark.slow
def test_more_processes_train_as_one(tmp_path: Path) -> None:
    do("private_ranks", str(tmp_path), *ones(MORE), *MORE)
    for name in MORE:
        require_same(tmp_path, name)


@pytest.mark.parametrize("name", with_marks([*SAME, *ALIKE], NIGHTLY))
def test_processes_end_alike(folder: Path, name: str) -> None:
    """The same parameters to the bit, the same step, the same epsilon and the same statement."""
    first, second = found(folder, name), found(folder, name, 1)
    assert torch.equal(first.pop("end"), second.pop("end"))
    del first["start"], second["start"]
    assert first == second
    assert "every process reads the same data set" in first["statement"]
    assert "every process" not in found(folder, "plain=1")["statement"]


@pytest.mark.parametrize("name", with_marks(SAME, NIGHTLY))
def test_small_batches_leave_a_process_without_records(folder: Path, name: str) -> None:
    """The loops above take empty batches, and batches of one record, also through a device."""
    parts = [[len(records) for _, records in steps_of(folder / f"{name}.{rank}.steps")] for rank in (0, 1)]
    assert {(0, 0), (1, 0), (1, 1)} <= set(zip(*parts, strict=True))


@pytest.mark.slow
def test_a_module_that_is_wrapped_afterwards_trains_as_a_plain_one(folder: Path) -> None:
    """DistributedDataParallel then finds nothing to average."""
    assert torch.equal(found(folder, "wrapped")["end"], found(folder, "plain=2")["end"])


def test_a_spent_budget_ends_all_processes_at_the_same_step(folder: Path) -> None:
    first, second = found(folder, "budget"), found(folder, "budget", 1)
    assert 10 < first["step"] == second["step"] == steps_paid(folder / "budget")
    assert f"the loop ended after step {first['step']}" in first["stopped"]
    assert first["epsilon"] <= 4


def test_resumed_steps_of_a_release_are_paid_again(folder: Path) -> None:
    """Saved after 11 of 20 steps, and resumed after 12."""
    assert found(folder, "release=2+2")["step"] == 20
    assert steps_paid(folder / "release=2+2") == 21


# The noise and the batches


def noise_deviation(folder: Path, name: str) -> float:
    """Return how many standard errors the update's variance is from (rate z C / b)^2; one step of sample rate 1."""
    values = found(folder, name)
    update = values["end"] - values["start"]
    expected = (0.5 * NOISE / N_RECORDS) ** 2
    return (float(update.square().mean()) / expected - 1) / math.sqrt(2 / update.numel())


@pytest.mark.parametrize("name", with_marks(NOISES, NIGHTLY))
def test_the_released_sum_has_the_accounted_noise(folder: Path, name: str) -> None:
    """At most N records of norm C contribute, which is below a tenth of a standard error of the variance."""
    assert abs(noise_deviation(folder, name)) < SURE
    entries = found(folder, name)["end"].numel()
    assert (N_RECORDS / NOISE) ** 2 / entries < 0.1 * math.sqrt(2 / entries)


@pytest.mark.parametrize("name", with_marks(FAULTS, NIGHTLY))
def test_other_noise_is_found(folder: Path, name: str) -> None:
    assert abs(noise_deviation(folder, name)) > 2 * SURE


def batches(folder: Path, name: str) -> np.ndarray:
    """Return whether each record is in each batch of two processes, shape (STEPS, records)."""
    first, second = (steps_of(folder / f"{name}.{rank}.steps") for rank in (0, 1))
    assert [step for step, _ in first] == [step for step, _ in second] == list(range(STEPS))
    taken = np.zeros((STEPS, N_RECORDS))
    for (step, mine), (_, others) in zip(first, second, strict=True):
        assert not set(mine) & set(others)
        taken[step, mine + others] = 1
    return taken


def test_batches_are_poisson_over_the_whole_data_set(folder: Path) -> None:
    """In release mode; the processes' parts are disjoint, and together they are one secret Poisson batch."""
    assert all(abs(found) < SURE for found in deviations(batches(folder, "batches"), 0.1).values())


@pytest.mark.slow
def test_batches_of_each_process_of_its_own_are_found(folder: Path) -> None:
    """Two batches of the stated size, each from half of the records, are not one from all."""
    assert abs(deviations(batches(folder, "own batches"), 0.1)["rate"]) > 2 * SURE


# What is refused, and what ends a loop


@pytest.mark.parametrize("name", with_marks(REFUSED, NIGHTLY))
def test_calls_that_differ_are_refused_before_anything_is_paid(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert (folder / f"{name}.{rank}.error").read_text().startswith(REFUSED[name])
    assert not list((folder / name).glob("ledger*"))


@pytest.mark.parametrize("name", with_marks(ENDED, NIGHTLY))
def test_what_ends_one_process_ends_the_other(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert (folder / f"{name}.{rank}.error").read_text().startswith(ENDED[name][rank])
    handed_out = {step for rank in (0, 1) for step, _ in steps_of(folder / f"{name}.{rank}.steps")}
    assert max(handed_out) < steps_paid(folder / name)


def test_the_first_process_writes_the_only_folder(folder: Path) -> None:
    assert (folder / "plain=2" / "ledger.jsonl").exists()
    assert not list(folder.glob("*rank1*"))


# Kills


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_every_step_is_paid_for(tmp_path: Path) -> None:
    require_kills_are_paid(tmp_path, "loop", seed=5, kills=2)


@pytest.mark.slow
def test_torchrun_starts_the_command_of_the_documentation() -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    call = [*launcher, "examples/private/plain_loop.py"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=settings, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.endswith("epsilon 8.00")
