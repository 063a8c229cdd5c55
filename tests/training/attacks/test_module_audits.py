"""Audits of modules whose records are protected: quiet on the product as it is, and loud on planted faults."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opusim import training
from opusim.accounting.one_run import Method
from opusim.randomness.streams import NoiseStream
from opusim.training.attacks.findings import Role
from opusim.training.attacks.mechanism.checks import report_text
from opusim.training.attacks.one_run.audit import audit_one_training
from opusim.training.attacks.run_audit import audit_run
from opusim.training.networks.record_gradients import probe
from tests.support.command import opusim
from tests.support.faults.base import FEEDBACKS, replaced
from tests.support.faults.streams import Wrapped, changed_noise, credited_noise
from tests.support.record_models import Custom

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(kind, model, marks=() if (kind, model) == ("bp", "convolution") else pytest.mark.slow)
        for kind in FEEDBACKS
        for model in ("convolution", "attention")
    ],
)
def test_modules_release_what_is_accounted(kind: str, model: str, seed: int) -> None:
    found = training.audit_mechanism(kind, model=model, steps=40, seed=seed, level=1e-6)
    assert found.holds, report_text(found)
    assert found.coordinates >= 40


def _without_one(noise: list[Tensor]) -> list[Tensor]:
    return [own.zero_() if number == 3 else own for number, own in enumerate(noise)]


class _Smaller(Wrapped):
    def __init__(self, stream: NoiseStream, share: float) -> None:
        super().__init__(stream)
        self._share = share

    def normal(self, shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
        return super().normal(shape, device=device).mul_(self._share)


def _first_layer_unclipped(factors: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def unclipped(self: Any, norms: Tensor) -> Tensor:
        found = factors(self, norms).clone()
        found[0] = 1.0
        return found

    return unclipped


def _by_realised_batch(write: Callable[..., None]) -> Callable[..., None]:
    def divided(self: Any, parts: Any, **options: Any) -> None:
        (found,), stated = parts, self._divisor
        self._divisor = float(max(found.records, 1))
        try:
            write(self, [found], **options)
        finally:
            self._divisor = stated

    return divided


FACTORS = "opusim.training.protections.record:RecordGradients._factors"
WRITER = "opusim.training.protections.record:RecordGradients.set_gradients"
STEPS = {"a group norm's bias without noise": 40}
"""Steps of a planted fault that shows after fewer than 60."""
FAULTS: dict[str, tuple[str, str, Callable[[], AbstractContextManager[None]]]] = {
    "a layer that is not clipped": ("bp", "convolution", lambda: replaced(FACTORS, _first_layer_unclipped)),
    "an embedding that is not clipped": ("pdfa", "attention", lambda: replaced(FACTORS, _first_layer_unclipped)),
    "a group norm's bias without noise": ("pdfa", "convolution", lambda: changed_noise(_without_one)),
    "division by the realised batch": ("bp", "attention", lambda: replaced(WRITER, _by_realised_batch)),
    "noise too small by a tenth": (
        "dfa", "convolution", lambda: credited_noise(lambda mode, stream: _Smaller(stream, 0.9)),
    ),
}  # fmt: skip


IN_CI, *NIGHTLY = FAULTS


@pytest.mark.parametrize("name", [IN_CI, *(pytest.param(name, marks=pytest.mark.slow) for name in NIGHTLY)])
def test_every_planted_fault_is_found(name: str, seed: int) -> None:
    kind, model, plant = FAULTS[name]
    with plant():
        options = {"level": 1e-4, "seed": seed, "steps": STEPS.get(name, 60)}
        found = training.audit_mechanism(kind, model=model, **options)
    assert not found.holds, report_text(found)


# Membership in a run


def parity(_: Any, x: Tensor) -> Tensor:
    """Turns the sign of every record if their number is odd."""
    return -x if len(x) % 2 else x


def model_of(name: str) -> nn.Module:
    torch.manual_seed(6)
    if name == "embedding":
        positions = nn.Parameter(torch.randn(4, 6))  # a parameter without a module of its own
        return Custom(
            lambda m, x: m.head((m.tokens(x) + m.positions).flatten(1)), tokens=nn.Embedding(9, 6),
            positions=positions, head=nn.Linear(24, 3),
        )  # fmt: skip
    first = Custom(parity) if name == MIXING else nn.Identity()
    return nn.Sequential(
        first, nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    )


MIXING = "a layer that mixes records"
PROTECTION = {"kind": "record", "noise_multiplier": 4.0, "clip_norm": 0.3}


def trained(folder: Path, name: str, **changes: Any) -> tuple[Any, nn.Module]:
    generator, y = np.random.default_rng(1), np.arange(200) % 3
    tokens = name == "embedding"
    x = generator.integers(0, 9, size=(200, 4)) if tokens else generator.normal(size=(200, 1, 6, 6))
    if name == MIXING:
        x, y = x + 1.0, 0 * y  # all contributions point the same way, and turn together
    config = {
        "epochs": 1, "threads": 1, "trainer": {"kind": "bp"}, "protection": PROTECTION,
        "data": {"n_classes": 3, **({"inputs": "tokens", "vocabulary": 9} if tokens else {})},
        "sampler": {"batch_size": 40 if name == MIXING else 12},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0}, **changes,
    }  # fmt: skip
    model = model_of(name)
    training.train(config, data=(x, y), model=model, folder=folder)
    return (x, y), model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolution", "embedding"])
def test_an_attack_on_a_protected_module_stays_below_its_theorem(tmp_path: Path, name: str) -> None:
    """Fewer trials would leave the controls without a finding."""
    data, model = trained(tmp_path, name)
    found = audit_run(tmp_path, data=data, model=model, trials=100, seed=7)
    assert found.controls_hold
    assert not any(finding.refutes for finding in found.findings if finding.role is not Role.BROKEN)


@pytest.mark.slow
def test_an_attack_finds_a_layer_that_mixes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes refuse such a layer; with odd batches only they do not, and the audit refutes the statement."""
    with pytest.raises(ValueError, match="does not run in batches of every size"):
        trained(tmp_path / "refused", MIXING)
    monkeypatch.setattr(probe, "_COUNTS", (5, 37))
    monkeypatch.setattr("opusim.training.feedback.trainer.require_separate_steps", lambda *a, **k: None)
    data, model = trained(tmp_path / "run", MIXING)
    found = audit_run(tmp_path / "run", data=data, model=model, trials=100, seed=7)
    assert any(finding.refutes for finding in found.of(Role.RUN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainer"), [("convolution", "bp"), ("convolution", "pdfa"), ("embedding", "bp")]
)
def test_one_training_of_a_module_shows_what_its_steps_cost(tmp_path: Path, name: str, trainer: str) -> None:
    """Without noise a planted canary counts as one clip; with it the bounds come near the claim, and not above."""
    protection = {"kind": "record", "epsilon": 4.0}
    data, model = trained(tmp_path, name, epochs=10, trainer={"kind": trainer}, protection=protection)
    options: dict[str, Any] = {"data": data, "model": model, "canaries": 50 if name == "embedding" else 190}
    found = audit_one_training(tmp_path, **options, seed=4)
    assert not found.refuted
    low, high = found.scores()["all updates"].bound(Method.NORMAL_ESTIMATE).interval or (9.0, 0.0)
    assert low < 4.0 < high + 1.0
    with replaced("opusim.training.protections.base:Protection.central_noise", _almost_silent):
        loud = audit_one_training(tmp_path, **options, seed=4)
    assert loud.scores()["all updates"].auc > 0.99


def _almost_silent(make: Callable[..., NoiseStream]) -> Callable[..., NoiseStream]:
    return lambda *a, **k: _Smaller(make(*a, **k), 0.02)


CODE = """
import torch
from torch import nn


def build(record_shape, n_outputs):
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, n_outputs))


def own_loss(output, target):
    return -torch.log_softmax(output, 1).gather(1, target[:, None]).squeeze(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--trials", "40"], ["--one-run", "--canaries", "40"]])
@pytest.mark.parametrize(
    "named", [{"model": {"name": "NAME:build"}}, {"loss": "NAME:own_loss", "model": {"hidden": [8]}}]
)
def test_audits_execute_code_of_the_user_when_trusted_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], named: dict[str, Any]
) -> None:
    name = f"audited_code_{'_'.join(named)}_{options[0].strip('-').replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(1).normal(size=(60, 8)).astype(np.float32), np.arange(60) % 3
    np.savez("records.npz", x=x, y=y)
    config = {
        "epochs": 1, "threads": 1, "trainer": {"kind": "bp"}, "data": {"n_classes": 3}, "sampler": {"batch_size": 20},
        "optimizer": {"name": "sgd", "lr": 0.1}, "protection": PROTECTION,
        **json.loads(json.dumps(named).replace("NAME", name)),
    }  # fmt: skip
    training.train(config, data=(x, y), folder="run")
    command = ["audit", "run", "--data", "npz:records.npz", *options]
    for trusted in (False, True):
        monkeypatch.delitem(sys.modules, name, raising=False)
        result = opusim(*command, *(["--trust-code"] if trusted else []), cwd=tmp_path)
        printed = result.stderr
        assert f"{name}:{'own_loss' if 'loss' in named else 'build'} from {tmp_path / name}.py" in printed
        assert trusted or name not in sys.modules
        # 3: so few canaries and draws do not find half of the noise
        assert (result.returncode in (0, 3)) == trusted, printed
    assert Path("run/report.html").exists()
