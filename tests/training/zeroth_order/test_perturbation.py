"""Clipped differences, scalar noise, perturbation in place, and half precision."""

from __future__ import annotations

import math
import resource
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim.medium.transmission import Direction
from opusim.randomness.rounded import toward_zero
from opusim.training.zeroth_order.perturbation import InPlacePerturbation, MemoryMappedTensors, StepEntry
from opusim.training.zeroth_order.trainer import (
    LARGEST_DIFFERENCE,
    Differences,
    jointly_clipped,
    loss_differences,
)

NAN, INF = math.nan, math.inf


def test_differences_are_clipped_each_by_itself() -> None:
    found = loss_differences(torch.tensor([1.0, 5.0, 0.0]), torch.tensor([0.9, 0.0, 7.0]), 0.5)
    assert found.values.tolist() == pytest.approx([0.1, 0.5, -0.5], abs=1e-7)
    assert (found.clipped, found.non_finite) == (2, 0)


@pytest.mark.parametrize(
    ("plus", "minus", "expected"),
    [
        (NAN, 1.0, 0.5), (INF, 1.0, 0.5), (-INF, 1.0, 0.5), (1.0, NAN, -0.5), (1.0, INF, -0.5),
        (NAN, NAN, 0.0), (INF, -INF, 0.0),
    ],
)  # fmt: skip
def test_losses_that_are_not_finite_count_as_the_bound(plus: float, minus: float, expected: float) -> None:
    found = loss_differences(torch.tensor([plus]), torch.tensor([minus]), 0.5)
    assert found.values.tolist() == [expected]
    assert found.non_finite == 1
    assert loss_differences(torch.tensor([plus]), torch.tensor([minus]), None).values.tolist() == [0.0]


def test_one_record_moves_a_steps_sums_together_by_at_most_the_joint_clip(seed: int) -> None:
    """Whatever the losses along seven directions; clipped one by one, the planted fault, they move by more."""
    generator = np.random.default_rng(seed)
    special = [NAN, INF, -INF, 3e38, -3e38, 1e-45, 0.0]
    plus, minus = (
        torch.tensor(generator.choice([*special, *generator.normal(size=20)], (7, 200)), dtype=torch.float32)
        for _ in range(2)
    )
    pairs = list(zip(plus, minus, strict=True))
    found = jointly_clipped([loss_differences(p, m, LARGEST_DIFFERENCE) for p, m in pairs], 0.05)
    moves = torch.stack([each.values for each in found])
    assert torch.isfinite(moves).all()
    assert float(moves.norm(dim=0).max()) <= 0.05 * (1 + 1e-12)
    assert {int(each.clipped) for each in found} == {int((moves.norm(dim=0) > 0.05 * (1 - 1e-12)).sum())}
    alone = torch.stack([loss_differences(p, m, 0.05).values for p, m in pairs])
    assert float(alone.norm(dim=0).max()) > 0.05 * 2


@pytest.mark.parametrize("clip", [0.05, 1 / 3, 1e-12, 1e12])
def test_a_joint_clip_bounds_the_exact_norm(seed: int, clip: float) -> None:
    """In rational arithmetic, whatever the magnitudes; clipped without a margin, the fault, some norms are above C."""
    generator = np.random.default_rng(seed)
    raw = generator.normal(size=(9, 60)) * 10.0 ** generator.uniform(-20, 20, size=60)
    raw[:, :10] = generator.choice([1e100, -1e100, 2.0**-149, 0.0, 3e38], size=(9, 10))
    raw[:, 10] = clip / 3  # a norm of C
    raw[:, 11] = np.nextafter(clip / 3, math.inf)
    zero = torch.tensor(0)
    rows = [Differences(values=torch.from_numpy(row), non_finite=zero, clipped=zero) for row in raw]
    found = jointly_clipped(rows, clip)

    def most(records: np.ndarray) -> Fraction:
        return max(sum(Fraction(float(x)) ** 2 for x in record) for record in records)

    rounded = [toward_zero(each.values, bound=clip, count=2**22).numpy() for each in found]
    for moves in (np.stack([each.values.numpy() for each in found]), np.stack(rounded)):
        assert most(moves.T) <= Fraction(clip) ** 2
    careless = raw * (clip / np.maximum(np.linalg.norm(raw, axis=0), clip))
    assert most(careless.T) > Fraction(clip) ** 2


def test_a_joint_clip_keeps_small_records_and_the_direction_of_large_ones() -> None:
    rows = [torch.tensor([0.1, 3.0, NAN, 0.0]), torch.tensor([0.2, 4.0, 1.0, 0.0])]
    found = jointly_clipped([loss_differences(r, torch.zeros(4), LARGEST_DIFFERENCE) for r in rows], 1.0)
    first, second = (each.values.tolist() for each in found)
    assert first == pytest.approx([0.1, 0.6, 1.0, 0.0], abs=1e-7)
    assert second == pytest.approx([0.2, 0.8, 0.0, 0.0], abs=1e-7)
    assert [each.non_finite for each in found] == [1, 0]


def test_an_empty_batch_has_no_differences() -> None:
    found = loss_differences(torch.zeros(0), torch.zeros(0), 1.0)
    assert (float(found.values.sum()), found.clipped, found.non_finite) == (0.0, 0, 0)


def _entries(count: int, directions: int = 1) -> list[StepEntry]:
    generator = np.random.default_rng(0)
    return [
        StepEntry.rounded(
            rate=0.01,
            seeds=tuple(int(s) for s in generator.integers(2**60, size=directions)),
            scalars=tuple(generator.normal(size=directions)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("directions", [1, 3])
def test_a_step_goes_along_its_directions(directions: int) -> None:
    """Against the update in exact arithmetic; a move of the other sign, the planted fault, is far off."""
    start = [torch.linspace(-1, 1, 5000), torch.ones(7)]
    moved = [tensor.clone() for tensor in start]
    perturbation = InPlacePerturbation(moved, perturbation=1e-3, weight_decay=0.1)
    (entry,) = _entries(1, directions)
    perturbation.replay(entry)
    for number, (before, after) in enumerate(zip(start, moved, strict=True)):
        expected = before.double() * (1 - 0.01 * 0.1)
        for seed, scalar in zip(entry.seeds, entry.scalars, strict=True):
            z = Direction(seed).entries(number, 0, before.numel()).double()
            expected -= 0.01 * scalar / directions * z
        assert torch.allclose(after.double(), expected, rtol=0, atol=5e-6)
        assert not torch.allclose(after.double(), 2 * before.double() - expected, rtol=0, atol=5e-6)


def test_float32_returns_to_within_its_last_digits() -> None:
    """A thousand perturbations at phi 1e-3: the drift is a random walk of roundings, far below phi."""
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 0.05
    start = tensor.clone()
    perturbation = InPlacePerturbation([tensor], perturbation=1e-3)
    for seed in range(1000):
        perturbation.shift(seed, 1)
        perturbation.shift(seed, -2)
        perturbation.shift(seed, 1)
    drift = float((tensor - start).double().square().mean().sqrt())
    assert drift < 2e-7
    assert drift > 0  # it is there, and a log repeats it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_what_the_entries_say(dtype: torch.dtype) -> None:
    """Settled parameters are the float32 recursion, rounded once; unsettled ones, the planted fault, drift off."""
    start = (torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype)
    entries = _entries(150)
    settled, drifting = start.clone(), start.clone()
    for tensor, settle_every in ((settled, 50), (drifting, 10**6)):
        perturbation = InPlacePerturbation([tensor], perturbation=1e-3, weight_decay=0.01)
        for step, entry in enumerate(entries, start=1):
            perturbation.shift(entry.seeds[0], 1)
            perturbation.shift(entry.seeds[0], -2)
            perturbation.update(entry)
            if step % settle_every == 0:
                perturbation.settle()
    exact = start.float()
    for entry in entries:
        keep = 1.0 - entry.rate * 0.01
        Direction(entry.seeds[0]).return_and_move(exact, 0, back=0.0, keep=keep, move=entry.moves[0])
    assert torch.equal(settled, exact.to(dtype))
    assert not torch.equal(drifting, exact.to(dtype))
    replayed = start.clone()
    again = InPlacePerturbation([replayed], perturbation=1e-3, weight_decay=0.01)
    for entry in entries:
        again.replay(entry)
    again.settle()
    assert torch.equal(replayed, settled)


def test_copies_on_disk_keep_what_is_written_and_give_their_memory_back() -> None:
    """Of 64 MiB at least half is resident after writing, and next to nothing after paging out."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    like = {0: torch.ones(2**20, dtype=torch.bfloat16), 3: torch.ones(2**23 - 5, 2, dtype=torch.bfloat16)}
    paged = MemoryMappedTensors(like, dtype=torch.float32)
    assert paged.tensors[3].shape == (2**23 - 5, 2)
    assert paged.tensors[3].dtype == torch.float32
    empty = resident()
    paged.tensors[3].mul_(3)
    full = resident()
    paged.release_memory()
    assert full - empty > 32
    assert resident() - empty < 8
    assert bool((paged.tensors[3] == 3).all())
    assert bool((paged.tensors[0] == 1).all())
    assert MemoryMappedTensors({}).tensors == {}
