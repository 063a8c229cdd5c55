"""A protected step against that of Opacus, and what protected runs state, exact rounding among it."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.bare import feedback_trainer
from opusim import training
from opusim.accounting.guarantee import NoGuarantee
from opusim.description.section import merged
from opusim.randomness.rounded import grid_of
from opusim.randomness.streams import SeededStream, SystemStream, noise_stream
from opusim.training.config.run import load_config
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.samplers import most_records
from opusim.training.engine.plan import RunPlan, load_data
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import BpConfig, FeedbackConfig, TdfaConfig
from opusim.training.feedback.trainer import FeedbackTrainer
from opusim.training.networks.clipping import CountedSums
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.base import counts_sums, rounds_exactly
from opusim.training.protections.record import RecordGradients

CLIP, DIVISOR = 0.27, 17.0


def new_network() -> FullyConnected:
    torch.manual_seed(3)
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)
    return FullyConnected(nn.Sequential(*layers))


def parts(batch: int = 13) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    deltas = [torch.randn(batch, n, generator=generator) for n in (9, 8, 4)]
    inputs = [torch.randn(batch, n, generator=generator) for n in (6, 9, 8)]
    return deltas, inputs


def protection(noise_multiplier: float = 0.0, seed: int = 5) -> RecordGradients:
    noise = noise_stream("experiment", seed, "central-noise")
    return RecordGradients(clip_norm=CLIP, noise_multiplier=noise_multiplier, divisor=DIVISOR, noise=noise)


def trainer_of(network: FullyConnected, config: FeedbackConfig, shield: RecordGradients) -> FeedbackTrainer:
    optimizer = make_optimizer(network.parameters, OptimizerConfig(lr=0.1))
    return feedback_trainer(ClosedForm(network, config), optimizer, protection=shield)


def test_backpropagation_with_protected_records_is_the_step_of_opacus() -> None:
    """What `opusim curve` draws as DP-SGD: the same clipped sum, from a library that shares no code with ours."""
    opacus = pytest.importorskip("opacus")
    network = new_network()
    generator = torch.Generator().manual_seed(6)
    x, y = torch.randn(13, 6, generator=generator), torch.randint(0, 4, (13,), generator=generator)
    reference = opacus.GradSampleModule(copy.deepcopy(network.model), loss_reduction="sum")
    nn.functional.cross_entropy(reference(x.clone().requires_grad_()), y, reduction="sum").backward()
    samples = [parameter.grad_sample for parameter in reference.parameters()]
    norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1.0)
    assert (factors < 1).any()
    trainer_of(network, BpConfig(), protection()).step(x, y, step=0)
    for parameter, sample in zip(network.parameters, samples, strict=True):
        expected = torch.einsum("b,b...->...", factors, sample) / DIVISOR
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


def test_a_batch_in_parts_adds_noise_once() -> None:
    network, found = new_network(), []
    deltas, inputs = parts(7)
    for size in (7, 3, 1):
        writer, pieces = protection(1.0), [slice(n, n + size) for n in range(0, 7, size)]
        batches = [([d[rows] for d in deltas], [h[rows] for h in inputs]) for rows in pieces]
        writer.set_gradients(network.contributions(*each) for each in batches)
        found.append(torch.cat([p.grad.flatten() for p in network.parameters]))
        assert writer.batches_written == 1
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="parts"):
        writer.set_gradients([])


def test_one_records_nan_does_not_stop_a_protected_step() -> None:
    network = new_network()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    x[2] = float("nan")
    trainer_of(network, TdfaConfig(), protection(0.5)).step(x, torch.zeros(5, dtype=torch.int64), step=0)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters)


RECORD = {
    "epochs": 2, "threads": 1, "model": {"hidden": [8]}, "data": {"n_classes": 3},
    "sampler": {"scheme": "poisson", "batch_size": 16}, "protection": {"kind": "record", "noise_multiplier": 1.3},
}  # fmt: skip


def data(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """The first n of the same records."""
    return np.random.default_rng(1).normal(size=(n, 5)), np.arange(n) % 3


@pytest.mark.parametrize("kind", ["bp", "pdfa"])
def test_a_protected_run_says_what_is_proven(tmp_path: Path, kind: str) -> None:
    run = training.train({**RECORD, "trainer": {"kind": kind}}, data=data(), folder=tmp_path)
    (guarantee,) = run.guarantees
    assert (guarantee.status, guarantee.adjacency) == ("proven", "zero_out")
    exact = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    event = dp_accounting.PoissonSampledDpEvent(16 / 54, dp_accounting.GaussianDpEvent(1.3))
    epsilon = exact.compose(event, 2 * run.metrics[0]["step"]).get_epsilon(1e-5)
    assert guarantee.epsilon == pytest.approx(epsilon, rel=1e-3)


def test_no_run_states_add_or_remove_where_a_record_expels_another(tmp_path: Path) -> None:
    """At 1,005 records the split by index lets an appended record into the training set and another one out of it."""
    config = {**RECORD, "epochs": 1, "trainer": {"kind": "bp"}}
    run = training.train(config, data=data(1005), folder=tmp_path)
    old, new = ({tuple(row) for row in load_data(run.config, data(n)).train.x.tolist()} for n in (1005, 1006))
    moved = (len(old - new), len(new - old))
    stated = run.guarantees[0].adjacency
    assert stated != "add_or_remove_one" or moved in ((0, 0), (0, 1))
    assert (stated, moved) == ("zero_out", (1, 1))


def test_a_published_photonic_run_claims_a_formula_whose_assumptions_fail(tmp_path: Path) -> None:
    published = {"trainer": {"order": "published", "tau_b": 1.0, "tau_h_max": 1.0}}
    published["protection"] = {"kind": "none"}
    run = training.train({**RECORD, **published}, data=data(), folder=tmp_path / "published")
    none, claimed = run.guarantees
    assert (none.status, claimed.status, claimed.epsilon) == ("none", "claimed", float("inf"))
    assert claimed.formula_value is not None
    assert any("gamma_min" in a.text or "gmin" in a.text for a in claimed.failed_assumptions)
    unclipped = merged({**RECORD, **published}, {"trainer": {"clipped_layers": "none"}})
    run = training.train(unclipped, data=data(), folder=tmp_path / "unclipped")
    assert all(guarantee.formula_value is None for guarantee in run.guarantees)


@pytest.mark.parametrize(("change", "message"), [
    ({"sampler": {"scheme": "shuffled-epochs", "batch_size": 16}}, "shuffled-epochs.*no theorem.*Use"),
    ({"data": {}}, "data.n_classes is missing"),
])  # fmt: skip
def test_runs_without_a_theorem_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(NoGuarantee, match=message):
        training.train({**RECORD, **change}, data=data(), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Exact rounding


ROUNDED = {"kind": "record", "noise_multiplier": 0.8}
ROUNDED_DATA = np.random.default_rng(1).normal(size=(64, 5)), np.arange(64) % 3


def config(kind: str, protection: dict[str, Any], **sections: Any) -> dict[str, Any]:
    poisson = protection["kind"] != "last-iterate" and "bands" not in protection
    return {
        "epochs": 1, "threads": 1, "data": {"n_classes": 3, "validation_fraction": 0.0}, "trainer": {"kind": kind},
        "sampler": {"batch_size": 16, **({"scheme": "poisson"} if poisson else {})},
        "protection": protection, **sections,
    }  # fmt: skip


AMPLIFIED = {"kind": "label-amplified", "noise_multiplier": 0.8}


@pytest.mark.parametrize(("kind", "protection", "exact"), [
    ("bp", ROUNDED, True),
    ("ulr", ROUNDED, True),
    ("convex", {**ROUNDED, "relation": "zero_out"}, True),
    ("bp", {**ROUNDED, "relation": "replace_one"}, True),
    ("bp", AMPLIFIED, True),
    ("bp", {**ROUNDED, "bands": 2}, False),
    ("pdfa", {**ROUNDED, "noise": "device"}, False),
    ("pdfa", {**AMPLIFIED, "noise": "device"}, False),
])  # fmt: skip
def test_a_step_says_whether_its_sums_are_exactly_rounded(kind: str, protection: Any, exact: bool) -> None:
    resolved = load_config(config(kind, protection)).replaced(data={"name": "arrays"})
    (mechanism,) = RunPlan.resolve(resolved, load_data(resolved, ROUNDED_DATA)).mechanisms
    assert mechanism.exactly_rounded is exact


@pytest.mark.parametrize(
    ("place", "noise", "experiment", "release"),
    [
        ("cpu", "digital", True, True),
        ("cuda", "digital", False, True),
        ("cuda:1", "digital", False, True),
        ("mps", "digital", False, False),
        ("cpu", "device", False, False),
        ("cuda", "device", False, False),
    ],
)
def test_digital_noise_is_rounded_exactly_where_a_stream_does(
    place: str, noise: str, experiment: bool, release: bool
) -> None:
    for mode, exact in (("experiment", experiment), ("release", release)):
        config: Any = SimpleNamespace(torch_device=place, mode=mode, protection=SimpleNamespace(noise=noise))
        assert rounds_exactly(config) is exact
        assert counts_sums(config) is (exact and (mode, place) == ("release", "cpu"))


@pytest.mark.parametrize(("kind", "protection"), [
    ("bp", ROUNDED),
    ("ulr", ROUNDED),
    ("convex", ROUNDED),
    ("convex", {"kind": "last-iterate", "noise_multiplier": 0.8}),
    ("bp", AMPLIFIED),
])  # fmt: skip
def test_noisy_sums_lie_on_their_grid(kind: str, protection: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """No step adds noise past `add_rounded`, whose results are what the optimizer gets."""
    drawn: list[bool] = []
    add_rounded = SeededStream.add_rounded

    def seen(self: SeededStream, y: torch.Tensor, std: float) -> torch.Tensor:
        found = add_rounded(self, y, std)
        drawn.append(bool((found.double() / grid_of(std) % 1 == 0).all()))
        return found

    monkeypatch.setattr(SeededStream, "add_rounded", seen)
    added: list[int] = []
    add_to = SeededStream.add_to
    monkeypatch.setattr(
        SeededStream, "add_to", lambda self, y, std: added.append(y.numel()) or add_to(self, y, std)
    )
    training.train(config(kind, protection), data=ROUNDED_DATA, folder=tmp_path / "run")
    assert len(drawn) >= 4
    assert all(drawn)
    if kind != "ulr":  # whose estimates have noise of their own
        assert added == []


@pytest.mark.filterwarnings("ignore:after 4 steps")  # without noise the sum of a bias may stay as it was
@pytest.mark.parametrize("mode", ["release", "experiment"])
@pytest.mark.parametrize(("kind", "protection", "counts"), [
    ("bp", ROUNDED, True),
    ("bp", {**ROUNDED, "relation": "replace_one"}, True),
    ("ulr", ROUNDED, True),
    ("convex", ROUNDED, True),
    ("bp", AMPLIFIED, True),
    ("bp", {**ROUNDED, "bands": 2}, False),
])  # fmt: skip
def test_the_noise_of_a_release_counts_the_rounding_of_its_sum(
    kind: str, protection: dict[str, Any], counts: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the bound of the largest batch that public numbers allow; an experiment's numbers are as they were."""
    drawn: list[float] = []
    for stream in (SystemStream, SeededStream):
        monkeypatch.setattr(stream, "add_rounded", lambda self, y, std: drawn.append(std) or y)
    run = training.train(config(kind, protection, mode=mode), data=ROUNDED_DATA, folder=tmp_path / "run")
    (mechanism,) = {replace(one, steps=1) for one in run.folder.read_ledger().mechanisms}
    assert mechanism.counts_sums is (counts and mode == "release")
    block = {"block": 0} if protection["kind"] == "label-amplified" else {}
    records = most_records(16.0, records=64, processes=1)
    error = replace(CountedSums.of(records, processes=1), **block).error
    assert error > 1e-5
    clip = run.config.protection.clip if kind != "convex" else mechanism.clip_norm
    wanted = 0.8 * clip * (1 + error * mechanism.counts_sums)
    assert drawn == pytest.approx([wanted] * len(drawn), rel=1e-12)
    assert drawn or not counts
