"""What is installed is what was written: every module of a built wheel imports."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("opusim", "opusim/training", "opusim/accounting")

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import opusim
assert opusim.__file__.startswith(sys.argv[1]), opusim.__file__
found = [module.name for module in pkgutil.walk_packages(opusim.__path__, "opusim.")]
for name in found:
    importlib.import_module(name)
assert {"opusim.training.engine", "opusim.accounting.ledger", "opusim.hw_configs"} <= set(found)
from opusim.devices.registry import open_device
assert all(hasattr(opusim, name) for name in opusim.__all__)
with open_device("gaussian", n_inputs=4, n_outputs=8) as device:
    print(device.noise.describe())
"""


@pytest.mark.slow
def test_every_module_of_the_wheel_imports(tmp_path: Path) -> None:
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(".*", "build", "results", "__pycache__", "*.egg-info")
    shutil.copytree(
        ROOT, source, ignore=unwanted
    )  # a build leaves folders behind that a second one would ship
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"opusim"}  # one name is taken from users
    assert "opusim/hw_configs/gaussian.toml" in names
    assert {"opusim/py.typed", *(f"{layer}/__init__.pyi" for layer in LAYERS)} <= set(names)
    assert "opusim/templates/report.html" in names
    assert "opusim/accounting/numerics/__init__.pyi" in names  # lazy packages read their stubs when they run
    run = [sys.executable, "-I", "-c", IMPORT_ALL, str(tmp_path / "installed")]
    output = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "Gaussian" in output.stdout
