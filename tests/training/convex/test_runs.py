"""Convex runs: guarantees, refusals, contents of the folder, resuming after a kill or a failed device, devices."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.bare import bare
from benchmarks.devices.faults import AT_STEP, description_file, weights
from opusim import training
from opusim.accounting.guarantee import Adjacency, NoGuarantee, Release, Status
from opusim.accounting.ledger import read_ledger
from opusim.accounting.mechanisms.convex import ConvexLastIterate, proven_mu
from opusim.description.section import merged
from opusim.devices.kinds import register_device
from opusim.devices.registry import open_device
from opusim.errors import ConfigError, DeviceError, DeviceUnavailable
from opusim.testing.faults import KIND, Fault, FaultyDevice, faulty_device
from opusim.training.cli.app import app
from opusim.training.config import load_config
from opusim.training.convex.trainer import ConvexTrainer, GatedNetwork, GatedRelu, Objective
from opusim.training.protections.base import DeviceNormals
from opusim.training.protections.record import LastIterateProtection
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from tests.support.command import opusim
from tests.support.run_folders import newest, require_resumed_alike

CONFIG: dict[str, Any] = {
    "epochs": 3, "threads": 1, "data": {"n_classes": 3, "mean": 0.0, "std": 1.0, "validation_fraction": 0.0},
    "trainer": {"kind": "convex", "hyperplanes": 6}, "optimizer": {"lr": 1.5, "momentum": 0.0},
    "sampler": {"scheme": "disjoint-cyclic", "batch_size": 10}, "protection": {"kind": "last-iterate", "epsilon": 3.0},
}  # fmt: skip
DEVICE = {"device": {"name": "gaussian", "noise": {"sigma": 0.5}}}


def data(n: int = 66) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(n, 5)), np.arange(n) % 3


def test_a_run_states_what_its_last_iterate_guarantees(tmp_path: Path) -> None:
    run = training.train(CONFIG, data=data(), folder=tmp_path)
    proven, claimed = run.guarantees
    assert (proven.status, proven.release) == (Status.PROVEN, Release.LAST_ITERATE)
    assert proven.adjacency is Adjacency.REPLACE_ONE
    assert 2.99 < proven.epsilon <= 3.0
    assert {assumption.holds for assumption in proven.assumptions} == {True, None}
    assert claimed.status is Status.CLAIMED
    assert math.isinf(claimed.epsilon)
    (mechanism,) = read_ledger(tmp_path).mechanisms
    assert isinstance(mechanism, ConvexLastIterate)
    assert (mechanism.batches, mechanism.epochs, mechanism.final_noise) == (6, 3, math.sqrt(5))
    x, y = data()
    assert training.load_run(tmp_path).predict(x).shape == y.shape


def test_the_noise_of_a_run_is_what_its_ledger_says(tmp_path: Path) -> None:
    """With records that have no features nothing but noise moves the weights: its variance is known in closed form."""
    x, y = data()
    config = merged(CONFIG, {"trainer": {"hyperplanes": 400}, "optimizer": {"schedule": "linear"}})
    training.train(config, data=(np.zeros_like(x), y), folder=tmp_path)
    (mechanism,) = read_ledger(tmp_path).mechanisms
    assert isinstance(mechanism, ConvexLastIterate)
    unit = 1.5 * mechanism.noise_multiplier * 0.5 / 10  # eta z C / b
    shares = 1 - np.arange(18) / 18
    expected = unit**2 * (float(np.sum(shares**2)) + mechanism.final_noise**2)
    weight = newest(tmp_path)["model.weight"].double()
    ratio = float(weight.square().mean()) / expected
    assert abs(ratio - 1) < 5 * math.sqrt(2 / weight.numel())
    without_final = unit**2 * float(np.sum(shares**2))
    assert abs(float(weight.square().mean()) / without_final - 1) > 10 * math.sqrt(2 / weight.numel())


def test_poisson_batches_release_every_update_for_replacing_a_record(tmp_path: Path) -> None:
    config = merged(CONFIG, {"sampler": {"scheme": "poisson"}, "protection": {"kind": "record"}})
    run = training.train(config, data=data(), folder=tmp_path)
    (guarantee,) = run.guarantees
    assert (guarantee.release, guarantee.adjacency) == (Release.EVERY_UPDATE, Adjacency.REPLACE_ONE)
    assert guarantee.status is Status.PROVEN
    assert 2.99 < guarantee.epsilon <= 3.0


def test_full_batches_are_batches_too(tmp_path: Path) -> None:
    run = training.train({**CONFIG, "sampler": {"scheme": "full-batch"}}, data=data(), folder=tmp_path)
    (mechanism,) = read_ledger(tmp_path).mechanisms
    assert isinstance(mechanism, ConvexLastIterate)
    assert mechanism.batches == 1
    assert proven_mu(mechanism) == pytest.approx(2 * math.sqrt(3) / mechanism.noise_multiplier)
    assert run.guarantees[0].is_proven


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": {"lr": 2.0}}, NoGuarantee, r"learning_rate = 2: must be below 2 / \(beta \+"),
    ({"trainer": {"regularisation": 0.5}}, NoGuarantee, "learning_rate = 1.5: must be below .* = 1.33"),
    ({"optimizer": {"momentum": 0.9}}, ConfigError, "optimizer.momentum: 0.9 is not for .*set it to 0"),
    ({"model": {"hidden": [8]}}, ConfigError, "model: .* set trainer.hyperplanes"),
    ({"optimizer": {"weight_decay": 0.1}}, ConfigError, "use trainer.regularisation"),
    ({"optimizer": {"name": "adam"}}, ConfigError, "optimizer.name: 'adam'"),
    ({"optimizer": {"averaged_tail": 0.5}}, ConfigError, "a mean of iterates is not the last iterate"),
    ({"protection": {"divisor": 5.0}}, ConfigError, "the theorem divides by the batch size"),
    ({"protection": {"clip_norm": 1.0}}, ConfigError, "use trainer.clip"),
    ({"sampler": {"scheme": "shuffled-epochs"}}, NoGuarantee, "fixed disjoint batches in a fixed order"),
    ({"sampler": {"scheme": "poisson"}}, NoGuarantee, "fixed disjoint batches in a fixed order"),
    ({"protection": {"kind": "record"}}, NoGuarantee, "'disjoint-cyclic'.*Use 'poisson'"),
    ({"protection": {"kind": "label-amplified", "noise_multiplier": 1.0}}, ConfigError, "it takes none"),
    ({"data": {"components": 2}}, NoGuarantee, "principal components are computed from the private records"),
    ({"data": {"n_classes": None}}, NoGuarantee, "data.n_classes is missing"),
    ({"trainer": {"gate_readings": 3}}, ConfigError, "gate_readings: 3 does nothing here"),
    ({"protection": {"noise": "device"}, "device": {"name": "ideal"}}, ConfigError, "'device' credits"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_no_theorem_covers_is_refused(tmp_path: Path, change: dict, error: type, message: str) -> None:
    config = merged(CONFIG, change)
    if change.get("device"):
        config["device"] = change["device"]
    with pytest.raises(error, match=message):
        training.train(config, data=data(), folder=tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_module_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"must be a opusim.training.convex.trainer.GatedRelu, got Linear"):
        training.train(CONFIG, data=data(), model=torch.nn.Linear(5, 3), folder=tmp_path)


def test_another_trainer_has_no_last_iterate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'last-iterate' is not for trainer.kind = 'bp'"):
        training.train({"trainer": {"kind": "bp"}, "protection": CONFIG["protection"]}, folder=tmp_path)


@pytest.mark.parametrize("source", ["seed", "device"])
def test_a_stopped_run_goes_on_bit_for_bit_and_pays_once(tmp_path: Path, source: str, stop_at: type) -> None:
    config = merged(CONFIG, {"trainer": {"gates": source}, "checkpoint": {"every_steps": 4}})
    config["protection"]["noise"] = "device" if source == "device" else "digital"
    config |= DEVICE if source == "device" else {}
    _, run = require_resumed_alike(tmp_path, config, data(), stop_at(10))
    assert run.guarantees[0].epsilon <= 3.0


def test_a_release_run_keeps_no_intermediate_model(tmp_path: Path, stop_at: type) -> None:
    """Killed and gone on with, it pays once: one last model leaves, whatever was computed on the way."""
    config = merged(CONFIG, {"mode": "release", "checkpoint": {"every_steps": 2}})
    with pytest.raises(ConfigError, match="checkpoint.keep: 5 keeps iterates before the last one"):
        training.train(merged(config, {"checkpoint": {"keep": 5}}), data=data(), folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=data(), folder=tmp_path, watcher=stop_at(9))
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-0000000008.safetensors"]
    assert "unfinished" in CliRunner().invoke(app, ["account", "run", str(tmp_path)]).output
    run = training.train(data=data(), folder=tmp_path, resume=True)
    assert "unfinished" not in CliRunner().invoke(app, ["account", "run", str(tmp_path)]).output
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-0000000018.safetensors"]
    assert len(read_ledger(tmp_path).payments) == 1
    assert run.guarantees[0].epsilon <= 3.0
    assert set(run.summary or {}) == {"schema_version", "steps"}
    assert all(set(line) == {"schema_version", "epoch", "step"} for line in run.metrics)
    assert not list(tmp_path.glob("timing*"))


@pytest.mark.slow
def test_gates_and_noise_of_a_device_learn_like_those_of_a_seed(tmp_path: Path) -> None:
    """Means of five seeds on digits, each source with its own; tolerance five standard errors of the difference."""
    accuracies: dict[str, list[float]] = {"seed": [], "device": []}
    for source, found in accuracies.items():
        for seed in range(5):
            config = {
                **CONFIG, "seed": seed, "epochs": 10, "data": {"name": "digits"},
                "trainer": {"kind": "convex", "hyperplanes": 64, "gates": source},
                "sampler": {"scheme": "disjoint-cyclic", "batch_size": 50},
                "protection": {
                    "kind": "last-iterate", "epsilon": 8.0, "noise": "device" if source == "device" else "digital",
                },
            }  # fmt: skip
            if source == "device":  # the packaged medium is one matrix: each seed takes another device
                config["device"] = {"name": "gaussian", "medium": {"seed": 1000 + seed}}
            run = training.train(config, folder=tmp_path / f"{source}-{seed}")
            found.append((run.summary or {})["test_accuracy"])
            status = Status.PROVEN_UNDER_DEVICE_MODEL if source == "device" else Status.PROVEN
            assert run.guarantees[0].status is status
    means = {source: np.mean(values) for source, values in accuracies.items()}
    error = math.sqrt(sum(np.var(values, ddof=1) / 5 for values in accuracies.values()))
    assert abs(means["seed"] - means["device"]) < 5 * error
    assert min(means.values()) > 0.85


def test_a_planted_fault_of_blind_gates_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the device's hyperplanes never read, all would be 0 and every gate open."""
    monkeypatch.setattr(ConvexTrainer, "initialise", lambda self, trainer: None)
    config = merged(CONFIG, {"trainer": {"gates": "device"}, **DEVICE})
    training.train(config, data=data(), folder=tmp_path / "blind")
    monkeypatch.undo()
    training.train(config, data=data(), folder=tmp_path / "seeing")
    planes = [newest(tmp_path / name)["model.hyperplanes"] for name in ("blind", "seeing")]
    assert not torch.equal(*planes)


@pytest.mark.parametrize(("given", "kind", "scheme"), [
    ([], "record", "poisson"),
    (["--method", "poisson"], "record", "poisson"),
    (["--method", "cyclic"], "last-iterate", "disjoint-cyclic"),
])  # fmt: skip
def test_a_file_gives_the_method_unless_given(tmp_path: Path, given: list, kind: str, scheme: str) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(
        'epochs = 1\nthreads = 1\ntrainer = { kind = "convex", hyperplanes = 8 }\n'
        'optimizer = { lr = 1.0, momentum = 0.0 }\nsampler = { scheme = "poisson", batch_size = 100 }\n'
        'protection = { kind = "record", epsilon = 2.0 }\n'
    )
    call = ("train", "convex", "--config", file, "--epsilon", "5", "--out", out, "--quiet", *given)
    assert opusim(*call, cwd=tmp_path).returncode == 0
    config = training.load_run(out).config
    assert (config.protection.kind, config.protection.epsilon, config.sampler.scheme) == (kind, 5.0, scheme)


D, P, K, B = 5, 6, 3, 8
LAST_STEP = AT_STEP + 13


@pytest.fixture(autouse=True)
def _breakable() -> Iterator[None]:
    register_device(KIND, faulty_device)
    FaultyDevice.repaired = False
    yield
    FaultyDevice.repaired = False


def run(folder: Path, device: Path) -> Any:
    """36 steps whose noise the device gives; its gates come from a seed, so that noise is all it is asked for."""
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(48, D)), np.arange(48) % K
    if folder.exists():
        return training.train(data=(x, y), folder=folder, resume=True)
    changes = {
        "epochs": 6, "trainer": {"regularisation": 0.05}, "sampler": {"batch_size": B},
        "protection": {"noise": "device"}, "device": {"name": str(device), "noise": {"sigma": 0.5}},
        "checkpoint": {"every_steps": AT_STEP, "keep": 100},
    }  # fmt: skip
    return training.train(merged(CONFIG, changes), data=(x, y), folder=folder)


def kept(folder: Path, step: int) -> Tensor:
    """The weights of one checkpoint."""
    (path,) = (p for p in list_checkpoints(folder / "checkpoints") if int(p.stem.split("-")[1]) == step)
    return read_checkpoint(path).tensors["model.weight"]


@pytest.mark.parametrize("fault", [Fault.UNPLUGGED, Fault.WRONG_SHAPE, Fault.NOT_A_NUMBER])
def test_a_run_whose_noise_fails_keeps_the_model_of_the_step_before(tmp_path: Path, fault: Fault) -> None:
    wanted = run(tmp_path / "unbroken", description_file(tmp_path, None))
    with pytest.raises(DeviceError, match=f"Step {AT_STEP} of 36 was not done"):
        run(tmp_path / "broken", description_file(tmp_path, fault))
    assert torch.equal(kept(tmp_path / "broken", AT_STEP), kept(tmp_path / "unbroken", AT_STEP))
    FaultyDevice.repaired = True
    found = run(tmp_path / "broken", tmp_path)
    assert found.step == wanted.step == 36
    assert torch.equal(weights(found)["model.weight"], weights(wanted)["model.weight"])


class DescendsBeforeItDraws(ConvexTrainer):
    """The planted fault: the gradient step comes first, its noise after."""

    def _descend(self, x: Tensor, spread: Tensor, step: int) -> None:
        self.model.weight.data.mul_(0.5)
        super()._descend(x, spread, step)


@pytest.mark.parametrize(("kind", "moved"), [(ConvexTrainer, False), (DescendsBeforeItDraws, True)])
def test_a_step_of_failed_noise_moves_nothing(tmp_path: Path, kind: type[ConvexTrainer], moved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    model = GatedRelu(D, K, torch.randn(P, D, generator=generator))
    config = load_config({"trainer": {"kind": "convex", "regularisation": 0.05}})
    optimizer = torch.optim.SGD([model.weight], lr=1.5)
    x, y = torch.randn(B, D, generator=generator), torch.arange(B) % K
    description = str(description_file(tmp_path, Fault.UNPLUGGED))
    with open_device(description, n_inputs=D, n_outputs=P) as device:
        trainer = bare(
            kind, GatedNetwork(model), config, total_steps=LAST_STEP + 1, optimizer=optimizer,
            objective=Objective(name="margin", clip=0.5), divisor=B, noise=DeviceNormals(device), noise_std=1.0,
            final_std=1.0, device=device,
        )  # fmt: skip
        trainer.step(x, y, step=0)
        before = model.weight.detach().clone()
        assert bool(before.count_nonzero())
        with pytest.raises(DeviceUnavailable):
            trainer.step(x, y, step=LAST_STEP)
        assert torch.equal(model.weight, before) is not moved


def test_a_protection_that_gives_no_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without its noise would be stated as proven."""
    monkeypatch.setattr(LastIterateProtection, "central_noise", lambda self, device: None)
    with pytest.raises(ValueError, match="noise is missing; noise_std = "):
        run(tmp_path / "run", description_file(tmp_path, Fault.UNPLUGGED))
