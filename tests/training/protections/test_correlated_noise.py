"""Noise that is correlated over steps: its law, its batches, its factorisation, resumed runs and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm

from opusim import training
from opusim.accounting.guarantee import BudgetExceeded, NoGuarantee, Status
from opusim.description.section import merged
from opusim.errors import ConfigError
from opusim.randomness.streams import CorrelatedStream, SeededStream
from opusim.training.config.run import load_config
from opusim.training.config.sections import OptimizerConfig
from opusim.training.engine.plan import RunPlan, load_data
from opusim.training.errors import RunInterrupted
from opusim.training.protections.record import (
    NEW_NOISE,
    CyclicPoissonSampler,
    banded_coefficients,
    weights_of_gradients,
)
from opusim.training.runs.folder import RunFolder
from tests.accounting.records.test_banded_records import dense
from tests.support.run_folders import newest, require_resumed_alike

COEFFICIENTS = (0.75, 0.5, 0.25)
STEPS, SIZE = 9, 6
N = 64
CONFIG: dict[str, Any] = {
    "epochs": 3, "threads": 1, "data": {"n_classes": 3, "validation_fraction": 0.0}, "model": {"hidden": [5]},
    "trainer": {"kind": "bp"}, "sampler": {"batch_size": 16},
    "protection": {"kind": "record", "noise_multiplier": 0.8, "bands": 3},
}  # fmt: skip
DATA = np.random.default_rng(1).normal(size=(N, 5)), np.arange(N) % 3


def same_model(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if name.startswith("model."))


def changed(**sections: Any) -> dict[str, Any]:
    return merged(CONFIG, sections)


def stream(coefficients: tuple[float, ...] = COEFFICIENTS, *, stored: bool = True) -> CorrelatedStream:
    return CorrelatedStream(fresh(), coefficients, size=SIZE, stored=stored)


def drawn(noise: CorrelatedStream | SeededStream, steps: range) -> np.ndarray:
    """The numbers of some steps, in two readings each, shape (steps, SIZE)."""
    found = []
    for step in steps:
        noise.seek(step)
        found.append(torch.cat([noise.normal((2, 2)).flatten(), noise.normal((2,))]).numpy().copy())
    return np.stack(found).astype(np.float64)


def fresh() -> SeededStream:
    return SeededStream(5, "test")


def test_the_noise_is_the_inverse_of_the_dense_matrix_times_fresh_noise() -> None:
    steps = range(STEPS)
    found = drawn(stream(), steps)
    np.testing.assert_allclose(dense(COEFFICIENTS, STEPS) @ found, drawn(fresh(), steps), rtol=0, atol=3e-6)
    wrong = dense((0.8, 0.5, 0.25), STEPS)  # planted: columns that were not normalised
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(wrong @ found, drawn(fresh(), steps), rtol=0, atol=3e-6)


def test_rounding_does_not_grow_with_the_steps() -> None:
    flat = (0.5, 0.5, 0.5, 0.5)  # the least stable of all coefficients that do not increase
    steps = range(400)
    found = drawn(stream(flat), steps)
    gap = np.abs(dense(flat, len(steps)) @ found - drawn(fresh(), steps)).max(axis=1)
    assert gap.max() < 4e-6 * max(1.0, np.abs(found).max())
    assert gap[-100:].mean() < 3 * gap[:100].mean() + 1e-6


def test_a_stream_continues_from_its_state_and_begins_anew_without_it() -> None:
    whole, first, second = stream(), stream(), stream()
    expected = drawn(whole, range(STEPS))
    drawn(first, range(4))
    for name, tensor in second.state.items():
        tensor.copy_(first.state[name])
    assert np.array_equal(drawn(second, range(4, STEPS)), expected[4:])
    assert all(torch.equal(whole.state[name], second.state[name]) for name in whole.state)
    anew = stream(stored=False)
    assert anew.state == {}
    drawn(anew, range(4))
    skipped = drawn(anew, range(6, 6 + STEPS))  # step 4 was not drawn, so nothing is known to lead to step 6
    expected = drawn(fresh(), range(6, 6 + STEPS))
    np.testing.assert_allclose(dense(COEFFICIENTS, STEPS) @ skipped, expected, rtol=0, atol=3e-6)


def test_a_step_that_broke_off_leaves_what_leads_to_it() -> None:
    broken, whole = stream(), stream()
    drawn(broken, range(4))
    assert int(broken.state["noise_leads_to"]) == 4
    broken.seek(4)
    broken.normal((2, 2))
    resumed = stream()
    for name, tensor in resumed.state.items():
        tensor.copy_(broken.state[name])
    assert int(broken.state["noise_leads_to"]) == 4
    assert np.array_equal(drawn(resumed, range(4, 8)), drawn(whole, range(8))[4:])


def test_a_wrong_number_of_draws_is_refused() -> None:
    noise = stream()
    noise.seek(0)
    noise.normal((5,))
    with pytest.raises(ValueError, match="size = 6: step 0 drew 5 numbers; state as many"):
        noise.seek(1)
    with pytest.raises(ValueError, match="size = 6: step 0 draws more numbers"):
        noise.normal((2,))


def pair_deviation(make: Callable[[int], np.ndarray]) -> float:
    """How far the share of 2,000 draws with the first two records in one subset is from 1 / 2, in standard errors."""
    first, second = np.stack([make(seed)[:2] for seed in range(2000)]).T
    return float(abs(np.mean(first == second) - 0.5) * 2 * 2000**0.5)


def test_subsets_are_coins_of_each_record() -> None:
    def coins(seed: int) -> np.ndarray:
        return CyclicPoissonSampler(4, sampling_probability=0.5, subsets=2, seed=seed).subset_of_records

    def partition(seed: int) -> np.ndarray:  # planted: two subsets of two records each
        return np.random.default_rng(seed).permutation(np.arange(4) % 2)

    assert pair_deviation(coins) < 5 < pair_deviation(partition)
    free = CyclicPoissonSampler(4000, sampling_probability=0.1, subsets=4, seed=None)
    sizes = np.bincount(free.subset_of_records, minlength=4)
    assert np.abs(sizes - 1000).max() < norm.isf(norm.sf(5.0) / 4) * math.sqrt(4000 * 0.25 * 0.75)
    assert np.array_equal(free.subset_of_records, free.subset_of_records)
    assert not np.array_equal(free.subset_of_records, replace(free).subset_of_records)


def gaps(indices: Callable[[int], torch.Tensor], steps: int, n: int) -> int:
    """Least number of steps between two batches of one record."""
    times: list[list[int]] = [[] for _ in range(n)]
    for step in range(steps):
        for record in indices(step).tolist():
            times[record].append(step)
    return min(after - before for own in times for before, after in pairwise(own))


@pytest.mark.parametrize("seed", [3, None])
def test_a_record_comes_up_in_its_own_steps_only(seed: int | None) -> None:
    n, bands, q, steps = 300, 4, 0.2, 200
    sampler = CyclicPoissonSampler(n, sampling_probability=q, subsets=bands, seed=seed)
    subset = sampler.subset_of_records
    assert gaps(sampler.indices, steps, n) == bands
    every = training.data.samplers.PoissonSampler(n, sampling_probability=q, seed=seed)
    assert gaps(every.indices, steps, n) < bands  # planted: all subsets at each step
    drawn_in = [sampler.indices(step).numpy() for step in range(steps)]
    assert all((subset[batch] == step % bands).all() for step, batch in enumerate(drawn_in))
    rates = np.array([len(batch) / np.sum(subset == step % bands) for step, batch in enumerate(drawn_in)])
    error = math.sqrt(bands * q * (1 - bands * q) / (n / bands) / steps)
    assert abs(rates.mean() - bands * q) < 5 * error
    assert (sampler.scheme, sampler.expected_batch_size, sampler.steps_per_epoch) == ("cyclic-poisson", 60, 5)


@pytest.mark.parametrize(("momentum", "schedule"), [(0.0, "constant"), (0.9, "cosine")])
def test_coefficients_are_those_of_a_dense_search(momentum: float, schedule: Any) -> None:
    steps, bands, optimizer = 24, 3, OptimizerConfig(momentum=momentum, schedule=schedule)
    rates = [1.0 if schedule == "constant" else (1 + math.cos(math.pi * s / steps)) / 2 for s in range(steps)]

    def weight(t: int, s: int) -> float:
        return sum(rates[u] * momentum ** (u - s) for u in range(s, t + 1))

    weights = np.array([[weight(t, s) for s in range(steps)] for t in range(steps)])

    def error(c: np.ndarray) -> float:
        return float(np.linalg.norm(weights @ np.linalg.inv(dense((1.0, *c), steps)))) * math.hypot(1, *c)

    found = banded_coefficients(bands, steps, optimizer)
    exact = {"xatol": 1e-8, "fatol": 1e-10}
    best = minimize(error, np.array([0.5, 0.3]), method="Nelder-Mead", options=exact)
    mine = np.array(found) / found[0]
    assert error(mine[1:]) <= best.fun * (1 + 1e-4)
    np.testing.assert_allclose(weights_of_gradients(steps, optimizer), weights, atol=1e-12)
    assert error(mine[1:]) < 0.75 * error(np.zeros(2))


@pytest.mark.parametrize(("bands", "steps"), [(1, 7), (2, 7), (5, 3), (16, 200)])
def test_columns_have_norm_one_and_float32_holds_the_coefficients(bands: int, steps: int) -> None:
    found = banded_coefficients(bands, steps, OptimizerConfig())
    norms = np.linalg.norm(dense(found, steps), axis=0)
    assert 1 - 2.0**-20 * bands <= math.hypot(*found) <= 1
    assert norms.max() <= 1
    assert all(float(np.float32(c)) == c and c >= 0 for c in found)


def test_one_band_is_independent_noise_bit_for_bit(tmp_path: Path) -> None:
    runs = {"plain": merged(CONFIG, {}), "one": changed(protection={"bands": 1}), "three": CONFIG}
    runs["plain"]["protection"] = {"kind": "record", "noise_multiplier": 0.8}
    for name, config in runs.items():
        training.train(config, data=DATA, folder=tmp_path / name)
    found = {name: newest(tmp_path / name) for name in runs}
    assert found["plain"].keys() == found["one"].keys()
    assert all(torch.equal(found["plain"][name], found["one"][name]) for name in found["plain"])
    assert not same_model(found["plain"], found["three"])


def convolutions() -> torch.nn.Module:
    torch.manual_seed(2)
    layers = (torch.nn.Unflatten(1, (1, 5)), torch.nn.Conv1d(1, 3, 3), torch.nn.Tanh(), torch.nn.Flatten())
    return torch.nn.Sequential(*layers, torch.nn.Linear(9, 3))


@pytest.mark.parametrize("coefficients", [(1, 2, 0.5), (0.1, 1, 0), (1, -0.5, 0), (0, 0, 0)])
def test_coefficients_whose_inverse_may_grow_are_refused(coefficients: tuple[float, ...]) -> None:
    """Planted by (1, 2): float32 holds none of the noise after 40 steps, which the accountant cannot see."""
    with pytest.raises(ConfigError, match=r"protection\.correlation: .* must not increase"):
        training.load_config(changed(protection={"correlation": list(coefficients)}))
    growing = CorrelatedStream(fresh(), (1.0, 2.0), size=64, stored=True)
    rows = []
    for step in range(60):
        growing.seek(step)
        rows.append(growing.normal((64,)).numpy().astype(float))
    left = rows[-1] + 2 * rows[-2]  # what C leaves of the last noise
    assert not np.std(left) > 0.5


@pytest.mark.parametrize("kind", ["bp", "ulr", "module"])
def test_a_resumed_run_repeats_the_whole_one_bit_for_bit(tmp_path: Path, kind: str, ctrl_c_at: type) -> None:
    config, model = changed(trainer={"kind": "bp" if kind == "module" else kind}), lambda: None
    if kind == "module":
        del config["model"]
        model = convolutions
    runs = require_resumed_alike(tmp_path, config, DATA, ctrl_c_at(5), model)
    assert {"state.noise", "state.noise_leads_to"} <= newest(tmp_path / "cut").keys()
    paid = [run.folder.read_ledger().mechanisms for run in runs]
    assert paid[0] == paid[1]


def test_planted_forgotten_noise_is_caught(tmp_path: Path, ctrl_c_at: type, monkeypatch: Any) -> None:
    monkeypatch.setattr(CorrelatedStream, "state", {})
    with pytest.raises(AssertionError):
        require_resumed_alike(tmp_path, CONFIG, DATA, ctrl_c_at(5))
    assert not same_model(newest(tmp_path / "whole"), newest(tmp_path / "cut"))


def test_a_release_run_stores_no_noise_and_pays_for_beginning_anew(tmp_path: Path, ctrl_c_at: type) -> None:
    config = changed(mode="release")
    with pytest.raises(RunInterrupted):
        training.train(config, data=DATA, folder=tmp_path, watcher=ctrl_c_at(5))
    assert not [name for name in newest(tmp_path) if "noise" in name]
    before = RunFolder(tmp_path).read_ledger()
    assert [payment.name for payment in before.payments] == [None]
    assert before.mechanisms[0].steps == 5
    run = training.train(data=DATA, folder=tmp_path, resume=True)
    payments = RunFolder(tmp_path).read_ledger().payments
    assert [payment.name for payment in payments] == [None, NEW_NOISE, None]
    (mechanism,) = RunFolder(tmp_path).read_ledger().mechanisms
    assert mechanism.steps == 12 + 2  # so that 5 and 7 steps cost ceil(5 / 3) + ceil(7 / 3) releases
    assert run.guarantees[0].status is Status.PROVEN
    assert not [name for name in newest(tmp_path) if "noise" in name]


def test_a_release_run_that_cannot_pay_to_begin_anew_keeps_its_model(tmp_path: Path, ctrl_c_at: type) -> None:
    config = changed(mode="release", protection={"noise_multiplier": None, "epsilon": 3.0})
    with pytest.raises(RunInterrupted):
        training.train(config, data=DATA, folder=tmp_path, watcher=ctrl_c_at(11))
    with pytest.raises(BudgetExceeded, match=r"training ended after step 11 of 12, whose model is in [^;]*$"):
        training.train(data=DATA, folder=tmp_path, resume=True)
    assert (tmp_path / "summary.json").exists()
    assert [mechanism.steps for mechanism in RunFolder(tmp_path).read_ledger().mechanisms] == [11]


def test_noise_of_a_device_is_correlated_like_any_other(tmp_path: Path) -> None:
    noisy = {"device": {"noise": {"sigma": 0.1}}, "protection": {"noise": "device"}}
    config = changed(trainer={"kind": "pdfa"}, epochs=1, **noisy)
    run = training.train(config, data=DATA, folder=tmp_path)
    assert run.guarantees[0].status is Status.PROVEN_UNDER_DEVICE_MODEL
    assert "device noise correlated over 3 steps" in run.guarantees[0].mechanism
    assert "state.noise" in newest(tmp_path)


def plan(config: dict[str, Any]) -> RunPlan:
    resolved = load_config(config).replaced(data={"name": "arrays"})
    return RunPlan.resolve(resolved, load_data(resolved, DATA))


def test_a_resolved_run_states_its_coefficients_and_takes_given_ones() -> None:
    found = plan(changed(protection={"noise_multiplier": None, "epsilon": 3.0})).config.protection
    assert found.correlation == banded_coefficients(3, 12, OptimizerConfig())
    own = plan(changed(protection={"correlation": (1.0, 0.5, 0.25)}))
    assert own.config.protection.correlation == (1.0, 0.5, 0.25)
    (mechanism,) = own.mechanisms
    assert mechanism.as_noise().scale == pytest.approx(0.8 / 1.0)  # one step: c_0 only
    assert mechanism.repeated(12).as_noise().scale == pytest.approx(0.8 / math.hypot(1.0, 0.5, 0.25))


@pytest.mark.parametrize(("config", "message"), [
    (changed(protection={"bands": 5}), "protection: bands = 5: times the sampling probability 0.25"),
    (changed(protection={"bands": 1, "correlation": (1.0,)}), "correlation.*needs protection.bands"),
    (changed(protection={"correlation": (1.0, 0.5)}), "correlation: has 2 coefficients"),
    (changed(sampler={"scheme": "full-batch"}), "sampler.scheme: 'full-batch' draws no subsets in turn"),
    (changed(trainer={"kind": "zo"}), "protection.bands: 3 is for trainers whose gradients"),
    (changed(trainer={"kind": "convex"}, protection={"relation": "zero_out"}), "protection.bands: 3"),
])  # fmt: skip
def test_unproven_runs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config)


def test_other_batches_and_unstated_noise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(CONFIG)
    flat = training.data.samplers.PoissonSampler(N, sampling_probability=0.25, seed=1)
    with pytest.raises(NoGuarantee, match="scheme = 'poisson': noise that is correlated over 3 steps"):
        replace(found, sampler=flat).protection.require_covered()
    other = replace(found, sampler=replace(found.sampler, subsets=2))
    with pytest.raises(NoGuarantee, match="scheme = 'cyclic-poisson'"):
        other.protection.require_covered()
    own = found.mechanisms[0]
    other = replace(own, correlation=(1.0,))
    kind = type(found.algorithm)
    monkeypatch.setattr(kind, "mechanism", lambda self, z: replace(other, noise_multiplier=z))
    with pytest.raises(NoGuarantee, match="does not state noise that is correlated over 3 steps"):
        _ = replace(found).protection.released()
