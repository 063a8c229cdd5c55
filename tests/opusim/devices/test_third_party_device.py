"""The device that docs/devices.md writes: installed by pip, found by its entry point, tested and trained with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "devices.md"


def files() -> dict[str, str]:
    """The files that the page spells out, by the name in their first line."""
    blocks = re.findall(r"```(?:toml|python)\n# (\S+\.(?:toml|py))\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return dict(blocks)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    for name, text in files().items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder / "site"), str(folder)], check=True, cwd=folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder / "site"), str(DOCS.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_all_four_files_and_a_short_class() -> None:
    found = files()
    assert set(found) == {"pyproject.toml", "lab_device.py", "lab.toml", "test_lab_device.py"}
    assert len(found["lab_device.py"].splitlines()) < 60


def test_it_passes_the_contract(installed: Path) -> None:
    said = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lab_device.py")
    assert re.search(r"\d\d passed", said)


def test_it_trains(installed: Path) -> None:
    options = ["--data", "digits", "--device", "lab.toml", "--epochs", "2", "--out", "run", "--quiet"]
    code = "from training.cli import main; main()"
    assert run(installed, "-c", code, "train", "pdfa", *options).strip().endswith("run")
    assert "accuracy" in run(installed, "-c", code, "evaluate", "run")
