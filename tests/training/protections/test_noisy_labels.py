"""Labels that are looked at once: what is read, what it costs, and that nothing else tells of them."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import norm

from opusim import open_device, training
from opusim.accounting.guarantee import BudgetExceeded
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout, RandomizedResponse
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream
from opusim.training.errors import RunInterrupted
from opusim.training.feedback.projection import _CALIBRATION_STEP
from opusim.training.protections import base, noisy_labels
from opusim.training.protections.noisy_labels import randomize, read_once_through
from opusim.training.runs.storage import read_array
from tests.oracles.label_readings import posterior_targets
from tests.support.discrete_noise import DiscreteNoise
from tests.support.run_folders import equal, newest

K, N, MU = 4, 20_000, 0.83
LIMIT = float(norm.isf(norm.sf(5.0) / 2))  # mean and variance


def stream(seed: int) -> SeededStream:
    return SeededStream(seed, "label-noise")


def law_deviation(ratios: np.ndarray, mu: float) -> float:
    """How far log-likelihood ratios are from N(mu^2/2, mu^2), in standard errors."""
    of_mean = abs(ratios.mean() - mu**2 / 2) / (mu / len(ratios) ** 0.5)
    of_variance = abs(ratios.var() - mu**2) / (mu**2 * (2 / len(ratios)) ** 0.5)
    return float(max(of_mean, of_variance))


def likelihoods(n: int = 7) -> torch.Tensor:
    return 3 * torch.randn(n, K, generator=torch.Generator().manual_seed(1))


def test_targets_are_the_posterior_with_a_flat_prior_and_then_with_the_models() -> None:
    labels = noisy_labels.NoisyLabels(log_likelihood=likelihoods(), flat_steps=5)
    output = 2 * torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    records = torch.tensor([6, 0, 3])
    scores = likelihoods()[records].double().numpy()
    flat, informed = posterior_targets(np.zeros((3, K)), scores), posterior_targets(output.numpy(), scores)
    for step, expected in ((0, flat), (4, flat), (5, informed), (99, informed)):
        targets = labels.targets(output, records, step)
        np.testing.assert_allclose(targets.numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(targets.sum(dim=1).numpy(), 1.0, rtol=1e-6)
    assert np.abs(flat - informed).max() > 0.01


def shared(ratios: np.ndarray) -> float:
    """Correlation of the first half of the records with the second, in standard errors."""
    first, second = np.split(ratios, 2)
    return abs(float(np.corrcoef(first, second)[0, 1])) * len(first) ** 0.5


def device_of(sigma: float, seed: int = 4) -> NoisyDevice:
    return open_device("gaussian", n_inputs=K, n_outputs=40, seed=seed, noise={"sigma": sigma})


@pytest.mark.parametrize(
    ("sigma", "topped_up", "fault"), [(0.7, True, False), (60.0, False, False), (0.7, True, True)]
)
def test_a_reading_of_a_device_has_the_law_that_is_paid_for(
    sigma: float, topped_up: bool, fault: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mu = max_ab ||B_a - B_b|| / sigma_total, of the device's noise and what is added; planted: nothing is added."""
    if fault:
        monkeypatch.setattr(SeededStream, "add_to", lambda self, y, std: y)
    paid: list[Mechanism] = []
    device = device_of(sigma, seed=seed % 2**31)
    b = device.matrix().double().numpy()
    gaps = np.linalg.norm(b[:, :, None] - b[:, None, :], axis=0)
    first, second, gap = *map(int, np.unravel_index(gaps.argmax(), gaps.shape)), float(gaps.max())
    assert topped_up == (gap / MU > sigma)
    scores = read_once_through(device, torch.full((N,), first), K, mu=MU, noise=stream(seed), pay=paid.append)
    (mechanism,) = paid
    assert isinstance(mechanism, LabelReadout)
    assert mechanism.device_law
    assert mechanism.mu == pytest.approx(MU if topped_up else gap / sigma, rel=1e-9)
    assert mechanism.mu <= MU
    ratios = (scores[:, first] - scores[:, second]).double().numpy()
    assert (law_deviation(ratios, mechanism.mu) > LIMIT) == fault
    assert device.usage.frames == 2 * N  # each label was read once
    if not fault:
        assert law_deviation(1.1 * ratios, mechanism.mu) > LIMIT
        assert shared(ratios) < 5
        assert shared(np.tile(ratios[: N // 2], 2)) > 5  # planted: two records share their noise


def hardware(name: str, noise: Any, *more: str) -> Any:
    """A device that no monitor compares."""
    can = frozenset({"project", "draw", *more})
    matrix = partial(torch.zeros, 3, K)
    return SimpleNamespace(name=name, capabilities=can, noise=noise, matrix=matrix, credit_noise=lambda: None)


COIN = DiscreteNoise(values=np.array([-1.0, 1.0]), log_masses=np.log([0.5, 0.5]))


@pytest.mark.parametrize(("device", "message"), [
    (open_device("ideal", n_inputs=K, n_outputs=40), "'ideal' .*standard deviation 0 .*above 0"),
    (hardware("hardware", device_of(1.0).noise), "'hardware', whose matrix is not known"),
    (hardware("counter", COIN, "matrix"), "'counter' .*discrete.*Gaussian law"),
])  # fmt: skip
def test_devices_without_noise_to_credit_are_refused_before_they_are_paid(device: Any, message: str) -> None:
    paid: list[Mechanism] = []
    with pytest.raises(ConfigError, match=f"protection.noise.*{message}.*another device"):
        read_once_through(device, torch.zeros(3).long(), K, mu=MU, noise=stream(1), pay=paid.append)
    assert not paid


def test_responses_follow_the_mechanism(seed: int) -> None:
    """Frequencies of every pair of labels, five standard errors over the family; 5 % of epsilon more is caught."""
    mechanism, n = RandomizedResponse.from_epsilon(1.3, K), 10 * N / K
    paid: list[Mechanism] = []
    labels = torch.arange(10 * N) % K
    scores = randomize(labels, mechanism, np.random.default_rng(seed), pay=paid.append)
    assert paid == [mechanism]
    counts = np.zeros((K, K))
    np.add.at(counts, (labels.numpy(), scores.argmax(dim=1).numpy()), 1)

    def deviation(epsilon: float) -> float:
        other = 1 / (math.exp(epsilon) + K - 1)
        law = other + (1 - K * other) * np.eye(K)
        return float(np.max(np.abs(counts / n - law) / np.sqrt(law * (1 - law) / n)))

    assert deviation(1.3) < norm.isf(norm.sf(5.0) / K**2) < deviation(1.05 * 1.3)
    probabilities = np.exp(scores.double().numpy())
    np.testing.assert_allclose(probabilities.max(axis=1), mechanism.keep_probability, rtol=1e-6)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-6)


def test_nothing_unpaid_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=BudgetExceeded("no"))
    for name in ("normal", "add_to"):
        monkeypatch.setattr(SeededStream, name, lambda *_: pytest.fail("noise was drawn"))
    monkeypatch.setattr(noisy_labels, "respond", lambda *_, **__: pytest.fail("a response was drawn"))
    labels, response = torch.zeros(3).long(), RandomizedResponse.from_epsilon(1.0, K)
    with pytest.raises(BudgetExceeded):
        read_once_through(device_of(0.5), labels, K, mu=1.0, noise=stream(1), pay=refuse)
    with pytest.raises(BudgetExceeded):
        randomize(labels, response, np.random.default_rng(0), pay=refuse)


ONCE = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3}, "sampler": {"batch_size": 16},
    "device": {"name": "gaussian", "noise": {"sigma": 0.5}},
    "protection": {"kind": "label-readout", "noise": "device", "epsilon": 2.0},
}  # fmt: skip


def config_of(kind: str, **protection: Any) -> dict[str, Any]:
    return {**ONCE, "protection": {"kind": kind, "epsilon": 2.0, **protection}}


DATA = np.random.default_rng(1).normal(size=(60, 5)), np.arange(60) % 3
KINDS = [
    config_of("label-readout", noise="device"),
    config_of("label-randomized-response"),
    config_of("label-randomized-response", stages=2),
]
IDS = ["once", "response", "response in stages"]
LOOKS = (
    noisy_labels.LabelReadoutProtection,
    noisy_labels.RandomizedResponseProtection,
    noisy_labels.StagedResponseProtection,
)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_true_labels_reach_no_weights(tmp_path: Path, config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data sets that differ in labels alone, given the same labels.safetensors, end in the same weights."""
    x, y = DATA
    training.train(config, data=(x, y), folder=tmp_path / "first")
    kept = torch.from_numpy(read_array(tmp_path / "first" / "labels.safetensors"))
    for protection in LOOKS:
        look = protection.look  # it pays, and then gives what the other run's look found
        monkeypatch.setattr(protection, "look", lambda *given, look=look: (look(*given), kept)[1])
    training.train(config, data=(x, (y + 1) % 3), folder=tmp_path / "second")
    assert equal(newest(tmp_path / "first"), newest(tmp_path / "second"))
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("first", "second")]
    assert metrics[0] != metrics[1]  # where accuracies on true labels stand: experiment mode


def test_planted_fault_true_labels_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = DATA
    kept = likelihoods(54)[:, :3]
    look = "opusim.training.protections.noisy_labels.LabelReadoutProtection.look"
    monkeypatch.setattr(look, lambda self, device, pay: (pay(LabelReadout(mu=0.1)), kept)[1])
    monkeypatch.setattr("opusim.training.feedback.closed_form.Batch.targets", lambda self, output: self.y)
    for name, labels in (("first", y), ("second", (y + 1) % 3)):
        training.train(ONCE, data=(x, labels), folder=tmp_path / name)
    assert not equal(newest(tmp_path / "first"), newest(tmp_path / "second"))


def readings_of(config: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every reading of every seeded stream in a run: seed of the stream, step, number within the step."""
    readings: list[tuple[int, int, int]] = []
    following = SeededStream._next_reading

    def recorded(self: SeededStream) -> int:
        number = following(self)
        readings.append((self._seed, self._step, number))
        return number

    monkeypatch.setattr(SeededStream, "_next_reading", recorded)
    training.train(config, data=DATA, folder=folder)
    return readings


PHOTONIC = {**KINDS[0], "model": {"hidden": [8], "initial_output": "feedback"}}
POISSON = {"sampler": {"scheme": "poisson", "batch_size": 16}}
READ = {
    "once": PHOTONIC,
    "once, published order": {**PHOTONIC, "trainer": {"order": "published", "tau_b": 1.0}},
    "label-amplified": config_of("label-amplified") | POISSON,
    "record": config_of("record", noise="device") | POISSON
    | {"trainer": {"order": "published", "encoding": "planes"}},
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_no_reading_is_taken_twice(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, the start of the output layer, and every step draw noise of their own."""
    readings = readings_of(READ[name], tmp_path, monkeypatch)
    assert len(readings) > 12
    assert len(set(readings)) == len(readings)


def test_planted_labels_read_in_a_step_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_labels, "LABEL_STEP", 3)
    readings = readings_of(KINDS[0], tmp_path, monkeypatch)
    assert len(set(readings)) < len(readings)


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_a_resumed_run_neither_reads_nor_pays_again(
    tmp_path: Path, config: dict, mode: str, monkeypatch: pytest.MonkeyPatch, stop_at: type, ctrl_c_at: type,
) -> None:  # fmt: skip
    """Killed, then stopped by Ctrl-C, then resumed to its end."""
    looks: list[type] = []
    for protection in LOOKS:
        look = protection.look
        monkeypatch.setattr(
            protection,
            "look",
            lambda self, *given, look=look: (looks.append(type(self)), look(self, *given))[1],
        )
    config = {**config, "mode": mode}
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=DATA, folder=broken, watcher=stop_at(6))
    kept = (broken / "labels.safetensors").read_bytes()
    with pytest.raises(RunInterrupted):
        training.train(data=DATA, folder=broken, resume=True, watcher=ctrl_c_at(8))
    run = training.train(data=DATA, folder=broken, resume=True)
    assert (len(looks), (broken / "labels.safetensors").read_bytes()) == (1, kept)
    (payment,) = read_ledger(broken).payments
    assert payment.name == "labels"
    (guarantee,) = run.guarantees
    assert guarantee.epsilon <= 2.0
    if mode == "experiment":
        training.train(config, data=DATA, folder=tmp_path / "unbroken")
        assert equal(newest(tmp_path / "unbroken"), newest(broken))


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_look_that_was_paid_and_lost(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between payment and file: the same look is taken again for nothing, a fresh one is not affordable."""
    with monkeypatch.context() as patch:
        patch.setattr(noisy_labels, "write_array", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            training.train({**ONCE, "mode": mode}, data=DATA, folder=tmp_path)
    if mode == "release":
        with pytest.raises(BudgetExceeded, match="exceed epsilon 2"):
            training.train(data=DATA, folder=tmp_path, resume=True)
        assert not (tmp_path / "labels.safetensors").exists()
        return
    training.train(data=DATA, folder=tmp_path, resume=True)
    assert len(read_ledger(tmp_path).payments) == 1


@pytest.mark.parametrize("config", KINDS[:2], ids=IDS[:2])
def test_what_is_paid_upfront_is_calibrated_once(tmp_path: Path, monkeypatch: Any, config: dict) -> None:
    asked, calibrate, file = [], base.calibrate_noise, tmp_path / "run" / "config.json"
    monkeypatch.setattr(
        base,
        "calibrate_noise",
        lambda *given, **options: (asked.append(file.exists()), calibrate(*given, **options))[1],
    )
    base._calibrated.cache_clear()
    training.train(config, data=DATA, folder=tmp_path / "run")
    assert asked == [False]


def test_label_and_calibration_steps_are_no_training_steps() -> None:
    assert noisy_labels.LABEL_STEP != _CALIBRATION_STEP
    assert min(noisy_labels.LABEL_STEP, _CALIBRATION_STEP) > 2**63
    device = device_of(0.5)
    noises = []
    for step in (*range(40), _CALIBRATION_STEP, noisy_labels.LABEL_STEP):
        device.seek(step)
        noises.append(tuple(device.draw((1, 40)).flatten().tolist()))
    assert len(set(noises)) == 42
