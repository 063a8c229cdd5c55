"""Every trainer and protection on an NVIDIA GPU: it learns, stops, goes on, and is read back on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opusim
from benchmarks.speed import run_steps
from opusim import training
from opusim.randomness.streams import noise_stream
from opusim.training.engine import cards
from opusim.training.errors import CardMemoryError, RunInterrupted
from opusim.training.networks.network import FullyConnected
from opusim.training.protections.record import RecordGradients
from tests.support.private_loops import parts, private_loop
from tests.support.run_folders import equal, newest

BASE: dict[str, Any] = {
    "epochs": 2, "threads": 1, "data": {"n_classes": 3}, "model": {"hidden": [16, 8]}, "sampler": {"batch_size": 32},
    "checkpoint": {"every_steps": 4},
}  # fmt: skip
RECORD: dict[str, Any] = {
    "sampler": {"scheme": "poisson", "batch_size": 64},
    "protection": {"kind": "record", "noise_multiplier": 0.7},
}
CASES: dict[str, dict[str, Any]] = {
    "bp": {"trainer": {"kind": "bp"}},
    "dfa": {"trainer": {"kind": "dfa"}},
    "tdfa": {"trainer": {"kind": "tdfa"}},
    "pdfa": {"trainer": {"kind": "pdfa"}},
    "pdfa, camera": {"trainer": {"kind": "pdfa"}, "device": {"name": "camera"}},
    "pdfa, bit planes": {"trainer": {"kind": "pdfa", "encoding": "planes"}},
    "pdfa, published order": {"trainer": {"kind": "pdfa", "order": "published", "tau_b": 1.0, "tau_h_max": 1.0}},
    "ulr": {"trainer": {"kind": "ulr", "copies": 4}},
    "ulr, orthogonal": {"trainer": {"kind": "ulr", "copies": 4, "shape": "matched", "directions": "orthogonal"}},
    "ulr, published": {"trainer": {"kind": "ulr", "form": "published", "copies": 4, "target_std": 0.5}},
    "zo": {"trainer": {"kind": "zo"}, "optimizer": {"name": "sgd", "lr": 0.01}},
    "bp, record": {"trainer": {"kind": "bp"}, **RECORD},
    "bp, record, correlated": {
        "trainer": {"kind": "bp"}, "sampler": {"scheme": "poisson", "batch_size": 32},
        "protection": {"kind": "record", "noise_multiplier": 0.7, "bands": 3},
    },
    "pdfa, record": {"trainer": {"kind": "pdfa"}, **RECORD},
    "ulr, record": {"trainer": {"kind": "ulr", "copies": 4}, **RECORD},
    "zo, record": {"trainer": {"kind": "zo"}, "optimizer": {"name": "sgd", "lr": 0.01}, **RECORD},
    "convex, record": {
        "trainer": {"kind": "convex", "hyperplanes": 4}, "model": None, "optimizer": {"momentum": 0.0}, **RECORD,
    },
    "convex, last iterate": {
        "trainer": {"kind": "convex", "hyperplanes": 4}, "model": None,
        "sampler": {"scheme": "disjoint-cyclic", "batch_size": 32}, "optimizer": {"momentum": 0.0},
        "protection": {"kind": "last-iterate", "epsilon": 8.0},
    },
    "ridge": {
        "trainer": {"kind": "ridge"}, "epochs": None, "model": None, "sampler": None,
        "protection": {"kind": "label-release", "epsilon": 4.0},
    },
    "tdfa, amplified labels": {
        "trainer": {"kind": "tdfa"}, "sampler": {"scheme": "poisson", "batch_size": 64},
        "protection": {"kind": "label-amplified", "epsilon": 4.0},
    },
    "bp, randomized response": {
        "trainer": {"kind": "bp"}, "protection": {"kind": "label-randomized-response", "epsilon": 4.0},
    },
}  # fmt: skip


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    values = {**BASE, **CASES[name], **changes}
    return {key: value for key, value in values.items() if value is not None}


def data(n: int = 320) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    y = np.arange(n) % 3
    return generator.normal(size=(n, 5)) + 2.0 * np.eye(3, 5)[y], y


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_learns_resumes_and_is_read_back(tmp_path: Path, name: str, gpu: Any, stop_at: type) -> None:
    config = config_of(name, torch_device=str(gpu))
    run = training.train(config, data=data(), folder=tmp_path / "unbroken")
    assert run.summary["steps"] > 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.model.parameters())
    assert {parameter.device.type for parameter in run.model.parameters()} == {"cpu"}
    assert training.load_run(tmp_path / "unbroken").evaluate(*data()) == run.evaluate(*data())
    if name == "ridge":  # one step
        return
    with pytest.raises((RunInterrupted, KeyboardInterrupt)):
        training.train(config, data=data(), folder=tmp_path / "broken", watcher=stop_at(6))
    training.train(data=data(), folder=tmp_path / "broken", resume=True)
    assert equal(newest(tmp_path / "unbroken"), newest(tmp_path / "broken"))


@pytest.mark.parametrize("name", ["bp", "dfa", "tdfa"])
def test_without_noise_parameters_are_those_of_the_cpu(tmp_path: Path, name: str, gpu: torch.device) -> None:
    for folder, place in (("here", "cpu"), ("there", str(gpu))):
        training.train(config_of(name, torch_device=place), data=data(), folder=tmp_path / folder)
    expected, found = newest(tmp_path / "here"), newest(tmp_path / "there")
    for key, value in expected.items():
        torch.testing.assert_close(found[key].to(value.dtype), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bp", "pdfa", "ulr", "bp, record", "pdfa, record", "ulr, record"])
def test_it_learns_as_on_the_cpu(tmp_path: Path, name: str, gpu: torch.device) -> None:
    """A linear rule of three far classes, chance 1/3; the record noise is small for 4,000 records."""
    changes: dict[str, Any] = {"epochs": 10, "optimizer": {"lr": 0.1}, "torch_device": str(gpu)}
    run = training.train(config_of(name, **changes), data=data(4000), folder=tmp_path)
    assert run.evaluate(*data(900))["accuracy"] > 0.75


@pytest.mark.parametrize("name", [name for name in run_steps.CASES if name not in run_steps.WAITS])
def test_a_step_waits_for_nothing(name: str, gpu: torch.device) -> None:
    with run_steps.steps_of(name, str(gpu)) as step:
        step(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_records_that_stay_on_the_host_give_the_same_run(tmp_path: Path, gpu: Any, monkeypatch: Any) -> None:
    config = config_of("bp", torch_device=str(gpu))
    training.train(config, data=data(), folder=tmp_path / "resident")
    monkeypatch.setattr(cards, "_free_memory", lambda place: 0)
    training.train(config, data=data(), folder=tmp_path / "host")
    assert equal(newest(tmp_path / "resident"), newest(tmp_path / "host"))


def test_a_batch_beyond_the_memory_of_the_card_is_one_line(tmp_path: Path, gpu: torch.device) -> None:
    model = nn.Sequential(nn.Linear(5, 2**20), nn.ReLU(), nn.Linear(2**20, 3))  # 4 MiB a record and layer
    config = config_of("bp", torch_device=str(gpu), sampler={"batch_size": 30_000}, model=None)
    with pytest.raises(CardMemoryError, match=r"step 0: .*sampler.batch_size=\d+ \(estimated from"):
        training.train(config, data=data(40_000), model=model, folder=tmp_path)


@pytest.mark.parametrize("mode", ["experiment", "release"])
def test_the_sum_that_leaves_a_step_has_the_accounted_noise(gpu: torch.device, mode: str, seed: int) -> None:
    """Records of gradient 0: what is left is N(0, (sigma C / divisor)^2), mean and variance at five standard errors."""
    clip, multiplier, divisor, steps = 0.5, 1.3, 16.0, 20
    network = FullyConnected(nn.Sequential(nn.Linear(99, 180), nn.Tanh(), nn.Linear(180, 4)).to(gpu))
    stream = noise_stream(mode, seed, "central-noise")
    protection = RecordGradients(clip_norm=clip, noise_multiplier=multiplier, divisor=divisor, noise=stream)
    drawn = []
    for step in range(steps):
        stream.seek(step)
        sizes = ((180, 4), (99, 180))
        deltas, inputs = ([torch.zeros(0, size, device=gpu) for size in each] for each in sizes)
        protection.set_gradients([network.contributions(deltas, inputs)])
        drawn.append(torch.cat([parameter.grad.flatten() for parameter in network.parameters]).double())
    z = torch.stack(drawn) / (multiplier * clip / divisor)
    assert is_standard_normal(z)
    assert not is_standard_normal(0.99 * z)  # a planted fault: 1 % too little
    assert abs(float((z[0] * z[1]).mean())) < 5 / z.shape[1] ** 0.5


def is_standard_normal(z: Tensor) -> bool:
    """Whether mean and variance are 0 and 1."""
    size = z.numel() ** 0.5
    return abs(float(z.mean())) < 5 / size and abs(float(z.square().mean()) - 1) < 5 * 2**0.5 / size


@pytest.mark.parametrize("release", [False, True])
def test_a_private_loop_trains_a_module_on_the_gpu(tmp_path: Path, gpu: torch.device, release: bool) -> None:
    module, _, criterion, loader = parts()
    module.to(gpu)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    options = {"mode": "release", "seed": None} if release else {}
    private = private_loop(tmp_path, (module, optimizer, criterion, loader), **options)
    model, private_optimizer, private_criterion, private_loader = private
    for x, y in private_loader:
        private_optimizer.zero_grad()
        private_criterion(model(x.to(gpu)), y.to(gpu)).backward()
        private_optimizer.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_feedback_points_under_a_device_train_a_module_on_the_gpu(gpu: torch.device) -> None:
    torch.manual_seed(1)
    layers = nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    module = nn.Sequential(*layers).to(gpu)
    model = opusim.FeedbackAlignment(module)
    x, y = (torch.from_numpy(part).to(gpu) for part in data())
    shape = model.shape(x[:2].float())
    model.noisy_device = opusim.open_device("gaussian", n_inputs=shape.n_inputs, n_outputs=shape.n_outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
