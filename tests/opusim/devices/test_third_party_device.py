"""The package of docs/extending.md: installed by pip, found by its entry point, tested and trained with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
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
