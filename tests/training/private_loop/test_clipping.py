"""Clipping by layer, automatic and adaptive: sums, noise, statements, resumption, games with planted faults."""

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import opusim
from opusim import training
from opusim.accounting.mechanism import mechanism_from_json
from opusim.accounting.mechanisms.records import RecordCentral, share_of_sum
from opusim.randomness.streams import noise_stream
from opusim.training import Clipping
from opusim.training.attacks.findings import Role
from opusim.training.attacks.run_audit import audit_run
from opusim.training.networks.contributions.sums import Contributions
from opusim.training.networks.contributions.uses import LinearUse
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import parts, private_loop, run_epoch
from tests.support.run_folders import require_resumed_alike

TINY, CLIP, BATCH = 1e-9, 0.3, 6
NORMS = (0.1, 0.4)
RULES: dict[str, Any] = {
    "per_layer": "per_layer",
    "two norms": "per_layer",
    "automatic": Clipping(kind="automatic", stability=0.2),
    "adaptive": Clipping(kind="adaptive", target_quantile=0.7, bound_rate=0.8),
}


def clipped(rule: str, parts_of_layers: list[Tensor], bound: float) -> Tensor:
    """What a gradient contributes, by the formulas of `opusim.training.protections.clipping`; norms in float64."""
    norms = [float(part.double().norm()) for part in parts_of_layers]
    whole = math.hypot(*norms)
    bounds = {"per_layer": [bound / 2**0.5] * 2, "two norms": list(NORMS)}.get(rule)
    if bounds is not None:
        factors = [min(1.0, c / norm) for c, norm in zip(bounds, norms, strict=True)]
    else:
        factors = [bound / (whole + 0.2) if rule == "automatic" else min(1.0, bound / whole)] * 2
    return torch.cat([f * part for f, part in zip(factors, parts_of_layers, strict=True)])


def gradients(module: nn.Module) -> Tensor:
    return parameters_to_vector(p.grad for p in module.parameters())


def loop_of(folder: Path, rule: str, **options: Any) -> opusim.PrivateTraining:
    return private_loop(folder, parts(batch_size=BATCH), **settings_of(rule), **options)


def settings_of(rule: str) -> dict[str, Any]:
    return {"max_grad_norm": NORMS if rule == "two norms" else CLIP, "clipping": RULES[rule]}


@pytest.mark.parametrize(("rule", "users"), [*((rule, False) for rule in RULES), ("adaptive", True)])
def test_the_gradient_is_the_sum_of_what_the_rule_leaves(tmp_path: Path, rule: str, users: bool) -> None:
    """Also in parts of a batch and in filled batches; the bound moves by the records of all parts, and no others."""
    ids = {"user_ids": [f"{n % 13}" for n in range(60)], "records_per_user": 2} if users else {}
    options = {"noise_multiplier": TINY, "max_physical_batch_size": 4, "fixed_batches": True}
    private = loop_of(tmp_path, rule, **options, **ids)
    model, optimizer, criterion, loader = private
    x, y = loader.dataset.tensors
    bound = CLIP
    for step, batch in enumerate(loader):
        wanted, within = torch.zeros(sum(p.numel() for p in model.parameters())), 0.0
        for unit in loader.sampler.indices(step).tolist():
            own = loader.users.chosen(unit, step) if users else [unit]
            loss = nn.functional.cross_entropy(model._call_impl(x[own]), y[own])
            found = torch.autograd.grad(loss, list(model.parameters()))
            layers = [torch.cat([g.flatten() for g in found[n : n + 2]]) for n in (0, 2)]
            wanted += clipped(rule, layers, bound)
            within += 0.5 if float(torch.cat(layers).norm()) <= bound else -0.5
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        torch.testing.assert_close(gradients(model), wanted / BATCH, rtol=1e-4, atol=1e-6)
        optimizer.step()
        if rule == "adaptive":
            bound *= math.exp(-0.8 * (within / BATCH + 0.5 - 0.7))
            assert private._private.gradients._moving.value == pytest.approx(bound, rel=1e-6)
    assert rule != "adaptive" or bound > 1.5 * CLIP
    private.close()


# Noise


def test_a_sum_and_its_count_cost_what_the_multiplier_says() -> None:
    """1 / z_s^2 + 1 / (2 r z)^2 is at most 1 / z^2, and not by much less, in exact arithmetic."""
    generator = np.random.default_rng(5)
    for z, r in zip(10.0 ** generator.uniform(-3, 4, 200), generator.uniform(0.6, 40, 200), strict=True):
        one = RecordCentral(
            noise_multiplier=z, sampling_probability=0.1, clip_norm=1, divisor=1, clipping="adaptive", count_noise=r,
        )  # fmt: skip
        spent = (
            1 / Fraction(z / share_of_sum(float(r))) ** 2
            + 1 / (2 * Fraction(float(r)) * Fraction(float(z))) ** 2
        )
        assert Fraction(1) - Fraction(1, 10**10) < spent * Fraction(float(z)) ** 2 <= 1
        assert one.as_noise().scale == z


def released(writer: RecordGradients, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise of sums and of counts over the bound of each step, of batches whose contributions are exactly 0."""
    weight, sums, counts = nn.Parameter(torch.zeros(40, 50)), [], []
    for step in range(steps):
        bound, before = writer._moving.value, writer.state["released_counts"].clone()
        writer.seek(step)
        use = LinearUse(torch.zeros(rows, 40), torch.zeros(rows, 50), weight)
        writer.set_gradients([Contributions([([weight], [use])], rows)])
        assert weight.grad is not None
        sums.append(weight.grad.double().flatten().numpy() / bound)
        counts.append(float((writer.state["released_counts"] - before)[0]))
    return np.concatenate(sums), np.array(counts)


@pytest.mark.parametrize(
    ("mode", "fault", "rows"),
    [("experiment", "none", 3), ("experiment", "count", 3), ("experiment", "sum", 0), ("release", "none", 0)],
)
def test_sums_and_counts_have_their_noise(mode: str, fault: str, rows: int) -> None:
    """Also of empty batches. Planted: the count without noise; the sum with z in place of z_s."""
    z, r, steps = 1.3, 0.6, 150
    stream = noise_stream(mode, 7 if mode == "experiment" else None, "test")
    rule = Clipping(kind="adaptive", count_noise=r, bound_rate=0.01)
    writer = RecordGradients(clip_norm=0.5, noise_multiplier=z, divisor=1.0, noise=stream, clipping=rule)
    if fault == "count":
        writer._count_std = 0.0
    if fault == "sum":
        writer._multiplier = z
    sums, counts = released(writer, rows, steps)
    stds = {"sum": z / share_of_sum(r), "count": r * z}
    errors = {}
    for name, found in (("sum", sums), ("count", counts - rows / 2)):  # a gradient of 0 is within every bound
        errors[name] = (float(np.mean(found**2)) / stds[name] ** 2 - 1) / math.sqrt(2 / len(found))
        assert abs(float(found.mean())) < 5 * stds[name] / math.sqrt(len(found))
    assert {name for name, error in errors.items() if abs(error) > 5} == {fault} - {"none"}
    first = sums.reshape(steps, -1)[:, 0]
    assert abs(np.corrcoef(first, counts + np.arange(steps) * 1e-12)[0, 1]) < 5 / steps**0.5


# Limit cases


@pytest.mark.parametrize("planted", [False, True])
def test_a_record_without_gradient_adds_nothing(planted: bool) -> None:
    """Planted: C / |g| without the constant, which is infinite for such a record, so that the sum is no number."""
    rule, weight = Clipping(kind="automatic", stability=1e-6), nn.Parameter(torch.zeros(2, 2))
    stream = noise_stream("experiment", 1, "test")
    writer = RecordGradients(clip_norm=1e12, noise_multiplier=0.0, divisor=1.0, noise=stream, clipping=rule)
    use = LinearUse(torch.zeros(1, 2), torch.zeros(1, 2), weight)

    def without_constant(self: Clipping, squares: Tensor, bound: float) -> Tensor:
        return bound / torch.zeros_like(squares)

    with patch.object(Clipping, "factors", without_constant if planted else Clipping.factors):
        writer.set_gradients([Contributions([([weight], [use])], 1)])
    assert weight.grad is not None
    assert bool((weight.grad == 0).all()) != planted


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("value", [1e-38, 1e30, float("nan")])
def test_a_record_moves_sum_and_count_by_no_more_than_one(tmp_path: Path, rule: str, value: float) -> None:
    """Values that float32 cannot hold count neither within the bound nor beyond it."""
    found = []
    for name in ("with", "without"):
        model, optimizer, criterion, loader = parts()
        x, y = (tensor[:12].clone() for tensor in loader.dataset.tensors)  # type: ignore[attr-defined]
        x[7] = x[7].sign() * value
        keep = [n for n in range(12) if n != 7 or name == "with"]
        given = model, optimizer, criterion, DataLoader(TensorDataset(x[keep], y[keep]), batch_size=6)
        options = {"sample_rate": 1.0, "noise_multiplier": TINY, **settings_of(rule)}
        with private_loop(tmp_path / name, given, **options) as private:
            inputs, labels = next(iter(private.data_loader))
            private.criterion(model(inputs), labels).backward()
            counts = private._private.gradients.state.get("released_counts", torch.zeros(1))
            found.append((gradients(model).double() * 6, float(counts[0]) * 6))
    (sum_, count), (without, fewer) = found
    bound = math.hypot(*NORMS) if rule == "two norms" else CLIP
    assert float((sum_ - without).norm()) <= bound * (1 + 1e-4)
    moved = 0.5 if rule == "adaptive" and value < 1 else 0.0
    assert abs(abs(count - fewer) - moved) < 1e-6


# Statements, folders, refusals


WORDS = {
    "per_layer": "clipped by layer", "automatic": "scaled below", "adaptive": "a bound that noisy counts move",
}  # fmt: skip


def test_the_ledger_and_the_statement_name_the_rule(tmp_path: Path) -> None:
    epsilons = []
    for rule in RULES:
        with loop_of(tmp_path / rule, rule) as private:
            run_epoch(private)
            document = private.statement().to_json()
        (mechanism,), (stated,) = document["mechanisms"], document["guarantees"]
        kind, adaptive = "per_layer" if rule == "two norms" else rule, rule == "adaptive"
        assert mechanism["clipping"] == kind
        assert (mechanism["count_noise"] == 5.0) == adaptive
        assert stated["theorem"]["name"] == "adaptive-" * adaptive + "clipped-records"
        assert WORDS[kind] in mechanism["description"]
        held = " ".join(one["text"] for one in stated["assumptions"] if one["holds"])
        assert ("released before, also in a run that was resumed" in held) == adaptive
        epsilons.append(stated["epsilon"])
        for key in ("clipping", "count_noise", "description"):  # which a ledger of an earlier version lacks
            del mechanism[key]
        older: Any = mechanism_from_json(mechanism)
        assert older.clipping == "flat"
    assert len(set(epsilons)) == 1


@pytest.mark.parametrize(("rule", "kept"), [("two norms", True), ("adaptive", True), ("adaptive", False)])
def test_a_resumed_loop_repeats_an_uninterrupted_one(tmp_path: Path, rule: str, kept: bool) -> None:
    """Planted: the save forgets what moved the bound."""
    whole, stopped = (loop_of(tmp_path / name, rule) for name in ("whole", "stopped"))
    run_epoch(whole)
    run_epoch(stopped, steps=4)
    stopped.save()
    stopped.close()
    again = loop_of(tmp_path / "stopped", rule, resume=True)
    if not kept:
        for tensor in again._private.gradients.state.values():
            tensor.zero_()
    run_epoch(again)
    pairs = zip(whole.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == kept
    whole.close()
    again.close()


DATA = np.random.default_rng(1).normal(size=(90, 6)), np.arange(90) % 3


def config(**protection: Any) -> dict[str, Any]:
    return {
        "trainer": {"kind": "bp"}, "epochs": 2, "seed": 4, "threads": 1, "model": {"hidden": [8]},
        "optimizer": {"name": "sgd", "lr": 0.5}, "sampler": {"batch_size": 9}, "data": {"n_classes": 3},
        "protection": {"kind": "record", "noise_multiplier": 1.0, "clip_norm": 0.1, **protection},
    }  # fmt: skip


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, ctrl_c_at: type) -> None:
    given = config(clipping="adaptive", bound_rate=1.0)
    whole, _ = require_resumed_alike(tmp_path, given, DATA, ctrl_c_at(7))
    assert "a bound that noisy counts move" in whole.guarantees[0].mechanism


OTHERWISE = "is for bp, dfa, tdfa and pdfa, .*"


@pytest.mark.parametrize(
    ("kind", "protection", "match"),
    [
        ("bp", {"clipping": "adaptive", "bands": 2}, "protection.bands: 2 is not for protection.clipping ="),
        ("bp", {"clipping": "adaptive", "count_noise": 0.5}, "count_noise"),
        ("bp", {"clipping": "per_layer", "clip_norm": None, "layer_norms": [1.0]}, "has 1 norms, and the module"),
        ("bp", {"clipping": "per_layer", "layer_norms": [1.0, 2.0]}, "protection.clip_norm: 0.1 follows from"),
        ("bp", {"clipping": "per_layer", "clip_norm": None, "layer_norms": [1.0, 0.0]}, "must be numbers in"),
        ("bp", {"clipping": "medium"}, "protection.clipping"),
        ("zo", {"clipping": "automatic"}, f"{OTHERWISE} leave it out"),
        ("ulr", {"clipping": "automatic"}, f"{OTHERWISE} take trainer.clip = 'module'"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(
    tmp_path: Path, kind: str, protection: dict[str, Any], match: str
) -> None:
    given = {**config(**protection), "trainer": {"kind": kind}}
    with pytest.raises((opusim.ConfigError, ValueError), match=match):
        opusim.train(given, data=DATA, folder=tmp_path)


# Games of single steps


def without_the_root() -> Any:
    """Each of L layers is clipped to C, so that a record adds up to sqrt(L) C."""

    def bounds(self: Clipping, layers: int, bound: float) -> Tensor:
        return torch.full((layers, 1), bound, dtype=torch.float64)

    return patch.object(Clipping, "_bounds", bounds)


def counts_without_noise() -> Any:
    finish: Callable[..., None] = RecordGradients._finish

    def found(self: RecordGradients, *args: Any, **options: Any) -> None:
        self._count_std = 0.0
        finish(self, *args, **options)

    return patch.object(RecordGradients, "_finish", found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "fault"),
    [("per_layer", without_the_root), ("adaptive", counts_without_noise), ("automatic", None)],
)
def test_the_game_of_single_steps_finds_planted_faults(tmp_path: Path, rule: str, fault: Any) -> None:
    data = np.random.default_rng(1).normal(size=(200, 20)), np.arange(200) % 3
    given = config(clipping=rule, clip_norm=0.05)
    given |= {"epochs": 1, "model": {"hidden": [24, 24, 24]}, "sampler": {"batch_size": 12}}
    training.train(given, data=data, folder=tmp_path)
    found = audit_run(tmp_path, data=data, trials=200, seed=7)
    assert found.controls_hold
    assert not any(each.refutes for each in found.of(Role.RUN))
    if fault is not None:
        with fault():
            found = audit_run(tmp_path, data=data, trials=200, seed=7)
        assert any(each.refutes for each in found.of(Role.RUN))
