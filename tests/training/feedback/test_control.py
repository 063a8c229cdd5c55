"""A copy without feedback follows the first batches; one line says when feedback is worse than none."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opusim import FeedbackAlignment, open_device, training
from opusim.training.feedback import choice
from opusim.training.feedback.diagnosis import Control, is_worse
from opusim.training.feedback.trainer import FeedbackTrainer
from tests.support.record_models import Custom
from tests.support.shared_checks import with_marks

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, CLASSES = 12, 3


def block() -> nn.Module:
    """x + f(x)."""
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    return Custom(lambda m, x: x + m.f(x), f=nn.Sequential(*layers))


def stream(dropout: float = 0.0) -> nn.Sequential:
    """A residual stream that nothing normalises; its first block is the point."""
    torch.manual_seed(1)
    stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(stem, block(), nn.Dropout(dropout), block(), nn.LayerNorm(WIDTH), head)


def batch(number: int, size: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(number))
    return x, (2 * x[:, 0] * x[:, 1] + x[:, 2]).sign().long() + 1


def losses(model: FeedbackAlignment, batches: int, control: bool) -> tuple[list[float], Any, Tensor]:
    """Losses of a loop, its control, and a number that the global generator draws behind it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    found, follower = [], model.control(optimizer, batches=batches) if control else None
    for number in range(batches):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        if follower is not None:
            follower.follow(lambda model, x=x, y=y: cross_entropy(model(x), y), loss)
        optimizer.step()
        found.append(float(loss.detach()))
    return found, follower, torch.rand(())


def test_the_control_is_a_loop_without_feedback_from_the_same_start() -> None:
    followed = FeedbackAlignment(stream(), "1")
    _, control, _ = losses(followed, 20, control=True)
    alone, _, _ = losses(FeedbackAlignment(stream(), "1", gain=0.0), 20, control=False)
    assert control._without == alone
    assert not control.running


def test_a_control_changes_nothing_of_the_loop_and_reads_no_device() -> None:
    def new() -> FeedbackAlignment:
        device = open_device("gaussian", n_inputs=CLASSES, n_outputs=WIDTH, seed=2)
        return FeedbackAlignment(stream(dropout=0.2), "1", device=device)

    plain, followed = new(), new()
    with_none, _, drawn = losses(plain, 18, control=False)
    with_one, _, drawn_too = losses(followed, 18, control=True)
    assert with_one == with_none
    assert torch.equal(drawn, drawn_too)
    assert all(map(torch.equal, plain.parameters(), followed.parameters()))
    assert plain.usage.frames == followed.usage.frames > 0


@pytest.mark.filterwarnings("ignore:no norm follows")
def test_feedback_that_is_worse_than_none_is_told_in_one_line() -> None:
    """Feedback without any relation to the error moves the blocks about; the true one does not."""
    ruined = FeedbackAlignment(stream(), "1", normalised=False)
    drawn = torch.Generator().manual_seed(4)
    ruined._read = lambda rows, projection, step: torch.randn(len(rows), WIDTH, generator=drawn)
    line = r"^feedback is worse than none: over batches 49 to 64 .*try model.start_from_feedback\('5'\) .*feedback$"
    with pytest.warns(UserWarning, match=line):
        losses(ruined, 64, control=True)
    losses(FeedbackAlignment(stream(), "1"), 64, control=True)  # a warning is an error here


def curve(end: float, *, noise: float, seed: int, n: int = 64) -> list[float]:
    """Losses that fall from 2 to an end, with independent noise of the batches."""
    drawn = np.random.default_rng(seed).normal(size=n)
    return [end + (2 - end) * math.exp(-k / 10) + noise * float(drawn[k]) for k in range(n)]


@pytest.mark.parametrize(
    ("end", "noise", "worse"),
    [(1.0, 0.0, False), (0.9, 0.0, False), (1.02, 0.001, False), (1.3, 0.05, True), (1.3, 1.0, False)],
    ids=["equal", "better", "a fiftieth of what was learnt", "worse", "worse within the noise"],
)
def test_worse_means_by_noise_and_a_share_of_what_was_learnt(end: float, noise: float, worse: bool) -> None:
    assert is_worse(curve(end, noise=noise, seed=1), curve(1.0, noise=0.0, seed=2)) == worse


def test_a_control_of_few_batches_is_refused() -> None:
    model = FeedbackAlignment(stream(), "1")
    with pytest.raises(ValueError, match="batches = 3: must be at least 16"):
        model.control(torch.optim.SGD(model.parameters(), lr=0.1), batches=3)


class Locked(nn.Sequential):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__(*stream())
        self.records = (number for number in range(3))


RUNS: dict[str, tuple[dict[str, Any], type[nn.Module] | Any, bool]] = {
    "plain": ({}, stream, True),
    "no feedback": ({"trainer": {"kind": "dfa", "gain": 0.0}}, stream, False),
    "backpropagation": ({"trainer": {"kind": "bp"}}, stream, False),
    "few steps": ({"epochs": 3}, stream, False),
    "not copied": ({}, Locked, False),
    "records": ({"protection": {"kind": "record", "noise_multiplier": 1.0}}, stream, False),
    "labels": ({"protection": {"kind": "label-randomized-response", "epsilon": 4.0}}, stream, False),
}
QUICK = {"plain", "few steps", "records"}
BATCHES = 20


@pytest.mark.parametrize("name", with_marks(RUNS, RUNS.keys() - QUICK))
def test_only_unprotected_runs_have_one(name: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """The first steps; a run of fewer says in one line that it has none."""
    change, build, expected = RUNS[name]
    followed, step = [], FeedbackTrainer.step

    def counted(self: FeedbackTrainer, *args: Any, **kwargs: Any) -> Any:
        record = step(self, *args, **kwargs)
        followed.append(self.source._control is not None)
        if len(followed) > (BATCHES + 1 if expected else 0):
            raise KeyboardInterrupt
        return record

    monkeypatch.setattr(FeedbackTrainer, "step", counted)
    monkeypatch.setattr("opusim.training.feedback.trainer.BATCHES", BATCHES)
    x, y = batch(0, 40)
    config = {"threads": 1, "epochs": 6, "trainer": {"kind": "dfa"}, "data": {"n_classes": CLASSES}}
    config |= {"sampler": {"batch_size": 9}, **change}
    with pytest.raises(KeyboardInterrupt):
        training.train(config, data=(x, y), model=build(), folder=tmp_path / "run")
    assert sum(followed) == (BATCHES if expected else 0)
    assert followed[0] == expected
    assert ("no control without feedback, which takes 20 steps" in caplog.text) == (name == "few steps")


def test_a_resumed_run_says_that_it_has_no_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = batch(0, 40)
    config = {"threads": 1, "epochs": 30, "trainer": {"kind": "dfa"}, "data": {"n_classes": CLASSES}}
    config |= {"sampler": {"batch_size": 8}, "checkpoint": {"every_steps": 2}}
    steps, step = list[Control | None](), FeedbackTrainer.step

    def stopped(self: FeedbackTrainer, *args: Any, **given: Any) -> Any:
        steps.append(self.source._control)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return step(self, *args, **given)

    choice.tell.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(FeedbackTrainer, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            training.train(config, data=(x, y), model=stream(), folder=tmp_path / "run")
    assert steps[-1] is not None
    assert "no control" not in caplog.text
    training.train(folder=tmp_path / "run", resume=True, data=(x, y), model=stream())
    assert "no control without feedback in a resumed run" in caplog.text


@pytest.mark.parametrize("sigma", [1.0, 300.0])
def test_a_run_as_short_as_its_control_is_warned_of_noise_only(sigma: float, tmp_path: Path) -> None:
    x, y = batch(0, 320)
    torch.manual_seed(3)
    hidden = [nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)]
    config = {"threads": 1, "epochs": 16, "device": {"name": "gaussian", "noise": {"sigma": sigma}}}
    config |= {"optimizer": {"lr": 0.05}, "trainer": {"kind": "pdfa"}, "sampler": {"batch_size": 36}}
    config |= {"data": {"n_classes": CLASSES}}
    model = nn.Sequential(*hidden, nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, CLASSES))
    told = pytest.warns(UserWarning, match="feedback is worse than none") if sigma > 1 else nullcontext()
    with told:
        training.train(config, data=(x, y), model=model, folder=tmp_path / "run")
