"""A device of another package, on the Python path with its metadata: listed, opened, tested and trained with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opusim.devices.base import NoisyDevice
from opusim.devices.registry import open_device
from opusim.errors import ConfigError
from opusim.testing.contract import DeviceContract

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "support" / "third_party_device"


def run(folder: Path, code: str, *arguments: str) -> str:
    paths = [str(PACKAGE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestBench(DeviceContract):
    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(PACKAGE)

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device(PACKAGE / "bench.toml", n_inputs=12, n_outputs=40, **options)


def test_a_noise_that_its_class_does_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    with pytest.raises(ConfigError, match="noise: does nothing: the kind 'lab_bench' does not read"):
        open_device(PACKAGE / "bench.toml", n_inputs=12, n_outputs=40, noise={"sigma": 3.0})


def test_a_missing_option_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    lines = (PACKAGE / "bench.toml").read_text().splitlines()
    text = "\n".join(
        line for line in lines if not line.replace('"', "").startswith(("sigma", "options.sigma"))
    )
    (tmp_path / "bench.toml").write_text(text)
    with pytest.raises(ConfigError, match="options.sigma: is missing; the kind 'lab_bench' needs it"):
        open_device(tmp_path / "bench.toml", n_inputs=12, n_outputs=40)


def test_help_and_list_name_its_kind_without_importing_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom opusim.cli import app\n"
        "for words in (['--help'], ['list']):\n    print(CliRunner().invoke(app, words).output)\n"
        "assert 'lab_bench' not in sys.modules"
    )
    said = run(tmp_path, code)
    assert any("lab_bench" in line and "lab-bench" in line for line in said.splitlines())
