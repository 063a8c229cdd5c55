"""The notebooks are short, were executed, draw one figure each, and run."""

import json
import os
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
import torch

from opusim.training.runs.drawing import COLOURS

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
IN_CI = ("first_run",)
"""The notebook that every push executes; the others are executed every night."""
MOST_CELLS = 12
MOST_S = 60.0
"""Seconds of processor time that a notebook may take."""
SETTING = r'^INSTALL = "(.+)"$'
"""What notebooks install, in `.ci/notebooks.py`."""


def read(file: Path) -> dict[str, Any]:
    """Return a notebook."""
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def code_of(notebook: dict[str, Any], *, installs: bool) -> list[dict[str, Any]]:
    """Return the cells of code that install opusim, or the others."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if ("skip-execution" in cell["metadata"].get("tags", [])) == installs]


def problems(notebook: dict[str, Any], address: str) -> list[str]:
    """Return what is wrong with a notebook."""
    cells, code = notebook["cells"], code_of(notebook, installs=False)
    found = [f"{len(cells)} cells"] if len(cells) > MOST_CELLS else []
    if not re.match("# [A-Z].*\n\n", "".join(cells[0]["source"])):
        found.append("the first cell has no heading and no text")
    install = ["".join(cell["source"]) for cell in code_of(notebook, installs=True)]
    if install != [f"%pip install --quiet {address}"] or cells[1]["cell_type"] != "code":
        found.append(f"installs by {install}")
    if any(cell["execution_count"] is None for cell in code):
        found.append("was not executed")
    outputs = [(cell, output) for cell in code for output in cell["outputs"]]
    said = ["".join(output["text"]) for _, output in outputs if output.get("name") == "stderr"]
    is_error = any(output["output_type"] == "error" for _, output in outputs)
    if is_error or not all(text.startswith("opusim: FeedbackAlignment takes ") for text in said):
        found.append("shows an error")
    drawn = [(cell, "".join(output.get("data", {}).get("text/html", ""))) for cell, output in outputs]
    figures = [cell for cell, html in drawn if html.startswith("<svg")]
    figures += [cell for cell, output in outputs if "image/png" in output.get("data", {})]
    if len(figures) != 1:
        found.append(f"{len(figures)} figures")
    alternatives = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "") for cell in figures]
    if any(len(text) < 30 for text in alternatives):
        found.append("a figure without a description")
    return found


def address() -> str:
    """Return what notebooks install."""
    (found,) = re.findall(SETTING, (ROOT / ".ci" / "notebooks.py").read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_short_and_executed_and_draws_one_figure(file: Path) -> None:
    assert problems(read(file), address()) == []
    title = read(file)["cells"][0]["source"][0].removeprefix("# ").strip()
    assert f"| [{title}](notebooks/{file.name}) |" in (ROOT / "docs" / "index.md").read_text()


def test_what_is_wrong_with_a_notebook_is_found() -> None:
    notebook = read(NOTEBOOKS[0])
    assert problems(notebook, "https://example.org/opusim.whl")
    for cell in code_of(notebook, installs=False):
        cell["outputs"], cell["execution_count"] = [{"output_type": "error"}], None
    notebook["cells"][0]["source"] = ["No heading"]
    notebook["cells"] += notebook["cells"][:1] * MOST_CELLS
    assert problems(notebook, address()) == [
        *(f"{len(notebook['cells'])} cells", "the first cell has no heading and no text", "was not executed"),
        *("shows an error", "0 figures"),
    ]


def test_the_style_has_the_colours_of_opusims_figures() -> None:
    with matplotlib.style.context("opusim.figures"):
        cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    assert cycle == list(COLOURS)


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, id=f.stem, marks=() if f.stem in IN_CI else pytest.mark.slow) for f in NOTEBOOKS],
)
def test_a_notebook_runs_within_a_minute(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script in an empty folder; `make notebooks` executes it in a kernel."""
    cells = ["".join(cell["source"]) for cell in code_of(read(file), installs=False)]
    (tmp_path / "notebook.py").write_text("\n".join(cells))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    before, threads = os.times(), torch.get_num_threads()
    with warnings.catch_warnings(action="ignore"):
        runpy.run_path("notebook.py")
    torch.set_num_threads(threads)
    after = os.times()
    assert sum(after[:4]) - sum(before[:4]) < MOST_S
