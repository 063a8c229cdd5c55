"""Checks of what several processes share: the law of their batches, and what they computed and paid for when killed."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim.accounting.ledger import LedgerContent, read_ledger
from tests.support.kill_ranks import computed

ROOT = Path(__file__).parents[2]
SURE = 5.0  # standard errors


def do(program: str, *arguments: str) -> None:
    """Run a program of tests.support."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", f"tests.support.{program}", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=settings, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def with_marks(names: Iterable[str], nightly: Sequence[str]) -> list[Any]:
    """Return parameters, of which the nightly ones are marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in nightly else ()) for name in names]


def selected(request: pytest.FixtureRequest, names: Iterable[str], nightly: Sequence[str]) -> list[str]:
    """Return the names; without the nightly ones where no slow test of the fixture's module is selected."""
    tests = [item for item in request.session.items if item.path == request.path]
    is_night = any(item.get_closest_marker("slow") for item in tests)
    return [name for name in names if is_night or name not in nightly]


def steps_of(file: Path) -> list[tuple[int, list[int]]]:
    """Return the steps that a process noted, and the records that it had in each."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def deviations(taken: np.ndarray, q: float) -> dict[str, float]:
    """Return how many standard errors a sample of Poisson batches, shape (steps, records), is from its law."""
    steps, n = taken.shape
    variance = q * (1 - q)
    excess = (1 - 6 * variance) / variance  # kurtosis of one indicator
    centred = taken - q
    by_record, by_step = centred.sum(0), centred.sum(1)
    errors = {
        "rate": math.sqrt(steps * n * variance),
        "records": variance * math.sqrt(n * (2 + excess / steps)) * steps,
        "pairs": variance * math.sqrt(steps * (2 + excess / n)) * n,
        "steps": variance * math.sqrt((steps - 1) * n),
    }
    found = {
        "rate": centred.sum(), "records": (by_record**2).sum() - n * steps * variance,
        "pairs": (by_step**2).sum() - n * steps * variance, "steps": (centred[1:] * centred[:-1]).sum(),
    }  # fmt: skip
    return {name: float(found[name] / errors[name]) for name in errors}


def unpaid(ledger: LedgerContent, attempts: list[dict[int, int]]) -> dict[int, int]:
    """Return how often each step was computed and not paid for; a release run pays for every repetition."""
    paid: Counter[int] = Counter()
    for payment in ledger.payments:
        first = payment.first_step or 0
        paid.update(range(first, first + payment.steps))
    done: Counter[int] = Counter()
    for counts in attempts:
        done.update(counts)
    return dict(done - paid)


def require_kills_are_paid(tmp_path: Path, what: str, *, seed: int, kills: int) -> None:
    """Kill one of two processes again and again; every step is paid for, the other process ends, and resuming works.

    What is killed is a "run" or a "loop", see tests.support.kill_ranks, at moments that the seed draws.
    """
    do("kill_ranks", str(tmp_path), str(seed), str(kills), what)
    ends = json.loads((tmp_path / "kills.json").read_text())
    attempts = [computed(tmp_path, attempt) for attempt in range(kills)]
    ledger = read_ledger(tmp_path / "run")
    for end, counts in zip(ends, attempts, strict=True):
        assert end["ended"], "the other process hung"
        assert end["status"] != 0
        assert len(counts) >= min(end["after"] // 2, 1)
    assert not unpaid(ledger, attempts)
    assert sum(map(len, attempts)) > kills
    half = ledger.payments[: len(ledger.payments) // 2]
    short = LedgerContent(mode="release", delta=ledger.delta, enforced=True, payments=half)
    assert unpaid(short, attempts)  # the planted fault: a payment is missing
