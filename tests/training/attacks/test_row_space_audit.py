"""Whole audits of small runs: members are found, protected ones are not, and planted faults are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opusim import training
from opusim.accounting.guarantee import Status
from opusim.errors import ConfigError
from opusim.training.attacks.findings import Audit, Finding, Role, audit_rows, paragraphs, verdict
from opusim.training.attacks.replay import replayed_step
from opusim.training.attacks.run_audit import audit_run, read_run
from opusim.training.errors import RunFolderError
from opusim.training.protections.record import RecordGradients
from opusim.training.reports.run_report import write_report
from opusim.training.runs.folder import RunFolder

N, FEATURES = 300, 40
RUN = {
    "epochs": 1,
    "threads": 1,
    "model": {"hidden": [24]},
    "data": {"n_classes": 3},
    "sampler": {"batch_size": 12},
    "device": {"name": "gaussian", "noise": {"sigma": 10.0}},
}
PROTECTED = {
    "sampler": {"scheme": "poisson", "batch_size": 12},
    "protection": {"kind": "record", "noise_multiplier": 4.0},
}


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(N, FEATURES)), np.arange(N) % 3


def trained(folder: Path, **changes: object) -> Path:
    training.train({**RUN, **changes}, data=data(), folder=folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def plain_audit(plain: Path) -> Audit:
    return audit_run(plain, data=data(), trials=200, seed=7)


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("protected"), **PROTECTED)


def of(audit: Audit, role: Role, attack: str = "row space") -> Finding:
    (finding,) = [f for f in audit.findings if f.role is role and f.attack == attack]
    return finding


def plant_noise(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let every protection of records add a share of the noise that it was given."""
    make = RecordGradients.__init__

    def weaker(self: RecordGradients, *, noise_multiplier: float, **options: object) -> None:
        make(self, noise_multiplier=share * noise_multiplier, **options)

    monkeypatch.setattr(RecordGradients, "__init__", weaker)


def test_an_unprotected_run_is_found_out_as_far_as_the_trials_can_tell(plain_audit: Audit) -> None:
    finding = of(plain_audit, Role.RUN)
    assert finding.auc == 1.0
    assert finding.result.epsilon_lower == finding.result.ceiling > 2
    assert finding.claim is None
    assert plain_audit.controls_hold
    assert of(plain_audit, Role.NULL).result.epsilon_lower == 0
    assert of(plain_audit, Role.PROTECTED).claim.epsilon == pytest.approx(0.926, abs=0.01)
    assert of(plain_audit, Role.BROKEN).refutes


def test_the_words_say_what_was_found(plain_audit: Audit) -> None:
    text = "\n".join(paragraphs(plain_audit))
    assert "Found: membership" in text
    assert "no finite epsilon, so there is nothing to refute" in text
    (guarantee,) = plain_audit.guarantees
    for changes, said in (
        ({"epsilon": 1.0, "reason": None}, "is REFUTED, since a single step already costs more"),
        ({"formula_value": 1.0}, "1.000 for the whole run: is REFUTED"),
        ({"formula_value": 1e6}, "exceeds what so many trials can show"),
    ):
        claimed = replace(guarantee, status=Status.CLAIMED, **changes)
        assert said in "\n".join(paragraphs(replace(plain_audit, guarantees=(claimed,))))
    best = plain_audit.strongest.result.epsilon_lower
    assert repr(plain_audit).startswith(f"Audit(epsilon=at least {best:.4g}, ")
    assert plain_audit._repr_html_().count("<tr>") == 1 + len(audit_rows(plain_audit))


def test_the_result_is_kept_and_shown(plain: Path, plain_audit: Audit) -> None:
    kept = Audit.from_json(json.loads((plain / "audit.json").read_text()))
    assert kept == plain_audit
    page = write_report(training.load_run(plain)).read_text()
    assert "<h2>Audit</h2>" in page
    assert "membership found" in page
    with pytest.raises(ValueError, match="schema_version 9 is not 2"):
        Audit.from_json({"schema_version": 9})


@pytest.mark.slow
def test_the_same_seed_repeats_an_audit(plain: Path, plain_audit: Audit) -> None:
    again, other = (audit_run(plain, data=data(), trials=40, seed=seed).to_json() for seed in (7, 8))
    assert again == audit_run(plain, data=data(), trials=40, seed=7).to_json()
    assert again["findings"] != other["findings"]
    plain_audit.keep(plain)


def test_an_edited_audit_is_not_shown(plain: Path, plain_audit: Audit) -> None:
    file = plain / "audit.json"
    sound = file.read_text()
    file.write_text(sound.replace('"trials": 200', '"trials": 2000'))
    with pytest.raises(RunFolderError, match=r"audit\.json was changed since it was written"):
        write_report(training.load_run(plain))
    file.write_text(sound)
    write_report(training.load_run(plain))


@pytest.mark.slow
def test_a_protected_run_stays_below_its_theorem_and_is_found_without_its_noise(
    protected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the run's own protection forgets its noise, and its theorem is refuted."""
    honest = audit_run(protected, data=data(), trials=200, seed=7)
    assert honest.controls_hold
    for finding in honest.findings:
        assert finding.role is Role.BROKEN or not finding.refutes
    assert "is not contradicted" in "\n".join(paragraphs(honest))
    plant_noise(monkeypatch, 0.0)
    broken = audit_run(protected, data=data(), trials=200, seed=7)
    assert of(broken, Role.RUN).refutes
    assert not broken.controls_hold  # the protected control is broken as well
    assert "REFUTED: the step does not do" in "\n".join(paragraphs(broken))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_difference_attack_finds_noise_that_is_too_weak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Planted: a tenth of the noise. Without device noise the score is N(0 or 1, (z C / ||c||)^2)."""
    quiet = {"device": {"name": "gaussian", "noise": {"sigma": 0.0}}, "optimizer": {"name": optimizer}}
    run = trained(tmp_path, **PROTECTED, **quiet)
    told: list[str] = []
    sound = audit_run(run, data=data(), trials=200, seed=3, on_forecast=told.append)
    assert not of(sound, Role.RUN, "difference").refutes
    assert "times the proven" in told[0]
    read = of(sound, Role.RUN, "difference").anytime
    assert read.games == 200
    assert read.e_value < 20
    assert Audit.from_json(json.loads(json.dumps(sound.to_json()))) == sound
    plant_noise(monkeypatch, 0.1)
    found = audit_run(run, data=data(), trials=200, seed=3)
    assert of(found, Role.RUN, "difference").refutes
    assert of(found, Role.RUN, "difference").anytime.refuted_at is not None
    assert "The bets against the claim REFUTE it: 'difference' after" in verdict(found)
    assert not of(found, Role.RUN).refutes  # the row space cannot see it: the noise has full rank


@pytest.mark.slow
def test_batches_above_the_fan_in_are_found_by_what_they_add(tmp_path: Path) -> None:
    x, y = data()
    config = {**RUN, "sampler": {"batch_size": 60}, "model": {"hidden": [64]}}
    training.train(config, data=(x[:, :8], y), folder=tmp_path)
    found = audit_run(tmp_path, data=(x[:, :8], y), trials=120, seed=7)
    assert {finding.attack for finding in found.findings} == {"covariance", "difference"}
    assert of(found, Role.RUN, "difference").auc == 1.0
    assert of(found, Role.RUN, "covariance").auc > 0.8
    assert of(found, Role.NULL, "covariance").result.epsilon_lower == 0


def test_every_trial_starts_from_the_same_state_with_its_own_noise(plain: Path) -> None:
    run = read_run(RunFolder(plain), data())
    with replayed_step(run, run.plan) as step:
        batch = step.records(torch.arange(12), 0)
        first, second, again = (
            {name: tensor.clone() for name, tensor in step.state_after(batch, trial).items()}
            for trial in (0, 1, 0)
        )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layer1.weight"], second["layer1.weight"])
    assert torch.equal(first["layer2.weight"], second["layer2.weight"])  # its error crosses no device


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("bp", "sgd"),
        pytest.param("dfa", "sgd", marks=pytest.mark.slow),
        pytest.param("bp", "adam", marks=pytest.mark.slow),
    ],
)
def test_digital_trainers_are_found_out_too(tmp_path: Path, kind: str, optimizer: str) -> None:
    config = {key: value for key, value in RUN.items() if key != "device"}
    config |= {"trainer": {"kind": kind}, "optimizer": {"name": optimizer}}
    training.train(config, data=data(), folder=tmp_path)
    assert of(audit_run(tmp_path, data=data(), trials=40, seed=1), Role.RUN).auc == 1.0


def test_what_cannot_be_audited_is_named(plain: Path) -> None:
    with pytest.raises(ValueError, match="trials = 10"):
        audit_run(plain, data=data(), trials=10)
    x, y = data()
    with pytest.raises(RunFolderError, match="was trained on other data"):
        audit_run(plain, data=(x + 1, y), trials=40)
    with pytest.raises(ConfigError, match="user-supplied arrays"):
        audit_run(plain, trials=40)
