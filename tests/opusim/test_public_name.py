"""What a user needs is reachable as opusim.X, lazily, and another project's module that hides a layer is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import opusim

ROOT = Path(__file__).parents[2]


def test_all_public_names_resolve_and_are_listed() -> None:
    for name in opusim.__all__:
        assert getattr(opusim, name).__name__ == name
    assert set(opusim.__all__) <= set(dir(opusim))
    assert {"train", "load_run", "audit_run", "open_device", "guarantees", "ConfigError"} <= set(
        opusim.__all__
    )
    with pytest.raises(AttributeError, match="module 'opusim' has no attribute 'camra'"):
        opusim.__getattr__("camra")


@pytest.mark.parametrize(
    ("former", "new"),
    [("calibrate", "calibrate_noise"), ("require_scheme", "require_poisson"), ("train_on", "train")],
)
def test_a_former_name_leads_to_the_new_one(former: str, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{former}'; opusim\.{new} "):
        getattr(opusim, former)
    assert new in opusim.__all__
    assert former not in opusim.__all__


def test_the_stub_names_what_each_module_defines() -> None:
    """Type checkers read the stub; a name that its module does not have would be an error for every user."""
    stub = (ROOT / "opusim" / "__init__.pyi").read_text()
    assert all(f"import {name} as {name}\n" in stub for name in opusim.__all__)


def by_its_layer(text: str) -> list[str]:
    """Public names that a text reaches through a layer, such as `opusim.training.train`, and not as `opusim.train`."""
    return [
        name for name in re.findall(r"(?:training|accounting)\.(\w+)\b(?!\.)", text) if name in opusim.__all__
    ]


def test_messages_and_docstrings_use_the_public_name() -> None:
    for layer in ("opusim", "accounting", "training"):
        for file in (ROOT / layer).rglob("*.py"):
            assert not by_its_layer(file.read_text()), file
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")):
        assert not by_its_layer(page.read_text()), page
    assert by_its_layer("give it again: opusim.training.load_run(path, model=model)") == ["load_run"]


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    paths = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(folder)!r})\n"
    return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("layer", ["training", "accounting"])
@pytest.mark.parametrize("is_package", [True, False])
def test_a_foreign_module_that_hides_a_layer_is_named(tmp_path: Path, layer: str, is_package: bool) -> None:
    path = tmp_path / layer / "__init__.py" if is_package else tmp_path / f"{layer}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('imported')")
    name = {"training": "train", "accounting": "calibrate_noise"}[layer]
    found = run(tmp_path, f"import opusim; opusim.ConfigError; opusim.{name}")
    message = f"ImportError: the module {layer!r} at {path} hides the one that comes with opusim; rename it"
    assert message in found.stderr.splitlines()[-1]


def test_a_folder_of_that_name_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    found = run(tmp_path, "import opusim; print(opusim.RunConfig.__name__)")
    assert found.stdout.strip() == "RunConfig", found.stderr


@pytest.mark.parametrize(
    ("platform", "lifted", "words"),
    [
        ("win32", "", "Subsystem for Linux"),
        ("win32", "1", "Subsystem for Linux"),
        ("darwin", "", "tested on Linux only, not on 'darwin'"),
        ("darwin", "1", None),
    ],
)
def test_other_systems_than_linux_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, lifted: str, words: str | None
) -> None:
    monkeypatch.setenv("OPUSIM_UNTESTED", lifted)
    done = run(tmp_path, f"sys.platform = {platform!r}\nimport opusim")
    assert (done.returncode == 0) is (words is None), done.stderr
    assert words is None or words in done.stderr.splitlines()[-1]


def test_apples_gpu_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        opusim.ConfigError, match="torch_device: 'mps' is not supported: .*no float64.*use 'cpu'"
    ):
        opusim.train({"torch_device": "mps", "epochs": 1}, folder=tmp_path / "run")
