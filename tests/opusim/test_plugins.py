"""One rule for what other packages add: ours win, two packages clash, a broken one costs one line."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opusim import plugins
from opusim.accounting.mechanism import Mechanism, mechanism_class, mechanism_classes
from opusim.accounting.mechanisms.records import Gaussian
from opusim.devices.kinds import device_factory, device_kinds
from opusim.devices.simulated import IdealDevice
from opusim.noise import GaussianNoise, NoiseModel
from opusim.training.config.kinds import PROTECTIONS, TRAINERS
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
def test_a_package_replaces_nothing_of_ours(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, find, _ = GROUPS[group]
    before = find(ours)
    install(monkeypatch, tmp_path, "thief", group, {ours: "thief:Stolen"}, RAISES)
    assert find(ours) is before
    assert plugins.is_ours(group, ours)
    assert before in (IdealDevice, Gaussian, GaussianNoise) or before.__module__.startswith(
        "opusim.training."
    )


@EVERY
def test_a_name_of_two_packages_is_refused(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path / "1", "first", group, {"taken": "json:JSONDecoder"})
    install(monkeypatch, tmp_path / "2", "second", group, {"taken": "json:JSONEncoder"})
    said = r"'taken' is brought by several packages \(json:JSONDecoder of first, json:JSONEncoder of second\); remove"
    with pytest.raises(Exception, match=said) as caught:
        GROUPS[group][1]("taken")
    assert "\n" not in str(caught.value)


@EVERY
@pytest.mark.parametrize(
    ("code", "told"),
    [(RAISES, "RuntimeError: no licence for this machine"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_package_that_raises_is_one_line_and_leaves_the_others(
    group: str, code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, find, every = GROUPS[group]
    module = f"raising{group[7:]}{len(code)}"
    install(monkeypatch, tmp_path, module, group, {"broken": f"{module}:Thing"}, code)
    said = (
        r"'broken' cannot be used, raising\w+:Thing of package 'raising\w+' does not import "
        rf"\({told}\); repair or remove that package"
    )
    with pytest.raises(Exception, match=said) as caught:
        find("broken")
    assert "\n" not in str(caught.value)
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


def test_no_class_of_another_package_takes_the_kind_of_a_mechanism_of_ours() -> None:
    with pytest.raises(ValueError, match="kind = 'zo_laplace': is a mechanism of opusim; choose another"):
        type("Stolen", (Mechanism,), {"kind": "zo_laplace"})


def test_a_name_that_no_package_brings_is_refused() -> None:
    with pytest.raises(plugins.PluginError, match="'warp' is not installed in opusim.trainers"):
        plugins.load("opusim.trainers", "warp")
    assert plugins.package("opusim.trainers", "warp") == ""
    assert plugins.package("opusim.trainers", "bp") == "opusim"


def test_a_deferred_module_is_imported_at_the_first_use_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr("builtins.print", lambda *_: None)  # that module prints a poem
    module = plugins.Deferred("this")
    assert "this" not in sys.modules
    assert module.s is sys.modules["this"].s
    assert vars(module)["s"] is module.s
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = module.absent


def test_a_deferred_module_is_copied_and_pickled_by_its_name() -> None:
    used = plugins.Deferred("math")
    assert used.pi > 3
    for twin in (copy.copy(used), copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert vars(twin) == {"_name": "math"}
        assert twin.tau == 2 * used.pi
    absent = plugins.Deferred("no_module_of_this_name")
    assert repr(copy.deepcopy(absent)) == "Deferred('no_module_of_this_name')"
    assert not hasattr(absent, "__wrapped__")
    with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
        _ = absent.name
