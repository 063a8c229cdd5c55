"""Runs that share one served device with others, and with everything that can go wrong."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.devices.served_faults import summary
from tests.support.served_runs import differences, tensors
from tests.support.shared_checks import do

pytestmark = pytest.mark.slow

FAULTS = (
    "killed server", "stopped server", "frozen server", "killed client", "killed run", "broken connection",
)  # fmt: skip
ATTACKS = ("wrong key", "expired key", "garbage", "replayed", "oversized", "flood")


def require_undisturbed(folder: Path) -> None:
    """Every run and calibration equals that on a local device, bit for bit, and each fault was one line."""
    found = summary(folder)
    assert found["finished"]
    assert {row["who"] for row in found["runs"]} == {"alice", "bob", "ranks", "calibration", "victim"}
    for row in found["runs"]:
        assert row["equal"] == row["results"] > 0, row
    assert set(found["faults"]) == {*FAULTS, *ATTACKS}
    assert found["unexpected"] == found["crashes"] == []
    assert (found["stops_of_more_lines"], found["log_lines_without_time"]) == (0, 0)
    assert all("Device" in stop for stop in found["stops"]), found["stops"]


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
    one, other = (tensors(play / f"{name}-local") for name in ("alice", "bob"))
    assert [key for key in one if key.startswith("model.") and not torch.equal(one[key], other[key])]
    assert differences(play / "alice-local", play / "bob-local")
    assert not differences(play / "alice-local", play / "alice-local")


def test_the_journal_knows_who_used_how_much(play: Path) -> None:
    lines = [json.loads(line) for line in (play / "lab" / "usage.jsonl").read_text().splitlines()]
    assert {line["user"] for line in lines} == {"alice", "bob"}
    assert all(line["used"]["frames"] >= 0 and line["busy_s"] >= 0 for line in lines)


@pytest.mark.slow
def test_runs_under_many_faults_equal_undisturbed_ones(tmp_path: Path) -> None:
    do("served_runs", str(tmp_path), "240")
    require_undisturbed(tmp_path)
