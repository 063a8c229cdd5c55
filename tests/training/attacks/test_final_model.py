"""The game of the final model: near the proven epsilon, refuted without its noise, resumed, refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.accounting.one_run import Method
from opusim.progress import Progress
from opusim.training.attacks.findings import SYSTEM_NOISE, audit_rows, paragraphs, read_audit
from opusim.training.attacks.one_run.final_model import (
    SCORES_FILE,
    FinalModelGame,
    audit_final_model,
    play,
    quiet_direction,
    read_scores,
)
from opusim.training.attacks.run_audit import read_run
from opusim.training.cli.app import app
from opusim.training.errors import RunFolderError
from opusim.training.runs.folder import FINAL_MODEL_FILE, RunFolder

N, FEATURES, DELTA = 60, 8, 1e-5
RUN: dict[str, Any] = {
    "epochs": 6,
    "threads": 1,
    "data": {"n_classes": 3, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": N},
    "model": {"hidden": [8]},
    "trainer": {"kind": "bp"},
    "optimizer": {"lr": 0.01, "momentum": 0.0},
    "protection": {"kind": "record", "epsilon": 10.0},
}


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(N, FEATURES)).astype(np.float32)
    x[:, 3] = 0.0  # dark in every record
    return x, np.arange(N) % 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("final-model") / "run"
    training.train(RUN, data=data(), folder=folder)
    return folder


def test_the_crafted_record_lies_where_no_other_record_does() -> None:
    direction = quiet_direction(torch.from_numpy(data()[0]))
    assert float(direction.norm()) == pytest.approx(1.0)
    assert abs(float(direction[3])) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
def test_final_models_tell_nearly_what_is_proven_and_less_noise_is_refuted(run: Path) -> None:
    """At epsilon 10 the exact mu is 2.03: in 60 trainings the estimate's standard error is about 0.32."""
    game = FinalModelGame.of(read_run(RunFolder(run), data(), None).plan, seed=3)
    scores: list[float] = []
    play(game, 60, scores)
    found = read_scores(game, scores, delta=DELTA)
    (result,) = found.scores().values()
    estimate = result.bound(Method.NORMAL_ESTIMATE)
    assert estimate.interval is not None
    assert estimate.epsilon > 4.9
    assert estimate.interval[0] < 10 < estimate.interval[1]
    assert not found.refuted
    assert "60 trainings of 6 steps each" in paragraphs(found)[0]
    assert [row["attack"] for row in audit_rows(found)][1:4] == ["", "", ""]
    quarter = {"epsilon": None, "noise_multiplier": game.present.protection.noise_multiplier / 8}
    loud = replace(
        game,
        present=game.present.unchecked(protection=quarter),
        absent=game.absent.unchecked(protection=quarter),
    )
    louder: list[float] = []
    play(loud, 60, louder)
    assert read_scores(loud, louder, delta=DELTA).refuted
    assert not read_scores(replace(game, seed=4), scores, delta=DELTA).refuted  # other coins: nothing to find


@pytest.mark.slow
def test_a_stopped_audit_resumes_and_is_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "audit"

    class Stopped(Exception):
        pass

    def stop(bar: Progress, *, done: int) -> None:
        if done == 5:
            raise Stopped

    options: dict[str, Any] = {"data": data(), "trainings": 20, "seed": 7}
    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", stop)
        with pytest.raises(Stopped):
            audit_final_model(run, **options, out=place)
    before = json.loads((place / SCORES_FILE).read_text())["scores"]
    assert len(before) == 5
    capsys.readouterr()
    found = audit_final_model(run, **options, out=place, progress="lines")
    assert "audit of final models: 5 of 20 trainings\n" in capsys.readouterr().err
    after = json.loads((place / SCORES_FILE).read_text())["scores"]
    assert after[:5] == before
    assert len(after) == found.trials == 20
    assert read_audit(place / FINAL_MODEL_FILE) == found
    with pytest.raises(RunFolderError, match="another audit"):
        audit_final_model(run, **{**options, "seed": 8}, out=place)
    for content in ("[1]", "null", '{"seed": 7, "asked": {}, "scores": [null]}'):
        (tmp_path / SCORES_FILE).write_text(content)
        with pytest.raises(RunFolderError, match="another audit"):
            audit_final_model(run, **options, out=tmp_path)
    assert not (run / SCORES_FILE).exists()
    again = tmp_path / "run"
    for epsilon in (
        10.0,
        8.0,
    ):  # another run in the same place, whose scores would be read as those of the first
        shutil.rmtree(again, ignore_errors=True)
        protection = {**RUN["protection"], "epsilon": epsilon}
        training.train({**RUN, "protection": protection}, data=data(), folder=again)
        if epsilon == 10.0:
            audit_final_model(again, **options, out=tmp_path / "kept")
    with pytest.raises(RunFolderError, match="another audit"):
        audit_final_model(again, **options, out=tmp_path / "kept")


@pytest.mark.slow
def test_an_audit_that_is_extended_after_its_outcome_was_read_says_so(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": data(), "seed": 7, "out": tmp_path}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = audit_final_model(run, **options, trainings=20)
        assert audit_final_model(run, **options, trainings=20) == replace(
            first, cpu_s=pytest.approx(0, abs=60)
        )
    assert first.looks == 1
    assert first.confidence == pytest.approx(0.95)
    with pytest.warns(
        UserWarning,
        match=r"outcome of 20 trainings was read before, at delta 1e-05; .* confidence 0\.90 only",
    ):
        extended = audit_final_model(run, **options, trainings=24)
    assert extended.looks == 2
    assert extended.confidence == pytest.approx(0.9)
    assert replace(extended, looks=30).confidence == 0
    assert "read 2 times" in paragraphs(extended)[0]
    assert read_audit(tmp_path / FINAL_MODEL_FILE) == extended
    with pytest.warns(UserWarning, match=r"24 trainings was read before, at delta .* confidence 0\.85"):
        assert audit_final_model(run, **options, trainings=24, delta=1e-6).looks == 3
    kept = json.loads((tmp_path / SCORES_FILE).read_text())
    assert kept["looks"] == [[20, DELTA], [24, DELTA], [24, 1e-6]]
    (tmp_path / SCORES_FILE).write_text(json.dumps({**kept, "scores": kept["scores"][::-1]}))
    with pytest.raises(RunFolderError, match=r"scores\.json was changed since it was written"):
        audit_final_model(run, **options, trainings=24)
    del kept["seal"]  # as older versions kept them
    (tmp_path / SCORES_FILE).write_text(json.dumps({**kept, "looks": [20, 24]}))
    with pytest.warns(UserWarning, match=r"scores\.json: has no digest"):
        assert audit_final_model(run, **options, trainings=24).looks == 2


@pytest.mark.slow
def test_the_command_plays_it_in_several_processes(run: Path, tmp_path: Path) -> None:
    arrays, runner = tmp_path / "records.npz", CliRunner()
    np.savez(arrays, x=data()[0], y=data()[1])
    command = ["audit", str(run), "--final-model", "--data", f"npz:{arrays}", "--trials", "20", "--seed", "7"]
    places = [tmp_path / "one", tmp_path / "two"]
    for place, jobs in zip(places, (1, 2), strict=True):
        shown = runner.invoke(app, [*command, "--jobs", str(jobs), "--out", str(place)])
        assert shown.exit_code == 0, shown.output
        assert "ceiling" in shown.output
    one, two = (json.loads((place / SCORES_FILE).read_text())["scores"] for place in places)
    assert one == two
    assert runner.invoke(app, [*command, "--one-run"]).exit_code != 0
    assert runner.invoke(app, ["audit", str(run), "--jobs", "2"]).exit_code != 0


def test_the_command_refuses_too_few_trials_by_the_option_that_was_given(run: Path) -> None:
    shown = CliRunner().invoke(app, ["audit", str(run), "--final-model", "--trials", "0"])
    assert isinstance(shown.exception, ValueError)
    assert "--trials = 0: must be at least 20" in str(shown.exception)


def test_runs_without_protected_records_are_refused(tmp_path: Path) -> None:
    plain = {**RUN, "epochs": 1, "protection": {"kind": "none"}, "sampler": {"batch_size": 20}}
    training.train(plain, data=data(), folder=tmp_path / "run")
    with pytest.raises(NoGuarantee, match="the game of the final model plants a record"):
        audit_final_model(tmp_path / "run", data=data(), trainings=20)


def test_the_audit_of_a_release_says_that_its_noise_is_not_repeated(tmp_path: Path) -> None:
    training.train({**RUN, "mode": "release", "epochs": 1}, data=data(), folder=tmp_path / "run")
    found = audit_final_model(
        tmp_path / "run", data=data(), out=tmp_path / "audit", trainings=20, seed=1, worst_case=False
    )
    assert found.note == SYSTEM_NOISE
