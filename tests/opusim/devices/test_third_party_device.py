"""The package of docs/extending.md: installed by pip, found by its entry point, tested and trained with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opusim import ConfigError, NoisyDevice, open_device
from opusim.testing.contract import DeviceContract

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs" / "extending.md"
PACKAGE = ROOT / "tests" / "support" / "third_party_device"


def files() -> dict[str, str]:
    """The files that the page shows: spelled out with their name in the first line, or included from PACKAGE."""
    page = DOCS.read_text()
    blocks = re.findall(r"```(?:toml|python)\n# (\S+\.(?:toml|py))\n(.*?)```", page, re.DOTALL)
    included = re.findall(r"```\{literalinclude\} \.\./tests/support/third_party_device/(\S+)", page)
    return {**dict(blocks), **{name: (PACKAGE / name).read_text() for name in included}}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    for name, text in files().items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder / "site"), str(folder)], check=True, cwd=folder)
    return folder


def run(folder: Path, *command: str, **variables: str) -> str:
    paths = os.pathsep.join([str(folder / "site"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    settings = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_all_files_and_a_short_class() -> None:
    found = files()
    bench = {"pyproject.toml", "lab_bench.py", "bench.toml", "test_lab_bench.py", "train_bench.py"}
    assert set(found) == bench | {"lab_driver.py", "instrument.toml", "test_lab_driver.py"}
    assert len(found["lab_bench.py"].splitlines()) < 60


@pytest.mark.slow
def test_it_passes_the_contract(installed: Path) -> None:
    said = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lab_bench.py")
    assert re.search(r"\d\d passed", said)


@pytest.mark.slow
def test_a_script_trains_on_a_class_that_it_registers(tmp_path: Path) -> None:
    for name in ("lab_bench.py", "bench.toml", "train_bench.py"):
        (tmp_path / name).write_text(files()[name])
    assert "trainer='pdfa'" in run(tmp_path, "train_bench.py")


@pytest.mark.slow
def test_the_driver_passes_the_contract(tmp_path: Path) -> None:
    for name in ("lab_driver.py", "instrument.toml", "test_lab_driver.py"):
        (tmp_path / name).write_text(files()[name])
    (tmp_path / "lab_sdk.py").write_text((PACKAGE / "lab_sdk.py").read_text())
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lab_driver.py")
    assert re.search(r"\d\d passed", said)


class TestBench(DeviceContract):
    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(PACKAGE)

    def open_window(self, **options: Any) -> NoisyDevice:
        return open_device(PACKAGE / "bench.toml", n_inputs=12, n_outputs=40, **options)


def test_missing_options_and_noise_that_does_nothing_are_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    with pytest.raises(ConfigError, match="noise: does nothing: the kind 'lab_bench' does not read"):
        open_device(PACKAGE / "bench.toml", n_inputs=12, n_outputs=40, noise={"sigma": 3.0})
    monkeypatch.syspath_prepend(PACKAGE)
    lines = (PACKAGE / "bench.toml").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip('"').startswith(("sigma", "options.sigma")))
    (tmp_path / "bench.toml").write_text(text)
    with pytest.raises(ConfigError, match="options.sigma: is missing; the kind 'lab_bench' needs it"):
        open_device(tmp_path / "bench.toml", n_inputs=12, n_outputs=40)


def test_help_and_list_name_its_kind_without_importing_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom opusim.cli import app\n"
        "for words in (['--help'], ['list']):\n    print(CliRunner().invoke(app, words).output)\n"
        "assert 'lab_bench' not in sys.modules"
    )
    paths = os.pathsep.join([str(PACKAGE), str(ROOT)])
    said = run(tmp_path, "-c", code, PYTHONPATH=paths, COLUMNS="200")
    assert any("lab_bench" in line and "lab-bench" in line for line in said.splitlines())
