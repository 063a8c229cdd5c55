"""`opusim doctor` describes the installation in 80 columns, names no folder of the user, and finds what is broken."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opusim.training.cli import doctor
from opusim.training.data.formats import IMAGE_FILES
from tests.support.command import opusim
from tests.support.packages import install

Patch = pytest.MonkeyPatch


def test_a_sound_installation_is_described_without_its_folders(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OPUSIM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret-word")
    for file in IMAGE_FILES:
        place = tmp_path / "MNIST" / "raw" / f"{file}.gz"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(512))
    result = opusim("doctor", "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert (content["schema"], content["version"], content["broken"]) == ("opusim-doctor", 1, [])
    found = {
        title: {one["what"]: one["found"] for one in facts} for title, facts in content["sections"].items()
    }
    assert found["Versions"]["opusim"] == importlib.metadata.version("opusim")
    assert {"torch", "numpy", "numba"} <= set(found["Versions"])
    assert found["Devices"]["gaussian"] == "can be opened"
    assert found["Kernels"]["test projection"].endswith("as it must")
    assert (found["Data"]["mnist"], found["Data"]["cifar-10"]) == ("found, 2.0 KiB", "not in OPUSIM_DATA")
    assert all(part not in result.stdout for part in (str(tmp_path), str(Path.home()) + "/", "secret-word"))


def missing_library(tmp_path: Path, patch: Patch) -> None:
    needed = ["numpy>=999", "no-such-library>=2", 'no-such-extra; extra == "llm"']
    patch.setattr(importlib.metadata, "requires", lambda name: needed)


def broken_package(tmp_path: Path, patch: Patch) -> None:
    patch.setattr(Path, "home", lambda: tmp_path)
    source = f"raise RuntimeError('no licence in {tmp_path}/key')"
    install(patch, tmp_path, "lab_broken", "opusim.devices", {"lab_bench": "lab_broken:Bench"}, source)


def incomplete_data(tmp_path: Path, patch: Patch) -> None:
    patch.setenv("OPUSIM_DATA", str(tmp_path))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / IMAGE_FILES[0]).touch()


def wrong_digest(tmp_path: Path, patch: Patch) -> None:
    patch.setattr(doctor, "PROJECTION", "0" * 16)


def no_numba(tmp_path: Path, patch: Patch) -> None:
    patch.setitem(sys.modules, "numba", None)


def no_data(tmp_path: Path, patch: Patch) -> None:
    patch.setenv("OPUSIM_DATA", str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("section", "plant", "found"),
    [
        ("Versions", missing_library, {"numpy": "; opusim needs numpy>=999", "no-such-library": "missing; opusim"}),
        ("Entry points", broken_package, {"opusim.devices lab_bench": "(RuntimeError: no licence in ~/key)"}),
        ("Kernels", wrong_digest, {"test projection": "results are wrong here"}),
        ("Kernels", no_numba, {"failed": "ModuleNotFoundError"}),
        ("Data", incomplete_data, {"mnist": "incomplete: MNIST/raw/train-labels"}),
        ("Data", no_data, {"failed": "OPUSIM_DATA is $OPUSIM_DATA, which is not a folder"}),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    tmp_path: Path,
    monkeypatch: Patch,
    section: str,
    plant: Callable[[Path, Patch], None],
    found: dict[str, str],
) -> None:
    look = doctor._SECTIONS[section]
    assert not [fact for fact in doctor._looked_at(look) if fact.broken]
    plant(tmp_path, monkeypatch)
    broken = {fact.what: fact.found for fact in doctor._looked_at(look) if fact.broken}
    assert list(broken) == list(found)
    assert all(words in broken[what] for what, words in found.items())


def test_a_device_of_another_package_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    broken_package(tmp_path, monkeypatch)
    found = {fact.what: fact.found for fact in doctor._looked_at(doctor._SECTIONS["Devices"])}
    assert found["kind lab_bench of lab_broken"] == "cannot be used, see Entry points"


def test_an_extra_that_is_not_installed_is_not_broken(monkeypatch: Patch) -> None:
    needed = ['numpy>=999; extra == "lighton"', 'no-such-library; extra == "lighton"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert not any(fact.broken for fact in doctor._versions())
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed[:1])
    assert any(fact.broken for fact in doctor._versions())
