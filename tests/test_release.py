"""What a release says of itself agrees: versions, hashes, licences; and it is built alike each time."""

import configparser
import re
import subprocess
import sys
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


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == setup()["metadata"]["version"]
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["license"] == setup()["metadata"]["license"]


def test_the_lowest_versions_are_those_of_the_package() -> None:
    admitted = re.findall(r"([\w-]+)>=([\w.]+)", setup()["options"]["install_requires"])
    assert pins("requirements-lowest.txt") == dict(admitted)


def test_every_pinned_version_has_its_hash_and_its_licence() -> None:
    pinned = pins("requirements.txt")
    hashed = (ROOT / "requirements-hashes.txt").read_text()
    assert {name: pins("requirements-hashes.txt").get(name) for name in pinned} == pinned
    entries = re.split(r"^(?=[\w.-]+==)", hashed, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    listed = re.findall(
        r"^\| \[([\w.-]+)\]\(.+\) \| (.+) \| .+ \|$", (ROOT / "THIRD_PARTY.md").read_text(), re.M
    )
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
