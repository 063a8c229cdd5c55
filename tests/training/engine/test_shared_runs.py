"""Runs that several processes share, with real gloo processes: figures, noise, batches, ledger, refusals, kills."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim.accounting.ledger import read_ledger
from opusim.processes.ranks import Ranks
from opusim.training.engine.session import share_trainer
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from tests.support import shared_checks as checks
from tests.support.ranks import run_ranks
from tests.support.shared_runs import N_RECORDS, NOISE, RUNS

SAME = ["pdfa record=2", "pdfa record=2+1"]
MORE = [
    "pdfa=2", "pdfa module=2", "pdfa module record=2", "bp banded=2+1", "pdfa module small batches=2",
    "bp banded=3", "bp=2", "dfa=2", "pdfa published=2", "bp noisy=2", "bp module=2", "bp module=3", "tdfa module=2",
    "bp module record=2", "bp module record=3+2", "pdfa module record=3", "pdfa module record=2+1", "pdfa module=3",
    "bp record=2", "pdfa record=3", "pdfa record=1+2", "pdfa module=2+3", "bp record=3+2",
]  # fmt: skip
STEPS = 240
"""Of batches; enough for each fault of their law to show by ten standard errors."""
NOISES = ["noise", "noise in release"]
FAULTS = ["noise of both", "noise averaged", "noise over own divisor"]
REFUSED = {
    "ulr": "trainer.kind: 'ulr' trains in one process; take 'bp', 'dfa'",
    "convex": "trainer.kind: 'convex' trains in one process; take 'bp', 'dfa'",
    "amplified labels": "protection.kind: 'label-amplified' holds in one process; take 'none' or 'record'",
    "device noise": "protection.noise: 'device' is read by one process; take 'digital'",
    "batch norm": "model.name: Sequential has a batch norm, '1', whose statistics",
    "other data": "data: process 1 of 2 was given another one than process 0; make the same call",
}
FAILED = {
    "budget": "BudgetExceeded: budget: the next step would cost more",
    "device fault": "DeviceFault: device 'gaussian': the laser is off",
    "diverged": "TrainingDiverged: step ",
}
NOT_SHARED = ["evaluate", "curve", "account"]
NIGHTLY = ("noise of both", "noise over own divisor", "ulr", "convex", "device noise", "diverged")
"""What is done only where slow tests are selected; another of its kind is done in every run of the tests."""


def ones(runs: list[str]) -> list[str]:
    return sorted({f"{run.partition('=')[0]}=1" for run in runs})


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    names = [*ones(SAME), *SAME, *NOISES, *FAULTS, "batches", *REFUSED, *FAILED]
    checks.do("shared_runs", str(path), *checks.selected(request, names, NIGHTLY))
    return path


def parameters(run: Path, checkpoint: int = -1) -> torch.Tensor:
    tensors = read_checkpoint(list_checkpoints(run / "checkpoints")[checkpoint]).tensors
    return torch.cat([t.flatten().double() for n, t in sorted(tensors.items()) if n.startswith("model.")])


def last_metrics(run: Path) -> dict[str, float]:
    content: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return content


def require_same(folder: Path, name: str) -> None:
    """The parameters, metrics and ledger of one process, up to rounding.

    One process reads the device a few times more for a module, to diagnose its feedback. Where gradients leave exactly
    rounded, the last bits of a sum now and then move a parameter by a grid step, 0.05 / 2 of 2^-11 here.
    """
    one, many = folder / f"{name.partition('=')[0]}=1", folder / name
    close = 1e-3 if "record" in name else 2e-6
    assert torch.allclose(parameters(one), parameters(many), rtol=0, atol=close)
    assert read_ledger(one).mechanisms == read_ledger(many).mechanisms
    wanted, found = last_metrics(one), last_metrics(many)
    for key in ("train_loss", "train_accuracy", *(() if "module" in name else ("frames", "seconds"))):
        assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SAME)
def test_several_processes_train_as_one_and_the_first_one_writes(folder: Path, name: str) -> None:
    require_same(folder, name)
    assert (folder / name / "summary.json").exists()
    assert not list(folder.glob("*.rank1"))


def test_another_seed_of_the_noise_would_be_seen(folder: Path) -> None:
    """The planted fault of the comparison: other noise moves the parameters by far more than rounding."""
    assert float((parameters(folder / "noise") - parameters(folder / "noise averaged")).abs().max()) > 0.1


def test_small_batches_leave_a_process_without_records(folder: Path) -> None:
    """The runs above take empty batches, and batches of one record."""
    steps = (checks.steps_of(folder / f"pdfa record=2.{rank}.steps") for rank in (0, 1))
    parts = [[len(records) for _, records in each] for each in steps]
    assert {(0, 0), (1, 0), (1, 1)} <= set(zip(*parts, strict=True))


@pytest.mark.slow
def test_more_runs_of_several_processes_train_as_one(tmp_path: Path) -> None:
    checks.do("shared_runs", str(tmp_path), *ones(MORE), *MORE)
    for name in MORE:
        require_same(tmp_path, name)


# The noise of a release


def noise_deviation(run: Path) -> float:
    """Return how many standard errors the update's variance is from (z C / B)^2; one step of rate 1."""
    update = parameters(run) - parameters(run, 0)
    expected = (NOISE / N_RECORDS) ** 2
    return (float(update.square().mean()) / expected - 1) / math.sqrt(2 / update.numel())


@pytest.mark.parametrize("name", [*NOISES, *checks.with_marks(FAULTS, NIGHTLY)])
def test_the_released_sum_has_the_accounted_noise_and_other_noise_is_found(folder: Path, name: str) -> None:
    found = abs(noise_deviation(folder / name))
    assert found > 2 * checks.SURE if name in FAULTS else found < checks.SURE


def test_the_signal_is_small_in_the_noise(folder: Path) -> None:
    """At most N records of norm C contribute, which is below a tenth of a standard error of the variance above."""
    entries = parameters(folder / "noise").numel()
    assert (N_RECORDS / NOISE) ** 2 / entries < 0.1 * math.sqrt(2 / entries)


def test_batches_are_poisson_over_the_whole_data_set(folder: Path) -> None:
    """In release mode; the processes' parts are disjoint, and together they are one secret Poisson batch."""
    first, second = (checks.steps_of(folder / f"batches.{rank}.steps") for rank in (0, 1))
    assert [step for step, _ in first] == [step for step, _ in second] == list(range(STEPS))
    taken = np.zeros((STEPS, N_RECORDS))
    for (step, mine), (_, others) in zip(first, second, strict=True):
        assert not set(mine) & set(others)
        assert len(mine) - len(others) in (0, 1)
        taken[step, mine + others] = 1
    assert all(abs(found) < checks.SURE for found in checks.deviations(taken, 0.1).values())


@pytest.mark.parametrize("fault", ["pairs", "steps", "records", "rate"])
def test_batches_of_another_law_are_found(fault: str) -> None:
    generator = np.random.default_rng(7)
    taken = (generator.random((STEPS, N_RECORDS)) < 0.1).astype(float)
    assert all(abs(found) < checks.SURE for found in checks.deviations(taken, 0.1).values())
    if fault == "pairs":  # each process takes a fixed number of its own half
        taken = np.zeros_like(taken)
        for step in range(STEPS):
            taken[step, generator.choice(30, 3, replace=False)] = 1
            taken[step, 30 + generator.choice(30, 3, replace=False)] = 1
    elif fault == "steps":  # processes that share a generator, but not its position
        taken[1::2] = taken[::2]
    elif fault == "records":  # the first process's records only
        taken = (generator.random(taken.shape) < np.repeat([0.15, 0.05], 30)).astype(float)
    else:  # both processes draw from all records
        taken = np.maximum(taken, generator.random(taken.shape) < 0.1)
    assert abs(checks.deviations(taken, 0.1)[fault]) > 2 * checks.SURE


# What is refused, and what ends a run


@pytest.mark.parametrize("name", checks.with_marks(REFUSED, NIGHTLY))
def test_what_runs_in_one_process_is_refused_before_anything_is_written(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert REFUSED[name] in (folder / f"{name}.{rank}.error").read_text()
    assert not (folder / name).exists()


@pytest.mark.parametrize("name", checks.with_marks(FAILED, NIGHTLY))
def test_what_ends_the_first_process_ends_the_other_likewise(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert (folder / f"{name}.{rank}.error").read_text().startswith(FAILED[name])
    assert list_checkpoints(folder / name / "checkpoints")


def test_ctrl_c_ends_all_processes_with_a_checkpoint(folder: Path) -> None:
    told = [(folder / f"pdfa record=2+1.{rank}.error").read_text() for rank in (0, 1)]
    assert all("RunInterrupted: stopped after step 15 of 30" in each for each in told)


@pytest.mark.parametrize("command", ["audit", *checks.with_marks(NOT_SHARED, NOT_SHARED)])
def test_other_commands_are_refused_in_several_processes(command: str, tmp_path: Path) -> None:
    settings = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(checks.ROOT)}
    call = [sys.executable, "-c", "from opusim.training.cli import main; main()", command, "run"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=settings, timeout=100)
    assert done.returncode == 2
    assert "2 processes share `opusim train` only; start `opusim" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_every_step_is_paid_for(tmp_path: Path) -> None:
    checks.require_kills_are_paid(tmp_path, "run", seed=5, kills=3)


@pytest.mark.slow
def test_torchrun_starts_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """Also that the processes end without an abort, which gloo's threads would cause now and then."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checks.ROOT)}
    call = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=2",
    ]  # fmt: skip
    opusim = [sys.executable, "-c", "from opusim.training.cli import main; main()"]
    shared = ["train", "pdfa", "--data", "digits", "--set", "epochs=1", "--quiet"]
    private = ["--protect", "record", "--epsilon", "3", "--release"]
    for number, arguments in enumerate([shared, shared, shared, [*shared, *private]]):
        done = subprocess.run(
            [*call, *opusim, *arguments, "--out", str(tmp_path / f"{number}")], capture_output=True, text=True,
            cwd=tmp_path, env=settings, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split() == [str(tmp_path / f"{number}")]  # the first process's only
        assert (tmp_path / f"{number}" / "report.html").exists()


def test_one_process_shares_nothing() -> None:
    ranks = Ranks()
    tensor = torch.ones(3)
    ranks.sum([tensor])
    with ranks.session():
        assert ranks.on_first(lambda: 4) == 4
    assert (ranks.world, ranks.totals([2.0]), ranks.part(7), tensor.sum()) == (1, [2.0], slice(0, 7), 3)
    ends = ("2", "3", "2+1", "1+2", "2+3", "3+2")
    assert set(SAME + MORE) <= {f"{name}={rest}" for name in RUNS for rest in ends}


class Rowed:
    """A trainer with a state; the first process's holds earlier noise too."""

    def __init__(self, first: bool) -> None:
        linear = torch.nn.Linear(2, 1)
        self.model, self.optimizer = linear, torch.optim.SGD(linear.parameters(), lr=0.1)
        self.tensors = {name: parameter.detach() for name, parameter in linear.named_parameters()}
        self.state = {"spent": torch.full((3,), float(first))} | ({"noise": torch.ones(5)} if first else {})


def test_earlier_noise_stays_with_the_process_that_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        ranks, sent = Ranks(), []
        broadcast = ranks.broadcast_tensors
        monkeypatch.setattr(
            ranks, "broadcast_tensors", lambda tensors: broadcast(sent.extend(tensors) or sent)
        )
        trainer = Rowed(first=rank == 0)
        share_trainer(trainer, ranks)  # type: ignore[arg-type]
        assert [tensor.numel() for tensor in sent] == [2, 1, 3]  # the parameters and what was spent
        assert trainer.state["spent"].tolist() == [1.0] * 3

    assert run_ranks(work) == [0, 0]
