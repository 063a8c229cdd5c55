"""Import paths that stored folders name, before and after modules moved."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.errors import ConfigError
from opusim.training.config.sections import DataConfig
from opusim.training.engine.plan import RunPlan
from opusim.training.errors import RunFolderError
from opusim.training.networks.models import VisionTransformer
from opusim.training.networks.user_code import code_facts, load_object, named_code, named_dataset
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.run import evaluate_run
from opusim.training.sweeps.execution import run_point
from opusim.training.sweeps.sweep import parse_spec, points_of


def test_a_path_of_02_leads_to_the_module_of_today() -> None:
    for module in (
        "opusim.training.networks.models",
        "training.networks.models",
        "training.networks.image_models",
    ):
        path = f"{module}:VisionTransformer"
        assert load_object(path, key="model.name") is VisionTransformer
        assert Path(code_facts(path)["file"]).name == "models.py"


def test_a_module_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "training" / "networks"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "models.py").write_text("VisionTransformer = 'own'")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("training", "training.networks", "training.networks.models"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported leaves with the test
        del sys.modules[name]
    assert load_object("training.networks.models:VisionTransformer", key="model.name") == "own"


RECORDS = """
import numpy as np
import torch

x = np.random.default_rng(0).normal(size=(40, 3))
y = (x[:, 0] > 0).astype(int)

def pair():
    return x, y

def with_ids():
    return x, y, np.arange(40) // 2

def dataset():
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

def own():
    from opusim.training.data import from_arrays
    return from_arrays(x, y, validation_fraction=0.1, split_seed=0)
"""
CONFIG = {"trainer": {"kind": "bp"}, "epochs": 1, "sampler": {"batch_size": 9}}
PAIRS = {**CONFIG, "data": {"name": "own_records:pair"}}


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Functions that return records, in a module of the current folder."""
    (tmp_path / "own_records.py").write_text(RECORDS)
    monkeypatch.chdir(tmp_path)
    yield load_object("own_records:pair", key="data.name")
    del sys.modules["own_records"]


def test_a_function_returns_the_records_of_a_run(own_records: Any, tmp_path: Path) -> None:
    x, y = own_records()
    plain = training.train(CONFIG, data=(x, y), folder=tmp_path / "plain")
    for name in ("pair", "dataset"):
        config = {**CONFIG, "data": {"name": f"own_records:{name}"}}
        run = training.train(config, folder=tmp_path / name)
        assert run.metrics[-1]["train_loss"] == plain.metrics[-1]["train_loss"]
        assert run.facts["data"]["name"] == f"own_records:{name}"
        found = evaluate_run(tmp_path / "plain", data=f"own_records:{name}")
        assert (found["records"], found["accuracy"]) == (40, plain.evaluate(x, y)["accuracy"])
    unnamed = training.train({**CONFIG, "data": {"name": "own_records:with_ids"}})
    assert (unnamed.facts["data"]["split"], unnamed.folder.path.name) == ("id", "bp-own_records-with_ids-1")
    protection = {"kind": "record", "noise_multiplier": 1.0}
    with pytest.raises(NoGuarantee, match="data.n_classes is missing"):
        training.train({**PAIRS, "protection": protection}, folder=tmp_path / "private")


def test_a_folder_that_names_a_function_executes_it_only_if_trusted(own_records: Any, tmp_path: Path) -> None:
    training.train(PAIRS, folder=tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    facts = json.loads(file.read_text())
    assert [code["path"] for code in facts["code"]] == ["own_records:pair"]
    with pytest.raises(RunFolderError, match="this run executes user-supplied code: own_records:pair from "):
        training.load_run(tmp_path / "run")
    assert named_code({**facts, "code": []}) == ["own_records:pair"]  # a folder that does not list it
    for name in ("csv:flowers", "npz:records", "digits", "folder:images"):
        assert named_code({"config": {"data": {"name": name}}, "network": {}}) == []
    assert training.load_run(tmp_path / "run", trust_code=True).step == 4
    plan = RunPlan.stored(RunFolder(tmp_path / "run"), trust_code=True)
    assert len(plan.dataset.train) == 36


def test_sweeps_take_functions(own_records: Any, tmp_path: Path) -> None:
    spec = {"title": "own", "config": PAIRS, "axes": {"seed": [0]}}
    (point,) = points_of(*parse_spec(spec, "spec"))
    row = run_point(point.config, tmp_path / "run", tmp_path / "row.json")
    assert (row.status, row.reason) == ("done", None)


def test_what_is_no_function_of_records_is_named(own_records: Any) -> None:
    for name, message in (
        ("x", "data.name: .*'own_records:x' is a ndarray; name a function that returns"),
        ("own", "data.name: .*'own_records:own' returns a Dataset; let it return"),
        ("none", "has no 'none'"),
    ):
        with pytest.raises(ConfigError, match=message):
            named_dataset(DataConfig(name=f"own_records:{name}"))
    with pytest.raises(ConfigError, match="data.test: .* needs a data.name that begins with csv:"):
        training.load_config({"data": {"name": "own_records:pair", "test": "a.npz"}})
