"""A process forked from a private loop neither trains, pays nor saves; the loop goes on as if it were not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import opusim
from opusim.accounting.ledger import read_ledger
from opusim.training.errors import FolderBusy
from tests.support.forked import in_forked_process
from tests.support.private_loops import parts, private_loop, run_epoch

MODES = pytest.mark.parametrize("mode", ["experiment", "release"])
OTHER = "RuntimeError: the private loop belongs to process"


def opened(folder: Path, mode: str, **loader: Any) -> opusim.PrivateTraining:
    return private_loop(folder, parts(**loader), mode=mode, seed=3 if mode == "experiment" else None)


def paid_steps(folder: Path) -> int:
    return sum(payment.steps for payment in read_ledger(folder).payments)


@MODES
def test_parent_and_child_do_not_take_the_same_step(tmp_path: Path, mode: str) -> None:
    private = opened(tmp_path, mode)
    batches = iter(private.data_loader)
    for _ in range(2):
        assert in_forked_process(lambda: next(batches)).startswith(OTHER)
        x, y = next(batches)
        private.criterion(private.module(x), y).backward()
    private.close()


def test_a_child_does_not_release_the_batch_at_hand_again(tmp_path: Path) -> None:
    private = opened(tmp_path, "release")
    module, optimizer, criterion, loader = private
    for number, (x, y) in enumerate(loader):
        loss = criterion(module(x), y)

        def backward(loss: Tensor = loss) -> object:
            loss.backward()
            return [p.grad for p in module.parameters()]

        if number < 2:
            assert in_forked_process(backward).startswith(OTHER)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.step == len(loader)
    private.close()
    assert paid_steps(tmp_path) == len(loader)


def test_a_child_that_saves_or_closes_leaves_the_loop_as_it_is(tmp_path: Path) -> None:
    private = opened(tmp_path, "experiment")
    run_epoch(private, steps=2)
    private.save("parent")
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    works: list[Callable[[], object]] = [lambda: private.save("child"), lambda: run_epoch(private)]
    for work in works:
        assert in_forked_process(work).startswith(OTHER)
    assert in_forked_process(lambda: (private.epsilon, private.close())[1]) == "None"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept
    with pytest.raises(FolderBusy, match="close what holds it"):
        opened(tmp_path, "experiment")
    run_epoch(private)
    private.close()
    assert paid_steps(tmp_path) == 5


@pytest.mark.slow
@MODES
def test_workers_of_the_loader_may_be_forked(tmp_path: Path, mode: str) -> None:
    with opened(tmp_path, mode, num_workers=2, multiprocessing_context="fork") as private:
        run_epoch(private)
        run_epoch(private)
        assert private.step == 10
