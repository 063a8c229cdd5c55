"""The learning rate over a run, the mean of its end, and both in a run that was taken up again."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opusim import training
from opusim.training.config.sections import OptimizerConfig
from opusim.training.engine.loop import Engine
from opusim.training.networks.optimizers import TailAverage, make_optimizer, set_learning_rate
from tests.support.run_folders import newest, require_resumed_alike

LAWS = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "step": lambda p: 0.85 ** (p // 0.4),
}


@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
@pytest.mark.parametrize("schedule", list(LAWS))
def test_the_rate_follows_its_law(schedule: str, name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.27, schedule=schedule)
    optimizer = make_optimizer([nn.Parameter(torch.zeros(3))], config)
    for progress in (0.0, 0.3, 0.5, 0.99, 0.1):  # backwards too: the rate depends on the step alone
        set_learning_rate(optimizer, config, progress)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.27 * LAWS[schedule](progress), rel=1e-12)


def test_steps_of_the_rate_are_those_of_torch() -> None:
    """A fall every ten of 25 epochs, though 10 / 25 and the steps' shares are rounded numbers."""
    config = OptimizerConfig(lr=0.27, schedule="step", gamma=0.85, step_size=10 / 25)
    ours, theirs = (make_optimizer([nn.Parameter(torch.zeros(3))], config) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, step_size=10, gamma=0.85)
    for epoch in range(25):
        for step in range(7):
            set_learning_rate(ours, config, (7 * epoch + step) / (7 * 25))
            assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        theirs.step()
        scheduler.step()


CONFIG = {
    "epochs": 3, "threads": 1, "model": {"hidden": [8]}, "sampler": {"batch_size": 16}, "trainer": {"kind": "dfa"},
}  # fmt: skip
DATA = np.random.default_rng(1).normal(size=(60, 5)), np.arange(60) % 3


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_resumed_run_takes_up_its_schedule(tmp_path: Path, schedule: str, name: str, stop_at: type) -> None:
    config = {**CONFIG, "optimizer": {"name": name, "schedule": schedule, "averaged_tail": 0.5}}
    for stop in (3, 9):  # before and within the mean's steps
        require_resumed_alike(tmp_path / str(stop), config, DATA, stop_at(stop))
    constant = {**config, "optimizer": {"name": name, "averaged_tail": 0.5}}
    training.train(constant, data=DATA, folder=tmp_path / "constant")
    ends = [newest(tmp_path / name)["model.layer1.weight"] for name in ("constant", "3/whole")]
    assert not torch.equal(*ends)


def test_steps_of_a_run_have_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: type) -> None:
    rates: list[float] = []

    def recorded(optimizer: torch.optim.Optimizer, config: OptimizerConfig, progress: float) -> None:
        set_learning_rate(optimizer, config, progress)
        rates.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr("opusim.training.engine.loop.set_learning_rate", recorded)
    optimizer = {"lr": 0.3, "schedule": "linear"}
    with pytest.raises(KeyboardInterrupt):
        training.train({**CONFIG, "optimizer": optimizer}, data=DATA, folder=tmp_path, watcher=stop_at(6))
    training.train(data=DATA, folder=tmp_path, resume=True)
    steps = [0, 1, 2, 3, 4, 5, *range(4, 12)]  # the checkpoint of the first epoch stands at 4
    np.testing.assert_allclose(rates, [0.3 * (1 - step / 12) for step in steps])


def test_the_tail_is_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last model is the mean over the last third of the iterates, which are those of a run without it."""
    iterates: list[torch.Tensor] = []
    advance = Engine._advance

    def recorded(engine: Engine) -> None:
        advance(engine)
        iterates.append(engine._trainer.tensors["layer1.weight"].clone())

    monkeypatch.setattr(Engine, "_advance", recorded)
    training.train(CONFIG, data=DATA, folder=tmp_path / "plain")
    averaged: dict[str, Any] = {**CONFIG, "optimizer": {"averaged_tail": 1 / 3}}
    run = training.train(averaged, data=DATA, folder=tmp_path / "averaged")
    plain, tail = iterates[:12], iterates[12:]
    assert all(torch.equal(a, b) for a, b in zip(plain[:11], tail[:11], strict=True))
    expected = torch.stack(plain[8:]).mean(dim=0)
    torch.testing.assert_close(run.model[0].weight.detach(), expected)
    assert not torch.allclose(expected, plain[11])


def test_no_tail_and_a_tail_of_one_step_are_the_last_iterate() -> None:
    for share in (0.0, 0.1):
        average, parameter = TailAverage(share, 10), torch.zeros(2)
        for step in range(1, 11):
            parameter.fill_(step)
            average.update(step, {"w": parameter})
        assert parameter.tolist() == [10.0, 10.0]
