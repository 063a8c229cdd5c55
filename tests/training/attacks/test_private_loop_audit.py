"""The audit of a private loop in one training: sound loops stay below their claim, and weaker noise is refuted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import opusim
from accounting.audit import Method
from tests.support.private_loops import private_loop, records, run_epoch
from training.attacks.findings import Role, read_audit
from training.protections.record import RecordGradients

CANARIES = 240


def builder(folder: Path, **options: Any) -> Callable[[Callable[[Any], Any]], opusim.PrivateTraining]:
    """A loop with Adam, whose steps no audit of weights could undo."""

    def build(plant: Callable[[Any], Any]) -> opusim.PrivateTraining:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        planted: Dataset[Any] = plant(records(100))
        given = model, optimizer, nn.CrossEntropyLoss(), DataLoader(planted, batch_size=20, shuffle=True)
        return private_loop(folder, given, **options)

    return build


def five_epochs(private: opusim.PrivateTraining) -> None:
    for _ in range(5):
        run_epoch(private)


@pytest.mark.slow
def test_a_sound_loop_is_not_refuted_and_a_quarter_of_its_noise_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without information, the area under the curve of m / 2 and m / 2 scores has the standard error 1 / sqrt(3 m)."""
    found = opusim.audit_private_loop(builder(tmp_path / "sound"), five_epochs, canaries=CANARIES, seed=1)
    updates = found.scores()["all updates"]
    assert read_audit(tmp_path / "sound" / "one-run.json") == found
    assert updates.plan.claimed == pytest.approx(found.guarantees[0].epsilon)
    assert updates.auc > 0.5 + 5 * (3 * CANARIES) ** -0.5
    assert not [one for one in updates.refuting if one.method is not Method.NORMAL_BOUND]
    assert len(found.of(Role.BROKEN)) == 1
    make = RecordGradients.__init__

    def weaker(self: RecordGradients, *, noise_multiplier: float, **options: Any) -> None:
        make(self, noise_multiplier=noise_multiplier / 4, **options)

    monkeypatch.setattr(RecordGradients, "__init__", weaker)
    faulty = opusim.audit_private_loop(builder(tmp_path / "faulty"), five_epochs, canaries=CANARIES, seed=1)
    assert faulty.refuted, faulty.scores()["all updates"]


def test_loops_that_cannot_be_audited_are_refused(tmp_path: Path) -> None:
    build = builder(tmp_path / "release", mode="release", seed=None)
    with pytest.raises(ValueError, match="audit the loop in mode = 'experiment'"):
        opusim.audit_private_loop(build, five_epochs, canaries=CANARIES)
    build = builder(tmp_path / "bare")
    with pytest.raises(ValueError, match="must call the function that it is given once"):
        opusim.audit_private_loop(lambda plant: build(lambda each: each), five_epochs, canaries=CANARIES)
    parts = builder(tmp_path / "parts", max_physical_batch_size=4)
    with pytest.raises(ValueError, match="leave max_physical_batch_size out"):
        opusim.audit_private_loop(parts, five_epochs, canaries=CANARIES)
