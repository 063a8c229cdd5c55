"""Data parallel zeroth-order training with real processes: one log, one model, only scalars between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opusim.processes.ranks import Ranks
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from opusim.training.zeroth_order.step_log import LOG_FILE, LogContent, replay

ROOT = Path(__file__).parents[3]


def run(*command: str) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", *command]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=settings, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def folders(first: Path, processes: int) -> list[Path]:
    return [first, *(first.with_name(f"{first.name}.rank{rank}") for rank in range(1, processes))]


def parameters(folder: Path) -> torch.Tensor:
    tensors = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).tensors
    return torch.cat([t.flatten() for n, t in sorted(tensors.items()) if n.startswith("model.")])


@pytest.mark.slow
def test_one_process_and_four_agree_to_rounding(tmp_path: Path) -> None:
    runs = {str(tmp_path / "one"): "1", str(tmp_path / "four"): "4"}
    triples = [(folder, "experiment", processes) for folder, processes in runs.items()]
    run("tests.support.zo_ranks", *(word for triple in triples for word in triple))
    alone, four = tmp_path / "one", folders(tmp_path / "four", 4)
    logs = [(folder / LOG_FILE).read_bytes() for folder in four]
    assert all(log == logs[0] for log in logs)
    metrics = [(folder / "metrics.jsonl").read_bytes() for folder in four]
    assert all(lines == metrics[0] for lines in metrics)
    assert all(torch.equal(parameters(folder), parameters(four[0])) for folder in four)
    one, many = (LogContent.read(folder / LOG_FILE).entries for folder in (alone, four[0]))
    assert [entry.seeds for entry in one] == [entry.seeds for entry in many]
    for a, b in zip(one, many, strict=True):
        assert a.scalars == pytest.approx(b.scalars, rel=1e-3, abs=1e-3)
    assert torch.allclose(parameters(alone), parameters(four[0]), atol=1e-5)
    assert replay(four[3]).arrived


@pytest.mark.slow
def test_release_mode_draws_shares_apart_and_logs_alike(tmp_path: Path) -> None:
    """No process knows another's generator, nor the first one's noise; the models agree to the bit all the same."""
    program = str(ROOT / "tests" / "support" / "zo_ranks.py")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(*launcher, program, str(tmp_path / "two"), "release")
    both = folders(tmp_path / "two", 2)
    assert (both[0] / LOG_FILE).read_bytes() == (both[1] / LOG_FILE).read_bytes()
    assert torch.equal(parameters(both[0]), parameters(both[1]))
    assert replay(both[1]).arrived


def test_shares_are_disjoint_and_cover_the_batch() -> None:
    ranks = Ranks()
    records = torch.tensor([3, 8, 1, 12, 6])
    found = []
    for rank in range(4):
        ranks.rank, ranks.world = rank, 4
        found += records[ranks.share(records)].tolist()
    assert sorted(found) == sorted(records.tolist())
