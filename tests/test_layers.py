"""A layer imports only the layers below it: training -> accounting -> opusim (in part), and opusim -> hw_configs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("training", "accounting", "opusim", "hw_configs", "tests", "benchmarks")
ALLOWED = {
    "training": {"training", "accounting", "opusim", "hw_configs"},
    "accounting": {
        "accounting",
        "opusim.noise",
        "opusim.errors",
        "opusim.checks",
        "opusim.files",
        "opusim.tables",
    },
    "opusim": {"opusim", "hw_configs"},
    "hw_configs": {"hw_configs"},
}


def imports(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(layer: str, source: str) -> set[str]:
    ours = {name for name in imports(source) if name.split(".")[0] in LAYERS}
    return {name for name in ours if not any(f"{name}.".startswith(f"{good}.") for good in ALLOWED[layer])}


@pytest.mark.parametrize("layer", list(ALLOWED))
def test_imports_go_one_way(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        assert not violations(layer, path.read_text()), path


def test_planted_fault_is_caught() -> None:
    assert violations("opusim", "from training.engine.loop import Engine") == {"training.engine.loop.Engine"}
    assert violations("accounting", "from opusim.devices import base") == {"opusim.devices.base"}
    assert not violations("accounting", "from opusim.noise import NoiseModel")


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import opusim.noise, opusim.errors", {"torch", "numba", "pydantic"}),
        ("import training.cli", {"torch", "numba", "matplotlib", "scipy", "sklearn"}),
        ("from training.config import load_config; load_config()", {"torch", "numba", "matplotlib", "scipy"}),
    ],
)
def test_heavy_libraries_are_imported_when_needed(statement: str, heavy: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not heavy & set(loaded.stdout.split())
