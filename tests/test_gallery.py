"""The scripts of the gallery run, and show what its page says."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(file for part in ("gallery", "optical") for file in (ROOT / "examples" / part).glob("*.py"))
PAGE = ROOT / "docs" / "index.md"
HOLDS: dict[str, Any] = {
    "ridge": lambda f: f["camera_fitted"][-1] > f["pixels"][-1] + 3,
    "kernel": lambda f: f["degree 4"] > 90 and abs(f["10,000 features, noise of 0"] - f["OPU kernel"]) < 2,
    "reservoir": lambda f: f["reservoir"] < 0.7 * f["last value"],
    "change_points": lambda f: f[0] == 5 and f[1] <= 5,
    "linear_algebra": lambda f: f["rank 10, camera"] < 1.2 * f["rank 10, best"] and abs(f["trace"]) < 0.2,
    "transfer": lambda f: f["features of the network"][-1] > f["pixels"][-1] - 1,
    "noise": lambda f: f[0.1] > 88 and f[30.0] < f[1.0] - 5,
    "photon_transfer": lambda f: abs(f["gain"] / f["gain described"] - 1) < 0.03,
    "drift": lambda f: all(values[0] > 88 and values[-1] > 85 for values in f.values()),
    "membership": lambda f: (
        all(inside < 1e-5 < outside for name, (inside, outside) in f.items() if "sigma" in name)
        and f["central noise"][0] > f["central noise"][1]
    ),
    "private_classifier": lambda f: all(values[-1] > 85 for values in f.values()),
}
"""What is true of the figures that a script returns."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_short_and_say_how_to_run_them(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 70
    assert re.search(rf"^python examples/{script.parent.name}/{script.name} ", text, re.MULTILINE)
    assert script.stem in HOLDS


def test_every_script_is_shown_with_its_picture() -> None:
    text = PAGE.read_text()
    for script in SCRIPTS:
        assert f"(../{script.relative_to(ROOT)})" in text
        assert re.search(rf"^!\[[^\]]{{30,}}\]\(gallery/{script.stem}\.png\)$", text, re.MULTILINE)
        assert (PAGE.parent / "gallery" / f"{script.stem}.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_show_what_they_say(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPUSIM_CACHE", str(tmp_path))
    figure = tmp_path / "figure.png"
    main = runpy.run_path(str(script))["main"]
    assert HOLDS[script.stem](main(figure=str(figure)))
    assert figure.stat().st_size > 10_000
