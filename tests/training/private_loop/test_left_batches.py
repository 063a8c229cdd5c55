"""Batches that a break, an error or a failed backward pass leaves are trained on before the next one is drawn.

A batch that is skipped because of what it holds would tell of its records without noise.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opusim
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import private_loop, records

Loop = opusim.PrivateTraining


def parameters(loop: Loop) -> Tensor:
    return torch.cat([p.detach().flatten() for p in loop.module.parameters()])


def step(loop: Loop, x: Tensor, y: Tensor) -> None:
    loop.optimizer.zero_grad()
    loop.criterion(loop.module(x), y).backward()
    loop.optimizer.step()


def trained_through(loop: Loop, leave: dict[int, str]) -> tuple[list[Tensor], Tensor]:
    """Train an epoch, and leave some batches the first time: by a break, by an error, or after the forward pass."""
    seen: list[Tensor] = []
    while loop.step < len(loop.data_loader) or not loop.data_loader._module.trained:
        try:
            for x, y in loop.data_loader:
                seen.append(x)
                way = leave.pop(len(seen) - 1, "")
                if way == "break":
                    break
                if way == "error":
                    raise MemoryError
                if way == "after the forward pass":
                    loop.criterion(loop.module(x), y)
                    raise torch.OutOfMemoryError
                step(loop, x, y)
        except (MemoryError, torch.OutOfMemoryError):
            pass
    return seen, parameters(loop)


def test_a_batch_that_was_left_is_handed_out_again(tmp_path: Path) -> None:
    """An interrupted epoch takes the same steps as an uninterrupted one, bit for bit, and pays as often."""
    with private_loop(tmp_path / "whole") as loop:
        batches, wanted = trained_through(loop, {})
        spent = loop.epsilon
    with private_loop(tmp_path / "left") as loop:
        ways = {0: "break", 2: "error", 4: "after the forward pass", 5: "break", 8: "break"}
        seen, found = trained_through(loop, dict(ways))
        assert loop.step == len(batches) == len(loop.data_loader)
        assert loop.epsilon == spent
    assert len(seen) == len(batches) + len(ways)
    assert torch.equal(found, wanted)
    kept = [x for number, x in enumerate(seen) if number not in ways]
    assert all(torch.equal(a, b) for a, b in zip(kept, batches, strict=True))


def test_a_backward_pass_that_failed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was released by it; the loss of the failed attempt is refused."""
    with private_loop(tmp_path / "whole") as loop:
        _, wanted = trained_through(loop, {})
    write = RecordGradients.set_gradients
    fails = iter([False, True, True, *itertools.repeat(False, 20)])

    def failing(self: RecordGradients, parts: Any) -> None:
        write(self, parts)
        if next(fails):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(RecordGradients, "set_gradients", failing)
    refused = 0
    with private_loop(tmp_path / "failed") as loop:
        while loop.step < len(loop.data_loader):
            for x, y in loop.data_loader:
                try:
                    loop.optimizer.zero_grad()
                    loss = loop.criterion(loop.module(x), y)
                    loss.backward(retain_graph=True)
                except torch.OutOfMemoryError:
                    assert all(p.grad is None for p in loop.module.parameters())
                    with pytest.raises(RuntimeError, match="failed before on the batch of step 1"):
                        loss.backward()
                    refused += 1
                    break
                loop.optimizer.step()
        found = parameters(loop)
    assert refused == 2
    assert torch.equal(found, wanted)


def skipping(loop: Loop, left_out: Tensor) -> None:
    while True:
        for x, y in loop.data_loader:
            if bool((x == left_out).all(dim=1).any()):
                break
            step(loop, x, y)


def test_a_loop_that_skips_batches_by_their_records_ends(tmp_path: Path) -> None:
    """It trained on every batch without the record and on none with it, and the statement said proven."""
    with private_loop(tmp_path) as loop:
        for _ in range(2):  # an error that a retry catches comes again
            with pytest.raises(RuntimeError, match=r"step \d+: .* by a break or an error, \d times"):
                skipping(loop, records()[7][0])
        with pytest.raises(RuntimeError, match=r"save: step \d+ is under way"):
            loop.save()


def test_an_iterator_that_another_one_took_over_from_is_refused(tmp_path: Path) -> None:
    with private_loop(tmp_path) as loop:
        first = iter(loop.data_loader)
        step(loop, *next(first))
        step(loop, *next(iter(loop.data_loader)))
        with pytest.raises(RuntimeError, match="another iteration over it began meanwhile"):
            next(first)
