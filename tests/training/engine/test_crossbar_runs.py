"""Runs that use a crossbar: as the projector of photonic DFA, and under a trained model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import opusim
from opusim import training
from opusim.errors import CapabilityMissing
from opusim.training.cli import runs as commands
from opusim.training.errors import RunFolderError
from opusim.training.networks.network import jacobian_of
from opusim.training.runs import checkpoints
from opusim.training.runs.run import evaluate_run, load_run
from tests.support.command import opusim as run_command
from tests.support.record_models import Custom

DIGITS: dict[str, Any] = {"epochs": 1, "threads": 1, "data": {"name": "digits"}}
CROSSBAR = {**DIGITS, "model": {"hidden": [32]}, "trainer": {"kind": "pdfa"}, "device": {"name": "pcm"}}


def small(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of photonic DFA whose projector is a crossbar of phase-change memory."""
    path = tmp_path_factory.mktemp("crossbar") / "run"
    training.train(CROSSBAR | {"epochs": 20}, folder=path)
    return path


def test_photonic_dfa_learns_on_a_crossbar(run: Path, tmp_path: Path) -> None:
    found = load_run(run)
    assert found.summary["test_accuracy"] > 0.85
    assert found.facts["device"]["name"] == "pcm"
    one, other = (training.train(CROSSBAR, folder=tmp_path / name) for name in ("one", "other"))
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)  # noise and programming are replayed


def test_a_model_is_evaluated_on_a_device_over_time(run: Path) -> None:
    digital = evaluate_run(run)["accuracy"]
    figures = [evaluate_run(run, device="pcm", after_s=time, seed=1) for time in (1.0, 365.25 * 86400)]
    assert figures[0] == evaluate_run(run, device="pcm", after_s=1.0, seed=1)
    assert figures[0]["loss"] != evaluate_run(run, device="pcm", after_s=1.0, seed=2)["loss"]
    assert digital - 0.1 < figures[0]["accuracy"] < 1
    assert figures[1]["loss"] != figures[0]["loss"]
    for given, message in ({"after_s": 1.0}, "a device drifts"), ({"seed": 1}, "a device has chips"):
        with pytest.raises(ValueError, match=f"{next(iter(given))} = 1: only {message}"):
            evaluate_run(run, **given)
    with pytest.raises(CapabilityMissing, match="lacks the capability 'program'"):
        evaluate_run(run, device="gaussian")
    refused = run_command("evaluate", run.name, "--device", "gaussian", cwd=run.parent)
    assert refused.returncode == 2, refused.stderr  # 3 says that a device failed
    assert "lacks the capability 'program'; hermes, " in refused.stderr


def test_a_noise_aware_network_is_trained_with_its_noise_and_evaluated_on_a_device(tmp_path: Path) -> None:
    config = DIGITS | {"epochs": 2, "trainer": {"kind": "bp"}}
    weights = []
    for noise in (0.0, 0.2):
        torch.manual_seed(1)
        model = opusim.noise_aware(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), noise)
        found = training.train(config, model=model, folder=tmp_path / str(noise))
        weights.append(found.model[0].weight.detach())
        assert found.put_on_device("pcm", after_s=3600.0).usage.programmings == 2
        x, y = load_digits(return_X_y=True)
        assert found.evaluate(x.astype("float32"), y)["accuracy"] > 0.2
    assert not torch.allclose(*weights, atol=1e-3)


@pytest.mark.parametrize(("trainer", "step"), [
    ({"kind": "ulr", "copies": 8, "sigma": 0.3}, 0.02),
    ({"kind": "zo", "perturbation": 0.1, "directions": 2}, 0.0),
])  # fmt: skip
def test_forward_passes_train_in_place(trainer: dict[str, Any], step: float, tmp_path: Path) -> None:
    """The run's weights reach the device; without a programming step they would not, and nothing is learnt."""
    model, figures, programmings = small(32), [], []
    config = DIGITS | {"epochs": 6, "trainer": trainer}
    if trainer["kind"] == "zo":
        config["optimizer"] = {"lr": 0.05}
    for given in (step, None):
        with opusim.convert(model, "reram", seed=1, programming_step=given) as analog:
            run = training.train(config, model=analog.model, folder=tmp_path / str(given))
            figures.append(run.summary["test_accuracy"])
            programmings.append(analog.usage.programmings)
    assert figures[0] - figures[1] > 5 * (2 * 0.25 / 359) ** 0.5
    assert programmings[0] > 10
    assert programmings[1] == 2


IN_PLACE = {"zo": ({"kind": "zo", "perturbation": 0.1}, 0.0), "pdfa": ({"kind": "pdfa"}, 0.05)}
IN_PLACE["ulr"] = ({"kind": "ulr", "copies": 4, "sigma": 0.3}, 0.02)


@pytest.mark.parametrize("kind", [*IN_PLACE, pytest.param("without", id="planted fault")])
def test_a_run_in_place_resumes_to_the_bit(kind: str, tmp_path: Path, stop_at: Any, monkeypatch: Any) -> None:
    """Resumed on chips that the new process opened: conductances, scales and noise are those of before, to the bit."""
    trainer, step = IN_PLACE["ulr" if kind == "without" else kind]
    model = small()
    config = DIGITS | {"trainer": trainer, "checkpoint": {"every_steps": 3}}

    def end_of(folder: str, **options: Any) -> tuple[list[torch.Tensor], Any]:
        with opusim.convert(model, "pcm", seed=1, programming_step=step) as analog:
            analog.wait(60.0)
            found = training.train(model=analog.model, folder=tmp_path / folder, **options)
            held = [tensor for layer in analog.layers for tensor in layer.get_extra_state().values()]
            x = torch.rand(5, 64, generator=torch.Generator().manual_seed(1))
            return [*held, *(p.detach() for p in analog.parameters()), analog(x).detach()], found.summary

    whole, summary = end_of("whole", config=config)
    with pytest.raises(KeyboardInterrupt):
        end_of("cut", config=config, watcher=stop_at(4))
    if kind == "without":
        monkeypatch.setattr("opusim.training.runs.checkpoints.hold_on_devices", lambda model, states: None)
    cut, summary_of_cut = end_of("cut", resume=True)
    equal = [torch.equal(*pair) for pair in zip(whole, cut, strict=True)]
    if kind == "without":
        assert not any(equal[-5:])
        return
    assert all(equal)
    assert summary["test_accuracy"] == summary_of_cut["test_accuracy"]


def test_a_run_in_place_resumes_in_release(tmp_path: Path, stop_at: type) -> None:
    """The conductances are those of before, and the noise of products is fresh."""
    model = small()
    trainer, step = IN_PLACE["ulr"]
    config = DIGITS | {"trainer": trainer, "checkpoint": {"every_steps": 4}}
    with opusim.convert(model, "pcm", seed=1, mode="release", programming_step=step) as analog:
        with pytest.raises(KeyboardInterrupt):
            training.train(config, model=analog.model, folder=tmp_path, watcher=stop_at(4))
        held = [layer.device.require("matrix").matrix() for layer in analog.layers]
    with opusim.convert(model, "pcm", seed=1, mode="release", programming_step=step) as analog:
        saved = newest(tmp_path)
        assert [key for key in saved.tensors if "elapsed_s" in key]
        assert not [key for key in saved.tensors if "position" in key]  # of noise that could be rebuilt
        layers = checkpoints.layers_on_devices(analog.model)
        states = {name: saved.named(f"device.{name}.") for name in layers}
        checkpoints.hold_on_devices(analog.model, states)
        found = [layer.device.require("matrix").matrix() for layer in analog.layers]
    assert all(torch.equal(*pair) for pair in zip(held, found, strict=True))
    refused = pytest.raises(RunFolderError, match="'0' cannot resume: .*medium.seed: is that of another")
    with opusim.convert(model, "pcm", seed=2, mode="release") as other, refused:
        training.train(folder=tmp_path, resume=True, model=other.model)


def test_a_run_in_place_does_not_resume_without_devices(tmp_path: Path, stop_at: type) -> None:
    layers = {"first": nn.Linear(64, 16), "last": nn.Linear(16, 10)}  # of a class that opusim does not know
    model = Custom(lambda m, x: m.last(m.first(x).tanh()), **layers)
    config = DIGITS | {"trainer": {"kind": "zo"}}
    with opusim.convert(model, "reram", programming_step=0.1) as analog, pytest.raises(KeyboardInterrupt):
        training.train(config, model=analog.model, folder=tmp_path, watcher=stop_at(2))
    with pytest.raises(RunFolderError, match="layer 'first' ran on a device, and is digital in the model"):
        training.train(folder=tmp_path, resume=True, model=model)


def test_a_release_run_takes_only_devices_whose_noise_cannot_be_rebuilt(tmp_path: Path) -> None:
    """The checkpoint of a run on other devices would hold how far noise was drawn from a seed."""
    model, protection = small(), {"kind": "record", "epsilon": 3.0, "clip_norm": 1.0}
    config = DIGITS | {"mode": "release", "trainer": {"kind": "zo"}, "protection": protection}
    refused = pytest.raises(ValueError, match="layer '0' reads device 'reram' in mode = 'experiment'")
    with opusim.convert(model, "reram", seed=1) as analog, refused:
        training.train(config, model=analog.model, folder=tmp_path / "experiment")
    assert not (tmp_path / "experiment").exists()
    with opusim.convert(model, "reram", seed=1, mode="release") as analog:
        training.train(config, model=analog.model, folder=tmp_path / "release")
    assert not [key for key in newest(tmp_path / "release").tensors if "position" in key]


def newest(folder: Path) -> checkpoints.Checkpoint:
    return checkpoints.read_checkpoint(checkpoints.list_checkpoints(folder / "checkpoints")[-1])


def test_a_layer_on_a_device_has_the_gradients_of_its_digital_one() -> None:
    """The signals at outputs reach the parameters digitally: the device is not read for it."""
    convolution = nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    for module, h in ((convolution, torch.randn(4, 2, 8, 8)), (nn.Linear(7, 3), torch.randn(4, 7))):
        with opusim.convert(module, "reram") as analog:
            frames = analog.usage.frames
            digital, found = jacobian_of(module), jacobian_of(analog.model)
            delta = torch.randn(module(h).shape)
            ways = [each.contributions(delta, h) for each in (digital, found)]
            ones = torch.ones(1, len(h), dtype=torch.float64)
            for (_, one), (_, other) in zip(*(way.totals(ones) for way in ways), strict=True):
                assert torch.allclose(one.view_as(other), other, atol=1e-4)
                assert not torch.allclose(1.01 * one.view_as(other), other, atol=1e-4)
            assert torch.allclose(*(way.squared_norms() for way in ways), rtol=1e-3)
            assert analog.usage.frames == frames


def test_evaluation_on_a_device_names_what_stays_digital(tmp_path: Path, capsys: Any) -> None:
    x, y = np.random.default_rng(1).normal(size=(90, 4)).astype(np.float32), np.arange(90) % 2
    np.savez(tmp_path / "test.npz", x=x, y=y)
    config = {"epochs": 1, "model": {"name": "gru", "options": {"width": 3}}, "trainer": {"kind": "bp"}}
    training.train(config, data=(x, y), folder=tmp_path / "run")
    figures = evaluate_run(tmp_path / "run", data=f"npz:{tmp_path}/test.npz", device="pcm")
    assert figures["digital"] == ["blocks.0.gru", "blocks.1.gru"]
    commands.evaluate(tmp_path / "run", data=f"npz:{tmp_path}/test.npz", device="pcm")
    assert "No device takes blocks.0.gru, blocks.1.gru: digital in this figure." in capsys.readouterr().out


@pytest.mark.parametrize(("options", "code", "said"), [
    (["--after", "1h", "--json"], 0, '"accuracy"'),
    (["--after", "1h"], 0, "records of digits on reram, 1h after programming: accuracy"),
    (["--after", "soon"], 2, "'soon': must be like 1s, 30min, 1h, 1d or 1y"),
])  # fmt: skip
def test_the_command_evaluates_on_a_device(run: Path, options: list[str], code: int, said: str) -> None:
    result = run_command("evaluate", str(run), "--device", "reram", *options, cwd=run.parent)
    assert (result.returncode, said in result.stdout + result.stderr) == (code, True)
