"""The gallery of optical features runs, and shows what its pages say."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "optical"
SCRIPTS = sorted(FOLDER.glob("*.py"))
HOLDS: dict[str, Any] = {
    "ridge": lambda f: f["camera_fitted"][-1] > f["pixels"][-1] + 3,
    "kernel": lambda f: f["degree 4"] > 90 and abs(f["10,000 features, noise of 0"] - f["OPU kernel"]) < 2,
    "reservoir": lambda f: f["reservoir"] < 0.7 * f["last value"],
    "change_points": lambda f: f[0] == 5 and f[1] <= 5,
    "linear_algebra": lambda f: f["rank 10, camera"] < 1.2 * f["rank 10, best"] and abs(f["trace"]) < 0.2,
    "transfer": lambda f: f["features of the network"][-1] > f["pixels"][-1] - 1,
    "private_classifier": lambda f: all(values[-1] > 85 for values in f.values()),
}
"""What is true of the figures that a script returns."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_short_and_say_how_to_run_them(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 60
    assert re.search(rf"^python examples/optical/{script.name} ", text, re.MULTILINE)
    assert script.stem in HOLDS


@pytest.mark.parametrize(
    "name", [name if name == "ridge" else pytest.param(name, marks=pytest.mark.slow) for name in HOLDS]
)
def test_scripts_show_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPUSIM_CACHE", str(tmp_path))
    figure = tmp_path / "figure.png"
    main = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    assert HOLDS[name](main(figure=str(figure)))
    assert figure.stat().st_size > 10_000
