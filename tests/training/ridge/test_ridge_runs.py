"""Ridge runs: the closed form, the one release, and what stays true when a run is stopped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opusim import training
from opusim.accounting.composition import guarantees
from opusim.accounting.guarantee import BudgetExceeded, LedgerCorrupt
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import mechanism_from_json
from opusim.accounting.mechanisms.labels import LabelRelease, noise_of
from opusim.errors import ConfigError
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import NoiseStream, SystemStream
from opusim.training.attacks.findings import Role
from opusim.training.attacks.run_audit import audit_run
from opusim.training.config.kinds import without_derived
from opusim.training.config.run import load_config
from opusim.training.protections import noisy_labels, released_model
from opusim.training.protections.released_model import Design, public_design
from opusim.training.ridge.algorithm import RidgeTrainer
from opusim.training.runs.folder import RunFolder
from opusim.training.runs.storage import read_array

FEATURES, CLASSES, RECORDS = 39, 5, 300
PLAIN: dict[str, Any] = {
    "threads": 1, "trainer": {"kind": "ridge", "ridge": 0.05},
    "data": {"n_classes": CLASSES, "standardise": False, "validation_fraction": 0.0},
}  # fmt: skip
LABELS = {"kind": "label-release", "epsilon": 2.0}
PROTECTED = {**PLAIN, "protection": LABELS}


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    y = np.arange(RECORDS) % CLASSES
    centres = generator.normal(size=(CLASSES, FEATURES))
    return (centres[y] + 2 * generator.normal(size=(RECORDS, FEATURES))).astype(np.float32), y


def weights_of(run: training.Run) -> np.ndarray:
    (linear,) = run.model
    return np.column_stack([linear.weight.detach().numpy(), linear.bias.detach().numpy()])


def closed_form(ridge: float) -> np.ndarray:
    """Without the code under test."""
    x, y = data()
    h = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    s = h.T @ h
    targets = np.eye(CLASSES)[y] - 1 / CLASSES
    return np.linalg.solve(s + ridge * np.trace(s) / len(s) * np.eye(len(s)), h.T @ targets).T


def test_a_run_without_protection_is_the_closed_form(tmp_path: Path) -> None:
    run = training.train(PLAIN, data=data(), folder=tmp_path / "run")
    assert weights_of(run) == pytest.approx(closed_form(0.05), rel=1e-5, abs=1e-7)
    assert (run.config.epochs, run.config.sampler.scheme, run.summary["steps"]) == (1, "full-batch", 1)
    assert run.summary["train_accuracy"] > 0.8
    assert weights_of(training.load_run(tmp_path / "run")) == pytest.approx(weights_of(run), abs=0)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_protected_run_states_its_one_release(tmp_path: Path, mode: str) -> None:
    run = training.train({**PROTECTED, "mode": mode}, data=data(), folder=tmp_path)
    (guarantee,) = run.guarantees
    assert (guarantee.status, guarantee.unit, guarantee.adjacency) == ("proven", "label", "replace_one")
    assert 1.99 < guarantee.epsilon <= 2.0
    payments = read_ledger(tmp_path / "ledger.jsonl").payments
    assert [(payment.name, len(payment.mechanisms)) for payment in payments] == [("model", 1)]
    assert weights_of(run) == pytest.approx(read_array(tmp_path / "labels.safetensors"), rel=1e-6, abs=1e-9)
    (metrics,) = run.folder.read_metrics()
    assert ("train_accuracy" in metrics) == (mode == "experiment")


def whitened_noise(folder: Path, seed: int, changes: dict[str, Any]) -> np.ndarray:
    """The noise of a run, which should have independent N(0, 1), without the code that drew it."""
    run = training.train({**PROTECTED, **changes, "seed": seed}, data=data(), folder=folder)
    x, y = (torch.from_numpy(each) for each in data())
    options = run.config.protection
    design = Design.levelled(x, ridge=0.05, rounds=options.rounds, level=options.level)
    mechanism: Any = read_ledger(folder / "ledger.jsonl").mechanisms[0]
    factor = design.metric.factor.numpy()
    h = np.column_stack([x.numpy(), np.ones(len(x))]) * design.weights.numpy()[:, None]
    clean = np.linalg.solve(factor @ factor.T, h.T @ (np.eye(CLASSES)[y] - 1 / CLASSES)).T
    noise = read_array(folder / "labels.safetensors") - clean
    largest = design.label_sums(x, y, CLASSES).largest
    return np.asarray(noise @ factor / noise_of(mechanism.mu, largest))


CASES: dict[str, dict[str, Any]] = {
    "digital": {},
    "all weights 1": {"protection": {**LABELS, "rounds": 0}},
    "device": {"protection": {**LABELS, "noise": "device"}, "device": {"name": "gaussian", "noise": {"sigma": 0.3}}},
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_the_noise_of_runs_is_that_of_the_theorem(tmp_path: Path, name: str) -> None:
    """White and of variance 1 after whitening, in each run another; 10 % less of it is noticed."""
    noise = np.stack([whitened_noise(tmp_path / str(seed), seed, CASES[name]) for seed in range(24)])
    flat = noise.ravel()

    def deviation(values: np.ndarray) -> float:
        error = (2 / len(values)) ** 0.5
        return max(abs(values.mean()) * len(values) ** 0.5, abs(values.var() - 1) / error)

    assert deviation(flat) < 5
    assert deviation(0.9 * flat) > 5
    rows = noise.reshape(-1, FEATURES + 1)  # neighbouring weights, classes and runs are uncorrelated
    pairs = (rows[:, 1:], rows[:, :-1]), (noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])
    for first, second in pairs:
        assert abs((first * second).mean()) * first.size**0.5 < 5
    if name == "device":
        run = training.load_run(tmp_path / "0")
        assert [each.status for each in run.guarantees] == ["proven under a device model"]


def float32_gap(values: np.ndarray) -> float:
    """Mean distance of numbers from the nearest float32 number, in half spacings: near 0 only for float32 numbers."""
    nearest = values.astype(np.float32)
    return float(np.mean(np.abs(values - nearest) / (np.abs(nearest) * 2.0**-24)))


@pytest.mark.parametrize("exactly_rounded", [True, False])
def test_a_released_model_fits_every_label_of_a_record_equally_well(
    tmp_path: Path, exactly_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knows all other labels subtracts them: the rest tells nothing; float32 noise, the fault, names the label."""
    if not exactly_rounded:

        def added(stream: NoiseStream, count: int, scale: float, law: str = "gaussian") -> Any:
            normals = stream.normal((count,)).double()
            return SimpleNamespace(added_to=lambda values: values + scale * normals.view(values.shape))

        monkeypatch.setattr(SystemStream, "rounded", added)
    run = training.train({**PROTECTED, "mode": "release"}, data=data(), folder=tmp_path)
    x, y = (torch.from_numpy(each) for each in data())
    options, (paid,) = run.config.protection, read_ledger(tmp_path / "ledger.jsonl").mechanisms
    assert paid.exactly_rounded
    design = Design.levelled(x, ridge=0.05, rounds=options.rounds, level=options.level)
    sums = design.label_sums(x, y, CLASSES)
    sigma = noise_of(paid.mu, sums.largest)
    model = read_array(tmp_path / "labels.safetensors")
    solved = model @ design.metric.factor.numpy() + sums.total.numpy() / CLASSES  # R, up to rounding
    seen = solved
    if exactly_rounded:
        seen = np.rint(solved / grid_of(sigma)) * grid_of(sigma)
    gaps = []
    for guess in range(CLASSES):
        labels = y.clone()
        labels[0] = guess
        gaps.append(float32_gap((seen - design.label_sums(x, labels, CLASSES).by_class.numpy()) / sigma))
    named = int(np.argmin(gaps)) == int(y[0]) and sorted(gaps)[0] < 0.1 * sorted(gaps)[1]
    assert named != exactly_rounded
    if exactly_rounded:
        grid_steps = solved / grid_of(sigma)
        assert np.abs(grid_steps - np.rint(grid_steps)).max() < 1e-6
        texts = [each.text for each in run.guarantees[0].assumptions]
        assert not any("is not attacked" in text for text in texts)
        assert any("exactly rounded number" in text for text in texts)


def test_a_ledger_of_the_first_version_keeps_its_rounding_on_trust() -> None:
    content = LabelRelease(mu=0.7).to_json()
    del content["exactly_rounded"]
    (stated,) = guarantees([mechanism_from_json(content)], delta=1e-5)
    assert any("rounding of floating-point numbers is not attacked" in a.text for a in stated.assumptions)


def test_noise_of_a_device_without_any_is_refused_before_the_run(tmp_path: Path) -> None:
    config = {**PROTECTED, **CASES["device"], "device": {"name": "ideal"}}
    with pytest.raises(ConfigError, match=r"protection\.noise.*use 'digital'"):
        training.train(config, data=data(), folder=tmp_path / "run")
    training.train({**config, "device": CASES["device"]["device"]}, data=data(), folder=tmp_path / "run")


def fail(*_: Any, **__: Any) -> None:
    raise OSError("killed")


def killed(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], config: dict, folder: Path) -> None:
    """Train until a function is called, at which the run ends."""
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        with pytest.raises(OSError, match="killed"):
            training.train(config, data=data(), folder=folder)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_killed_run_takes_its_release(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, (RidgeTrainer, "step"), {**PROTECTED, "mode": mode}, tmp_path)
    kept = read_array(tmp_path / "labels.safetensors")
    run = training.train(folder=tmp_path, resume=True, data=data())
    assert np.array_equal(read_array(tmp_path / "labels.safetensors"), kept)
    assert weights_of(run) == pytest.approx(kept, rel=1e-6, abs=1e-9)
    assert len(read_ledger(tmp_path / "ledger.jsonl").payments) == 1


def test_a_run_killed_before_its_release_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise again in experiment mode; in release mode it would be other noise, which the budget refuses."""
    for mode in ("experiment", "release"):
        killed(monkeypatch, (noisy_labels, "write_array"), {**PROTECTED, "mode": mode}, tmp_path / mode)
    run = training.train(folder=tmp_path / "experiment", resume=True, data=data())
    whole = training.train(PROTECTED, data=data(), folder=tmp_path / "whole")
    assert np.array_equal(weights_of(run), weights_of(whole))
    assert len(read_ledger(tmp_path / "experiment" / "ledger.jsonl").payments) == 1
    with pytest.raises(BudgetExceeded, match="'model' was paid for"):
        training.train(folder=tmp_path / "release", resume=True, data=data())
    assert not RunFolder(tmp_path / "release").labels_file.exists()


def test_a_model_that_is_not_paid_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, (released_model, "public_design"), PROTECTED, tmp_path)
    noisy_labels.write_array(tmp_path / "labels.safetensors", np.zeros((CLASSES, FEATURES + 1)))
    with pytest.raises(LedgerCorrupt, match="does not pay for labels"):
        training.train(folder=tmp_path, resume=True, data=data())


@pytest.mark.parametrize(("changes", "message"), [
    ({"epochs": 2}, "epochs: 2 is not for trainer.kind = 'ridge'"),
    ({"sampler": {"scheme": "poisson"}}, "sampler.scheme: 'poisson' is not for trainer.kind = 'ridge'"),
    ({"sampler": {"batch_size": 100}}, "sampler.batch_size: 100 does nothing here"),
    ({"optimizer": {"lr": 0.1}}, "optimizer.lr: 0.1 does nothing here"),
    ({"model": {"hidden": [5]}}, "model.hidden: .* does nothing here"),
    ({"protection": {"kind": "record", "epsilon": 1.0}}, "'record' is not for trainer.kind = 'ridge'"),
    ({"trainer": {"kind": "bp"}}, "'label-release' is not for trainer.kind = 'bp'"),
    ({"protection": {"rounds": 0, "level": 2.0}}, "protection.level: 2.0 does nothing here"),
    ({"protection": {"noise": "device"}, "device": None}, None),
])  # fmt: skip
def test_what_would_do_nothing_is_refused(changes: dict[str, Any], message: str | None) -> None:
    base = {"trainer": {"kind": "ridge"}, "protection": {"kind": "label-release", "epsilon": 1.0}}
    config = {**base, **{key: value for key, value in changes.items() if value is not None}}
    if "protection" in changes:
        config["protection"] = {**base["protection"], **changes["protection"]}
    if message is None:
        assert load_config(config).uses_device
        return
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_an_audit_plays_its_release(tmp_path: Path) -> None:
    training.train(PROTECTED, data=data(), folder=tmp_path)
    found = audit_run(tmp_path, data=data(), trials=2048, seed=1)
    run, broken = (next(f for f in found.findings if f.role is role) for role in (Role.RUN, Role.BROKEN))
    assert 0 < run.result.epsilon_lower <= run.claim.epsilon < broken.result.epsilon_lower


def test_the_number_of_epochs_follows_the_trainer() -> None:
    ridge = load_config({"trainer": {"kind": "ridge"}, "protection": {"epsilon": 1.0}})
    assert (ridge.epochs, type(ridge.protection).__name__) == (1, "LabelReleaseConfig")
    resolved = ridge.model_dump(mode="json")
    changes = {"trainer": {"kind": "bp"}}
    assert "epochs" not in without_derived(resolved, changes)
    assert without_derived(resolved, {**changes, "epochs": 1})["epochs"] == 1
    assert without_derived(resolved, {"seed": 3})["epochs"] == 1


def test_a_kept_design_is_that_of_the_same_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for known data behind a public map; a cut file, other settings and other features are computed again."""
    monkeypatch.setenv("OPUSIM_CACHE", str(tmp_path))
    counted: list[int] = []
    original = Design.levelled.__func__  # type: ignore[attr-defined]

    def levelled(cls: Any, *args: Any, **settings: Any) -> Any:
        counted.append(1)
        return original(cls, *args, **settings)

    monkeypatch.setattr(Design, "levelled", classmethod(levelled))
    settings: dict[str, Any] = {"cached": True, "ridge": 0.01, "rounds": 1, "level": 1.0}
    x = torch.from_numpy(data()[0])
    first, again = public_design(x, **settings), public_design(x, **settings)
    assert len(counted) == 1
    assert torch.equal(first.metric.factor, again.metric.factor)
    assert torch.equal(first.weights, again.weights)
    assert first.ridge == again.ridge
    (file,) = (tmp_path / "features").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert torch.equal(public_design(x, **settings).weights, first.weights)
    public_design(x + 1, **settings)
    assert len(counted) == 3
