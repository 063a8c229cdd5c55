"""Import paths that stored folders name, before and after modules moved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opusim.training.networks.models import VisionTransformer
from opusim.training.networks.user_code import code_facts, load_object


@pytest.mark.parametrize(
    "path",
    [
        "opusim.training.networks.models:VisionTransformer",
        "training.networks.models:VisionTransformer",
        "training.networks.image_models:VisionTransformer",
    ],
)
def test_a_path_of_02_leads_to_the_module_of_today(path: str) -> None:
    assert load_object(path, key="model.name") is VisionTransformer
    assert Path(code_facts(path)["file"]).name == "models.py"


def test_a_module_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "training" / "networks"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "models.py").write_text("VisionTransformer = 'own'")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert load_object("training.networks.models:VisionTransformer", key="model.name") == "own"
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "training"]:
            del sys.modules[name]
