"""The audit of one training: tight on correct runs, refutes planted faults and published PDFA, writes where it may."""

import json
import math
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.attacks import one_run
from opusim import training
from opusim.accounting.audit import normal_limits
from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced
from opusim.accounting.one_run import NOT_NORMAL, Law, Method, OneRunPlan, audit_one_run, correct_guesses
from opusim.errors import ConfigError
from opusim.training.attacks.findings import SYSTEM_NOISE, Audit, Role, audit_rows, paragraphs, read_audit
from opusim.training.attacks.one_run.audit import _crafted, audit_one_training, claimed_epsilon, started_again
from opusim.training.attacks.one_run.observers import EntryObserver, ScoreLaw, Steps, log_ratio
from opusim.training.attacks.run_audit import read_run
from opusim.training.cli.app import app
from opusim.training.config.sections import OptimizerConfig
from opusim.training.engine.session import train_planned
from opusim.training.errors import RunFolderError
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.runs.folder import RunFolder
from tests.support.faults import NAMED, Fault

N, FEATURES, CANARIES = 300, 32, 2000
RUN: dict[str, Any] = {
    "epochs": 20, "threads": 1, "data": {"n_classes": 3, "validation_fraction": 0.0},
    "sampler": {"scheme": "poisson", "batch_size": 30}, "model": {"hidden": [64, 64]},
    "optimizer": {"lr": 0.05, "weight_decay": 0.001, "schedule": "cosine"},
    "protection": {"kind": "record", "epsilon": 4.0},
}  # fmt: skip


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(N, FEATURES)).astype(np.float32), np.arange(N) % 3


def trained(folder: Path, **changes: Any) -> Path:
    training.train({**RUN, **changes}, data=data(), folder=folder)
    return folder


def audited(folder: Path, fault: Fault | None = None, **options: Any) -> Audit:
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(fault.planted())
        return audit_one_training(folder, data=data(), **{"canaries": CANARIES, "seed": 5, **options})


@pytest.fixture(scope="module")
def pdfa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("one-run") / "pdfa", trainer={"kind": "pdfa"})


def test_a_correct_run_is_not_refuted_and_the_bounds_come_near_the_claim(pdfa: Path) -> None:
    before = {path.name for path in pdfa.iterdir()}
    found = audited(pdfa)
    updates = found.scores()["all updates"]
    reported = [b for result in found.scores().values() for b in result.bounds if b.method.is_bound]
    assert len(reported) == 7  # three of two adversaries, and one from the counts of consecutive updates
    assert updates.plan.confidence == pytest.approx(1 - 0.05 / 7)
    assert found.confidence == pytest.approx(0.95)
    assert updates.plan.claimed == pytest.approx(4.0, rel=0.01)
    assert updates.bound(Method.NORMAL_ESTIMATE).epsilon >= 0.7 * 4
    assert updates.bound(Method.GAUSSIAN_TRADE_OFF).epsilon >= 0.4 * 4
    assert not found.refuted
    final = found.scores()["final model"].bound(Method.NORMAL_ESTIMATE).epsilon
    assert 0 < final < updates.bound(Method.NORMAL_ESTIMATE).epsilon
    assert found.scores()["consecutive updates"].bound(Method.GAUSSIAN_TRADE_OFF).epsilon < 1
    assert {path.name for path in pdfa.iterdir()} == before | {"one-run.json"}
    assert read_audit(pdfa / "one-run.json") == found
    assert Audit.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert all(row["ceiling"] for row in audit_rows(found))
    assert found.scores(Role.NULL).keys() == found.scores().keys()
    assert not any(one.refutes for one in found.of(Role.NULL))
    (broken,) = found.of(Role.BROKEN)
    assert broken.refutes, broken
    assert updates.plan.strictest is not None
    assert updates.plan.strictest[0] > updates.plan.delta
    assert "not refuted" in "\n".join(paragraphs(found))


@pytest.mark.parametrize("canaries", [60, 300])
def test_the_forecast_agrees_with_the_power(
    pdfa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canaries: int
) -> None:
    """A forecast's ratio is at most 2 if, and only if, half of the noise is found with probability 0.9.

    A narrow table also says how scores are read.
    """
    monkeypatch.setenv("COLUMNS", "80")
    told: list[str] = []
    found = audited(pdfa, canaries=canaries, on_forecast=told.append, out=tmp_path)
    ratio = re.search(r"noise ([\d.]+) times too small", told[0])
    assert ratio is not None
    assert found.power is not None
    assert (float(ratio[1]) <= 2) is (found.power >= 0.9), told
    assert f"half of the noise with probability {found.power:.2f}" in told[0]
    assert ("fails by chance" in told[0]) is (found.power < 0.9)
    assert re.search(r"all updates,.*guesses, Gaussian.*normal scores,", str(found), re.DOTALL)


@pytest.mark.slow
def test_correlated_noise_is_undone_before_it_is_scored(tmp_path: Path) -> None:
    """As tight as independent noise; half of it is found, and an attacker who ignores the correlation sees less."""
    folder = trained(tmp_path / "run", trainer={"kind": "bp"}, protection={**RUN["protection"], "bands": 4})
    updates = audited(folder).scores()["all updates"]
    assert 2.8 <= updates.bound(Method.NORMAL_ESTIMATE).epsilon <= 5.2
    assert not updates.refuting
    assert audited(folder, NAMED["noise_halved"]).scores()["all updates"].refuting


def test_a_drawn_canary_is_read_through_the_bands() -> None:
    """A draw adds c_0, c_1, ... to rows of C y, whose inner product with c over |c|^2 is 1; other rows give 0."""
    c, q, z = np.array([0.8, 0.5, 0.3]), 0.1, 1e-3
    drawn = np.zeros((7, 2))
    drawn[[0, 3, 6], 0] = [1.0, 0.0, 1.0]
    matrix = sum(np.diag(np.full(7 - k, c[k]), -k) for k in range(3))
    blocks = [c[: 7 - t] @ (matrix @ drawn)[t : t + 3, 0] / np.sum(c[: 7 - t] ** 2) for t in (0, 3, 6)]
    np.testing.assert_allclose(blocks, [1.0, 0.0, 1.0], atol=1e-12)
    assert log_ratio(np.array(blocks), q=3 * q, z=z, replaces=False)[1] < 0


@pytest.mark.parametrize(("q", "steps", "z", "normal"), [(0.0047, 422, 0.62, False), (0.1, 200, 1.76, True)])
def test_the_law_of_scores_is_that_of_drawn_canaries(q: float, steps: int, z: float, normal: bool) -> None:
    """Half of the noise: mean scores and right guesses agree with draws; two draws are no normal law, twenty are."""
    mechanism = RecordCentral(noise_multiplier=z, sampling_probability=q, clip_norm=1.0, divisor=1.0)
    law = ScoreLaw.of(mechanism, steps, replaces=False, ratio=2.0)
    assert law.draws == pytest.approx(q * steps)
    assert (law.normality(1000) >= NOT_NORMAL) is normal
    count, generator = 2000, np.random.default_rng(1)
    inside = np.arange(count) % 2 == 0
    drawn = (generator.random((steps, count)) < q) & inside
    shown = drawn + z / 2 * generator.standard_normal((steps, count))
    scores = log_ratio(shown, q=q, z=z, replaces=False).sum(axis=0)
    for own, masses in ((scores[inside], law.inside), (scores[~inside], law.outside)):
        mean = law.values @ masses
        error = math.sqrt((law.values - mean) ** 2 @ masses / len(own))
        assert abs(own.mean() - mean) < 5 * error
    guesses = 400
    right, expected = correct_guesses(scores, inside, guesses) / guesses, law.right(guesses / count)
    error = math.sqrt(expected * (1 - expected) / guesses)
    assert abs(right - expected) < 5 * error
    _, low, high = normal_limits(scores[inside], scores[~inside], confidence=1 - 2.9e-7)  # 5 errors
    assert low < law.mu < high
    full = ScoreLaw.of(mechanism, steps, replaces=False, ratio=1.0)  # planted: the noise is not halved
    moved = abs(scores[inside].mean() - full.values @ full.inside)
    far = moved > 5 * scores[inside].std() / math.sqrt(count / 2)
    assert far or abs(right - full.right(guesses / count)) > 5 * error


def test_the_share_of_scores_that_pass_as_normal_is_that_of_drawn_ones() -> None:
    """Two draws: the typical p-value of 1,000 scores passes, and a fifth of all scores do not. Off by 0.1 at most."""
    mechanism = RecordCentral(noise_multiplier=1.0, sampling_probability=0.02, clip_norm=1.0, divisor=1.0)
    law = ScoreLaw.of(mechanism, 100, replaces=False, ratio=2.0)
    plan = OneRunPlan(adversary="sees all", canaries=1000, delta=1e-5, claimed=1.43, law=Law.GAUSSIAN)
    plan = replace(plan, readings=(Method.NORMAL_BOUND,), weaker_normality=law.normality(1000))
    repeats, generator = 150, np.random.default_rng(1)
    inside = np.arange(1000) % 2 == 0
    passed = 0
    for _ in range(repeats):
        uniform, scores = generator.random(1000), np.zeros(1000)
        for own, masses in ((inside, law.inside), (~inside, law.outside)):
            scores[own] = np.interp(uniform[own], np.cumsum(masses), law.values)
        passed += audit_one_run(scores, inside, plan).normality >= NOT_NORMAL
    error = 0.1 + 5 * math.sqrt(plan.normal_share * (1 - plan.normal_share) / repeats)
    assert abs(passed / repeats - plan.normal_share) < error
    many = replace(plan, weaker_normality=law.normality(5000))  # planted: the law of other scores
    assert abs(passed / repeats - many.normal_share) > error
    guessed = replace(plan, readings=None, weaker_mu=law.mu)  # scores that fail leave it to the guesses
    normal, guesses = (guessed.power(method) for method in (Method.NORMAL_BOUND, Method.GAUSSIAN_TRADE_OFF))
    assert normal is not None
    assert guesses is not None
    assert guessed.power_of_all == pytest.approx(normal + (1 - guessed.normal_share) * guesses)


@pytest.mark.slow
def test_a_seed_repeats_the_audit(pdfa: Path) -> None:
    options: dict[str, Any] = {"canaries": 200, "delta": 1e-4}
    first, again, other = (audited(pdfa, **options, seed=seed) for seed in (1, 1, 2))
    assert first.findings == again.findings != other.findings
    assert next(iter(first.scores().values())).plan.delta == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["noise_halved", "noise_reused", "clipped_by_layer", "averaged_before_noise", "sampled_too_often"],
)
def test_a_planted_fault_is_refuted(pdfa: Path, fault: str) -> None:
    found = audited(pdfa, NAMED[fault])
    updates = found.scores()["consecutive updates" if fault == "noise_reused" else "all updates"]
    assert updates.refuting, updates
    assert "REFUTED" in "\n".join(paragraphs(found))


DECAYED = {"lr": 0.01, "weight_decay": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"kind": "ulr", "clip": "module"}},
        {"trainer": {"kind": "bp"}, "optimizer": {"lr": 0.05, "nesterov": True, "averaged_tail": 0.2}},
        {"trainer": {"kind": "bp"}, "optimizer": {"name": "adam", **DECAYED}},
        {"trainer": {"kind": "bp"}, "optimizer": {"name": "nadam", **DECAYED}},
        {"trainer": {"kind": "pdfa"}, "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}},
        {"trainer": {"kind": "dfa"}, "protection": {**RUN["protection"], "relation": "replace_one"}},
    ],
)
def test_other_trainers_relations_and_optimizers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What an optimizer of the Adam family does to a noisy sum hides nothing."""
    folder = trained(tmp_path / "run", **changes)
    found = audited(folder)
    updates = found.scores()["all updates"]
    assert 2.8 <= updates.bound(Method.NORMAL_ESTIMATE).epsilon <= 5.2
    assert not [bound for bound in updates.refuting if bound.method is not Method.NORMAL_BOUND]
    if changes.get("optimizer", {}).get("name") in ("adam", "nadam"):
        assert "optimizer's state" in updates.plan.adversary
        assert found.controls_hold
        assert audited(folder, NAMED["noise_halved"]).scores()["all updates"].refuting


def test_published_pdfa_is_refuted_from_the_updates_of_one_run(tmp_path: Path) -> None:
    """Activations of slope 1 and tau_h_min = tau_h_max make the paper's formula finite: 0.04 or less."""
    folder = trained(
        tmp_path / "run",
        trainer={"kind": "pdfa", "order": "published", "tau_b": 1.0, "tau_h_max": 1.0, "tau_h_min": 1.0},
        model={"hidden": [64], "activation": "identity"}, device={"name": "gaussian", "noise": {"sigma": 1e4}},
        optimizer={"lr": 1e-4}, sampler={"scheme": "shuffled-epochs", "batch_size": 12}, epochs=1,
        protection={"kind": "none"},
    )  # fmt: skip
    found = audited(folder, canaries=400).scores()["row space"]
    assert found.plan.claimed is not None
    assert found.plan.claimed < 1 < 3 < found.bounds[0].epsilon
    assert found.refuting


@pytest.mark.slow
def test_published_likelihood_ratios_are_refuted_from_the_updates_of_one_run(tmp_path: Path) -> None:
    """Along a batch's inputs there is less noise than sigma_0 C; noise on the parameters hides nothing of that kind."""
    trainer = {"kind": "ulr", "form": "published", "copies": 2, "sigma": 0.05, "target_std": 8.0}
    changes: dict[str, Any] = {
        "model": {"hidden": [32]}, "optimizer": {"lr": 1e-3, "momentum": 0.0}, "epochs": 4,
        "sampler": {"scheme": "poisson-min-batch", "batch_size": 12, "min_batch_size": 6},
        "protection": {"kind": "none"},
    }  # fmt: skip
    folder = trained(tmp_path / "extra", trainer={**trainer, "remedy": "extra-noise"}, **changes)
    found = audited(folder, canaries=200).scores()["quiet rows"]
    assert found.plan.claimed is not None
    assert found.plan.claimed < 1.5 < found.bounds[0].epsilon
    assert found.refuting
    folder = trained(tmp_path / "parameters", trainer={**trainer, "remedy": "parameters"}, **changes)
    with pytest.raises(NoGuarantee, match="extra-noise"):
        audited(folder, canaries=200)


def test_an_audit_of_a_release_run_writes_nothing_into_its_folder(tmp_path: Path) -> None:
    folder = trained(
        tmp_path / "run", trainer={"kind": "bp"}, mode="release", epochs=2,
        sampler={"scheme": "poisson", "batch_size": 30, "sampling_probability": 0.1},
        protection={"kind": "record", "noise_multiplier": 1.0, "relation": "add_or_remove_one"},
    )  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for place in (None, folder / "audit"):
        with pytest.raises(RunFolderError, match="outside"):
            audited(folder, canaries=100, out=place)
    audited(folder, canaries=100, out=tmp_path / "audit")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    kept = read_audit(tmp_path / "audit" / "one-run.json")
    assert (kept.trials, kept.note) == (100, SYSTEM_NOISE)


LABELS = {"kind": "label-randomized-response", "epsilon": 4.0}


@pytest.mark.parametrize(
    ("kind", "protection", "message"),
    [
        pytest.param("zo", RUN["protection"], "writer of private gradients", marks=pytest.mark.slow),
        ("bp", LABELS, "labels"),
    ],
)
def test_what_cannot_be_audited_is_named(tmp_path: Path, kind: str, protection: Any, message: str) -> None:
    descent = {"lr": 0.01, "momentum": 0.0}
    changes = {"trainer": {"kind": kind}, "protection": protection, "optimizer": descent, "epochs": 1}
    with pytest.raises((NoGuarantee, ConfigError), match=message):
        audited(trained(tmp_path / "run", **changes))


def test_more_canaries_than_weights_are_refused(pdfa: Path) -> None:
    with pytest.raises(ConfigError, match="fewer"):
        audited(pdfa, canaries=5000)


@pytest.mark.slow
def test_the_command_audits_one_training(pdfa: Path, tmp_path: Path) -> None:
    arrays, runner = tmp_path / "records.npz", CliRunner()
    np.savez(arrays, x=data()[0], y=data()[1])
    command = ["audit", str(pdfa), "--one-run", "--data", f"npz:{arrays}", "--out", str(tmp_path / "page")]
    shown = runner.invoke(app, [*command, "--canaries", "200", "--seed", "1"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "page" / "report.html").exists()
    assert (tmp_path / "page" / "one-run.html").exists()
    document = (tmp_path / "page" / "one-run.pdf").read_bytes()
    assert document.count(b"/Type /Page ") == 1
    assert b"595" in document  # A4, in points
    with NAMED["noise_halved"].planted():
        assert runner.invoke(app, [*command, "--canaries", "2000", "--seed", "1"]).exit_code == 1
    assert runner.invoke(app, [*command, "--trials", "40"]).exit_code != 0
    assert runner.invoke(app, ["audit", str(pdfa), "--canaries", "40"]).exit_code != 0


@pytest.mark.parametrize("relation", ["zero_out", pytest.param("replace_one", marks=pytest.mark.slow)])
def test_without_noise_a_step_shows_who_was_in_its_batch(tmp_path: Path, relation: str) -> None:
    """A canary counts as exactly one clip C, times its sign, in a share q of the steps; what others add is known."""
    protection = {"kind": "record", "noise_multiplier": 1e-3, "relation": relation}
    folder = trained(tmp_path / "run", trainer={"kind": "bp"}, epochs=5, protection=protection)
    run = read_run(RunFolder(folder), data(), None)
    plan, observer, inside, _ = _crafted(started_again(run, 3), 500, 3)
    assert isinstance(observer, EntryObserver)
    train_planned(plan, RunFolder(tmp_path / "game"), watcher=observer)
    shown = np.array(observer._readings)
    counts = np.rint(shown)
    np.testing.assert_allclose(shown, counts, atol=0.02)
    out = -1.0 if relation == "replace_one" else 0.0
    assert set(np.unique(counts[:, inside])) == {0.0, 1.0}
    assert set(np.unique(counts[:, ~inside])) == {0.0, out}
    draws, q = counts[:, inside].size, 0.1
    assert abs(counts[:, inside].mean() - q) <= 5 * math.sqrt(q * (1 - q) / draws)


def test_a_claim_is_about_the_relation_of_the_game() -> None:
    """RecordReplaced claims replace_one only, which a game on adding a record must not refute."""
    numbers: dict[str, Any] = {"noise_multiplier": 2.0, "sampling_probability": 0.1, "clip_norm": 1.0}
    replaced = RecordReplaced(**numbers, divisor=1.0, steps=100)
    found = RecordReplaced.guarantees([replaced], delta=1e-5, enforced=True)
    assert claimed_epsilon(found, Adjacency.REPLACE_ONE) == found[0].epsilon
    assert claimed_epsilon(found, Adjacency.ADD_OR_REMOVE_ONE) is None


def test_every_run_of_the_benchmark_has_its_own_seed() -> None:
    seeds = [one_run.seed_of(cell, number) for cell, number in one_run.jobs()]
    assert len(seeds) == len(set(seeds)) > 100


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"nesterov": True}])
def test_descent_is_undone_from_the_weights(options: dict[str, Any], seed: int) -> None:
    section = OptimizerConfig(lr=0.1, weight_decay=0.01, schedule="constant", **options)
    generator = np.random.default_rng(seed)
    parameter = nn.Parameter(torch.from_numpy(generator.standard_normal(50)))
    optimizer, descent = make_optimizer([parameter], section), Steps(section)
    for _ in range(6):
        gradient, before = generator.standard_normal(50), parameter.detach().clone()
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        found = descent.gradient_at(before, parameter.detach(), 0.0)
        np.testing.assert_allclose(found, gradient, atol=1e-9)


@pytest.mark.parametrize("q", [0.1, 1.0])
def test_the_log_ratio_is_that_of_the_two_laws(q: float) -> None:
    z, y = 1.3, np.linspace(-5, 5, 11)

    def density(mean: float) -> np.ndarray:
        return np.exp(-((y - mean) ** 2) / (2 * z * z)) / math.sqrt(2 * math.pi) / z

    present, opposite = ((1 - q) * density(0.0) + q * density(s) for s in (1.0, -1.0))
    for replaces, other in ((False, density(0.0)), (True, opposite)):
        found = log_ratio(y, q=q, z=z, replaces=replaces)
        np.testing.assert_allclose(found, np.log(present / other), atol=1e-9)
