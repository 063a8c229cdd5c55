"""Whole audits of small runs: members are found, protected ones are not, and planted faults are; the attacks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opusim import training
from opusim.accounting.audit import area_under_curve
from opusim.accounting.guarantee import Status
from opusim.errors import ConfigError
from opusim.training.attacks.base import EarlierSteps, steps_needed
from opusim.training.attacks.findings import Audit, Finding, Role, audit_rows, paragraphs, verdict
from opusim.training.attacks.replay import replayed_step
from opusim.training.attacks.run_audit import audit_run, read_run
from opusim.training.attacks.update_attacks import Rows, residual, row_space
from opusim.training.config.sections import OptimizerConfig
from opusim.training.errors import RunFolderError
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.record import RecordGradients
from opusim.training.reports.run_report import write_report
from opusim.training.runs.folder import RunFolder

N, FEATURES = 300, 40
POISSON = {"scheme": "poisson", "batch_size": 12}
RUN = {
    "epochs": 1, "threads": 1, "model": {"hidden": [24]}, "data": {"n_classes": 3}, "sampler": {"batch_size": 12},
    "device": {"name": "gaussian", "noise": {"sigma": 10.0}},
}  # fmt: skip
PROTECTED = {"sampler": POISSON, "protection": {"kind": "record", "noise_multiplier": 4.0}}


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
    assert repr(plain_audit).startswith(f"Audit(epsilon=at least {plain_audit.largest[0]:.4g}, ")
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
def test_a_protected_run_stays_below_its_theorem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the run's own protection forgets its noise, and its theorem is refuted."""
    protected = trained(tmp_path, **PROTECTED)
    honest = audit_run(protected, data=data(), trials=200, seed=7)
    assert honest.controls_hold
    for finding in honest.findings:
        assert finding.role is Role.BROKEN or not finding.refutes
    assert "does not contradict the guarantee" in "\n".join(paragraphs(honest))
    plant_noise(monkeypatch, 0.0)
    broken = audit_run(protected, data=data(), trials=200, seed=7)
    assert of(broken, Role.RUN).refutes
    assert not broken.controls_hold  # the protected control is broken as well
    assert "REFUTED: the step does not do" in "\n".join(paragraphs(broken))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_noise_too_weak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
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
        batch, found = step.records(torch.arange(12), 0), []
        for trial in (0, 1, 0):
            state = step.state_after(batch, trial)
            found.append({name: tensor.clone() for name, tensor in state.items()})
    first, second, again = found
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layer1.weight"], second["layer1.weight"])
    assert torch.equal(first["layer2.weight"], second["layer2.weight"])  # its error crosses no device


SLOW = [pytest.param(kind, name, marks=pytest.mark.slow) for kind, name in (("dfa", "sgd"), ("bp", "adam"))]


@pytest.mark.parametrize(("kind", "optimizer"), [("bp", "sgd"), *SLOW])
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


# The attacks themselves: exact algebra first, then their laws on simulated updates

RATE = 0.27


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _last_gradient(weights: list[Tensor], options: OptimizerConfig) -> Tensor:
    named = [{"w": tensor} for tensor in weights]
    return EarlierSteps.of_weights(named[:-1], options, RATE).gradient("w", weights[-1])


@pytest.mark.parametrize(
    ("momentum", "decay", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.03, False), (0.9, 0.03, True), (0.0, 0.3, False)],
)
def test_momentum_and_decay_are_undone_from_weights(momentum: float, decay: float, nesterov: bool) -> None:
    config = OptimizerConfig(lr=RATE, momentum=momentum, weight_decay=decay, nesterov=nesterov)
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(_normal(generator, 5, 7))
    optimizer = make_optimizer([parameter], config)
    gradients = _normal(generator, 60, 5, 7)
    history = [parameter.detach().clone()]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        history.append(parameter.detach().clone())
    seen = history[-(steps_needed(config) + 2) :]  # what went before is not shown
    torch.testing.assert_close(_last_gradient(seen, config), gradients[-1], rtol=0, atol=1e-9)
    changes = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    without = _last_gradient(seen, config.model_copy(update=changes))  # planted: nothing undone
    assert (float((without - gradients[-1]).abs().max()) > 0.1) is (momentum + decay > 0)


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam", "adamax"])
def test_the_means_of_the_adam_family_tell_the_gradient(name: str, seed: int) -> None:
    config = OptimizerConfig(name=name, lr=RATE, weight_decay=0.03)
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(5, 7, generator=generator))
    optimizer = make_optimizer([parameter], config)
    for _ in range(6):
        weights = parameter.detach().clone()
        before = optimizer.state[parameter]["exp_avg"].clone() if optimizer.state else torch.zeros(5, 7)
        parameter.grad = gradient = torch.randn(5, 7, generator=generator)
        optimizer.step()
        after = optimizer.state[parameter]["exp_avg"]
        for read in ("gradient", "rounded_gradient"):
            earlier = EarlierSteps.of_means({"w": before}, {"w": weights}, config)
            found = getattr(earlier, read)("w", after)
            # the mean is rounded at 2^-24 of its size, and the quotient by 1 - beta1 makes ten times that of it
            torch.testing.assert_close(found.double(), gradient.double(), rtol=0, atol=2e-5)
    planted = EarlierSteps.of_means({"w": before}, {"w": weights}, config.model_copy(update={"beta1": 0.5}))
    assert float((planted.gradient("w", after) - gradient).abs().max()) > 0.1


@pytest.mark.parametrize("sigma", [0.1, 1.0, 1e4])
def test_the_row_space_holds_members_and_no_others_at_any_noise(sigma: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = _normal(generator, 30, 80) + 0.7
    deltas = _normal(generator, 20, 50) + sigma * _normal(generator, 20, 50)
    basis = row_space(deltas.t() @ inputs[:20] / 20, 20)
    assert max(residual(h, basis) for h in inputs[:20]) < 1e-10
    assert min(residual(h, basis) for h in inputs[20:]) > 0.3
    full = deltas.t() @ inputs[:20]
    full += 10 * max(sigma, 1.0) * _normal(generator, 50, 80)
    assert min(residual(h, row_space(full, 20)) for h in inputs[:20]) > 0.01  # noise on the sum hides them


def test_the_likelihood_ratio_equals_that_of_the_densities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, d, n = 40, 6, 9
    inputs, slopes = _normal(generator, m, d), _normal(generator, m, n).abs()
    h, slope, signal, left = (_normal(generator, *shape) for shape in ((d,), (n,), (n,), (n, d)))
    rows = Rows(left, inputs, slopes)
    covariances = [(slopes[:, j, None] * inputs).t() @ (slopes[:, j, None] * inputs) for j in range(n)]
    energy = sum(float(y @ torch.linalg.solve(a, y)) for y, a in zip(left, covariances, strict=True))
    variance = energy / (n * d)
    total = 0.0
    for j, a in enumerate(covariances):
        without = torch.distributions.MultivariateNormal(torch.zeros(d, dtype=torch.float64), variance * a)
        wider = variance * (a + slope[j] ** 2 * torch.outer(h, h))
        within = torch.distributions.MultivariateNormal(signal[j] * h, wider)
        total += float(within.log_prob(left[j]) - without.log_prob(left[j]))
    assert rows.log_likelihood_ratio(h, slope, signal) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_the_covariance_tells_members_without_any_signal_at_any_noise(seed: int) -> None:
    """Batch 400, fan-in 32, 256 rows, a record of 1.4 times the usual norm; a planted noise of its own hides it."""
    generator = torch.Generator().manual_seed(seed)
    coins = [trial % 2 == 0 for trial in range(60)]
    found, louder, hidden = [], [], []
    for present in coins:
        inputs = _normal(generator, 401, 32)
        inputs[400] *= 2**0.5
        slopes = torch.rand(401, 256, generator=generator, dtype=torch.float64)
        noise, n = _normal(generator, 401, 256) * slopes, 400 + present
        for scores, sigma, kept in ((found, 0.1, n), (louder, 1e4, n), (hidden, 0.1, 400)):
            rows = Rows(sigma * noise[:kept].t() @ inputs[:kept], inputs[:400], slopes[:400])
            silence = torch.zeros(256, dtype=torch.float64)
            scores.append(rows.log_likelihood_ratio(inputs[400], slopes[400], silence))
    assert found == pytest.approx(louder, rel=1e-6)
    standard_error = (1 / 12 * (1 / 30 + 1 / 30)) ** 0.5
    assert _auc(found, coins) - 0.5 > 5 * standard_error
    assert abs(_auc(hidden, coins) - 0.5) < 5 * standard_error


def _auc(scores: list[float], coins: list[bool]) -> float:
    values, present = np.array(scores), np.array(coins)
    return area_under_curve(values[present], values[~present])


def test_auc_counts_pairs() -> None:
    first, second = np.array([3.0, 1.0, 2.0]), np.array([2.0, 0.0])
    pairs = [(a > b) + (a == b) / 2 for a in first for b in second]
    assert area_under_curve(first, second) == pytest.approx(np.mean(pairs))
