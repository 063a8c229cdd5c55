"""`opusim audit` as a person types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opusim.training.attacks import run_audit
from opusim.training.cli.app import app
from tests.support.command import opusim

SMALL = [
    "--epochs", "1", "--set", "model.hidden=[48]", "--set", "threads=1", "--set", "sampler.batch_size=24",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit")
    result = opusim("train", "pdfa", *SMALL, "--quiet", "--out", "run", cwd=path)
    assert result.returncode == 0, result.stderr
    return path


def test_an_audit_prints_a_table_and_its_meaning_and_keeps_them(folder: Path) -> None:
    result = opusim("audit", "run", "--trials", "80", "--seed", "1", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "membership found" in (folder / "run" / "report.html").read_text()
    again = opusim("audit", "run", "--trials", "80", "--seed", "1", "--json", cwd=folder)
    kept = json.loads((folder / "run" / "audit.json").read_text())
    assert kept.pop("seal").keys() == {"digest"}
    assert json.loads(again.stdout) == kept
    assert json.loads(again.stdout)["schema_version"] == 2


@pytest.mark.slow
def test_a_control_that_fails_is_a_headline_and_exit_code_3(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the broken control keeps its noise, so that no attack can find it."""
    command = f"audit {folder}/run --trials 40 --seed 1 --out {tmp_path}/audit".split()
    sound = CliRunner().invoke(app, command)
    assert sound.exit_code == 0, sound.output
    assert "All controls behaved as required" in sound.output
    monkeypatch.setattr(run_audit, "without_noise", lambda plan: plan)
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 3, shown.output
    assert shown.stdout.startswith("DO NOT RELY ON THIS AUDIT: the broken control")
    assert "DO NOT RELY" in (tmp_path / "audit" / "audit.html").read_text()


@pytest.mark.parametrize(("arguments", "message"), [
    (["audit", "run", "--trials", "3"], "--trials 3: "),
    (["audit", "run", "--delta", "2"], "delta"),
    (["audit", "run", "--data", "npz:nowhere.npz"], "nowhere.npz"),
    (["audit", "run", "--data", "digits"], "--data digits: must be npz:FILE"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], message: str) -> None:
    result = opusim(*arguments, cwd=folder)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
