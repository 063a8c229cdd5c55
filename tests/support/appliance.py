"""LightOn's appliance, by the double of its closed driver in `lightonopu_double`."""

import sys
from pathlib import Path
from typing import Any

import pytest

DOUBLE = Path(__file__).parent / "lightonopu_double"
CONFIG_FILE = str(DOUBLE / "opu.json")


def connect(monkeypatch: pytest.MonkeyPatch, folder: Path, *, speed: float | None = None) -> dict[str, Any]:
    """Put the double in the place of the driver, and return the section ``[lighton]`` that finds it.

    The appliance keeps in the folder the process that has it. Frames pass `speed` times faster than in real time, or
    in no time at all.
    """
    pytest.importorskip("lightonml")
    monkeypatch.syspath_prepend(str(DOUBLE))
    if hasattr(resources := sys.modules["pkg_resources"], "WorkingSet"):
        monkeypatch.setattr(resources, "require", resources.WorkingSet([str(DOUBLE)]).require)
    monkeypatch.setenv("LIGHTONOPU_DOUBLE_FOLDER", str(folder))
    monkeypatch.setenv("LIGHTONOPU_DOUBLE_SPEED", "inf" if speed is None else str(speed))
    monkeypatch.setenv("OPUSIM_LOCKS", str(folder / "locks"))
    for file in DOUBLE.rglob("*.py"):
        name = ".".join(file.relative_to(DOUBLE).with_suffix("").parts).removesuffix(".__init__")
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now leaves with the test
        del sys.modules[name]
    return {"config_file": CONFIG_FILE}
