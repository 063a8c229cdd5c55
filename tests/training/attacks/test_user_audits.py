"""Audits by canaries that are whole users: a sound loop passes, and planted faults are refuted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import opusim
from opusim.accounting.one_run import Method
from tests.support.faults.users import FAULTS
from tests.support.private_loops import private_loop, records, run_epoch

CANARIES, EACH, STEPS = 240, 2, 20


def builder(folder: Path, *, workers: int = 0, **options: Any) -> Callable[..., opusim.PrivateTraining]:
    """A loop that draws every user in every step, which the accountant allows and which shows a fault best."""

    def build(plant: Callable[..., Any]) -> opusim.PrivateTraining:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
        planted, ids = plant(records(60), torch.arange(60) // 3, EACH)
        loader = DataLoader(planted, batch_size=10, num_workers=workers)
        given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), loader
        settings: dict[str, Any] = {"sample_rate": 1.0, "noise_multiplier": 4.5, "user_ids": ids, **options}
        return private_loop(folder, given, records_per_user=EACH, **settings)

    return build


def train(private: opusim.PrivateTraining) -> None:
    for _ in range(STEPS):
        run_epoch(private)


def test_an_audit_of_users_sees_whole_users(tmp_path: Path) -> None:
    """Canaries that add C to noise of 0.2 C are told apart: the area under the curve is Phi(5 / sqrt(2)) = 0.9998."""
    found = opusim.audit_private_loop(
        builder(tmp_path / "a", noise_multiplier=0.2), run_epoch, canaries=40, seed=1
    )
    assert found.scores()["all updates"].auc > 0.99
    assert "users (at most 2 records each a step)" in found.game
    with pytest.raises(ValueError, match="give num_workers=0"):
        opusim.audit_private_loop(builder(tmp_path / "b", workers=1), run_epoch, canaries=40, seed=1)

    def unknown_to_the_audit(plant: Callable[..., Any]) -> opusim.PrivateTraining:
        def one_each(given: Any, *_: Any) -> tuple[Any, range]:
            planted = plant(given)
            return planted, range(len(planted))

        return builder(tmp_path / "c")(one_each)

    with pytest.raises(ValueError, match="the IDs of the users and k"):
        opusim.audit_private_loop(unknown_to_the_audit, run_epoch, canaries=40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_sound_loop_is_not_refuted_and_planted_faults_are(tmp_path: Path, fault: str | None) -> None:
    if fault is None:
        found = opusim.audit_private_loop(builder(tmp_path), train, canaries=CANARIES, seed=1)
        updates = found.scores()["all updates"]
        assert updates.auc > 0.5 + 5 * (3 * CANARIES) ** -0.5
        assert not [one for one in updates.refuting if one.method is not Method.NORMAL_BOUND]
        return
    with FAULTS[fault]():
        found = opusim.audit_private_loop(builder(tmp_path), train, canaries=CANARIES, seed=1)
    assert found.refuted, found.scores()["all updates"]
