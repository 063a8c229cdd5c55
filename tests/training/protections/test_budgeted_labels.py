"""What a budgeted step releases, against its exact Gaussian law under two labels of a record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import training
from accounting.errors import BudgetExceeded
from accounting.ledger.ledger import read_ledger
from opusim import open_device
from opusim.randomness.streams import NoiseStream, SeededStream, noise_stream
from tests.oracles.label_leverage import LayerReadings, leverages
from training.config import RunConfig, load_config
from training.config.sections import OptimizerConfig
from training.engine.plan import RunPlan, build_sampler
from training.errors import RunFolderError, RunInterrupted
from training.feedback.closed_form import ClosedForm
from training.feedback.trainer import FeedbackTrainer
from training.networks.contributions.sums import Contributions
from training.networks.functions import ACTIVATIONS
from training.networks.layers import LinearJacobian
from training.networks.network import FullyConnected
from training.networks.optimizers import make_optimizer
from training.protections import budgeted_labels
from training.protections.budgeted_labels import BudgetedLabels
from training.protections.metric import batch_leverages
from training.runs.checkpoints import list_checkpoints, read_checkpoint

Z, FLOOR = 1.7, 0.01
BIG = 1e9


pytestmark = pytest.mark.usefixtures("one_thread")


class NoNoise(NoiseStream):
    """Zeros where noise belongs: what is released is then its own mean."""

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(tuple(shape), device=device)

    def seek(self, step: int) -> None:
        pass


def network_of(widths: Sequence[int], *, bias: bool = True, output: str = "identity") -> FullyConnected:
    modules: list[nn.Module] = []
    for fan_in, width in pairwise(widths):
        modules += [nn.Linear(fan_in, width, bias=bias), nn.Tanh()]
    return FullyConnected(nn.Sequential(*modules[:-1], ACTIVATIONS[output].module()))


def with_constant(h: torch.Tensor, *, bias: bool = True) -> np.ndarray:
    return np.hstack([h.double().numpy(), np.ones((len(h), int(bias)))])


def covariance(rows: np.ndarray, sigma: float) -> np.ndarray:
    """Of every row of the released sum: sigma^2 (H^T H + lambda I), lambda a share of the mean diagonal."""
    gram = rows.T @ rows
    return sigma**2 * (gram + FLOOR * np.trace(gram) / len(gram) * np.eye(len(gram)))


def released(network: Any, divisor: int) -> list[np.ndarray]:
    """The noisy sum of each layer, shape (n_l, n_(l-1) + bias)."""
    sums = []
    for linear in network.linears:
        assert linear.weight.grad is not None
        parts = [linear.weight.grad] + ([] if linear.bias is None else [linear.bias.grad[:, None]])
        sums.append(torch.cat(parts, dim=1).double().numpy() * divisor)
    return sums


def mahalanobis(first: list[np.ndarray], second: list[np.ndarray], covariances: list[np.ndarray]) -> float:
    squares = [
        np.sum((a - b) * np.linalg.solve(p, (a - b).T).T)
        for a, b, p in zip(first, second, covariances, strict=True)
    ]
    return float(np.sqrt(np.sum(squares)))


FEEDBACKS = {
    "dfa": ({"kind": "dfa"}, "cross-entropy", "identity"),
    "tdfa": ({"kind": "tdfa"}, "cross-entropy", "identity"),
    "pdfa": ({"kind": "pdfa"}, "cross-entropy", "identity"),
    "bp": ({"kind": "bp"}, "cross-entropy", "identity"),
    "bp with a gain": ({"kind": "bp", "signal_gain": 40.0}, "cross-entropy", "identity"),
    "bp on a sphere": (
        {"kind": "bp", "order": "published", "tau_b": 9.0, "scale": "sphere"},
        "cross-entropy",
        "identity",
    ),
    "bp in a ball": ({"kind": "bp", "order": "published", "tau_b": 0.8}, "cross-entropy", "identity"),
    "sigmoid output": ({"kind": "dfa"}, "squared-error", "sigmoid"),
    "gelu output": ({"kind": "bp"}, "squared-error", "gelu"),
}


def charged_and_exact(
    name: str, generator: np.random.Generator, *, clip: float, bias: bool = True
) -> tuple[float, float]:
    """What the filter charges a record for a step, and the exact mu of the label change that shows most."""
    settings, loss, output = FEEDBACKS[name]
    n_classes, m = int(generator.integers(2, 5)), int(generator.integers(2, 12))
    hidden = 0 if output == "gelu" else 2  # alone, the output layer has no room to hide in
    widths = [*generator.integers(2, 8, size=1 + hidden).tolist(), n_classes]
    torch.manual_seed(int(generator.integers(2**31)))
    network = network_of(widths, bias=bias, output=output)
    if output == "gelu":  # sqrt(2) is where GELU is steepest
        with torch.no_grad():
            network.linears[-1].weight.mul_(0.1)
            if bias:
                network.linears[-1].bias.fill_(2**0.5)
    x = torch.from_numpy(generator.normal(size=(m, widths[0])) * generator.exponential(size=(m, 1))).float()
    y, record = torch.from_numpy(generator.integers(0, n_classes, m)), int(generator.integers(m))
    config = load_config(
        {
            "trainer": settings,
            "loss": loss,
            "model": {"output_activation": output},
            "sampler": {"batch_size": 1},
            "protection": {
                "kind": "label-budget", "epsilon": 1.0, "clip_norm": clip, "noise_multiplier": Z, "floor": FLOOR
            },
        }
    )  # fmt: skip
    means, charged = [], 0.0
    for label in range(n_classes):
        y[record] = label
        shield = _silent(config, network, m)
        device = open_device("ideal", n_inputs=n_classes, n_outputs=max(sum(widths[1:-1]), 1))
        optimizer = make_optimizer(network.parameters, OptimizerConfig(lr=1e-30))
        trainer = FeedbackTrainer(
            ClosedForm(network, config.trainer, loss=config.loss, device=device), optimizer, protection=shield
        )
        trainer.step(x, y, step=0, records=torch.arange(m))
        means.append(released(network, m))
        charged = float(shield.state["label_spending"][record]) ** 0.5
    covariances = [covariance(with_constant(h, bias=bias), Z * clip) for h in network.forward(x).inputs]
    exact = max(mahalanobis(a, b, covariances) for a in means for b in means)
    return charged, exact


def _silent(config: RunConfig, network: FullyConnected, n_records: int) -> BudgetedLabels:
    """The protection that a run would take, without noise and with all the budget in the world."""
    x, y = np.zeros((n_records, 2)), np.zeros(n_records, dtype=np.int64)
    dataset = training.data.from_arrays(x, y, n_classes=2, validation_fraction=0.0, split_seed=0)
    sampler = build_sampler(config, dataset)
    plan = RunPlan(config=config, dataset=dataset, network=network, sampler=sampler, description=None)
    shield = plan.protection.gradients(None)
    assert isinstance(shield, BudgetedLabels)
    shield._noise = NoNoise()
    shield._filter.budget_mu = BIG
    return shield


@pytest.mark.parametrize("name", list(FEEDBACKS))
def test_the_charge_is_never_below_the_exact_distance(name: str, seed: int) -> None:
    """Whatever feedback, loss and network; the clip from far below the signals to far above."""
    generator = np.random.default_rng(seed)
    for trial in range(10):
        charged, exact = charged_and_exact(
            name, generator, clip=float(10 ** generator.uniform(-2, 1)), bias=trial % 4 > 0
        )
        assert 0 < exact <= charged * (1 + 1e-5)


class Step:
    """One step of hand-made signals: `own` under a record's label, `other` under another one.

    The record's signals are opposite and longer than the ball, which is the worst that any label can do, so that the
    filter's charge is the exact mu. Its features are small, so that its leverage is that of the bias.
    """

    clip = 0.6  # below sqrt(1/2), so that the ball binds at the output, too

    def __init__(self, generator: np.random.Generator, *, m: int = 4, copies: int = 1, z: float = Z) -> None:
        self.m, self.record, self.z = m, 0, z
        fan_ins, widths = (3, 4, 2), (4, 2, 3)
        linears = [nn.Linear(d, n * copies) for d, n in zip(fan_ins, widths, strict=True)]
        self.network: Any = SimpleNamespace(linears=linears)
        self.inputs = [torch.from_numpy(generator.normal(size=(m, d))).float() for d in fan_ins]
        for h in self.inputs:
            h[0] *= 0.1
        self.own = [
            torch.from_numpy(3 * generator.normal(size=(m, n))).float().repeat(1, copies) for n in widths
        ]
        self.other = [delta.clone() for delta in self.own]
        for mine, theirs in zip(self.own, self.other, strict=True):
            mine[0] *= 2 / mine[0].norm()
            theirs[0] = -mine[0]
        self.covariances = [covariance(with_constant(h), z * self.clip) for h in self.inputs]

    def protection(self, noise: NoiseStream, *, budget: float = BIG) -> BudgetedLabels:
        return BudgetedLabels(
            budget_mu=budget,
            n_records=self.m,
            clip_norm=self.clip,
            noise_multiplier=self.z,
            floor=FLOOR,
            noise=noise,
        )

    def release(self, shield: BudgetedLabels, deltas: list[torch.Tensor]) -> list[np.ndarray]:
        shield.set_gradients([self.contributions(deltas)], records=torch.arange(self.m))
        return released(self.network, self.m)

    def contributions(self, deltas: list[torch.Tensor]) -> Contributions:
        """Of layers that do not feed each other, as copies of a small one do not."""
        layers = [LinearJacobian(linear) for linear in self.network.linears]
        uses = [layer.use(*pair) for layer, *pair in zip(layers, deltas, self.inputs, strict=True)]
        return Contributions([(use.wrt, [use]) for use in uses], self.m)

    def means(self, deltas: list[torch.Tensor]) -> list[np.ndarray]:
        """sum_i ball(delta_i) h_i^T, written out."""
        sums = []
        for delta, h in zip(deltas, self.inputs, strict=True):
            d = delta.double().numpy()
            scaled = d * np.minimum(1.0, self.clip / np.linalg.norm(d, axis=1, keepdims=True))
            sums.append(scaled.T @ with_constant(h))
        return sums

    def charge(self, noise: NoiseStream) -> float:
        shield = self.protection(noise)
        self.release(shield, self.own)
        return float(shield.state["label_spending"][self.record]) ** 0.5


def test_the_charge_of_opposite_signals_is_exact(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for m in (1, 2, 5, 30):
        step = Step(generator, m=m)
        exact = mahalanobis(step.means(step.own), step.means(step.other), step.covariances)
        assert step.charge(NoNoise()) == pytest.approx(exact, rel=1e-5)
        found = step.release(step.protection(NoNoise()), step.own)
        for a, b in zip(found, step.means(step.own), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


COPIES = 4000


def law_deviation(seed: int) -> float:
    """How far log p(released | own) - log p(released | other) is from N(mu^2/2, mu^2), mu as charged, in SE.

    The density is that of the step as it is described: means of signals in their balls, full covariances. The layers
    are 4000 copies of a small one side by side, whose rows are independent: one step gives 4000 ratios, each of its
    share mu^2 / 4000 of the charge. The noise is small, so that a share is of the order of 1.
    """
    generator = np.random.default_rng(seed)
    step = Step(generator, copies=COPIES, z=0.05)
    stream = noise_stream("experiment", seed, "central-noise")
    mu = step.charge(stream) / COPIES**0.5
    own, other = step.means(step.own), step.means(step.other)
    ratios = np.zeros(COPIES)
    for sums, a, b, p in zip(
        step.release(step.protection(stream), step.own), own, other, step.covariances, strict=True
    ):
        q = np.linalg.inv(p)
        rows = (np.sum((sums - b) @ q * (sums - b), axis=1) - np.sum((sums - a) @ q * (sums - a), axis=1)) / 2
        ratios += rows.reshape(COPIES, -1).sum(axis=1)
    of_mean = abs(ratios.mean() - mu**2 / 2) / (mu / COPIES**0.5)
    of_variance = abs(ratios.var() - mu**2) / (mu**2 * (2 / COPIES) ** 0.5)
    return float(max(of_mean, of_variance))


def test_the_log_likelihood_ratio_has_the_law_that_is_charged(seed: int) -> None:
    assert law_deviation(seed) < 5


@pytest.mark.parametrize("fault", ["no output noise", "bias left out", "ball after the noise"])
def test_planted_faults_are_caught(monkeypatch: pytest.MonkeyPatch, fault: str, seed: int) -> None:
    ball, add_to = budgeted_labels.scale_to_ball, SeededStream.add_rounded
    calls = 0

    def wrong(self: NoiseStream, y: torch.Tensor, std: float) -> torch.Tensor:
        """Two readings a layer: on the signals, then on the weights."""
        nonlocal calls
        calls += 1
        on_signals, on_output = calls % 2 == 1, (calls - 1) % 6 >= 4
        noisy = add_to(self, y, 0.0 if fault == "no output noise" and on_output else std)
        return ball(noisy, Step.clip) if fault == "ball after the noise" and on_signals else noisy

    monkeypatch.setattr(SeededStream, "add_rounded", wrong)
    if fault == "ball after the noise":
        monkeypatch.setattr(budgeted_labels, "scale_to_ball", lambda v, radius: v)
    if fault == "bias left out":
        monkeypatch.setattr(
            budgeted_labels, "batch_leverages", lambda rows, floor: batch_leverages(rows[:, :-1], floor=floor)
        )
    assert law_deviation(seed) > 5


WIDE = 20_000
LIMIT = float(norm.isf(norm.sf(5.0) / 21))


def noise_deviation(seed: int, *, factor: float = 1.0, real_floor: float = FLOOR) -> float:
    """The covariance of the noise of 20,000 rows of one layer against sigma^2 (H^T H + lambda I), worst entry in SE."""
    network = FullyConnected(nn.Sequential(nn.Linear(5, WIDE)))
    h = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))  # fewer records than features
    shield = BudgetedLabels(
        budget_mu=BIG,
        n_records=4,
        clip_norm=0.3,
        noise_multiplier=factor * Z,
        floor=real_floor,
        noise=noise_stream("experiment", seed, "central-noise"),
    )
    shield.set_gradients([network.contributions([torch.zeros(4, WIDE)], [h])], records=torch.arange(4))
    (noise,) = released(network, 4)
    p = covariance(with_constant(h), Z * 0.3)
    white = np.linalg.solve(np.linalg.cholesky(p), noise.T)
    error = white @ white.T / WIDE - np.eye(6)
    return float(np.max(np.abs(error) / np.sqrt((1 + np.eye(6)) / WIDE)))


def test_noise_has_the_stated_covariance(seed: int) -> None:
    assert noise_deviation(seed) < LIMIT
    assert noise_deviation(seed, factor=0.95) > LIMIT  # planted
    assert noise_deviation(seed, real_floor=0.9 * FLOOR) > LIMIT  # planted


@pytest.mark.parametrize(("m", "d"), [(12, 5), (5, 12), (1, 4), (7, 7), (40, 3)])
@pytest.mark.parametrize("floor", [1e-6, 1e-3, 0.7])
def test_leverages_equal_the_accountants(m: int, d: int, floor: float, seed: int) -> None:
    """Both Gram matrices against a QR factorisation; a record twice, and rows of very different length."""
    generator = np.random.default_rng(seed)
    h = generator.normal(size=(m, d)) * generator.exponential(size=(m, 1))
    h[-1] = h[0]
    rows = torch.from_numpy(h)
    scores, ridge = batch_leverages(rows, floor=floor)
    assert ridge == pytest.approx(floor * np.square(h).sum() / d)
    oracle = leverages(LayerReadings(activations=h, slopes=None, bias=False, floor=ridge))
    np.testing.assert_allclose(scores.numpy(), oracle[:, 0], rtol=1e-7, atol=1e-9)


def test_leverages_of_features_that_are_all_zero() -> None:
    scores, ridge = batch_leverages(torch.zeros(3, 5), floor=FLOOR)
    assert ridge == FLOOR
    assert not scores.any()


def test_a_record_over_its_budget_keeps_its_noise_and_loses_its_signal(seed: int) -> None:
    step = Step(np.random.default_rng(seed))
    budget = 3 * step.charge(NoNoise())
    stream = noise_stream("experiment", seed, "central-noise")
    shield = step.protection(stream, budget=budget)
    shield.state["label_spending"][0] = budget**2  # spent to the last
    shield.seek(3)
    found = step.release(shield, step.own)
    spent = shield.state["label_spending"]
    assert float(spent[0]) == budget**2
    assert bool((spent[1:] > 0).all())
    silenced = [delta.clone() for delta in step.own]
    for delta in silenced:
        delta[0] = 0
    stream.seek(3)
    expected = step.release(step.protection(stream), silenced)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    stream.seek(3)
    with_signal = step.release(step.protection(stream), step.own)
    assert not np.array_equal(found[0], with_signal[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_signal_that_is_not_finite_counts_as_zero(value: float, seed: int) -> None:
    step = Step(np.random.default_rng(seed))
    broken, silenced = ([delta.clone() for delta in step.own] for _ in range(2))
    broken[1][0, 1], silenced[1][0] = value, 0.0
    found, expected = (step.release(step.protection(NoNoise()), deltas) for deltas in (broken, silenced))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_empty_batch_takes_a_noisy_step_and_charges_nobody() -> None:
    network = network_of((3, 4, 2, 3))
    shield = Step(np.random.default_rng(0)).protection(noise_stream("experiment", 1, "central-noise"))
    deltas, inputs = [torch.zeros(0, n) for n in (4, 2, 3)], [torch.zeros(0, d) for d in (3, 4, 2)]
    shield.set_gradients([network.contributions(deltas, inputs)], records=torch.zeros(0, dtype=torch.int64))
    assert all(bool((parameter.grad != 0).all()) for parameter in network.parameters)
    assert not shield.state["label_spending"].any()


def test_the_filter_must_know_the_records() -> None:
    step = Step(np.random.default_rng(0))
    with pytest.raises(ValueError, match="records is missing.*whose budget"):
        step.protection(NoNoise()).set_gradients([step.contributions(step.own)])


LABEL = {
    "epochs": 4,
    "threads": 1,
    "model": {"hidden": [8]},
    "data": {"n_classes": 3},
    "sampler": {"batch_size": 16},
    "protection": {"kind": "label-budget", "epsilon": 3.0, "noise_multiplier": 4.0},
    "trainer": {"kind": "dfa"},
}


def data(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(1).normal(size=(n, 5)), np.arange(n) % 3


def last_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).tensors


def test_a_resumed_run_takes_up_its_spending_bit_for_bit(tmp_path: Path, stop_at: type) -> None:
    """Records run out of budget in this run, so a spending that was forgotten would change the weights."""
    unbroken = training.train(LABEL, data=data(), folder=tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        training.train(LABEL, data=data(), folder=tmp_path / "broken", watcher=stop_at(10))
    resumed = training.train(data=data(), folder=tmp_path / "broken", resume=True)
    expected, found = last_tensors(tmp_path / "unbroken"), last_tensors(tmp_path / "broken")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed.guarantees == unbroken.guarantees
    (payment,) = read_ledger(tmp_path / "broken").payments  # paid once
    spent, budget = found["state.label_spending"], payment.mechanisms[0].to_json()["budget_mu"]
    assert float(spent.max()) <= budget**2
    first = read_checkpoint(list_checkpoints(tmp_path / "broken" / "checkpoints")[0]).tensors
    idle = spent - first["state.label_spending"]
    assert int((idle == 0).sum()) > 0, "no record ran out: the test would not see a filter that is forgotten"


def test_planted_fault_a_forgotten_spending_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: type
) -> None:
    training.train(LABEL, data=data(), folder=tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        training.train(LABEL, data=data(), folder=tmp_path / "broken", watcher=stop_at(10))
    monkeypatch.setattr(budgeted_labels.PerRecordBudget, "restore", lambda self, spent: None)
    training.train(data=data(), folder=tmp_path / "broken", resume=True)
    expected, found = last_tensors(tmp_path / "unbroken"), last_tensors(tmp_path / "broken")
    assert not all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_release_run_cannot_spend_its_budget_twice(tmp_path: Path, stop_at: type) -> None:
    """Its noise would be drawn afresh, so the whole budget is charged again: more than epsilon."""
    config = {**LABEL, "mode": "release"}
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=data(), folder=tmp_path, watcher=stop_at(10))
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExceeded, match="more than epsilon 3 .*not taken"):
        training.train(data=data(), folder=tmp_path, resume=True)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    run = training.load_run(tmp_path)  # what was trained so far is there, with what it cost
    (guarantee,) = run.guarantees
    assert guarantee.status == "proven"
    assert guarantee.epsilon <= 3.0
    assert len(run.predict(data()[0])) == 60


def test_a_release_resumes_on_features_in_their_order_only(tmp_path: Path, ctrl_c_at: type) -> None:
    """What a record has spent is kept by its number; under another number it could spend its budget again."""
    x, y = np.random.default_rng(2).normal(size=(60, 5)), np.arange(60) % 3
    config = {
        "mode": "release",
        "epochs": 6,
        "trainer": {"kind": "dfa"},
        "model": {"hidden": [8]},
        "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"batch_size": 20},
        "protection": {"kind": "label-budget", "epsilon": 2.0},
    }
    folder = tmp_path / "run"
    with pytest.raises(RunInterrupted):
        training.train(config, data=(x, y), folder=folder, watcher=ctrl_c_at(4))
    with pytest.raises(RunFolderError, match="started with another data"):
        training.train(data=(x[::-1].copy(), y[::-1].copy()), folder=folder, resume=True)
    training.train(data=(x, (y + 1) % 3), folder=folder, resume=True)  # it knows no labels
