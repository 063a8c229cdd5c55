"""A release agrees about versions, hashes and licences, is built alike each time, and its wheel imports."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def pins(name: str) -> dict[str, str]:
    """Packages of a requirements file with their versions, names as pip normalises them, local suffixes left out."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_the_citation_and_the_lowest_versions_are_those_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == setup()["metadata"]["version"]
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["license"] == setup()["metadata"]["license"]
    admitted = re.findall(r"([\w-]+)>=([\w.]+)", setup()["options"]["install_requires"])
    assert pins("requirements-lowest.txt") == dict(admitted)


def test_every_pinned_version_has_its_hash_and_its_licence() -> None:
    pinned = pins("requirements.txt")
    hashed = (ROOT / "requirements-hashes.txt").read_text()
    assert {name: pins("requirements-hashes.txt").get(name) for name in pinned} == pinned
    entries = re.split(r"^(?=[\w.-]+==)", hashed, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    page = (ROOT / "THIRD_PARTY.md").read_text()
    listed = re.findall(r"^\| \[([\w.-]+)\]\(.+\) \| (.+) \| .+ \|$", page, re.M)
    assert {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in listed} == pinned


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda file: file.stem)
def test_forms_and_workflows_are_yaml(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in content.get("jobs", {}).values():
        for step in job["steps"]:
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                named = {word for word in words[1:] if "=" not in word and word[0] != "-"}
                assert named <= targets


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("build.env")  # a folder `build` is a package as well
    command = [sys.executable, str(ROOT / ".ci" / "dist.py"), "--check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bytes" in done.stdout


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
    shutil.copytree(ROOT, source, ignore=unwanted)  # a build leaves folders that a second one would ship
    build = f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation -w {tmp_path}".split()
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
