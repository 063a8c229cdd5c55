"""What an alarm leaves in doubt: single outputs, killed and resumed runs, ends other than the last step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from opusim.accounting.composition import Budget
from opusim.accounting.guarantee import Status
from opusim.accounting.ledger import read_ledger
from opusim.devices.kinds import register_device
from opusim.errors import DeviceError, NoiseBelowCertificate
from opusim.training.config.run import RunConfig
from opusim.training.engine.loop import Engine
from opusim.training.errors import TrainingDiverged
from tests.training.engine import test_certified_runs as runs

OUTPUTS, SIGMA = runs.OUTPUTS, runs.SIGMA
Stds = Callable[[bool], torch.Tensor]
FALL = 23
"""Step at which the noise changes."""


class Killed(BaseException):
    """Stands for a signal that ends the process: no handler of the engine runs."""


class Uneven(runs.DrawingBench):
    """A device whose outputs have noise of their own, which changes during the run."""

    can: ClassVar = frozenset({"project", "draw", "matrix"})
    stds: ClassVar[Stds]
    begins: ClassVar[int] = FALL
    step = 0

    def matrix(self) -> torch.Tensor:
        return self._matrix.T

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        noise = self._stream.add_to(torch.zeros(x.shape[0], self.n_outputs), 1.0)
        return x @ self._matrix + noise * type(self).stds(self.begins <= self.step < 2**63)

    def _seek(self, step: int) -> None:
        self.step = step
        super()._seek(step)


def even(factor: float, *, always: bool = False) -> Stds:
    """Every output has the certified noise, times a factor after the change."""
    return lambda changed: torch.full((OUTPUTS,), SIGMA * (factor if changed or always else 1.0))


sound, weak, always_weak = even(1.0), even(0.5), even(0.5, always=True)


def halves(changed: bool) -> torch.Tensor:
    """Half of the outputs have the certified noise, the others twice as much; all lose a fifth."""
    return torch.where(torch.arange(OUTPUTS) < OUTPUTS // 2, SIGMA, 2 * SIGMA) * (0.8 if changed else 1.0)


def one_silent(changed: bool) -> torch.Tensor:
    stds = sound(changed)
    stds[0] = 0.0 if changed else SIGMA
    return stds


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register_device("uneven", Uneven)
    monkeypatch.setattr(Uneven, "stds", staticmethod(sound), raising=False)


def become(monkeypatch: pytest.MonkeyPatch, stds: Stds, begins: int = FALL) -> None:
    monkeypatch.setattr(Uneven, "stds", staticmethod(stds))
    monkeypatch.setattr(Uneven, "begins", begins)


def configured(folder: Path, *, every_steps: int, **changes: Any) -> dict[str, Any]:
    file = runs.description_file(folder, "drawing_bench", every_steps=every_steps)
    file.write_text(file.read_text().replace('kind = "drawing_bench"', 'kind = "uneven"'))
    return runs.config(file, runs.certify(folder, file), **changes)


def stop_at_step(monkeypatch: pytest.MonkeyPatch, steps: int, error: BaseException) -> None:
    advance = Engine._advance

    def step(engine: Engine) -> None:
        if engine.step == steps:
            raise error
        advance(engine)

    monkeypatch.setattr(Engine, "_advance", step)


def alarms(folder: Path) -> list[tuple[int, int, bool]]:
    return [(one.step, one.since, one.covered) for one in read_ledger(folder).alarms]


@pytest.mark.parametrize(
    ("stds", "every_steps", "expected"),
    [
        (halves, 10, (30, 20, False)),  # the mean over outputs stays far above the certified noise
        (one_silent, 1, (23, 22, False)),
    ],
)
def test_each_output_is_checked(
    tmp_path: Path, monkeypatch: Any, stds: Any, every_steps: int, expected: Any
) -> None:
    become(monkeypatch, stds)
    with pytest.raises(DeviceError, match=f"weaker than certified from step {expected[1]} on"):
        runs.train(configured(tmp_path, every_steps=every_steps), folder=tmp_path / "run")
    assert alarms(tmp_path / "run") == [expected]
    rest, early = read_ledger(tmp_path / "run").guarantees()
    assert (rest.status, early.status) == (Status.NONE, Status.PROVEN_UNDER_DEVICE_MODEL)
    assert "% less at a single output" in " ".join(one.text for one in early.assumptions)


@pytest.mark.parametrize(("mode", "every_steps"), [("release", 30), ("experiment", 10)])
def test_a_killed_run_trusts_no_step(tmp_path: Path, monkeypatch: Any, mode: str, every_steps: int) -> None:
    """The noise falls at step 23, a kill comes at 28: the run goes back to step 20, which was checked."""
    become(monkeypatch, weak)
    with monkeypatch.context() as patch:
        stop_at_step(patch, 28, Killed())
        chosen = configured(tmp_path, every_steps=every_steps, mode=mode, checkpoint={"every_steps": 20})
        with pytest.raises(Killed):
            runs.train(chosen, folder=tmp_path / "run")
    become(monkeypatch, always_weak)
    with pytest.raises(NoiseBelowCertificate, match="calibrate it again"):
        runs.train(folder=tmp_path / "run", resume=True)
    assert alarms(tmp_path / "run") == []
    become(monkeypatch, sound)
    run = runs.train(folder=tmp_path / "run", resume=True)
    assert run.summary is not None
    statuses = {one.status for one in read_ledger(tmp_path / "run").guarantees()}
    assert statuses == {Status.PROVEN_UNDER_DEVICE_MODEL}


def test_labels_that_no_check_followed_are_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = configured(tmp_path, every_steps=10)
    chosen["protection"] = {"kind": "label-readout", "epsilon": 2.0, "noise": "device"}
    with monkeypatch.context() as patch:
        stop_at_step(patch, 0, Killed())
        with pytest.raises(Killed):
            runs.train(chosen, folder=tmp_path / "run")
    assert read_ledger(tmp_path / "run").guarantees()[0].is_proven
    become(monkeypatch, always_weak)
    with pytest.raises(NoiseBelowCertificate):
        runs.train(folder=tmp_path / "run", resume=True)
    assert alarms(tmp_path / "run") == [(0, -1, False)]
    (found,) = read_ledger(tmp_path / "run").guarantees()
    assert found.status is Status.NONE


def spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunConfig, "budget", property(lambda _: Budget(epsilon=0.5, delta=1e-5)))


def diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_step(monkeypatch, 18, TrainingDiverged("loss is nan, so the training diverged"))


@pytest.mark.parametrize("end", [spent, diverged])
def test_every_end_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable) -> None:
    become(monkeypatch, weak, begins=1)
    chosen = configured(tmp_path, every_steps=1000)
    end(monkeypatch)
    with pytest.raises(NoiseBelowCertificate, match="weaker than certified from step 0 on"):
        runs.train(chosen, folder=tmp_path / "run")
    ((step, since, covered),) = alarms(tmp_path / "run")
    assert (since, covered) == (0, False)
    assert 1 < step < 40
