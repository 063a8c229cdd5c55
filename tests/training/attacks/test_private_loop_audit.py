"""Audits of private loops in one training, also by canaries that are whole users.

Sound loops stay below their claim; weaker noise and planted faults are refuted.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import opusim
from opusim.accounting.one_run import Method
from opusim.training.attacks.findings import Audit, Role, headline, read_audit
from opusim.training.attacks.mechanism.checks import report_text
from opusim.training.attacks.one_run.audit import audit_one_training, audit_private_folder
from opusim.training.attacks.one_run.observers import Canaries, EntryObserver
from opusim.training.cli.app import app
from opusim.training.private_loop.folder import PrivacySettings
from opusim.training.protections.record import RecordGradients
from tests.support.faults import NAMED
from tests.support.faults.base import replaced
from tests.support.faults.users import FAULTS
from tests.support.private_loops import parts, private_loop, records, run_epoch

CANARIES, EACH, STEPS = 240, 2, 20
USERS_OF_THREE = {"user_ids": torch.arange(60) // 3, "records_per_user": EACH, "sample_rate": 1.0}
Build = Callable[[Callable[..., Any]], opusim.PrivateTraining]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))


def builder(folder: Path, **options: Any) -> Build:
    """A loop with Adam, whose steps no audit of weights could undo."""

    def build(plant: Callable[[Any], Any]) -> opusim.PrivateTraining:
        model = wide()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        planted: Dataset[Any] = plant(records(100))
        given = model, optimizer, nn.CrossEntropyLoss(), DataLoader(planted, batch_size=20, shuffle=True)
        return private_loop(folder, given, **options)

    return build


def audited(build: Build, *, epochs: int = 1, canaries: int | None = 40, **options: Any) -> Audit:
    def train(private: opusim.PrivateTraining) -> None:
        for _ in range(epochs):
            run_epoch(private)

    return opusim.audit_private_loop(build, train, canaries=canaries, seed=1, **options)


@pytest.mark.slow
def test_a_quarter_of_the_noise_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without information, the area under the curve of m / 2 and m / 2 scores has the standard error 1 / sqrt(3 m)."""
    found = audited(builder(tmp_path / "sound", noise_multiplier=0.6), epochs=5, canaries=CANARIES)
    updates = found.scores()["all updates"]
    assert read_audit(tmp_path / "sound" / "one-run.json") == found
    assert CliRunner().invoke(app, ["report", str(tmp_path / "sound")]).exit_code == 0
    for text in ("one training of", "null control"):
        assert text in (tmp_path / "sound" / "report.html").read_text()
    assert "epsilon of at least" in (tmp_path / "sound" / "one-run.html").read_text()
    assert (tmp_path / "sound" / "one-run.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(opusim.RunFolderError, match="holds a private loop already"):
        private_loop(tmp_path / "sound")
    assert updates.plan.claimed == pytest.approx(found.guarantees[0].epsilon)
    assert updates.auc > 0.5 + 5 * (3 * CANARIES) ** -0.5
    assert not [one for one in updates.refuting if one.method is not Method.NORMAL_BOUND]
    assert len(found.of(Role.BROKEN)) == 1
    make = RecordGradients.__init__

    def weaker(self: RecordGradients, *, noise_multiplier: float, **options: Any) -> None:
        make(self, noise_multiplier=noise_multiplier / 4, **options)

    monkeypatch.setattr(RecordGradients, "__init__", weaker)
    faulty = audited(builder(tmp_path / "faulty"), epochs=5, canaries=CANARIES)
    assert faulty.refuted, faulty.scores()["all updates"]


def test_loops_that_cannot_be_audited_are_refused(tmp_path: Path) -> None:
    for build, canaries, message in (
        (builder(tmp_path / "a", mode="release", seed=None), 240, "audit the loop in mode = 'experiment'"),
        (builder(tmp_path / "b", max_physical_batch_size=4), 240, "leave max_physical_batch_size out"),
        (builder(tmp_path / "c"), 321, "321 exceeds the 320 weights"),
        (lambda plant: builder(tmp_path / "d")(lambda own: own), 240, "must call the function that it is given once"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            audited(build, canaries=canaries)


def test_an_audit_names_the_numbers_that_count_its_canaries(tmp_path: Path) -> None:
    calibrated: dict[str, Any] = {"noise_multiplier": None, "target_epsilon": 8.0, "epochs": 1}
    rate = {"sample_rate": 0.2}
    given_noise = {"noise_multiplier": 1.0, "target_epsilon": 8.0, "epochs": 1}
    noises = []
    for name, given, computed in (
        ("own", rate, None),
        ("rate", {}, "q and the steps were computed anew"),
        ("noise", {**calibrated, **rate}, None),
        ("both", calibrated, "z is calibrated to target_epsilon, and all were computed anew"),
        ("given", {**given_noise, **rate}, None),
    ):
        found = audited(builder(tmp_path / name, **given), canaries=20)
        text = " ".join(str(found).split())
        assert ("the run's own sampler" in text) is (computed is None), name
        assert "AUC" in text or "ceiling" in text
        settings = PrivacySettings.stored(tmp_path / name)
        noises.append(settings.noise_multiplier)
        if computed is None:
            assert found.differs == ""
            continue
        assert f"z = {settings.noise_multiplier:.4g}, q = {settings.sample_rate:.4g}" in found.differs
        assert (f"{found.steps} steps" if "epochs" in given else "the steps") in found.differs
        assert computed in found.differs
        assert found.differs.endswith("with canaries; give sample_rate=20/100, as in your loop")
        assert found.differs in text
    with builder(tmp_path / "loop", **calibrated)(lambda own: own) as loop:  # the loop that was not planted
        assert noises[2] == loop.settings.noise_multiplier != noises[3]


def test_an_audit_chooses_its_canaries_and_says_beforehand_what_it_finds(tmp_path: Path) -> None:
    """The largest weight matrix has 320 weights: of the usual numbers 200 fit, and without a forecast all 320 do."""
    told: list[str] = []
    for name, given, fitting in (("known", {"epochs": 1}, 200), ("unknown", {}, 320)):
        build = builder(tmp_path / name, noise_multiplier=0.6, **given)
        found = audited(build, canaries=None, on_forecast=told.append)
        assert found.trials == fitting
        assert told.pop() == f"This audits other numbers than those of your loop: {found.differs}."
        assert [f"{fitting} canaries find half of the noise" in text for text in told] == [True] * len(given)
        told.clear()


def test_an_audited_loop_of_fixed_batches_gives_weight_zero_to_what_fills_them(tmp_path: Path) -> None:
    ends = []

    def one_epoch(private: opusim.PrivateTraining) -> None:
        run_epoch(private)
        ends.append(parameters_to_vector(private.module.parameters()))

    for name, fixed in (("plain", False), ("fixed", True)):
        build = builder(tmp_path / name, noise_multiplier=1e-6, fixed_batches=fixed)
        opusim.audit_private_loop(build, one_epoch, canaries=40, seed=1)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_self_test_of_a_private_loop_agrees_with_its_ledger(mode: str, seed: int) -> None:
    own = seed if mode == "experiment" else None
    found = opusim.audit_mechanism("private-loop", mode=mode, steps=40, seed=own, level=1e-6)
    assert found.holds, report_text(found)
    assert found.single_records


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise_halved", "clipped_by_layer"])
def test_a_self_test_of_a_private_loop_finds_faults(name: str) -> None:
    with NAMED[name].planted():
        assert not opusim.audit_mechanism("private-loop", steps=40, seed=1, level=1e-6).holds


# Canaries that are whole users


def user_builder(folder: Path, *, workers: int = 0, **options: Any) -> Build:
    """A loop that draws every user in every step, which the accountant allows and which shows a fault best."""

    def build(plant: Callable[..., Any]) -> opusim.PrivateTraining:
        model = wide()
        planted, ids = plant(records(60), torch.arange(60) // 3, EACH)
        loader = DataLoader(planted, batch_size=10, num_workers=workers)
        given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), loader
        settings: dict[str, Any] = {"sample_rate": 1.0, "noise_multiplier": 4.5, "user_ids": ids, **options}
        return private_loop(folder, given, records_per_user=EACH, **settings)

    return build


def test_an_audit_of_users_sees_whole_users(tmp_path: Path) -> None:
    """Canaries that add C to noise of 0.2 C are told apart: the area under the curve is Phi(5 / sqrt(2)) = 0.9998."""
    found = audited(user_builder(tmp_path / "a", noise_multiplier=0.2))
    assert found.scores()["all updates"].auc > 0.99
    assert "users (at most 2 records each a step)" in found.game
    with pytest.raises(ValueError, match="give num_workers=0"):
        audited(user_builder(tmp_path / "b", workers=1))

    def unknown_to_the_audit(plant: Callable[..., Any]) -> opusim.PrivateTraining:
        return user_builder(tmp_path / "c")(lambda given, *_: (planted := plant(given), range(len(planted))))

    with (
        pytest.warns(UserWarning, match="no user has two records"),
        pytest.raises(ValueError, match="the IDs of the users and k"),
    ):
        audited(unknown_to_the_audit)


def dropped() -> AbstractContextManager[None]:
    """Planted: users with more than k records bring no row, so that no other fault could show."""

    def chosen(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, u, step: [] if len(self.records[u]) > self.most else before(self, u, step)

    return replaced("opusim.training.data.users:Users.chosen", chosen)


def test_an_audit_whose_canaries_do_not_arrive_has_a_failed_control(tmp_path: Path) -> None:
    with dropped():
        found = audited(user_builder(tmp_path))
    assert found.arrival is not None
    assert (found.arrival.share, found.arrival.draws) == (0.0, 0)
    assert found.failed_controls[0] is found.arrival
    assert found.to_json()["controls_hold"] is False
    assert found.to_json()["arrival"]["holds"] is False
    assert read_audit(tmp_path / "one-run.json") == found
    assert not found.refuted


def test_a_dropped_canary_is_exit_code_3_and_a_headline(tmp_path: Path) -> None:
    with private_loop(tmp_path, **USERS_OF_THREE) as private:
        run_epoch(private)
    asked = ["audit", str(tmp_path), "--canaries", "40", "--seed", "1", "--json"]
    with dropped():
        shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 3, shown.output
    headline = "DO NOT RELY ON THIS AUDIT: the arrival control did not behave as required."
    forecast, _, _ = shown.stderr.partition("DO NOT RELY")
    assert "Forecast: a canary is drawn" in forecast
    assert headline in " ".join(shown.stderr.split())
    assert headline in " ".join((tmp_path / "report.html").read_text().split())
    assert json.loads(shown.stdout)["arrival"]["holds"] is False


def lost(y: np.ndarray, drawn: np.ndarray) -> EntryObserver:
    observer = object.__new__(EntryObserver)
    inside = torch.ones(y.shape[1], dtype=torch.bool)
    observer._canaries = Canaries(inside=inside, entries=(), first=0, replaces=False)
    observer._readings, observer._drawn, observer.writer = list(y), list(drawn), None
    return observer


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (0.6, True), (0.3, False), (0.0, False)])
def test_arrival_is_read_within_five_standard_errors(share: float, holds: bool) -> None:
    draws = np.random.default_rng(0)
    drawn = (draws.random((50, 100)) < 0.2).astype(float)
    y = share * drawn + 0.5 * draws.standard_normal(drawn.shape)  # an error of 0.016 over 1,000 draws
    mechanism = SimpleNamespace(sampling_probability=0.2)
    found = lost(y, drawn).arrival(mechanism)
    assert found.holds is holds
    assert abs(found.share - share) < 5 * found.error
    assert found.expected == pytest.approx(1000)
    none = lost(0 * y, 0 * drawn)
    assert not none.arrival(mechanism).holds
    assert none.arrival(SimpleNamespace(sampling_probability=1e-3)).holds


def test_arrival_counts_the_noise_if_every_step_draws_every_canary() -> None:
    """The mean of 20 draws is off by 2.2 C at a noise of 10 C: an honest run does not fail, and nothing is shown."""
    noise, mechanism = np.random.default_rng(0), SimpleNamespace(sampling_probability=1.0)
    for share in (0.0, 1.0):
        for _ in range(50):
            drawn = np.ones((1, 20))
            found = lost(share * drawn + 10 * noise.standard_normal(drawn.shape), drawn).arrival(mechanism)
            assert found.holds
            assert found.says == "too few draws are expected to tell"
    assert not lost(0.1 * noise.standard_normal((1, 20)), np.ones((1, 20))).arrival(mechanism).holds


def test_arrival_is_in_units_of_what_the_clip_of_a_layer_leaves(tmp_path: Path) -> None:
    """Canaries fit into 1 of 10 layers, whose own bound is C / sqrt(10)."""

    def build(plant: Callable[..., Any]) -> opusim.PrivateTraining:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3), *[nn.Linear(3, 3) for _ in range(8)])
        loader = DataLoader(plant(records(60)), batch_size=24)
        given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), loader
        return private_loop(tmp_path, given, clipping="per_layer", noise_multiplier=0.1)

    found = audited(build, canaries=20)
    assert found.arrival is not None
    assert abs(found.arrival.share - 1) < 5 * found.arrival.error < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_sound_loop_is_not_refuted_and_planted_faults_are(tmp_path: Path, fault: str | None) -> None:
    with FAULTS[fault]() if fault else nullcontext():
        found = audited(user_builder(tmp_path), epochs=STEPS, canaries=CANARIES)
    updates = found.scores()["all updates"]
    assert found.refuted or fault is None, updates
    if fault is None:
        assert updates.auc > 0.5 + 5 * (3 * CANARIES) ** -0.5
        assert not [one for one in updates.refuting if one.method is not Method.NORMAL_BOUND]


USERS = 20


def run_data() -> tuple[np.ndarray, np.ndarray, list[str]]:
    draws = np.random.default_rng(1)
    each = [f"user {n // 3}" for n in range(3 * USERS)]
    return draws.normal(size=(len(each), 8)), draws.integers(0, 3, len(each)), each


def trained(folder: Path, noise: float, **changes: Any) -> dict[str, Any]:
    """Train on users, all of them in every step; return what an audit of the run is given."""
    protection = {"kind": "record", "unit": "user", "records_per_user": EACH, "noise_multiplier": noise}
    protection |= {"clip_norm": 0.2, **changes}
    config = {
        "trainer": {"kind": "bp"}, "epochs": STEPS, "seed": 4, "threads": 1, "protection": protection,
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.0}, "sampler": {"batch_size": USERS},
        "data": {"n_classes": 3},
    }  # fmt: skip
    opusim.train(config, data=run_data(), model=wide(), folder=folder, progress=False)
    return {"data": run_data(), "model": wide(), "seed": 1, "progress": False}


@pytest.mark.parametrize("fixed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_that_protect_users_are_audited_by_users(tmp_path: Path, fixed: bool) -> None:
    """Whole users are told apart at noise of 0.2 C, by both games; neither control fails."""
    given = trained(tmp_path, 0.2, fixed_batches=fixed)
    step = opusim.audit_run(tmp_path, **given, trials=40)
    assert step.arrival is None
    assert step.of(Role.RUN)[0].auc > 0.99
    assert step.of(Role.RUN)[0].result.plan.pair.startswith("a user in the step's batch")
    assert not step.refuted
    assert not step.failed_controls
    whole = audit_one_training(tmp_path, **given, canaries=40)
    assert whole.scores()["all updates"].auc > 0.99
    assert whole.arrival is not None
    assert abs(whole.arrival.share - 1) < 5 * whole.arrival.error
    assert whole.arrival.draws == whole.arrival.expected
    assert not whole.refuted
    assert "users (at most 2 records each a step)" in whole.game


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_an_audit_of_a_run_finds_planted_faults_of_users(tmp_path: Path, fault: str | None) -> None:
    with FAULTS[fault]() if fault else nullcontext():
        found = audit_one_training(tmp_path, **trained(tmp_path, 4.5), canaries=CANARIES)
    assert found.refuted is (fault is not None), found.scores()["all updates"]


def test_the_folder_of_a_private_loop_is_audited_by_its_constants(tmp_path: Path) -> None:
    with private_loop(tmp_path, noise_multiplier=0.2, **USERS_OF_THREE) as private:
        run_epoch(private)
    found = audit_private_folder(tmp_path, canaries=40, seed=1, progress=False)
    assert found.scores()["all updates"].auc > 0.99
    assert found.steps == private.step
    assert not found.holds_private_records
    assert found.guarantees[0].epsilon == pytest.approx(private.epsilon, rel=1e-6)
    assert "users (at most 2 records each a step)" in found.game
    assert read_audit(tmp_path / "one-run.json") == found
    refused = CliRunner().invoke(app, ["audit", str(tmp_path), "--trials", "40"])
    assert "not of a private loop" in str(refused.exception)


def test_the_audit_of_a_folder_says_before_it_starts_what_its_draws_can_find(tmp_path: Path) -> None:
    """One draw of each canary: half of the noise is found by chance, and every seed ends alike."""
    with private_loop(tmp_path, parts(count=600)) as private:
        run_epoch(private, steps=20)
    told: list[str] = []
    for seed in (1, 2):
        found = audit_private_folder(tmp_path, seed=seed, on_forecast=told.append, progress=False)
        (broken,) = found.of(Role.BROKEN)
        assert not found.refuted
        assert found.failed_controls == [broken]
        assert f"find half of the noise with probability {broken.power:.2f}" in told[-1]
    assert "more canaries and another seed" not in headline(found)
    for text in (
        "drawn q T = 1 times",
        "exit code 3",
        "--mechanism private-loop",
        "It takes 50 steps, about ",
    ):
        assert text in told[0], text


@pytest.mark.parametrize("canaries", [20, None])
def test_the_audit_of_a_folder_chooses_canaries_that_suffice(tmp_path: Path, canaries: int | None) -> None:
    with private_loop(tmp_path, sample_rate=1.0, noise_multiplier=4.0) as private:
        for _ in range(10):
            run_epoch(private)
    told: list[str] = []
    found = audit_private_folder(tmp_path, canaries=canaries, seed=1, on_forecast=told.append, progress=False)
    assert found.trials == (canaries or 200)
    too_few = "exit code 3 unless it refutes the claim. Take 200 canaries." in told[0]
    assert too_few is (canaries is not None)
    assert found.controls_hold is (canaries is None)


@pytest.mark.slow
def test_the_command_audits_the_folder_of_a_private_loop(tmp_path: Path) -> None:
    # each canary is drawn at every step, so that its scores are normal
    with private_loop(tmp_path, sample_rate=1.0) as private:
        for _ in range(10):
            run_epoch(private)
    shown = CliRunner().invoke(app, ["audit", str(tmp_path), "--canaries", "240", "--seed", "1"])
    assert shown.exit_code == 0, shown.output
    assert "opusim.audit_private_loop" in " ".join(shown.output.split())
    assert "null control" in (tmp_path / "report.html").read_text()


SETTINGS: dict[str, Any] = {
    "settings": ["protection.unit=user", "protection.records_per_user=2"], "steps": 40, "seed": 1, "level": 1e-6,
}  # fmt: skip


KINDS = pytest.mark.parametrize("kind", ["bp", pytest.param("private-loop", marks=pytest.mark.slow)])


@KINDS
def test_the_self_test_takes_users(kind: str) -> None:
    found = opusim.audit_mechanism(kind, **SETTINGS)
    assert found.holds, report_text(found)
    assert found.single_records
    assert "users (at most 2 records each a step)" in found.accounted


@pytest.mark.parametrize("fault", FAULTS)
@KINDS
def test_the_self_test_finds_planted_faults_of_users(fault: str, kind: str) -> None:
    with FAULTS[fault]():
        assert not opusim.audit_mechanism(kind, single_records=False, **SETTINGS).holds
