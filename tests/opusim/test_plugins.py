"""What other packages add: ours win, two clash, a broken one costs one line; opusim.X loads lazily."""

import copy
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import opusim
from opusim import plugins
from opusim.accounting.mechanism import Mechanism, mechanism_class, mechanism_classes
from opusim.accounting.mechanisms.records import Gaussian
from opusim.devices.kinds import device_factory, device_kinds
from opusim.devices.simulated import IdealDevice
from opusim.noise import GaussianNoise, NoiseModel
from opusim.training.config.kinds import PROTECTIONS, TRAINERS
from tests.opusim.common import refuses
from tests.support.packages import install, metadata

ROOT = Path(__file__).parents[2]
LAW = {"std": 0.5, "n_outputs": 2}
GROUPS: dict[str, tuple[str, Callable[[str], Any], Callable[[], Any]]] = {
    "opusim.devices": ("ideal", lambda name: device_factory("file", name), device_kinds),
    "opusim.trainers": ("bp", TRAINERS.find, TRAINERS.every),
    "opusim.protections": ("record", PROTECTIONS.find, PROTECTIONS.every),
    "opusim.mechanisms": ("gaussian", mechanism_class, mechanism_classes),
    "opusim.noise_laws": (
        "gaussian",
        lambda name: type(NoiseModel.from_json({"law": name, **LAW})),
        lambda: plugins.names("opusim.noise_laws"),
    ),
}
EVERY = pytest.mark.parametrize("group", list(GROUPS))
RAISES = "raise RuntimeError('no licence\\nfor this machine')"


@EVERY
def test_a_package_replaces_none_of_ours(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, find, _ = GROUPS[group]
    before = find(ours)
    install(monkeypatch, tmp_path, "thief", group, {ours: "thief:Stolen"}, RAISES)
    assert find(ours) is before
    assert plugins.is_ours(group, ours)
    assert before in (IdealDevice, Gaussian, GaussianNoise) or before.__module__.startswith("opusim.training")


@EVERY
def test_a_name_of_two_packages_clashes(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "1", "first", group, {"taken": "json:JSONDecoder"})
    install(monkeypatch, tmp_path / "2", "second", group, {"taken": "json:JSONEncoder"})
    said = r"'taken' is brought by several packages \(json:JSONDecoder of first, json:JSONEncoder of second\); remove"
    refuses(Exception, said, GROUPS[group][1], "taken")


@EVERY
@pytest.mark.parametrize(
    ("code", "told"),
    [(RAISES, "RuntimeError: no licence for this machine"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_package_that_raises_is_one_line(
    group: str, code: str, told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    ours, find, every = GROUPS[group]
    module = f"raising{group[7:]}{len(code)}"
    install(monkeypatch, tmp_path, module, group, {"broken": f"{module}:Thing"}, code)
    said = rf"'broken' cannot be used, raising\w+:Thing of package .* \({told}\); repair or remove"
    refuses(Exception, said, find, "broken")
    assert ours in every()


def test_a_broken_package_does_not_stop_the_command(tmp_path: Path) -> None:
    metadata(tmp_path, "costly", "opusim.trainers", {"costly": "costly:Section"}, RAISES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "COLUMNS": "80"}
    for arguments in (["--help"], ["options", "sampler"]):
        command = [sys.executable, "-c", "from opusim.training.cli import main; main()", "train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") == 1
        assert "'costly' cannot be used" in done.stderr
        assert "sampl" in done.stdout or "pdfa" in done.stdout


def test_kinds_of_ours_are_not_taken_and_unknown_names_are_refused() -> None:
    refuses(ValueError, "'zo_laplace': .* another", type, "Stolen", (Mechanism,), {"kind": "zo_laplace"})
    refuses(plugins.PluginError, "'warp' is not installed", plugins.load, "opusim.trainers", "warp")
    assert plugins.package("opusim.trainers", "warp") == ""
    assert plugins.package("opusim.trainers", "bp") == "opusim"


def test_a_deferred_module_is_imported_at_its_first_use_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr("builtins.print", lambda *_: None)  # that module prints a poem
    module = plugins.Deferred("this")
    assert "this" not in sys.modules
    assert module.s is sys.modules["this"].s
    assert vars(module)["s"] is module.s
    refuses(AttributeError, "no attribute 'absent'", lambda: module.absent)
    used = plugins.Deferred("math")
    assert used.pi > 3
    for twin in (copy.copy(used), copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert vars(twin) == {"_name": "math"}
        assert twin.tau == 2 * used.pi
    absent = plugins.Deferred("no_module_of_this_name")
    assert repr(copy.deepcopy(absent)) == "Deferred('no_module_of_this_name')"
    assert not hasattr(absent, "__wrapped__")
    refuses(ModuleNotFoundError, "no_module_of_this_name", lambda: absent.name)


def test_all_public_names_resolve_and_are_listed() -> None:
    for name in opusim.__all__:
        assert getattr(opusim, name).__name__ == name
    shown = set(dir(opusim))
    assert set(opusim.__all__) <= shown
    assert len(opusim.__all__) <= 40
    assert not shown & {"Any", "annotations", "import_module", "Path", "sys"}
    assert all(getattr(opusim, name) is not None for name in shown)
    assert {"train", "load_run", "audit_run", "open_device", "guarantees", "ConfigError"} < {*opusim.__all__}
    refuses(AttributeError, "module 'opusim' has no attribute 'camra'", opusim.__getattr__, "camra")


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ("calibrate", "opusim.calibrate_noise"),
        ("require_scheme", "opusim.accounting.require_poisson"),
        ("train_on", "opusim.train"),
    ],
)
def test_a_former_name_leads_to_the_new_one(former: str, new: str) -> None:
    refuses(AttributeError, rf"no attribute '{former}'; {re.escape(new)} ", getattr, opusim, former)
    pkgutil.resolve_name(new)
    assert former not in opusim.__all__


@pytest.mark.parametrize(
    ("name", "home"),
    [
        *(("ZoGaussian", "opusim.accounting"), ("DeviceLinear", "opusim.crossbar")),
        *(("bit_planes", "opusim.encodings"), ("DeviceFault", "opusim.errors")),
        *(("GaussianNoise", "opusim.noise"), ("Trainer", "opusim.training")),
    ],
)
def test_a_name_that_moved_to_its_subject_is_still_found_with_a_warning(name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"opusim\.{name} is {home}\.{name}; the short name leaves"):
        found = getattr(opusim, name)
    assert found is pkgutil.resolve_name(f"{home}:{name}")
    assert name not in dir(opusim)


def test_the_stubs_name_what_each_module_defines() -> None:
    """Type checkers read the stubs; a name that its module does not have would be an error for every user."""
    for subject in (opusim, *(getattr(opusim, name) for name in dir(opusim) if name not in opusim.__all__)):
        assert all(getattr(subject, name).__name__ == name for name in getattr(subject, "__all__", ()))


def by_its_layer(text: str) -> list[str]:
    """Public names that a text reaches through a layer, such as `opusim.training.train`, and not as `opusim.train`."""
    names = re.findall(r"(?:training|accounting)\.(\w+)\b(?!\.)", text)
    return [name for name in names if name in opusim.__all__]


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


ONE_MODULE_A_FILE = """
import collections, os, opusim.training.engine.session, opusim.accounting.ledger
files = [os.path.realpath(each.__file__) for each in list(sys.modules.values()) if getattr(each, "__file__", None)]
root = os.path.dirname(os.path.dirname(opusim.__file__))
folders = tuple(os.path.join(root, name, "") for name in ("opusim", "training", "accounting", "hw_configs"))
ours = collections.Counter(file for file in files if file.startswith(folders))
print(len(ours), max(ours.values()))
"""
"""A second way to a file would give every class of it twice."""


@pytest.mark.parametrize(
    "layer",
    ["training", *(pytest.param(name, marks=pytest.mark.slow) for name in ("accounting", "hw_configs"))],
)
@pytest.mark.parametrize("is_package", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_users_module_with_a_layers_name_is_the_users(tmp_path: Path, layer: str, is_package: bool) -> None:
    path = tmp_path / layer / "__init__.py" if is_package else tmp_path / f"{layer}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("OWN = True")
    names = f"{layer}.OWN, opusim.RunConfig.__name__, opusim.train.__name__"
    found = run(tmp_path, f"import {layer}, opusim.{layer}; print({names})\n{ONE_MODULE_A_FILE}")
    *told, files, most = found.stdout.split()
    assert told == ["True", "RunConfig", "train"], found.stderr
    assert int(files) > 60
    assert most == "1"


@pytest.mark.parametrize("layer", ["training", "accounting", "hw_configs"])
def test_the_folders_of_the_repository_are_refused_by_one_line(tmp_path: Path, layer: str) -> None:
    found = run(tmp_path, f"import {layer}.engine")
    last = found.stderr.splitlines()[-1]
    assert last.endswith(f"is imported as opusim.{layer}; write `from opusim import {layer}`")


@pytest.mark.parametrize(
    ("platform", "lifted", "words"),
    [
        ("win32", "", "Subsystem for Linux"),
        ("win32", "1", "Subsystem for Linux"),
        ("darwin", "", "tested on Linux only, not on 'darwin'"),
        ("darwin", "1", None),
    ],
)
def test_other_systems_than_linux_are_refused(
    tmp_path: Path, monkeypatch: Any, platform: str, lifted: str, words: Any
) -> None:
    monkeypatch.setenv("OPUSIM_UNTESTED", lifted)
    done = run(tmp_path, f"sys.platform = {platform!r}\nimport opusim")
    assert (done.returncode == 0) is (words is None), done.stderr
    assert words is None or words in done.stderr.splitlines()[-1]


def test_apples_gpu_is_refused_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(opusim.ConfigError, match="torch_device: 'mps' is not available here"):
        opusim.train({"torch_device": "mps", "epochs": 1}, folder=tmp_path / "run")
