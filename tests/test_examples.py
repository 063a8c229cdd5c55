"""The examples of the pages any-module.md and private-loops.md run, learn, and differ in few lines."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opusim

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "examples" / "any_module", ROOT / "examples" / "private")
MARK = "# opusim"
LEAST = 0.5
"""Accuracy on ten classes that even the slowest learner reaches at its quick size."""
LEAST_OF_TWO = {"zeroth_order_trainer": 0.7}
"""The same, of scripts with two classes."""
NEEDS = {"lightning_trainer": "lightning", "hugging_face_trainer": "transformers"}
NEEDS["zeroth_order_trainer"] = "peft"
PATCHES = sorted((ROOT / "examples" / "private").glob("*.diff"))
MOST_CHANGED = 10
SCRIPTS = [script for folder in FOLDERS for script in sorted(folder.glob("*.py"))]


def named(script: Path) -> str:
    """Return the folder and the name of a script."""
    return f"{script.parent.name}/{script.stem}"


def marked(text: str) -> list[str]:
    """Lines that differ from a script without opusim."""
    return [line for line in text.splitlines() if line.endswith(f"  {MARK}")]


def unmarked(text: str) -> list[str]:
    """Lines of code that name this package or what it returns, and that are not marked."""
    code = text.split('"""', 2)[2]
    return [line for line in code.splitlines() if "opusim" in line and line not in marked(text)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: named(script))
def test_few_lines_differ_from_a_normal_script(script: Path) -> None:
    text = script.read_text()
    assert 3 <= len(marked(text)) <= 15
    assert unmarked(text) == []


def test_unmarked_lines_and_wrong_arguments_are_caught() -> None:
    assert unmarked(f'"""A page."""\nimport opusim\nimport opusim  {MARK}') == ["import opusim"]
    patch = PATCHES[0].read_text().replace("max_grad_norm=", "clip=")
    assert misfits(patch) == ["clip", "max_grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: named(script))
def test_examples_learn(script: Path) -> None:
    """As the page says to run them, in a process of their own."""
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem], exc_type=ImportError)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(script)]
    done = subprocess.run(call, env=settings, capture_output=True, text=True, check=True, timeout=600)
    if script.stem == "nanogpt":
        losses = [float(word) for word in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert losses[-1] < losses[0] - 0.3  # nats
        return
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", done.stdout)
    assert float(accuracy) > 100 * LEAST_OF_TWO.get(script.stem, LEAST)


def changed(patch: str) -> tuple[list[str], list[str]]:
    """Return the lines that a patch without context takes away and those that it brings."""
    lines = patch.split("\n+++ ", 1)[1].splitlines()[1:]
    return [line[1:] for line in lines if line[:1] == "-"], [line[1:] for line in lines if line[:1] == "+"]


def misfits(patch: str) -> list[str]:
    """Arguments of make_private in a patch that it does not take, and those that it needs and does not get."""
    parameters = inspect.signature(opusim.make_private).parameters
    (call,) = re.findall(r"make_private\((.*?)\)\n", "\n".join(changed(patch)[1]), re.DOTALL)
    given = set(re.findall(r"(\w+)=", call))
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return sorted((given - set(parameters)) | (needed - given))


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.stem)
def test_public_scripts_change_in_few_lines(file: Path) -> None:
    page, patch = (ROOT / "docs" / "private-loops.md").read_text(), file.read_text()
    gone, come = changed(patch)
    (commit,) = re.findall(r"\b[0-9a-f]{40}\b", patch)
    assert max(len(gone), len(come)) <= MOST_CHANGED
    assert misfits(patch) == []
    assert commit in page
    assert file.name in page
