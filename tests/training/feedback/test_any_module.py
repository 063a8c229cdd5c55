"""Runs of any module: the same updates as the closed form, resumed bit for bit, every target, keys refused by name."""

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from benchmarks.bare import feedback_trainer
from opusim import FeedbackAlignment, open_device, training
from opusim.accounting.guarantee import NoGuarantee
from opusim.devices.base import NoisyDevice
from opusim.errors import ConfigError, DeviceError
from opusim.training.config.sections import OptimizerConfig
from opusim.training.errors import RunFolderError, TrainingDiverged
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import BpConfig, DfaConfig, FeedbackConfig, PdfaConfig
from opusim.training.feedback.trainer import FeedbackTrainer, ModuleGradients, feedback_points
from opusim.training.networks.any_module import AnyModule, from_recipe
from opusim.training.networks.functions import Objective, measure
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.user_code import require_trusted
from opusim.training.reports.run_report import write_report
from opusim.training.runs.folder import RunFolder, read_run
from tests.support.run_folders import equal, require_resumed_alike
from tests.support.shared_checks import with_marks

CONFIG: dict[str, Any] = {
    "threads": 1, "epochs": 2, "sampler": {"batch_size": 12}, "optimizer": {"name": "adam", "lr": 0.01},
    "data": {"n_classes": 3},
}  # fmt: skip


def images(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    generator, y = np.random.default_rng(3), np.arange(n) % 3
    x = generator.normal(size=(n, 1, 4, 4))
    x[np.arange(n), 0, y, y] += 3.0
    return x, y


X, Y = images()
FLAT = X.reshape(60, -1), Y


def module() -> nn.Module:
    """Dropout and batch statistics: what a step draws and what a checkpoint must hold."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(), nn.Flatten(), nn.Linear(96, 16), nn.SiLU(),
        nn.Dropout(0.2), nn.Linear(16, 3),
    )  # fmt: skip


def module_trainer(view: AnyModule, options: FeedbackConfig, device: NoisyDevice | None) -> FeedbackTrainer:
    objective, points = Objective.named("cross-entropy", "class"), feedback_points(view, options, device)
    optimizer = make_optimizer(view.parameters, OptimizerConfig())
    return feedback_trainer(ModuleGradients(view, objective, feedback=points), optimizer)


@pytest.mark.parametrize(
    "options",
    [BpConfig(), DfaConfig(gain=0.7, slices="own"), PdfaConfig(gain=0.7, slices="own", encoding="planes", planes=6)],
    ids=lambda options: options.kind,
)  # fmt: skip
def test_points_give_the_updates_of_the_closed_form(options: FeedbackConfig) -> None:
    def mlp() -> nn.Sequential:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 15), nn.GELU(), nn.Linear(15, 4))

    generator = torch.Generator().manual_seed(12)
    x, y = torch.randn(20, 9, generator=generator), torch.randint(0, 4, (20,), generator=generator)
    device, network = open_device("ideal", n_inputs=4, n_outputs=27, seed=3), FullyConnected(mlp())
    optimizer = make_optimizer(network.parameters, OptimizerConfig())
    closed_form = feedback_trainer(ClosedForm(network, options, device=device), optimizer)
    view = AnyModule(mlp(), n_inputs=9, record_shape=(9,), recipe={})
    points = module_trainer(view, options, device if options.kind == "pdfa" else None)
    found: list[list[Tensor]] = []
    for trainer in (closed_form, points):
        trainer.step(x, y, step=0, observe=False)
        found.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 6
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "trainer",
    [pytest.param({"kind": "bp"}, marks=pytest.mark.slow), {"kind": "pdfa"}, {"kind": "pdfa", "readout_every": 4}],
)  # fmt: skip
def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, stop_at: Any, trainer: dict) -> None:
    config = {**CONFIG, "trainer": trainer, "checkpoint": {"every_steps": 2}}
    whole, cut = require_resumed_alike(tmp_path, config, images(), stop_at(7), module)
    expected, found = whole.model.state_dict(), cut.model.state_dict()
    assert equal(expected, found)
    assert int(found["1.num_batches_tracked"]) == 10  # buffers come back too
    assert not any(hasattr(m, "_opusim") or m._forward_hooks for m in whole.model.modules())
    assert ("alignment" in whole.metrics[-1]) == (trainer["kind"] == "pdfa")


def test_a_built_in_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    config = {**CONFIG, "model": {"name": "resnet-small", "options": {"widths": [4, 8]}}, "epochs": 3}
    state = torch.get_rng_state()
    run = training.train(config, data=images(), folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    back, (x, y) = training.load_run(tmp_path), images()
    assert np.array_equal(back.predict(x), run.predict(x))
    assert back.evaluate(x, y)["accuracy"] > 0.5
    assert run.summary["train_accuracy"] > 0.5


def sequences(n: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Each token is followed by the next one modulo 5."""
    x = (np.arange(8)[None] + np.arange(n)[:, None]) % 5
    return x, (x + 1) % 5


TARGETS: dict[str, tuple[dict[str, Any], Any, nn.Module | None, str]] = {
    "tokens": (
        {
            "model": {"name": "transformer-lm", "options": {"width": 16, "depth": 2}, "initial_output": "feedback"},
            "data": {"n_classes": 5},
        },
        sequences(), None, "bits_per_token",
    ),
    "real": (
        {"loss": "squared-error", "data": {"target": "real", "n_classes": None}, "model": {"hidden": [16]}},
        (FLAT[0], X[:, 0, :2, 0]), None, "rmse",
    ),
    "labels": (
        {"loss": "binary-cross-entropy", "data": {"target": "labels", "n_classes": 3}},
        (X, np.eye(3)[Y]), module(), "accuracy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", with_marks(TARGETS, ["tokens"]))
def test_every_target_is_learnt_measured_and_reported(tmp_path: Path, target: str) -> None:
    change, data, model, figure = TARGETS[target]
    config = {**CONFIG, "trainer": {"kind": "dfa"}, "epochs": 8, **change}
    run = training.train(config, data=data, model=model, folder=tmp_path)
    assert run.metrics[-1]["train_loss"] < 0.8 * run.metrics[0]["train_loss"]
    assert math.isfinite(run.summary[f"validation_{figure}"])
    figures = training.load_run(tmp_path, model=model).evaluate(*data)
    assert figures.keys() >= {"loss", figure}
    label = {"bits_per_token": "bits per token", "rmse": "RMSE"}.get(figure, figure)
    assert f"validation {label}" in training.write_report(run).read_text()


def measured(loss: Any, target: Any, output: Tensor, y: Tensor) -> dict[str, float]:
    numbers = torch.arange(7)[:, None]
    return measure(Objective.named(loss, target), lambda x: output[x[:, 0]], numbers, y, at_once=3)


def test_figures_follow_their_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    output, y = torch.randn(7, 5, 4, generator=generator), torch.randint(0, 4, (7, 5), generator=generator)
    y[0, 2:], y[3, 4] = -100, -100
    found = measured("cross-entropy", "tokens", output, y)
    rows, nats, hits = [], [], []
    for i in range(7):
        own = [-math.log(float(output[i, t].softmax(0)[y[i, t]])) for t in range(5) if y[i, t] >= 0]
        rows.append(np.mean(own))
        nats += own
        hits += [int(output[i, t].argmax()) == int(y[i, t]) for t in range(5) if y[i, t] >= 0]
    assert found["loss"] == pytest.approx(np.mean(rows), rel=1e-6)
    assert found["bits_per_token"] == pytest.approx(np.mean(nats) / math.log(2), rel=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean(hits))
    z, real = output[:, 0], torch.randn(7, 4, generator=generator)
    numbers = measured("squared-error", "real", z, real)
    residual = (z - real).double()
    assert numbers["rmse"] == pytest.approx(float(residual.square().mean().sqrt()))
    total = (real.double() - real.double().mean(0)).square().sum()
    assert numbers["r2"] == pytest.approx(float(1 - residual.square().sum() / total))
    assert numbers["loss"] == pytest.approx(float(0.5 * residual.square().sum(1).mean()), rel=1e-6)
    labels = (real > 0).float()
    sets = measured("binary-cross-entropy", "labels", z, labels)
    likelihood = torch.where(labels > 0, z.sigmoid(), 1 - z.sigmoid())
    assert sets["loss"] == pytest.approx(float(-likelihood.log().sum(1).mean()), rel=1e-5)
    assert sets["accuracy"] == pytest.approx(float((likelihood > 0.5).double().mean()))
    with pytest.raises(ConfigError, match="loss: 'cross-entropy' takes no real numbers.*use 'squared-error'"):
        Objective.named("cross-entropy", "real")


def test_labels_that_were_replaced_train_any_module(tmp_path: Path) -> None:
    protection = {"kind": "label-randomized-response", "epsilon": 4.0}
    config = {**CONFIG, "protection": protection, "trainer": {"kind": "dfa"}, "epochs": 6}
    run = training.train(config, data=images(240), model=module(), folder=tmp_path)
    assert run.summary["validation_accuracy"] > 0.6
    assert run.guarantees[0].epsilon == pytest.approx(4.0, abs=1e-3)


RECORD = {"protection": {"kind": "record", "noise_multiplier": 1.0}}


@pytest.mark.parametrize(("change", "error", "message"), [
    (RECORD, ValueError, "BatchNorm2d '1' mixes"),
    (RECORD | {"trainer": {"kind": "pdfa", "readout_every": 4}}, ConfigError, r"trainer\.readout_every"),
    ({"protection": {"kind": "label-amplified", "epsilon": 3.0}}, NoGuarantee, "'label-amplified'"),
    ({"trainer": {"tau_b": 1.0, "order": "published"}}, ConfigError, "trainer.order: 'published'"),
    ({"trainer": {"threshold": 0.3, "encoding": "ternary"}}, ConfigError, "other models take"),
    ({"trainer": {"kind": "dfa", "sigma": 0.3, "order": "published"}}, ConfigError, "trainer.order"),
    ({"model": {"initial_output": "feedback"}}, ValueError, "Sequential names none; use 'random'"),
    ({"trainer": {"points": ["9"]}}, ValueError, "no submodule is '9'"),
    ({"trainer": {"error_at": "tpo"}}, ValueError, "error_at = 'tpo' is no submodule"),
    ({"model": {"name": "conv-small"}}, ConfigError, "'conv-small' names a network"),
    ({"loss": "binary-cross-entropy"}, ConfigError, "takes no class numbers, which the data have"),
])  # fmt: skip
def test_what_modules_do_not_take_is_refused(tmp_path: Path, change: dict, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        training.train({**CONFIG, **change}, data=images(), model=module(), folder=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


NO_EFFECT = "trainer.{}: .* does nothing for this model: .*leave it out"


@pytest.mark.parametrize(("trainer", "message"), [
    ({"points": ["1"]}, NO_EFFECT.format("points")),
    ({"slices": "shared"}, NO_EFFECT.format("slices")),
    ({"relative_threshold": 0.3}, NO_EFFECT.format("relative_threshold")),
    ({"readout_every": 4}, r"trainer\.readout_every"),
    ({"kind": "pdfa", "encoding": "stochastic"}, "trainer.encoding: 'stochastic' is for other modules"),
    ({"kind": "tdfa", "encoding": "stochastic"}, "trainer.encoding: 'stochastic' is for other modules"),
    ({"kind": "dfa", "gain": 0.0}, "trainer.gain: 0 leaves a fully connected network"),
])  # fmt: skip
def test_keys_of_modules_are_refused_for_other_networks(tmp_path: Path, trainer: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training.train({**CONFIG, "trainer": trainer}, data=FLAT, folder=tmp_path / "run")


@pytest.mark.parametrize("kind", ["bp", "pdfa"])
def test_pruned_weights_stay_pruned(kind: str, tmp_path: Path) -> None:
    """Their hooks compute the weight that is used: an update of that one would be gone in the next forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    model(torch.from_numpy(FLAT[0]).float())
    before, mask = model[0].weight_orig.detach().clone(), model[0].weight_mask.clone()
    config = {**CONFIG, "trainer": {"kind": kind}}
    run = training.train(config, data=FLAT, model=model, folder=tmp_path / "run")
    run.predict(FLAT[0])
    moved = run.model[0].weight_orig.detach() != before
    assert bool(moved[mask.bool()].any())
    assert not bool(run.model[0].weight[~mask.bool()].any())
    with pytest.raises(TypeError, match="no plain layer, because its weight is computed from other tensors"):
        FullyConnected(model)


@pytest.mark.parametrize("kind", ["pdfa", "tdfa"])
def test_named_modules_have_an_encoding_of_their_own(kind: str) -> None:
    named = training.load_config({"model": {"name": "gru"}, "trainer": {"kind": kind}})
    assert named.trainer.encoding == "stochastic"
    assert training.load_config({}).trainer.encoding == "ternary"


@pytest.mark.parametrize("name", ["transformer-encoder", "gru"])
def test_tokens_are_classified(tmp_path: Path, name: str) -> None:
    """The class of a sequence is its first token; a model learns the number of tokens from the data."""
    x = np.random.default_rng(2).integers(0, 3, size=(90, 5))
    config = {**CONFIG, "trainer": {"kind": "dfa"}, "model": {"name": name, "options": {"width": 8}}}
    config |= {"data": {"n_classes": 3, "inputs": "tokens", "vocabulary": 3}, "epochs": 1}
    run = training.train(config, data=(x, x[:, 0]), folder=tmp_path)
    assert run.facts["network"]["recipe"]["vocabulary"] == 3
    assert run.predict(x).shape == (90,)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1)), x


TOKENS = np.arange(300).reshape(60, 5) % 7


@pytest.mark.parametrize(("config", "data", "model", "message"), [
    ({}, (X, Y), nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), r"gives \(2, 4\) for two records of shape \(1, 4"),
    ({}, (X, Y), Pair(16, 3), r"gives tuple .* map records \(2, 1, 4, 4\) to outputs of shape \(2, 3\): return"),
    ({}, (X, Y), module().double(), "the module holds torch.float64 and records are torch.float32"),
    ({}, (X, Y), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 3)), r"cannot take records of shape \(1, 4, 4\)"),
    ({"trainer": {"kind": "zo"}}, (X, Y), module().bfloat16(), r"holds torch.bfloat16 .*; give model.float\(\)"),
    ({"model": {"name": "mlp"}}, (TOKENS, None), None, "take model.name = 'transformer-lm'"),
    ({"model": {"name": "transformer-lm"}}, FLAT, None, "set data.inputs = 'tokens'"),
    ({}, (np.zeros((60, 8, 2, 1)), Y), module(), r"move the channels first, x.transpose\(0, 3, 1, 2\)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    tmp_path: Path, config: Any, data: Any, model: Any, message: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        training.train({"trainer": {"kind": "bp"}, **config}, data=data, model=model, folder=tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_module_of_opacus_is_refused(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))
    wrapped = pytest.importorskip("opacus").GradSampleModule(plain)
    run = partial(training.train, CONFIG, data=images(), folder=tmp_path / "run")
    for inner in (wrapped, nn.Sequential(wrapped)):
        for take in (FeedbackAlignment, lambda model: run(model=model)):
            with pytest.raises(ValueError, match="model (is a GradSampleModule|has hooks) of Opacus[,;]"):
                take(inner)
    assert FeedbackAlignment(wrapped.to_standard_module())


def test_a_failed_device_leaves_parameters_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    view = AnyModule(module(), n_inputs=16, record_shape=(1, 4, 4), recipe={})
    x, y = torch.randn(6, 16), torch.arange(6) % 3
    with open_device("gaussian", n_inputs=3, n_outputs=96, seed=3) as device:
        trainer = module_trainer(view, PdfaConfig(), device)
        empty = trainer.step(x[:0], y[:0], step=0, observe=False)
        assert (empty.n_records, device.usage.frames) == (0, 0)
        before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}

        with monkeypatch.context() as patch:
            patch.setattr(type(device), "project", Mock(side_effect=DeviceError("the light went out")))
            with pytest.raises(DeviceError, match="the light went out"):
                trainer.step(x, y, step=1, observe=False)
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.tensors.items())
        with pytest.raises(TrainingDiverged, match="step 2"):
            trainer.step(x * torch.inf, y, step=2, observe=False)
        trainer.close()


CODE = """
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_name("executed").touch()


def build(record_shape, n_outputs, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.SiLU(), nn.Linear(width, n_outputs))


def focal(output, target):
    p = torch.log_softmax(output, 1).gather(1, target[:, None]).squeeze(1)
    return -((1 - p.exp()) ** 2) * p
"""


def test_code_of_users_runs_when_trusted(tmp_path: Path, monkeypatch: Any, stop_at: Any) -> None:
    name = "code_of_a_user"
    file, mark = tmp_path / f"{name}.py", tmp_path / "executed"
    file.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    config = {**CONFIG, "model": {"name": f"{name}:build", "options": {"width": 6}}, "loss": f"{name}:focal"}
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=images(), folder="run", watcher=stop_at(6))
    assert RunFolder("run").resume_command == "opusim train resume run --trust-code"
    mark.unlink()
    monkeypatch.delitem(__import__("sys").modules, name)
    resume = partial(training.train, data=images(), folder="run", resume=True)
    told = rf"{name}:build from {file}, BLAKE2 [0-9a-f]{{32}}; .*--trust-code"
    for attempt in (partial(training.load_run, "run"), resume):
        with pytest.raises(RunFolderError, match=told):
            attempt()
    assert "focal" in write_report(read_run("run")).read_text()  # a report needs no code
    assert not mark.exists()
    run = resume(trust_code=True)
    assert mark.exists()
    assert training.load_run("run", trust_code=True).evaluate(*images()).keys() == {"loss", "accuracy"}
    assert run.facts["network"]["recipe"]["options"] == {"width": 6}
    monkeypatch.delitem(__import__("sys").modules, name)
    run_folder = Path("run").resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=f"run from {tmp_path}, or set PYTHONPATH={tmp_path}$"):
        training.load_run(run_folder, trust_code=True)
    monkeypatch.chdir(tmp_path)
    file.write_text(CODE + "# another line\n")
    with pytest.warns(UserWarning, match="code_of_a_user:build is now .* when the run was trained"):
        training.load_run("run", trust_code=True)
    for wrong, message in ((f"{name}:buidl", "has no 'buidl'"), ("nosuch.py:f", "did you mean 'nosuch:f'")):
        with pytest.raises(ConfigError, match=message):
            training.train({**CONFIG, "model": {"name": wrong}}, data=images(), folder="other")


@pytest.mark.parametrize(("config", "network"), [
    ({"model": {"name": "a.b:f"}, "loss": "cross-entropy"}, {}),
    ({"loss": "a.b:f"}, {"layers": []}),
    ({"model": {"name": "vit-small"}, "loss": "cross-entropy"}, {"recipe": {"name": "a.b:f"}}),
])  # fmt: skip
def test_code_needs_trust_though_the_folder_does_not_list_it(config: dict, network: dict) -> None:
    """An untrusted folder may name code in its configuration or recipe and leave out the list of it."""
    facts = {"config": config, "network": network}
    with pytest.raises(RunFolderError, match=r"a\.b:f, for which the folder lists no file\. Look"):
        require_trusted(facts, trust_code=False)
    require_trusted(facts, trust_code=True)
    require_trusted({"config": {"loss": "cross-entropy"}, "network": {}}, trust_code=False)


def test_a_run_that_fails_to_begin_leaves_no_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    monkeypatch.setattr("opusim.training.engine.session._begin", Mock(side_effect=OSError("disk full")))
    config = CONFIG | {"trainer": {"kind": "dfa"}}
    with pytest.raises(OSError, match="disk full"):
        training.train(config, data=images(), model=net, folder=tmp_path / "run")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_a_module_without_a_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_path.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'no_path' is no import path; write package.module:name"):
        from_recipe({"name": "no_path", "options": {}}, seed=0)


LOSSES = {"real": "squared-error", "labels": "binary-cross-entropy", "class": "cross-entropy"}


@pytest.mark.parametrize("target", LOSSES)
def test_the_loss_follows_the_target(target: str) -> None:
    found = training.load_config({"data": {"target": target}})
    assert found.loss == LOSSES[target]
    assert training.load_config(found, ["data.target=class"]).loss == "cross-entropy"
    given = training.load_config({"loss": "squared-error", "data": {"target": target}})
    assert given.loss == "squared-error"


def test_a_module_takes_gain_0(tmp_path: Path) -> None:
    model = {"name": "gru", "options": {"width": 4}}
    config = {**CONFIG, "trainer": {"kind": "dfa", "gain": 0.0}, "model": model}
    run = training.train(config, data=images(), folder=tmp_path)
    assert run.config.trainer_as(DfaConfig).gain == 0


def test_a_module_of_the_user_has_the_defaults_of_modules(tmp_path: Path) -> None:
    """As a named one has; keys that are given stay, and a fully connected network keeps its own defaults."""
    data, config = images(80), {"epochs": 1, "trainer": {"kind": "pdfa"}}
    found = training.train(config, data=data, model=module(), folder=tmp_path / "own").config
    assert (found.model.name, found.optimizer.name, found.optimizer.lr) == ("module", "adam", 0.002)
    assert found.trainer_as(PdfaConfig).encoding == "stochastic"
    with pytest.raises(ConfigError, match="give it again"):
        training.train({"model": {"name": "module"}}, data=data, folder=tmp_path / "none")
