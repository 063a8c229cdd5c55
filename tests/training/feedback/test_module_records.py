"""Records of any module under protection: the private step, what a release run keeps, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.bare import feedback_trainer
from opusim import open_device, training
from opusim.errors import ConfigError
from opusim.randomness.streams import SeededStream
from opusim.training.config.sections import OptimizerConfig
from opusim.training.data.samplers import PoissonSampler
from opusim.training.engine.algorithm import Trainer
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.feedback.trainer import FeedbackTrainer, ModuleGradients
from opusim.training.networks.any_module import AnyModule
from opusim.training.networks.functions import Objective
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.networks.record_gradients.separation import require_separate_steps
from opusim.training.networks.record_gradients.tape import RecordTape
from opusim.training.protections.record import RecordGradients
from opusim.training.runs.checkpoints import list_checkpoints, read_checkpoint
from tests.support.record_models import Custom
from tests.support.run_folders import require_resumed_alike
from tests.support.shared_checks import with_marks

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
    "threads": 1, "epochs": 2, "sampler": {"batch_size": 12}, "data": {"n_classes": 3},
    "protection": {"kind": "record", "noise_multiplier": 1.0},
}  # fmt: skip


def images(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    generator, y = np.random.default_rng(3), np.arange(n) % 3
    x = generator.normal(size=(n, 1, 8, 8))
    x[np.arange(n), 0, y, y] += 3.0
    return x, y


def sequences(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(4).integers(0, 5, size=(n, 6)), np.arange(n) % 3


def module(*, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 16), nn.SiLU(),
        nn.Dropout(dropout), nn.Linear(16, 3),
    )  # fmt: skip


TOKENS = {"vocabulary": 5, "inputs": "tokens"}
BUILT_IN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "resnet-small": ("dfa", {"widths": [4, 8], "norm": "group"}, {}),
    "conv-small": ("bp", {"width": 4, "norm": "group"}, {}),
    "vit-small": ("pdfa", {"width": 16, "depth": 2, "heads": 2, "dropout": 0.1}, {}),
    "mixer-small": ("tdfa", {"width": 16, "depth": 2}, {}),
    "transformer-encoder": ("pdfa", {"width": 16, "depth": 2, "heads": 2}, TOKENS),
    "gru": ("bp", {"width": 8}, TOKENS),
    "transformer-lm": ("pdfa", {"width": 16, "depth": 2, "heads": 2}, {**TOKENS, "n_classes": 5}),
}
QUICK = {"conv-small", "vit-small", "mixer-small", "transformer-lm"}
"""Built-in models of each trainer's rule for images, and one for tokens."""


@pytest.mark.parametrize("name", with_marks(BUILT_IN, BUILT_IN.keys() - QUICK))
def test_every_built_in_model_trains_with_a_proven_statement(tmp_path: Path, name: str) -> None:
    kind, options, data = BUILT_IN[name]
    config = {**CONFIG, "trainer": {"kind": kind}, "model": {"name": name, "options": options}, "epochs": 1}
    config["data"] = {**CONFIG["data"], **data}
    config["protection"] = {"kind": "record", "epsilon": 3.0}
    x, y = sequences() if data else images()
    if name == "transformer-lm":
        y = (x + 1) % 5
    run = training.train(config, data=(x, y), folder=tmp_path / "run")
    assert run.guarantees[0].status == "proven"
    assert run.guarantees[0].epsilon == pytest.approx(3.0, rel=1e-3)
    assert any("no layer, hook or loss mixes" in line.text for line in run.guarantees[0].assumptions)


def private_trainer(model: nn.Module, x: Tensor, *, kind: str = "bp", noise: float = 0.0) -> FeedbackTrainer:
    """A trainer whose private step clips to 0.5 and divides by 8."""
    view = AnyModule(model, n_inputs=x[0].numel(), record_shape=x.shape[1:], recipe={})
    feedback, objective = None, Objective.named("cross-entropy", "class")
    if kind == "pdfa":
        device = open_device("gaussian", n_inputs=3, n_outputs=400, seed=3, noise={"sigma": 0.3})
        feedback = FeedbackAlignment(model, ["2", "5"], device=device, encoding="ternary")
    stream = SeededStream(1, "test")
    writer = RecordGradients(clip_norm=0.5, noise_multiplier=noise, divisor=8.0, noise=stream)
    tape = RecordTape(model.train(), x[:3])
    source = ModuleGradients(view, objective, feedback=feedback, seed=3, tape=tape)
    optimizer = make_optimizer(view.parameters, OptimizerConfig(lr=1.0, momentum=0.0))
    return feedback_trainer(source, optimizer, protection=writer)


def gradients(trainer: Trainer) -> list[Tensor]:
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def test_a_private_photonic_step_is_that_of_records_with_the_same_noise(monkeypatch: Any) -> None:
    x, y = (torch.as_tensor(part[:9]) for part in images())
    flat, model = x.float().flatten(1), module(dropout=0.0)
    trainer = private_trainer(model, x.float(), kind="pdfa")
    kept: list[Tensor] = []
    read = FeedbackAlignment._read
    monkeypatch.setattr(FeedbackAlignment, "_read", lambda *args: kept.append(read(*args)) or kept[-1])
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    trainer.step(flat, y, step=0, observe=False)
    found = gradients(trainer)
    trainer.model.load_state_dict(before)
    monkeypatch.setattr(FeedbackAlignment, "_read", lambda *args: kept[0][number : number + 1])
    totals, clipped = [torch.zeros_like(g) for g in found], 0
    for number in range(len(x)):
        trainer.model.zero_grad()
        nn.functional.cross_entropy(trainer.model(x[number : number + 1].float()), y[number, None]).backward()
        own = gradients(trainer)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in own))
        clipped += norm > 0.5
        for total, gradient in zip(totals, own, strict=True):
            total += gradient * min(1.0, 0.5 / norm) / 8.0
    assert clipped > 0
    torch.testing.assert_close(found, totals, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("bp", marks=pytest.mark.slow), "pdfa"])
def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, stop_at: Any, kind: str) -> None:
    config = {**CONFIG, "trainer": {"kind": kind}, "checkpoint": {"every_steps": 2}}
    config["optimizer"] = {"name": "adam", "lr": 0.01, "averaged_tail": 0.5}
    if kind == "pdfa":
        config["protection"] = {**CONFIG["protection"], "noise": "device"}
    require_resumed_alike(tmp_path, config, images(), stop_at(7), module)


def content(folder: Path) -> dict[str, Any]:
    """What a release run keeps, but for what its noise and its clock decide."""
    kept: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "metrics.jsonl":
            kept[name] = path.read_text()
        elif path.name == "summary.json":
            kept[name] = json.loads(path.read_text())
        elif path.name == "config.json":
            facts = json.loads(path.read_text())
            kept[name] = {key: facts[key] for key in ("config", "network", "data")}
        elif path.is_file():
            kept[name] = None
    for path in list_checkpoints(folder / "checkpoints"):
        found = read_checkpoint(path)
        kept[f"{path.name} tensors"] = sorted((n, tuple(t.shape)) for n, t in found.tensors.items())
        kept[f"{path.name} progress"] = {k: v for k, v in found.progress.items() if k != "identity"}
    return kept


def test_a_release_run_keeps_nothing_that_depends_on_its_records(tmp_path: Path) -> None:
    """Records of zeros, and records whose losses and gradients are not finite: the same files, the same figures."""
    (x, y), found = images(), []
    config = {**CONFIG, "mode": "release", "epochs": 1, "trainer": {"kind": "pdfa"}}
    config["checkpoint"] = {"every_steps": 1, "keep": 20}
    for value in (0.0, 3e38):
        folder, data = tmp_path / str(value), (np.full_like(x, value), y)
        run = training.train(config, data=data, model=module(), folder=folder)
        assert run.guarantees[0].status == "proven"
        found.append(content(folder))
    assert found[0] == found[1]
    assert found[0]["summary.json"].keys() == {"schema_version", "seal", "steps"}


def test_the_feedback_is_calibrated_before_any_record(tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint after empty batches would otherwise tell that they were empty."""
    monkeypatch.setattr(PoissonSampler, "indices", lambda self, step: torch.zeros(0, dtype=torch.int64))
    config = {**CONFIG, "trainer": {"kind": "pdfa", "encoding": "ternary"}}
    config["checkpoint"] = {"every_steps": 1, "keep": 3}
    run = training.train(config, data=images(), model=module(), folder=tmp_path / "run")
    last = read_checkpoint(list_checkpoints(run.folder.checkpoints)[-1])
    (column_sum,) = (tensor for name, tensor in last.tensors.items() if name.endswith("column_sum"))
    assert bool(column_sum.any())


def test_no_value_of_a_record_stops_a_private_step_or_reaches_the_parameters() -> None:
    x, y = (torch.as_tensor(part[:6]) for part in images())
    flat, moved = x.float().flatten(1), []
    for value in (0.0, math.nan, math.inf, 3e38):
        trainer = private_trainer(module(dropout=0.0), x.float())
        rows, labels = flat, y
        if value != 0.0:
            rows, labels = torch.cat([flat, flat[:1] * 0 + value]), y[[*range(6), 0]]
        trainer.step(rows, labels, step=0, observe=False)
        moved.append(torch.cat([g.flatten() for g in gradients(trainer)]))
    torch.testing.assert_close(moved[1:], 3 * moved[:1], rtol=1e-5, atol=1e-7)


def test_an_empty_batch_takes_its_noise() -> None:
    x = torch.as_tensor(images()[0][:3]).float()
    trainer = private_trainer(module(), x, noise=2.0)
    trainer.step(x.flatten(1)[:0], torch.zeros(0, dtype=torch.int64), step=0, observe=False)
    noise = torch.cat([g.flatten() for g in gradients(trainer)]).double()
    wanted = (2.0 * 0.5 / 8.0) ** 2
    standard_error = wanted * math.sqrt(2 / len(noise))
    assert abs(float(noise.square().mean()) - wanted) < 5 * standard_error
    assert abs(float((1.1 * noise).square().mean()) - wanted) > 5 * standard_error


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def invented() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(9, 4, generator=generator)
    x[1::3, 2:] = 0
    return x, torch.arange(9) % 3


def loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(kind: str) -> None:
    model = net()
    getattr(model[0].weight, kind)(lambda _: None)
    with pytest.raises(ValueError, match="'0.weight' has a gradient hook") as raised:
        require_separate_steps(model, loss, *invented())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mixing", [
    lambda output, y: loss(output, y) / len(y),
    lambda output, y: loss(output - output.mean(dim=0), y),
    lambda output, y: loss(output, y) * (1 + (y == y[0]).float().mean()),
    lambda output, y: loss(output, y) + 1e-3 * output.std(),
    lambda output, y: loss(output, y).mean().expand(len(y)),
])  # fmt: skip
def test_a_loss_in_which_records_meet_is_refused(mixing: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="loss: the loss of one record depends on other records"):
        require_separate_steps(net(), mixing, *invented())


def test_points_whose_positions_are_records_are_refused() -> None:
    """Time comes first at the points, so that a sum over positions is one over records."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model = Custom(lambda m, x: m.body(x.view(len(x), 2, 2).transpose(0, 1)).sum(dim=0), body=body)
    x, y = invented()
    feedback = FeedbackAlignment(model, ["body.1"], error_at="body.4", rows="sum")
    with pytest.raises(ValueError, match="feedback takes another dimension for that of the records"):
        require_separate_steps(model, loss, x, y, seek=lambda: feedback.seek(0))
    feedback.remove()
    each = FeedbackAlignment(model, ["body.1"], error_at="body.4", rows="each")
    require_separate_steps(model, loss, x, y, seek=lambda: each.seek(0))


def test_a_model_with_batch_norm_takes_group_norm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = CONFIG | {"model": {"name": "conv-small"}, "trainer": {"kind": "bp"}, "epochs": 1}
    run = training.train(given, data=images(), folder=tmp_path / "a")
    assert any(isinstance(part, nn.GroupNorm) for part in run.model.modules())
    assert "model.options.norm = group (chosen for conv-small" in caplog.text
    again = training.load_run(tmp_path / "a").model
    assert any(isinstance(part, nn.GroupNorm) for part in again.modules())


def test_batch_norm_by_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = {"name": "resnet-small", "options": {"norm": "batch"}}
    config = CONFIG | {"model": model, "trainer": {"kind": "bp"}}
    with pytest.raises(ConfigError, match="model.options.norm: 'batch' is BatchNorm2d .* take 'group'"):
        training.train(config, data=images(), folder=tmp_path / "a")
    assert not (tmp_path / "a" / "config.json").exists()
