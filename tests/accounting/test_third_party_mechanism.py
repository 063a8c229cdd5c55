"""A mechanism of another package, found through its entry point: priced, calibrated, composed with ours, read back."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opusim.accounting import Ledger, PoissonGaussian, guarantees, mechanism_from_json
from opusim.accounting.mechanism import Mechanism, mechanism_class, mechanism_kinds
from opusim.accounting.theorems import theorem

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "support" / "third_party_mechanism"
OURS = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=3)
PARAMETERS = {"noise_multiplier": 4.0, "sampling_probability": 0.1, "steps": 5}


def opusim(*arguments: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which has imported nothing of the package."""
    paths = [str(ROOT), *([str(PACKAGE)] if installed else []), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", "from opusim.training.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def theirs() -> Mechanism:
    sys.path.insert(0, str(PACKAGE))
    importlib.invalidate_caches()
    try:
        return mechanism_class("two_views")(**PARAMETERS)
    finally:
        sys.path.remove(str(PACKAGE))


@pytest.mark.slow
def test_a_ledger_holds_it_next_to_ours(theirs: Mechanism, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl", mode="release", delta=1e-5, enforced=True) as ledger:
        ledger.pay_once("ours", OURS)
        ledger.pay_once("theirs", theirs)
    half = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=8)
    (together,) = guarantees([OURS, theirs], delta=1e-5)
    assert together.epsilon == pytest.approx(guarantees([half], delta=1e-5)[0].epsilon, rel=1e-3)
    read = json.loads(opusim("account", "run", str(tmp_path), "--json").stdout)
    assert read["guarantees"][0]["epsilon"] == together.epsilon
    missing = opusim("account", "run", str(tmp_path), installed=False)
    assert missing.returncode == 2
    assert "kind = 'two_views': must be one of convex, gaussian" in missing.stderr
    assert missing.stderr.count("\n") == 1


def test_it_survives_json_and_its_theorem_is_known(theirs: Mechanism) -> None:
    assert mechanism_from_json(json.loads(json.dumps(theirs.to_json()))) == theirs
    assert "two_views" in mechanism_kinds()
    assert theorem("two-views").code == "two_views.TwoViews"


@pytest.mark.slow
def test_the_command_line_prices_and_calibrates_it() -> None:
    line = ["two-views", "--sampling-probability", "0.1", "--steps", "5"]
    priced = opusim("account", *line, "--noise-multiplier", "4", "--json")
    half = PoissonGaussian(noise_multiplier=2.0, sampling_probability=0.1, steps=5)
    found = json.loads(priced.stdout)["guarantees"][0]
    assert found["epsilon"] == guarantees([half], delta=1e-5)[0].epsilon
    calibrated = opusim("account", *line, "--target-epsilon", "1")
    assert "least noise that reaches the target: noise_multiplier = " in calibrated.stdout
