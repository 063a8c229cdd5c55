"""Labels that are looked at once: what is read, what it costs, and that nothing else tells of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from opusim import open_device, training
from opusim.accounting.guarantee import BudgetExceeded, LedgerCorrupt
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanism import Mechanism
from opusim.accounting.mechanisms.labels import LabelReadout, RandomizedResponse
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream
from opusim.training.feedback.projection import _CALIBRATION_STEP
from opusim.training.protections import base, noisy_labels
from opusim.training.protections.noisy_labels import (
    LabelReadoutProtection,
    NoisyLabels,
    RandomizedResponseProtection,
    StagedResponseProtection,
    randomize,
    read_once_through,
)
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
    labels = NoisyLabels(log_likelihood=likelihoods(), flat_steps=5)
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


def device_of(sigma: float, n_outputs: int = 40) -> Any:
    return open_device("gaussian", n_inputs=K, n_outputs=n_outputs, seed=4, noise={"sigma": sigma})


@pytest.mark.parametrize(("sigma", "topped_up"), [(0.7, True), (60.0, False)])
def test_a_reading_of_a_device_has_the_law_that_is_paid_for(sigma: float, topped_up: bool, seed: int) -> None:
    """mu = max_ab ||B_a - B_b|| / sigma_total, of the device's noise and what is added to reach it."""
    paid: list[Mechanism] = []
    device = open_device("gaussian", n_inputs=K, n_outputs=40, seed=seed % 2**31, noise={"sigma": sigma})
    b = device.matrix().double().numpy()
    gaps = np.linalg.norm(b[:, :, None] - b[:, None, :], axis=0)
    first, second = np.unravel_index(gaps.argmax(), gaps.shape)
    expected = MU if topped_up else gaps.max() / sigma
    assert topped_up == (gaps.max() / MU > sigma)
    labels = torch.full((N,), int(first))
    scores = read_once_through(device, labels, K, mu=MU, noise=stream(seed), pay=paid.append)
    (mechanism,) = paid
    assert isinstance(mechanism, LabelReadout)
    assert mechanism.device_law
    assert mechanism.mu == pytest.approx(expected, rel=1e-9)
    assert mechanism.mu <= MU
    ratios = (scores[:, first] - scores[:, second]).double().numpy()
    assert law_deviation(ratios, mechanism.mu) < LIMIT
    assert law_deviation(1.1 * ratios, mechanism.mu) > LIMIT
    assert shared(ratios) < 5
    assert shared(np.tile(ratios[: N // 2], 2)) > 5  # planted: two records share their noise
    assert device.usage.frames == 2 * N  # each label was read once


def test_planted_fault_a_device_without_top_up_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    paid: list[Mechanism] = []
    monkeypatch.setattr(SeededStream, "add_to", lambda self, y, std: y)
    device = device_of(0.7)
    b = device.matrix().double().numpy()
    gaps = np.linalg.norm(b[:, :, None] - b[:, None, :], axis=0)
    first, second = np.unravel_index(gaps.argmax(), gaps.shape)
    scores = read_once_through(
        device, torch.full((N,), int(first)), K, mu=MU, noise=stream(seed), pay=paid.append
    )
    ratios = (scores[:, first] - scores[:, second]).double().numpy()
    assert law_deviation(ratios, paid[0].to_json()["mu"]) > LIMIT


class _NoMatrix:
    """Hardware: it cannot tell its matrix."""

    name = "hardware"
    capabilities = frozenset({"project", "draw"})
    noise = device_of(1.0).noise

    def credit_noise(self) -> None:
        """No monitor compares it."""


class _Counts(_NoMatrix):
    name = "counter"
    capabilities = frozenset({"project", "draw", "matrix"})
    noise = DiscreteNoise(values=np.array([-1.0, 1.0]), log_masses=np.log([0.5, 0.5]))

    def matrix(self) -> torch.Tensor:
        return torch.zeros(3, K)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (open_device("ideal", n_inputs=K, n_outputs=40), "'ideal' .*standard deviation 0 .*above 0"),
        (_NoMatrix(), "'hardware', whose matrix is not known"),
        (_Counts(), "'counter' .*discrete.*Gaussian law"),
    ],
)
def test_devices_without_noise_to_credit_are_refused_before_they_are_paid(device: Any, message: str) -> None:
    paid: list[Mechanism] = []
    with pytest.raises(ConfigError, match=f"protection.noise.*{message}.*another device"):
        read_once_through(device, torch.zeros(3).long(), K, mu=MU, noise=stream(1), pay=paid.append)
    assert not paid


def test_responses_follow_the_mechanism(seed: int) -> None:
    """Frequencies of every pair of labels, five standard errors over the family; 5 % of epsilon more is caught."""
    mechanism = RandomizedResponse.from_epsilon(1.3, K)
    paid: list[Mechanism] = []
    labels = torch.arange(10 * N) % K
    scores = randomize(labels, mechanism, np.random.default_rng(seed), pay=paid.append)
    assert paid == [mechanism]
    observed = scores.argmax(dim=1)
    counts = np.zeros((K, K))
    np.add.at(counts, (labels.numpy(), observed.numpy()), 1)

    def deviation(epsilon: float) -> float:
        other = 1 / (math.exp(epsilon) + K - 1)
        law = other + (1 - K * other) * np.eye(K)
        n = 10 * N / K
        return float(np.max(np.abs(counts / n - law) / np.sqrt(law * (1 - law) / n)))

    assert deviation(1.3) < norm.isf(norm.sf(5.0) / K**2)
    assert deviation(1.05 * 1.3) > norm.isf(norm.sf(5.0) / K**2)
    probabilities = np.exp(scores.double().numpy())
    np.testing.assert_allclose(probabilities.max(axis=1), mechanism.keep_probability, rtol=1e-6)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "look",
    [
        lambda pay: read_once_through(
            device_of(0.5), torch.zeros(3).long(), K, mu=1.0, noise=stream(1), pay=pay
        ),
        lambda pay: randomize(
            torch.zeros(3).long(), RandomizedResponse.from_epsilon(1.0, K), np.random.default_rng(0), pay=pay
        ),
    ],
)
def test_nothing_unpaid_is_drawn(look: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mechanism: Mechanism) -> None:
        raise BudgetExceeded("no")

    for name in ("normal", "add_to"):
        monkeypatch.setattr(SeededStream, name, lambda *_: pytest.fail("noise was drawn"))
    monkeypatch.setattr(noisy_labels, "respond", lambda *_, **__: pytest.fail("a response was drawn"))
    with pytest.raises(BudgetExceeded):
        look(refuse)


# Runs

ONCE = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3}, "sampler": {"batch_size": 16},
    "device": {"name": "gaussian", "noise": {"sigma": 0.5}},
    "protection": {"kind": "label-readout", "noise": "device", "epsilon": 2.0},
}  # fmt: skip


def config_of(kind: str, **protection: Any) -> dict[str, Any]:
    return {**ONCE, "protection": {"kind": kind, "epsilon": 2.0, **protection}}


def data(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(n, 5)), np.arange(n) % 3


KINDS = [
    config_of("label-readout", noise="device"),
    config_of("label-randomized-response"),
    config_of("label-randomized-response", stages=2),
]
IDS = ["once", "response", "response in stages"]
LOOKS = (LabelReadoutProtection, RandomizedResponseProtection, StagedResponseProtection)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_true_labels_reach_no_weights(tmp_path: Path, config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data sets that differ in labels alone, given the same labels.safetensors, end in the same weights."""
    x, y = data()
    training.train(config, data=(x, y), folder=tmp_path / "first")
    kept = torch.from_numpy(read_array(tmp_path / "first" / "labels.safetensors"))
    for protection in LOOKS:
        monkeypatch.setattr(protection, "look", _kept_after(protection.look, kept))
    training.train(config, data=(x, (y + 1) % 3), folder=tmp_path / "second")
    first, second = newest(tmp_path / "first"), newest(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "first" / "metrics.jsonl").read_bytes() != (
        tmp_path / "second" / "metrics.jsonl"
    ).read_bytes()  # where accuracies on true labels stand: experiment mode


def test_planted_fault_true_labels_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    kept = likelihoods(54)[:, :3]
    monkeypatch.setattr(LabelReadoutProtection, "look", lambda self, device, pay: _paid(pay, kept))
    monkeypatch.setattr("opusim.training.feedback.closed_form.Batch.targets", lambda self, output: self.y)
    for name, labels in (("first", y), ("second", (y + 1) % 3)):
        training.train(ONCE, data=(x, labels), folder=tmp_path / name)
    first, second = newest(tmp_path / "first"), newest(tmp_path / "second")
    assert not all(torch.equal(first[name], second[name]) for name in first)


def _paid(pay: Any, scores: torch.Tensor) -> torch.Tensor:
    pay(LabelReadout(mu=0.1))
    return scores


def _kept_after(look: Callable[..., torch.Tensor], kept: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A look that pays, and then gives what another look found."""

    def look_at_the_kept(*arguments: Any) -> torch.Tensor:
        look(*arguments)
        return kept

    return look_at_the_kept


def readings_of(config: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every reading of every seeded stream in a run: seed of the stream, step, number within the step."""
    readings: list[tuple[int, int, int]] = []
    following = SeededStream._next_reading

    def recorded(self: SeededStream) -> int:
        number = following(self)
        readings.append((self._seed, self._step, number))
        return number

    monkeypatch.setattr(SeededStream, "_next_reading", recorded)
    training.train(config, data=data(), folder=folder)
    return readings


PHOTONIC = {
    **ONCE["model"],  # type: ignore[dict-item]
    "initial_output": "feedback",
}


@pytest.mark.parametrize(
    "config",
    [
        {**KINDS[0], "model": PHOTONIC},
        {**KINDS[0], "model": PHOTONIC, "trainer": {"order": "published", "tau_b": 1.0}},
        {**config_of("label-amplified"), "sampler": {"scheme": "poisson", "batch_size": 16}},
        {**config_of("record", noise="device"), "sampler": {"scheme": "poisson", "batch_size": 16},
         "trainer": {"order": "published", "encoding": "planes"}},
    ],
    ids=["once", "once, published order", "label-amplified", "record"],
)  # fmt: skip
def test_no_reading_is_taken_twice(tmp_path: Path, config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, the start of the output layer, and every step draw noise of their own."""
    readings = readings_of(config, tmp_path, monkeypatch)
    assert len(readings) > 12
    assert len(set(readings)) == len(readings)


def test_planted_fault_labels_read_in_a_step_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_labels, "LABEL_STEP", 3)
    readings = readings_of(KINDS[0], tmp_path, monkeypatch)
    assert len(set(readings)) < len(readings)


@pytest.mark.parametrize("mode", ["experiment", "release"])
@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_a_resumed_run_neither_reads_nor_pays_again(
    tmp_path: Path, config: dict, mode: str, monkeypatch: pytest.MonkeyPatch, stop_at: type
) -> None:
    looks: list[str] = []

    def counted(look: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def look_and_count(*arguments: Any) -> torch.Tensor:
            looks.append("look")
            return look(*arguments)

        return look_and_count

    for protection in LOOKS:
        monkeypatch.setattr(protection, "look", counted(protection.look))
    config = {**config, "mode": mode}
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=data(), folder=tmp_path / "broken", watcher=stop_at(6))
    kept = (tmp_path / "broken" / "labels.safetensors").read_bytes()
    run = training.train(data=data(), folder=tmp_path / "broken", resume=True)
    assert len(looks) == 1
    assert (tmp_path / "broken" / "labels.safetensors").read_bytes() == kept
    (payment,) = read_ledger(tmp_path / "broken").payments
    assert payment.name == "labels"
    (guarantee,) = run.guarantees
    assert guarantee.epsilon <= 2.0
    if mode == "experiment":
        training.train(config, data=data(), folder=tmp_path / "unbroken")
        assert equal(newest(tmp_path / "unbroken"), newest(tmp_path / "broken"))


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_a_look_that_was_paid_and_lost(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between payment and file: the same look is taken again for nothing, a fresh one is not affordable."""
    with monkeypatch.context() as patch:
        patch.setattr(noisy_labels, "write_array", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            training.train({**ONCE, "mode": mode}, data=data(), folder=tmp_path)
    if mode == "release":
        with pytest.raises(BudgetExceeded, match="exceed epsilon 2"):
            training.train(data=data(), folder=tmp_path, resume=True)
        assert not (tmp_path / "labels.safetensors").exists()
        return
    training.train(data=data(), folder=tmp_path, resume=True)
    assert len(read_ledger(tmp_path).payments) == 1


def test_labels_that_are_not_paid_for_are_refused(tmp_path: Path, stop_at: type) -> None:
    with pytest.raises(KeyboardInterrupt):
        training.train(ONCE, data=data(), folder=tmp_path, watcher=stop_at(6))
    for file in tmp_path.glob("ledger.*"):
        file.unlink()
    with pytest.raises(LedgerCorrupt, match="ledger.jsonl: line 1: is missing: checkpoint"):
        training.train(data=data(), folder=tmp_path, resume=True)


@pytest.mark.parametrize("config", KINDS[:2], ids=IDS[:2])
def test_what_is_paid_upfront_is_calibrated_once_and_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict
) -> None:
    asked = []
    calibrate = base.calibrate_noise

    def counted(mechanism: Mechanism, **options: float) -> Any:
        asked.append((tmp_path / "run" / "config.json").exists())
        return calibrate(mechanism, **options)

    monkeypatch.setattr(base, "calibrate_noise", counted)
    base._calibrated.cache_clear()
    training.train(config, data=data(), folder=tmp_path / "run")
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
