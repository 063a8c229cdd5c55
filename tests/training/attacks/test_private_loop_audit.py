"""The audit of a private loop in one training: sound loops stay below their claim, and weaker noise is refuted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import opusim
from opusim.accounting.one_run import Method
from opusim.training.attacks.findings import Audit, Role, read_audit
from opusim.training.attacks.mechanism.checks import report_text
from opusim.training.cli.app import app
from opusim.training.private_loop.folder import PrivacySettings
from opusim.training.protections.record import RecordGradients
from tests.support.faults import NAMED
from tests.support.private_loops import private_loop, records, run_epoch

CANARIES = 240


Build = Callable[[Callable[[Any], Any]], opusim.PrivateTraining]


def builder(folder: Path, **options: Any) -> Build:
    """A loop with Adam, whose steps no audit of weights could undo."""

    def build(plant: Callable[[Any], Any]) -> opusim.PrivateTraining:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        planted: Dataset[Any] = plant(records(100))
        given = model, optimizer, nn.CrossEntropyLoss(), DataLoader(planted, batch_size=20, shuffle=True)
        return private_loop(folder, given, **options)

    return build


def audited(build: Build, *, epochs: int = 5, canaries: int | None = CANARIES, **options: Any) -> Audit:
    def train(private: opusim.PrivateTraining) -> None:
        for _ in range(epochs):
            run_epoch(private)

    return opusim.audit_private_loop(build, train, canaries=canaries, seed=1, **options)


@pytest.mark.slow
def test_a_quarter_of_the_noise_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without information, the area under the curve of m / 2 and m / 2 scores has the standard error 1 / sqrt(3 m)."""
    found = audited(builder(tmp_path / "sound", noise_multiplier=0.6))
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
    faulty = audited(builder(tmp_path / "faulty"))
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
        found = audited(builder(tmp_path / name, **given), epochs=1, canaries=20)
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
        found = audited(build, epochs=1, canaries=None, on_forecast=told.append)
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
