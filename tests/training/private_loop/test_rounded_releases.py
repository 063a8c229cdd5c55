"""Released models of a private loop tell no digits of their sums, and the statement says what is rounded where."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import NoiseStream, SystemStream
from opusim.training.private_loop.module import PrivateModule
from tests.support.private_loops import Parts, private_loop, run_epoch
from tests.support.subtraction import explained

FEATURES, CLASSES, BATCH = 200, 10, 64
Z = 20.0
ADD_ROUNDED = SystemStream.add_rounded
TRUSTED = "the rounding of floating-point numbers is not attacked"


def linear(init: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """One layer and SGD at rate 1, on records of which every batch holds all."""
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, CLASSES)
    for parameter in module.parameters():
        init(parameter)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    return module, torch.optim.SGD(module.parameters(), lr=1.0), nn.CrossEntropyLoss(), loader


def released_step(
    folder: Path,
    init: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    *,
    rounded: bool,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The noisy sum that a release step's parameters tell, the sum, which an attacker computes, and the noise."""
    sums: list[torch.Tensor] = []
    stds: list[float] = []

    def seen(self: SystemStream, y: torch.Tensor, std: float) -> torch.Tensor:
        sums.append(y.detach().clone().flatten())
        stds.append(std)
        return ADD_ROUNDED(self, y, std) if rounded else self.add_to(y, std)  # else the planted fault

    monkeypatch.setattr(SystemStream, "add_rounded", seen)
    given = linear(init)
    before = nn.utils.parameters_to_vector(given[0].parameters()).detach().clone()
    private = private_loop(folder, given, noise_multiplier=Z, seed=None, mode="release")
    run_epoch(private, steps=1)
    after = nn.utils.parameters_to_vector(private.module.parameters()).detach()
    private.close()
    return ((before - after) * BATCH).numpy(), torch.cat(sums).numpy(), stds[0]


def other_sum(true: np.ndarray) -> np.ndarray:
    """The sum of a neighbouring data set: another record moves it by the clip norm."""
    move = np.random.default_rng(0).normal(size=len(true))
    return (true - move / np.linalg.norm(move)).astype(np.float32)


def test_no_candidate_sum_fits_a_released_step_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At zero initial weights parameters tell every digit of the noisy sum. With added float32 noise only one fits."""
    added, true, std = released_step(tmp_path / "added", nn.init.zeros_, monkeypatch, rounded=False)
    assert explained(added, true, std) == 1.0
    assert explained(added, other_sum(true), std) < 0.99
    found, true, std = released_step(tmp_path / "rounded", nn.init.zeros_, monkeypatch, rounded=True)
    assert (found.astype(np.float64) / grid_of(std) % 1 == 0).all()
    shares = [explained(found, guess, std) for guess in (true, other_sum(true))]
    middle, n = sum(shares) / 2, len(true)
    assert abs(shares[0] - shares[1]) < 5 * math.sqrt(2 * max(middle * (1 - middle), 1 / n) / n)


def test_steps_from_ordinary_weights_lie_on_the_grid_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the optimizer's own rounding, whatever the sum: half of its grid steps are odd."""
    found, true, std = released_step(
        tmp_path / "a", lambda p: nn.init.normal_(p, std=1e-4), monkeypatch, rounded=True
    )
    steps = found.astype(np.float64) / grid_of(std)
    assert np.abs(steps - np.rint(steps)).max() < 0.01
    odd = float((np.rint(steps) % 2 != 0).sum())
    assert abs(odd - len(true) / 2) < 5 * math.sqrt(len(true) / 4)


def rounding(private: opusim.PrivateTraining) -> dict[str, bool | None]:
    (stated,) = private.statement().guarantees
    words = ("exactly rounded number", "not attacked", "rounding is not counted", "for every batch")
    return {one.text: one.holds for one in stated.assumptions if any(word in one.text for word in words)}


def test_the_statement_says_that_sums_were_exactly_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("experiment", "release"):
        private = private_loop(tmp_path / mode, mode=mode, seed=1 if mode == "experiment" else None)
        run_epoch(private, steps=1)
        found = rounding(private)
        assert [holds for text, holds in found.items() if "every entry of a step's noisy sum" in text] == [
            True
        ]
        assert [holds for text, holds in found.items() if "its rounding is" in text] == [None] * (
            mode == "experiment"
        )
        assert [holds for text, holds in found.items() if "for every batch" in text] == [True] * (
            mode == "release"
        )
        assert TRUSTED not in found
    monkeypatch.setattr(PrivateModule, "on_processor", False)
    private = private_loop(tmp_path / "card", mode="release", seed=None)
    run_epoch(private, steps=1)
    assert rounding(private) == {TRUSTED: None}


def test_a_module_that_moves_within_a_step_is_refused(tmp_path: Path) -> None:
    private = private_loop(tmp_path)
    model, _, criterion, loader = private
    for x, y in loader:
        private._private.paid_on_processor = False
        with pytest.raises(RuntimeError, match="was moved to or from a graphics card after step 0 was paid"):
            criterion(model(x), y).backward()
        break


def test_a_stream_of_ones_own_is_added_as_it_is(tmp_path: Path) -> None:
    """Streams written for earlier versions know `normal` only."""

    class Own(NoiseStream):
        def normal(self, shape: object, *, device: object = "cpu") -> torch.Tensor:
            return torch.ones(tuple(shape))  # type: ignore[call-overload]

        def seek(self, step: int) -> None:
            pass

    assert Own().add_rounded(torch.zeros(2, 2), 0.3).flatten().tolist() == pytest.approx([0.3] * 4)
