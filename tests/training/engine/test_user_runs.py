"""Runs that protect users: a column of IDs, one clip for a user's mean gradient, and users held out as a whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import opusim
from opusim.accounting import Adjacency, Unit
from opusim.training.engine.plan import RunPlan
from opusim.training.runs.folder import RunFolder, stated
from tests.support.run_folders import require_resumed_alike

pytestmark = pytest.mark.filterwarnings("ignore:.*records have no ID")

COUNT, EACH, CLIP = 90, 3, 0.2
AS_THEY_ARE = {"mean": 0.0, "std": 1.0}


def records() -> tuple[np.ndarray, np.ndarray, list[Any]]:
    generator = np.random.default_rng(1)
    ids = [None if n % 7 == 0 else f"user {n % 20}" for n in range(COUNT)]
    return generator.normal(size=(COUNT, 6)), generator.integers(0, 3, COUNT), ids


def config(**changes: Any) -> dict[str, Any]:
    protection: dict[str, Any] = {
        "kind": "record", "unit": "user", "records_per_user": EACH, "clip_norm": CLIP,
    }  # fmt: skip
    protection |= {"noise_multiplier": 1e-6, **changes.pop("protection", {})}
    found = {"trainer": {"kind": "bp"}, "epochs": 2, "threads": 1, "protection": protection}
    found |= {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.0, "schedule": "constant"}}
    found |= {} if changes.get("mode") == "release" else {"seed": 4}
    return found | {"sampler": {"batch_size": 6}, "data": {"n_classes": 3}, **changes}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def table(folder: Path) -> Path:
    x, y, ids = records()
    path = folder / "records.csv"
    lines = ["who,label," + ",".join(f"f{n}" for n in range(6))]
    rows = (",".join(map(repr, row.tolist())) for row in x)
    lines += [f"{i or ''},{label},{row}" for row, label, i in zip(rows, y, ids, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("fixed", [False, True])
def test_a_run_takes_the_clipped_means_of_users(tmp_path: Path, fixed: bool) -> None:
    given = config(protection={"fixed_batches": fixed})
    run = opusim.train(given, data=records(), model=model(), folder=tmp_path / "run")
    plan = RunPlan.stored(RunFolder(tmp_path / "run"), records(), model())
    users, wanted = plan.users, model()
    train = plan.dataset.train
    parameters = list(wanted.parameters())
    for step in range(plan.total_steps):
        total = [torch.zeros_like(p) for p in parameters]
        for user in plan.sampler.indices(step).tolist():
            own = users.chosen(user, step)
            assert 1 <= len(own) <= EACH
            loss = nn.functional.cross_entropy(wanted(train.x[own]), train.y[own])
            found = torch.autograd.grad(loss, parameters)
            norm = float(torch.cat([g.flatten() for g in found]).norm())
            for sum_, g in zip(total, found, strict=True):
                sum_ += g * min(1.0, CLIP / norm)
        with torch.no_grad():
            for p, sum_ in zip(parameters, total, strict=True):
                p -= 0.5 * sum_ / 6
    torch.testing.assert_close(list(run.model.parameters()), parameters, rtol=1e-4, atol=1e-5)
    (found,) = run.guarantees
    assert found.unit is Unit.USER
    assert "users (at most 3 records each a step)" in found.mechanism
    number = stated(tmp_path / "run").public_number
    is_public = found.adjacency is Adjacency.ZERO_OUT
    assert number == (pytest.approx(len(users)) if is_public else None)


def test_doubtful_ids_are_told_once_and_not_in_files(tmp_path: Path) -> None:
    x, y, ids = records()
    ids = [one and (one.upper() if n % 3 else one) for n, one in enumerate(ids)]
    with pytest.warns(UserWarning, match=r"^data\.user: some IDs \(\d+\) equal another one") as found:
        opusim.train(config(), data=(x, y, ids), model=model(), folder=tmp_path / "run")
    assert [str(each.message).partition(" ")[2][:4] for each in found] == ["13 r", "some"]
    assert not [file for file in tmp_path.rglob("*.*") if b"case or blanks" in file.read_bytes()]
    RunPlan.stored(RunFolder(tmp_path / "run"), (x, y, ids), model())  # without another warning


def test_a_column_names_the_users_who_are_held_out_as_a_whole(tmp_path: Path) -> None:
    data = {"name": f"csv:{table(tmp_path)}", "label": "label", "user": "who", "n_classes": 3, **AS_THEY_ARE}
    data["validation_fraction"] = 0.3
    given = config(data=data, mode="release", protection={"noise_multiplier": 1.0})
    run = opusim.train(given, folder=tmp_path / "run")
    plan = RunPlan.stored(RunFolder(tmp_path / "run"))
    owners = plan.dataset.owners
    assert len(owners) == len(plan.dataset.train) < COUNT
    assert plan.dataset.columns == tuple(f"f{n}" for n in range(6))
    named = {f"user {n}" for n in range(20)}
    trained = {one for one in owners if one is not None}
    assert trained < named
    _, _, ids = records()
    assert len(owners) == sum(one is None or one in trained for one in ids)
    held = "".join(p.read_text(errors="ignore") for p in (tmp_path / "run").rglob("*.json*"))
    assert "user 7" not in held
    assert str(len(owners)) not in (tmp_path / "run" / "config.json").read_text().split('"protection"')[0]
    assert run.guarantees[0].unit is Unit.USER
    assert not opusim.audit_run(tmp_path / "run", out=tmp_path / "audit", trials=40).refuted


def test_a_resumed_run_repeats_an_uninterrupted_one_of_its_users(tmp_path: Path, ctrl_c_at: type) -> None:
    whole, _ = require_resumed_alike(tmp_path, config(), records(), ctrl_c_at(3), model)
    x, y, ids = records()
    other = RunPlan.stored(whole.folder, (x, y, ids), model()).dataset.owners
    ids[ids.index(other[-1])] = None  # one training record leaves its user
    with pytest.raises(opusim.RunFolderError, match="was trained on other data"):
        RunPlan.stored(whole.folder, (x, y, ids), model())


@pytest.mark.parametrize(("changes", "match"), [
    ({"protection": {"records_per_user": None}}, "records_per_user"),
    ({"protection": {"bands": 2}}, "protection.bands"),
    ({"protection": {"unit": "record"}}, "records_per_user"),
    ({"data": {"n_classes": 3, "split": "index"}}, "would separate a user"),
    ({"trainer": {"kind": "zo"}}, "is for bp, dfa, tdfa and pdfa"),
    ({"sampler": {"batch_size": 80}}, "users"),
    ({"data": {"n_classes": 3, "user": "who"}}, "data.user"),
])  # fmt: skip
def test_wrong_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises((opusim.ConfigError, ValueError), match=match):
        opusim.train(config(**changes), data=records(), folder=tmp_path)


def test_a_run_of_users_without_their_ids_is_refused(tmp_path: Path) -> None:
    x, y, _ = records()
    with pytest.raises(opusim.ConfigError, match="give data=\\(x, y, ids\\)"):
        opusim.train(config(), data=(x, y), folder=tmp_path / "a")
    data = {"name": f"csv:{table(tmp_path)}", "label": "label", "n_classes": 3}
    for column, message in (({}, "data.user: is missing"), ({"user": "whom"}, "is no column of")):
        with pytest.raises(ValueError, match=message):
            opusim.train(config(data=data | column), folder=tmp_path / "b")


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_release_says_that_its_records_are_on_trust(tmp_path: Path, mode: str) -> None:
    """An experiment keeps their digest and refuses others."""
    given = config(mode=mode, epochs=1, sampler={"scheme": "poisson", "batch_size": 6})
    opusim.train(given, data=records(), model=model(), folder=tmp_path)
    trusted = [each.text for each in stated(tmp_path).guarantees[0].assumptions if each.holds is None]
    assert any("the same records in the same order" in text for text in trusted) is (mode == "release")


def test_a_release_refuses_another_number_of_users(tmp_path: Path, ctrl_c_at: type) -> None:
    """It keeps no digest of records, but zero_out makes the number of users public."""
    given = config(mode="release", sampler={"scheme": "poisson", "batch_size": 6})
    with pytest.raises(opusim.training.RunInterrupted):
        opusim.train(given, data=records(), model=model(), folder=tmp_path / "run", callbacks=[ctrl_c_at(3)])
    x, y, ids = records()
    fewer = x, y, ["user 1" if each == "user 2" else each for each in ids]
    with pytest.raises(opusim.RunFolderError, match="another number of users"):
        opusim.train(folder=tmp_path / "run", data=fewer, model=model(), resume=True)
    with pytest.raises(opusim.RunFolderError, match="n_users"):
        opusim.audit_run(tmp_path / "run", data=fewer, model=model(), trials=40, out=tmp_path / "audit")
    opusim.train(folder=tmp_path / "run", data=records(), model=model(), resume=True)
