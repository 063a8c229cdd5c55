"""`opusim tune` for every trainer: the price of the choice, what a trial may spend, and the score that chooses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opusim.accounting.guarantee import Adjacency, LedgerCorrupt, NoGuarantee, Status, Unit
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.selection import PrivateSelection
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import SystemStream
from opusim.training.config import load_config
from opusim.training.config.run import RunConfig
from opusim.training.engine.session import train
from opusim.training.runs.run import load_run
from opusim.training.sweeps import tuning as searching
from opusim.training.sweeps.tuning import Draw, Search, parse_choices, priced_trials
from tests.support.command import opusim

BASE: dict[str, Any] = {
    "epochs": 1, "threads": 1, "seed": 3, "data": {"name": "digits", "validation_fraction": 0.2},
    "model": {"hidden": [8]}, "sampler": {"scheme": "poisson", "batch_size": 128},
    "protection": {"kind": "record", "epsilon": 4.0},
}  # fmt: skip
RATES = {"optimizer.lr": ["0.1", "0.5"]}
LABELS: dict[str, Any] = {"sampler": {"scheme": "shuffled-epochs"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {
    "bp": ({"trainer": {"kind": "bp"}}, RATES),
    "pdfa": ({"trainer": {"kind": "pdfa"}}, RATES),
    "zo": ({"trainer": {"kind": "zo"}}, RATES),
    "zo, Laplace": ({"trainer": {"kind": "zo", "law": "laplace"}}, RATES),
    "ulr": ({"trainer": {"kind": "ulr"}}, RATES),
    "dfa, add or remove": (
        {
            "trainer": {"kind": "dfa"}, "sampler": {"sampling_probability": 0.1, "batch_size": 140},
            "protection": {"relation": "add_or_remove_one"},
        },
        {**RATES, "epochs": ["1", "2"]},
    ),
    "convex, every update": (
        {"trainer": {"kind": "convex", "hyperplanes": 4}, "optimizer": {"momentum": 0.0}, "model": None},
        {"optimizer.lr": ["0.5", "1.0"]},
    ),
    "tdfa, amplified labels": ({"trainer": {"kind": "tdfa"}, "protection": {"kind": "label-amplified"}}, RATES),
    "pdfa, label readout": (
        {"trainer": {"kind": "pdfa"}, "protection": {"kind": "label-readout", "noise": "device"}, **LABELS}, RATES,
    ),
    "ridge, released labels": (
        {"trainer": {"kind": "ridge"}, "protection": {"kind": "label-release"}, "model": None, "sampler": None},
        {"trainer.ridge": ["0.1", "1.0"]},
    ),
}  # fmt: skip

SLOW = ("dfa, add or remove", "zo, Laplace", "convex, every update", "tdfa, amplified labels")


def config_of(name: str, **changes: Any) -> RunConfig:
    values = merged({key: value for key, value in BASE.items() if CASES[name][0].get(key, 0) is not None}, {})
    given = {key: value for key, value in CASES[name][0].items() if value is not None}
    values = merged(merged(values, given), changes)
    if values.get("mode") == "release":
        del values["seed"]
    return load_config(values)


@pytest.fixture
def two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw gives one trial of each end of the grid."""

    def drawn(choices: dict[str, list[str]], mean: float, *, seed: int | None) -> Draw:
        ends = [tuple(f"{key}={values[end]}" for key, values in choices.items()) for end in (0, -1)]
        return Draw(trials=tuple(ends), seed=seed)

    monkeypatch.setattr(searching, "draw_trials", drawn)


@pytest.mark.usefixtures("two_trials")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_a_search_of_every_trainer_is_proven_and_scored_on_noised_counts(name: str, tmp_path: Path) -> None:
    config, choices = config_of(name), CASES[name][1]
    found = Search(config, choices, mean=2.0, folder=tmp_path).run()
    guarantee = found.guarantee
    credited = config.protection.credits_device
    assert guarantee.status is (Status.PROVEN_UNDER_DEVICE_MODEL if credited else Status.PROVEN)
    assert 3.9 < guarantee.epsilon <= 4.0
    assert guarantee.unit is (Unit.LABEL if config.protection.protects == "labels" else Unit.RECORD)
    assert guarantee.adjacency is (config.relation or Adjacency.REPLACE_ONE)
    assert found.run is not None
    assert load_run(tmp_path / "best").guarantees[0].epsilon == guarantee.epsilon
    (paid,) = read_ledger(tmp_path).mechanisms
    assert isinstance(paid, PrivateSelection)
    scores = json.loads((tmp_path / "tuning.json").read_text())["scores"]
    assert found.score == max(scores.values())
    for number, score in scores.items():
        trial = load_run(tmp_path / f"trial-{number}")
        assert trial.guarantees[0].epsilon < 0.9 * guarantee.epsilon  # the planted fault would print this one
        n, accuracy = trial.facts["data"]["n_validation"], (trial.summary or {})["validation_accuracy"]
        divisor = n if guarantee.adjacency is not Adjacency.ADD_OR_REMOVE_ONE else 140 / 0.1 * 0.2 / 0.8
        noise = (score * divisor - accuracy * n) * paid.mu
        assert 0 < abs(noise) < 5


@pytest.mark.slow
def test_the_noise_of_a_trial_follows_its_own_settings() -> None:
    """More epochs need more noise; the search is priced for the dearest settings."""
    _, trials = priced_trials(config_of("dfa, add or remove"), CASES["dfa, add or remove"][1], 2.0)
    noises = {lines[1]: trial.config.protection.noise_multiplier for lines, trial in trials.items()}
    assert noises["epochs=2"] > 1.02 * noises["epochs=1"]
    for trial in trials.values():
        (stated,) = trial.whole.guarantees([trial.whole], delta=1e-5, enforced=True)
        assert trial.config.protection.epsilon == stated.epsilon  # one more step does not fit


@pytest.mark.usefixtures("two_trials")
def test_a_killed_release_search_pays_once_and_no_trial_exceeds_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed release trial lost the steps that it had reserved: its budget ends before its last step."""
    config = config_of("pdfa", mode="release")

    class Killed(Exception):
        """Stands for SIGKILL: nothing is returned to the ledger."""

    def killed(self: Any, step: int, *mechanisms: Any, until: int | None = None) -> None:
        pay(self, step, *mechanisms, until=until)
        if step == 5:
            raise Killed

    ledger = searching.train.__globals__["Ledger"]
    pay = ledger.pay
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "pay", killed)
        patch.setattr(ledger, "return_unused", lambda self: None)
        with pytest.raises(Killed):
            Search(config, RATES, mean=2.0, folder=tmp_path).run()
    found = Search(config, RATES, mean=2.0, folder=tmp_path).run()
    assert found.searches == 1
    assert found.guarantee.epsilon <= 4.0
    assert not list(tmp_path.glob("trial-*"))
    assert found.run.config.seed == 0
    assert found.trials is None


@pytest.mark.usefixtures("two_trials")
def test_planted_fault_less_noise_in_a_trial_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(config: RunConfig, **options: Any) -> Any:
        less = 0.9 * (config.protection.noise_multiplier or math.nan)
        return train(config.replaced(protection={"noise_multiplier": less, "epsilon": 9.0}), **options)

    monkeypatch.setattr(searching, "train", careless)
    with pytest.raises(LedgerCorrupt, match="is more than the search paid for"):
        Search(config_of("bp"), RATES, mean=2.0, folder=tmp_path).run()


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("bp", {"protection": {"kind": "label-randomized-response"}}, NoGuarantee, "names no noisy sum"),
        ("zo, Laplace", {"trainer": {"directions": 2}}, NoGuarantee, "only a pure epsilon"),
        ("bp", {"protection": {"noise_multiplier": 1.0}}, ConfigError, "computed by the search"),
    ],
)
def test_what_has_no_price_is_refused(
    name: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Search(config_of(name, **changes), RATES, mean=2.0, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_the_guarantee_is_about_cannot_be_chosen() -> None:
    for key in (
        "protection.delta", "protection.relation", "protection.noise", "data.split_seed", "device.name",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be chosen by a search"):
            parse_choices([f"{key}=1,2"])
    assert parse_choices(["protection.clip_norm=0.1,1"]) == {"protection.clip_norm": ["0.1", "1"]}


def test_scores_of_equal_trials_differ_by_their_noise_only(tmp_path: Path) -> None:
    """The score of a model is its count of right answers plus N(0, 1 / mu^2), a new draw for each trial."""
    scores = [
        searching.noisy_score(180, 360.0, 0.4, mode="experiment", seed=seed) * 360 - 180
        for seed in range(2000)
    ]
    assert abs(np.mean(scores)) < 5 / 0.4 / math.sqrt(2000)
    assert abs(np.var(scores) * 0.4**2 - 1) < 5 * math.sqrt(2 / 2000)


def test_a_released_score_fits_every_count_equally_well() -> None:
    """Its noisy count lies on a public grid, whatever the count; float32 noise, the fault, fits one count only."""
    mu, n = 0.6, 360
    scores = [searching.noisy_score(217, float(n), mu, mode="release", seed=0) for _ in range(50)]
    assert len(set(scores)) > 40  # no seed, which a release would publish, repeats them
    steps = np.array(scores) * n / grid_of(1 / mu)
    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    counts = np.arange(n + 1)

    def gaps(noisy_count: float) -> np.ndarray:
        z = (noisy_count - counts) * mu
        nearest = z.astype(np.float32).astype(float)
        return np.abs(z - nearest) / (np.maximum(np.abs(nearest), np.finfo(np.float32).tiny) * 2.0**-24)

    named = [int(np.argmin(gaps(round(step) * grid_of(1 / mu)))) == 217 for step in steps]
    assert sum(named) < 10
    faulty = [217 + float(noise) / mu for noise in SystemStream().normal((400,))]
    told = [int(np.argmin(gaps(count))) == 217 for count in faulty]
    assert sum(told) > 200  # two in three, by seven standard errors


def test_command_lines_that_lack_something(tmp_path: Path) -> None:
    for line, part in (
        ("tune --data digits --epsilon 3", "names no trainer"),
        ("tune bp --data digits --epsilon 3 --out x", "--choose"),
    ):
        told = opusim(*line.split(), cwd=tmp_path)
        assert (told.returncode, part in told.stderr) == (2, True)
