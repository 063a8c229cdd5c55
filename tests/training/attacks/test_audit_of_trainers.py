"""Audits of zeroth order, unified likelihood ratio and convex runs: members are found, and noise that is too weak."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from torch import nn

from opusim import training
from opusim.accounting.guarantee import Adjacency, NoGuarantee
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.records import RecordCentral, RecordReplaced
from opusim.training.attacks import base
from opusim.training.attacks.base import KeptTerms, NotedTerms, OuterProducts
from opusim.training.attacks.findings import Audit, Finding, Role
from opusim.training.attacks.replay import MembershipGame, noiseless_steps, replayed_step
from opusim.training.attacks.run_audit import audit_run, read_run
from opusim.training.attacks.update_attacks import DifferenceAttack
from opusim.training.convex.trainer import ConvexTrainer
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.record import RecordGradients
from opusim.training.runs.folder import RunFolder
from opusim.training.zeroth_order.trainer import ScalarRelease

N, FEATURES, TRIALS = 300, 20, 120
COMMON: dict[str, Any] = {
    "epochs": 1, "threads": 1, "data": {"n_classes": 3}, "sampler": {"scheme": "poisson", "batch_size": 12},
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "zo": {"trainer": {"kind": "zo"}, "model": {"hidden": [24]}, "optimizer": {"lr": 0.02, "momentum": 0.0}},
    "zo, laplace": {
        "trainer": {"kind": "zo", "law": "laplace", "directions": 2},
        "model": {"hidden": [24]},
        "optimizer": {"lr": 0.02, "momentum": 0.0, "weight_decay": 0.01},
    },
    "ulr": {"trainer": {"kind": "ulr"}, "model": {"hidden": [24]}},
    "convex": {
        "trainer": {"kind": "convex", "hyperplanes": 8, "regularisation": 0.01},
        "optimizer": {"lr": 0.5, "momentum": 0.0},
    },
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name != "zo" else []) for name in RUNS]
MULTIPLIER = {"zo": 4.0, "zo, laplace": 8.0, "ulr": 4.0, "convex": 8.0}


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(N, FEATURES)), np.arange(N) % 3


def trained(folder: Path, name: str, **changes: Any) -> Path:
    training.train({**COMMON, **RUNS[name], **changes}, data=data(), folder=folder)
    return folder


def protected(folder: Path, name: str) -> Path:
    clip = {"clip_norm": 2e-4} if name.startswith("zo") else {}  # most records reach it
    protection = {"kind": "record", "noise_multiplier": MULTIPLIER[name], **clip}
    return trained(folder, name, protection=protection)


def of(audit: Audit, role: Role) -> Finding:
    (finding,) = [f for f in audit.findings if f.role is role and f.attack == "difference"]
    return finding


def within_theorem(finding: Finding, name: str) -> bool:
    """Whether a game's AUC exceeds that of the best attack by five standard errors at most.

    That is 1/2 + T - T^2 / 2 at most, T the total variation: tanh(epsilon / 2) for Laplace, and for Gaussian noise it
    is Phi(mu / sqrt(2)), mu = 1 / z.
    """
    mu = 1 / MULTIPLIER[name]
    variation = np.tanh(mu)
    best = 0.5 + variation - variation**2 / 2 if "laplace" in name else ndtr(mu / np.sqrt(2))
    error = np.sqrt((TRIALS + 1) / (3 * TRIALS**2))  # of an AUC near 1/2, half of the trials with the record
    return bool(finding.auc < best + 5 * error)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_members_of_an_unprotected_step_are_found(tmp_path: Path, name: str) -> None:
    trainer = {key: value for key, value in RUNS[name]["trainer"].items() if key != "law"}  # of no noise
    found = audit_run(trained(tmp_path, name, trainer=trainer), data=data(), trials=TRIALS, seed=7)
    assert of(found, Role.RUN).auc == 1.0
    assert of(found, Role.RUN).result.epsilon_lower == of(found, Role.RUN).result.ceiling > 1.8
    assert found.controls_hold


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_protected_step_stays_below_its_theorem(tmp_path: Path, name: str) -> None:
    found = audit_run(protected(tmp_path, name), data=data(), trials=TRIALS, seed=7)
    assert found.controls_hold
    expected = 0.25 if "laplace" in name else 0.926
    for role in (Role.RUN, Role.PROTECTED):
        assert of(found, role).claim.epsilon == pytest.approx(expected, abs=0.001)
        assert within_theorem(of(found, role), name)
    assert not within_theorem(of(found, Role.BROKEN), name)


REPLACE_ONE = pytest.param(Adjacency.REPLACE_ONE, marks=pytest.mark.slow)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, REPLACE_ONE])
@pytest.mark.parametrize(
    ("protects", "kind", "planted"),
    [
        (True, "pdfa", False), (True, "dfa", False), (True, "pdfa", True),
        pytest.param(True, "bp", False, marks=pytest.mark.slow),
        pytest.param(False, "pdfa", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_single_records_stand_for_batches_only_if_updates_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adjacency: Adjacency, protects: bool, kind: str, planted: bool,
) -> None:  # fmt: skip
    """All ways to look at a record-protected step agree; a mean over the batch, or wrong terms, are looked at in full.

    The batches of dfa are filled up to a fixed number of rows. Planted: the terms of the last layer are 5 % too small.
    """
    protection = {"kind": "record", "noise_multiplier": 1.0, "relation": adjacency.value} if protects else {}
    if kind == "dfa":
        protection["fixed_batches"] = True
    config = {**COMMON, "trainer": {"kind": kind}, "model": {"hidden": [24]}, "protection": protection}
    training.train(config, data=data(), folder=tmp_path)
    if planted:
        _weaken_terms(monkeypatch)
    run = read_run(RunFolder(tmp_path), data())
    groups = [["layer1.weight", "layer1.bias"], ["layer2.weight", "layer2.bias"]]
    with noiseless_steps(run, run.plan) as noiseless, replayed_step(run, run.plan) as step:
        assert noiseless is not None
        attacks = [DifferenceAttack(noiseless, groups=groups) for _ in range(3)]
        attacks[1].has_terms = False  # takes steps on single records
        attacks[2].has_terms = attacks[2].adds_up = False  # takes steps on both batches
        game = MembershipGame(step, adjacency=adjacency, seed=3)
        for number in range(8):
            trial = game.play(number, first_world=False)
            for attack in attacks:
                attack.learn(trial)
        assert attacks[0].has_terms is (protects and not planted)
        assert [attack.adds_up for attack in attacks] == [protects, protects, False]
        for number in range(8, 16):
            trial = game.play(number, first_world=number % 2 == 0)
            of_terms, single, whole = (a.score(trial.observation, trial.candidates) for a in attacks)
            assert of_terms == pytest.approx(single, rel=0.02, abs=0.02)
            assert single == pytest.approx(whole, rel=0.02, abs=0.02)


def _weaken_terms(patch: pytest.MonkeyPatch) -> None:
    before = NotedTerms._write

    def write(self: NotedTerms, *arguments: Any, **options: Any) -> None:
        before(self, *arguments, **options)
        self.noted[-1:] = [replace(one, signals=0.95 * one.signals) for one in self.noted[-1:]]

    patch.setattr(NotedTerms, "_write", write)


def test_terms_that_do_not_fit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for four of ten records, every batch of four still gets its own rows, and one of five gets none."""
    network = FullyConnected(nn.Sequential(nn.Linear(2, 3)))
    monkeypatch.setattr(base, "_MOST_NUMBERS", 4 * 6)
    kept = KeptTerms({}, network, 10)
    for first in (0, 2, 6, 1):
        numbers = torch.arange(first, first + 4)
        lacking = kept.missing(numbers)
        assert lacking is not None
        missing = numbers[lacking]
        rows = missing[:, None].float()
        kept.add(missing, [OuterProducts(signals=rows.expand(-1, 3), inputs=-rows.expand(-1, 3))])
        (found,) = kept.of(numbers)
        assert found.signals[:, 0].tolist() == numbers.tolist()
        assert found.inputs[:, 2].tolist() == (-numbers).tolist()
    assert kept.missing(torch.arange(5)) is None


def _with_less(option: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A constructor that takes a twentieth of its noise."""

    def weaker(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, **options: init(self, **{**options, option: 0.05 * options.get(option, 0.0)})

    return weaker


def _weaker_descent(opens: Callable[..., None]) -> Callable[..., None]:
    def weaker(self: ConvexTrainer, *arguments: Any) -> None:
        opens(self, *arguments)
        self.noise_std *= 0.05

    return weaker


WEAKER: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "zo": (ScalarRelease, "__init__", _with_less("scale")),
    "zo, laplace": (ScalarRelease, "__init__", _with_less("scale")),
    "ulr": (RecordGradients, "__init__", _with_less("noise_multiplier")),
    "convex": (ConvexTrainer, "open", _weaker_descent),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_twentieth_of_noise_is_found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the trainer adds too little, and its theorem is refuted."""
    run = protected(tmp_path, name)
    owner, method, weaker = WEAKER[name]
    monkeypatch.setattr(owner, method, weaker(getattr(owner, method)))
    assert of(audit_run(run, data=data(), trials=TRIALS, seed=7), Role.RUN).refutes


@pytest.mark.slow
def test_a_released_run_is_played_with_directions_that_the_attacker_knows(tmp_path: Path) -> None:
    protection = {"kind": "record", "noise_multiplier": 0.01, "clip_norm": 2e-4}
    run = trained(tmp_path / "run", "zo", mode="release", protection=protection)
    found = audit_run(run, data=data(), out=tmp_path / "audit", trials=40, seed=7)
    assert of(found, Role.RUN).auc == 1.0


def test_a_module_of_a_persons_own_is_given_again(tmp_path: Path) -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Softplus(), nn.Linear(8, 3))

    training.train({**COMMON, **RUNS["zo"], "model": {}}, data=data(), model=module(), folder=tmp_path)
    found = audit_run(tmp_path, data=data(), model=module(), trials=40, seed=7)
    assert of(found, Role.RUN).auc == 1.0


@pytest.mark.slow
def test_a_published_likelihood_ratio_is_looked_at_in_its_row_space(tmp_path: Path) -> None:
    published = {"kind": "ulr", "form": "published", "copies": 4}
    run = trained(
        tmp_path, "ulr", trainer=published,
        sampler={"scheme": "poisson-min-batch", "batch_size": 4, "min_batch_size": 2},
    )  # fmt: skip
    found = audit_run(run, data=data(), trials=40, seed=7)
    assert {f.attack for f in found.findings if f.role is Role.RUN} == {"row space"}
    assert {f.attack for f in found.findings if f.role is Role.BROKEN} == {"row space", "difference"}


def test_a_last_iterate_is_audited_by_a_game_of_its_last_model(tmp_path: Path) -> None:
    run = trained(
        tmp_path, "convex", sampler={"scheme": "disjoint-cyclic", "batch_size": 50},
        protection={"kind": "last-iterate", "epsilon": 3.0},
    )  # fmt: skip
    found = audit_run(run, data=data(), trials=40, seed=3)
    assert "last" in found.game
    assert not any(finding.refutes for finding in found.findings if finding.role is Role.RUN)


@pytest.mark.slow
def test_a_full_batch_of_few_records_is_audited(tmp_path: Path) -> None:
    """The scheme leaves sampler.batch_size unused, so that its default may exceed the number of records."""
    few = [side[:100] for side in data()]
    config = {**COMMON, **RUNS["convex"], "sampler": {"scheme": "full-batch"}}
    training.train(config, data=(few[0], few[1]), folder=tmp_path)
    found = audit_run(tmp_path, data=(few[0], few[1]), trials=40, seed=7)
    assert of(found, Role.RUN).auc == 1.0
    assert not of(found, Role.PROTECTED).refutes


def test_a_mechanism_without_a_known_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = protected(tmp_path, "convex")
    monkeypatch.setattr(RecordCentral, "known_batch", Mechanism.known_batch)
    monkeypatch.setattr(RecordReplaced, "known_batch", Mechanism.known_batch)
    with pytest.raises(NoGuarantee, match="states no guarantee for an attacker who knows the batch"):
        audit_run(folder, data=data(), trials=40, seed=7)
