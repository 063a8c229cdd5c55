"""A private search: what it draws, what it prints, what it keeps, and how it resumes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim import training
from opusim.accounting.guarantee import NoGuarantee, Status
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.selection import PrivateSelection, selection_bounds
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.training.cli import main
from opusim.training.config import load_config
from opusim.training.config.run import RunConfig
from opusim.training.errors import RunFolderError
from opusim.training.runs.run import load_run
from opusim.training.sweeps import tuning as searching
from opusim.training.sweeps.tuning import Search, draw_trials, parse_choices

CONFIG: dict[str, Any] = {
    "epochs": 1,
    "threads": 1,
    "seed": 4,
    "data": {"name": "digits", "validation_fraction": 0.2},
    "trainer": {"kind": "convex", "hyperplanes": 8},
    "optimizer": {"lr": 1.5, "momentum": 0.0},
    "sampler": {"scheme": "disjoint-cyclic", "batch_size": 100},
    "protection": {"kind": "last-iterate", "epsilon": 6.0},
}
CHOICES = {"trainer.clip": ["0.3", "0.6"], "optimizer.schedule": ["constant", "linear"]}


def config(**changes: Any) -> RunConfig:
    values = merged(CONFIG, changes)
    if values.get("mode") == "release":
        del values["seed"]
    return load_config(values)


def test_draws_are_poisson_and_uniform() -> None:
    draws = [draw_trials(CHOICES, 5.0, seed=seed) for seed in range(3000)]
    counts = np.array([len(draw.trials) for draw in draws])
    assert abs(counts.mean() - 5) < 5 * math.sqrt(5 / 3000)
    assert abs(counts.var() / 5 - 1) < 5 * math.sqrt(
        (2 + 1 / 5) / 3000
    )  # kurtosis of a Poisson number: 3 + 1/m
    lines = [line for draw in draws for trial in draw.trials for line in trial]
    share = np.mean([line == "trainer.clip=0.3" for line in lines if line.startswith("trainer.clip")])
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(lines) / 2)
    assert draw_trials(CHOICES, 5.0, seed=7) == draw_trials(CHOICES, 5.0, seed=7)


def test_a_search_prints_the_epsilon_of_the_choice(tmp_path: Path) -> None:
    found = Search(config(), CHOICES, mean=4.0, folder=tmp_path).run()
    assert found.guarantee.status is Status.PROVEN
    assert 5.97 < found.guarantee.epsilon <= 6.0
    (mechanism,) = read_ledger(tmp_path).mechanisms
    assert isinstance(mechanism, PrivateSelection)
    assert selection_bounds(mechanism.mu, 4.0, 1e-5).upper == pytest.approx(6.0, rel=0.005)
    assert (
        found.run.guarantees[0].epsilon == found.guarantee.epsilon
    )  # not the trial's own, which forgets the choice
    trial = load_run(next(tmp_path.glob("trial-*")))
    assert trial.guarantees[0].epsilon < 0.8 * found.guarantee.epsilon
    scores = json.loads((tmp_path / "tuning.json").read_text())["scores"]
    assert found.score == max(scores.values())


def test_a_stopped_search_goes_on_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = Search(config(), CHOICES, mean=4.0, folder=tmp_path / "unbroken").run()
    train, calls = training.engine.session.train, []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(searching, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        Search(config(), CHOICES, mean=4.0, folder=tmp_path / "broken").run()
    found = Search(config(), CHOICES, mean=4.0, folder=tmp_path / "broken").run()
    assert (found.score, found.settings) == (unbroken.score, unbroken.settings)
    assert len(read_ledger(tmp_path / "broken").payments) == 1
    again = Search(
        config(), CHOICES, mean=4.0, folder=tmp_path / "broken"
    ).run()  # a finished one is read back
    assert again.score == unbroken.score


def test_a_release_search_keeps_the_best_alone(tmp_path: Path) -> None:
    found = Search(config(mode="release"), CHOICES, mean=6.0, folder=tmp_path).run()
    if found.run is None:
        pytest.skip("no trial was drawn, which happens with probability e^-6")
    assert not list(tmp_path.glob("trial-*"))
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["draw"] == {"trials": [list(found.settings)], "seed": None}
    assert list(kept["scores"].values()) == [found.score]
    again = Search(config(mode="release"), CHOICES, mean=6.0, folder=tmp_path).run()
    assert (again.score, again.settings) == (found.score, found.settings)


def test_no_trial_is_an_outcome(tmp_path: Path) -> None:
    seed = next(seed for seed in range(1000) if not draw_trials(CHOICES, 1.0, seed=seed).trials)
    found = Search(config(seed=seed), CHOICES, mean=1.0, folder=tmp_path).run()
    assert found.run is None
    assert found.guarantee.epsilon <= 6.0
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protection": {"noise_multiplier": 2.0}}, "is computed by the search"),
        ({"protection": {"kind": "record", "unit": "user", "records_per_user": 2}}, "protection.unit"),
        ({"data": {"validation_fraction": 0.0}}, "trials are scored on held-out records"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Search(config(**change), CHOICES, mean=4.0, folder=tmp_path)


def test_a_run_without_protection_cannot_be_searched(tmp_path: Path) -> None:
    values = {key: value for key, value in CONFIG.items() if key not in ("protection", "trainer")}
    with pytest.raises(ConfigError, match="'none' has no guarantee that a search could keep"):
        Search(load_config(values), CHOICES, mean=4.0, folder=tmp_path)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("trainer.clipp", ["0.3"], "trainer.clipp: unknown key.*did you mean 'clip'"),
        ("trainer.clip", ["0.3", "-1"], "trainer.clip"),
        ("sampler.scheme", ["disjoint-cyclic", "poisson"], "fixed disjoint batches"),
        ("optimizer.lr", ["1.0", "9.0"], "learning_rate = 9: must be below"),
    ],
)
def test_a_choice_that_cannot_be_trained_is_refused_before_it_is_paid_for(
    tmp_path: Path, key: str, values: list[str], message: str
) -> None:
    with pytest.raises((ConfigError, NoGuarantee), match=message):
        Search(config(), {**CHOICES, key: values}, mean=4.0, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    Search(config(), CHOICES, mean=4.0, folder=tmp_path).run()
    with pytest.raises(RunFolderError, match="holds another search"):
        Search(config(), CHOICES, mean=5.0, folder=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        *("trainer.clip", "=1", "trainer.clip=", "protection.epsilon=1,9", "data.mean=0", "trainer.kind=bp"),
        *("protection={delta=0.1}", 'trainer={kind="pdfa"}'),
    ],
)
def test_bad_choices_are_named(line: str) -> None:
    with pytest.raises(ConfigError, match="--choose"):
        parse_choices([line])


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "tune convex --data digits --epsilon 6 --trials 3 --epochs 1 --choose trainer.clip=0.4,0.6 --seed 2"
    )
    monkeypatch.setattr(sys, "argv", ["opusim", *arguments.split(), "--out", str(tmp_path / "search")])
    monkeypatch.setenv("COLUMNS", "300")  # so that no cell is folded
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = " ".join(capsys.readouterr().out.split())
    assert "the best of a Poisson number" in printed
    assert "best: trainer.clip=" in printed or "no trial was drawn" in printed


@pytest.mark.slow
def test_scores_are_noised_for_the_held_out_records(tmp_path: Path) -> None:
    """The noise has standard deviation 1 / (n mu): it is what the score differs from the accuracy by."""
    Search(config(), CHOICES, mean=12.0, folder=tmp_path).run()
    (mechanism,) = read_ledger(tmp_path).mechanisms
    mu = mechanism.mu
    scores = json.loads((tmp_path / "tuning.json").read_text())["scores"]
    errors, n = [], 0
    for number, score in scores.items():
        run = load_run(tmp_path / f"trial-{number}")
        n = run.facts["data"]["n_validation"]
        errors.append((score - (run.summary or {})["validation_accuracy"]) * n * mu)
    assert len(errors) > 5
    assert abs(np.mean(errors)) < 5 / math.sqrt(len(errors))
    assert abs(np.mean(np.square(errors)) - 1) < 5 * math.sqrt(2 / len(errors))
    assert all(error != 0 for error in errors)
