"""Runs that share one served device with others, and with everything that can go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.shared_checks import do
from training.runs.checkpoints import list_checkpoints, read_checkpoint

RUNS = ("alice", "bob", "ranks")


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).tensors)


def require_undisturbed(folder: Path) -> None:
    """Every run equals that on a local device, bit for bit, and used as much of it."""
    for name in RUNS:
        wanted, found = tensors(folder / f"{name}-local"), tensors(folder / name)
        assert wanted.keys() == found.keys()
        assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == [], name
        summaries = (
            json.loads((folder / run / "summary.json").read_text()) for run in (f"{name}-local", name)
        )
        used = [
            {key: summary[key] for key in ("steps", "frames", "seconds", "joules")} for summary in summaries
        ]
        assert used[0] == used[1]
    for name in ("alice", "bob"):
        faults = (folder / f"{name}.faults").read_text().splitlines()
        assert all(line.startswith(("Device", "ConfigError")) for line in faults), faults
    assert int((folder / "calibrations").read_text()) > 0


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings, two ranks and a calibration, a few seconds of faults."""
    folder = tmp_path_factory.mktemp("served")
    do("served_runs", str(folder), "5")
    return folder


def test_runs_under_faults_equal_undisturbed_ones(play: Path) -> None:
    require_undisturbed(play)


def test_another_seed_would_be_seen(play: Path) -> None:
    """The planted fault of the comparison."""
    one, other = (tensors(play / name) for name in ("alice", "bob"))
    assert [key for key in one if key.startswith("model.") and not torch.equal(one[key], other[key])]


def test_the_journal_knows_who_used_how_much(play: Path) -> None:
    lines = [json.loads(line) for line in (play / "lab" / "usage.jsonl").read_text().splitlines()]
    assert {line["user"] for line in lines} == {"alice", "bob"}
    assert all(line["used"]["frames"] >= 0 and line["busy_s"] >= 0 for line in lines)


@pytest.mark.slow
def test_runs_under_many_faults_equal_undisturbed_ones(tmp_path: Path) -> None:
    do("served_runs", str(tmp_path), "240")
    require_undisturbed(tmp_path)
