"""A learnt read-out starts as plain feedback, predicts true gradients, and touches nothing else."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import opusim
from opusim.training.feedback.layout import LearntReadout
from tests.support.private_loops import parts, private_loop
from tests.support.record_models import Custom


def stream(m: nn.Module, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = x + 0.5 * block(x)
    return m.head(x)


def residual() -> nn.Module:
    """A linear residual stream: the gradient at a point is a fixed linear map of the error."""
    torch.manual_seed(0)
    return Custom(stream, blocks=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), head=nn.Linear(16, 6))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 36, 6))


def rows(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x, torch.randint(0, 6, shape[:1] if len(shape) != 3 else shape[:2], generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    return nn.functional.cross_entropy(scores.reshape(-1, 6), y.flatten())


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, x, y).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


BOTH = ["blocks.0", "blocks.1"]
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "records": (residual, (40, 16), {"points": BOTH}),
    "positions": (residual, (10, 5, 16), {"points": BOTH}),
    "summed rows": (residual, (10, 5, 16), {"points": BOTH, "rows": "sum"}),
    "drawn rows": (residual, (10, 5, 16), {"points": BOTH, "rows": 3}),
    "own slices": (residual, (40, 16), {"points": BOTH, "slices": "own"}),
    "normalised": (residual, (10, 5, 16), {"points": ["blocks.0"], "normalised": True}),
    "broadcast": (convolutions, (20, 1, 8, 8), {"points": ["1"], "spread": "broadcast"}),
    "full": (convolutions, (20, 1, 8, 8), {"points": ["1"], "spread": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_starts_as_plain_feedback(name: str) -> None:
    build, shape, options = CASES[name]
    x, y = rows(shape)
    plain = opusim.FeedbackAlignment(build(), **options)
    wanted = gradients(plain, x, y)
    learnt = opusim.FeedbackAlignment(build(), **options)
    learnt.shape(x[:2])
    assert learnt.start_readout().updates == 0
    torch.testing.assert_close(gradients(learnt, x, y), wanted, rtol=1e-5, atol=1e-7)


def alignment(feedback: opusim.FeedbackAlignment, x: Tensor, y: Tensor) -> float:
    return min(p.signal_alignment for p in feedback.diagnose(lambda: loss_of(feedback, x, y)).points)


@pytest.mark.parametrize("options", [{}, {"slices": "own"}])
def test_it_finds_a_linear_gradient(options: dict[str, Any]) -> None:
    feedback = opusim.FeedbackAlignment(residual(), BOTH, **options)
    x, y = rows((200, 16))
    other = rows((200, 16), seed=1)
    plain = alignment(feedback, *other)
    assert plain < 0.6
    feedback.fit_readout(lambda: loss_of(feedback, x, y))
    assert plain + 0.1 < alignment(feedback, *other) < 0.99
    feedback.fit_readout(lambda: loss_of(feedback, x, y), plain=0.0)
    assert alignment(feedback, *other) > 0.999
    with pytest.raises(ValueError, match="plain"):
        feedback.fit_readout(lambda: loss_of(feedback, x, y), plain=-1.0)


def test_rows_of_other_records_would_be_seen() -> None:
    """Planted fault: gradients are paired with the readings of other records."""
    feedback = opusim.FeedbackAlignment(residual(), BOTH)
    x, y = rows((200, 16))
    fit = LearntReadout.fit
    shifted = {"fit": lambda self, n, r, g, plain: fit(self, n, r, g.roll(1, 0), plain=plain)}
    with patch.multiple(LearntReadout, **shifted):
        feedback.fit_readout(lambda: loss_of(feedback, x, y), plain=0.0)
    assert alignment(feedback, *rows((200, 16), seed=1)) < 0.6


def test_more_outputs_average_the_noise_of_a_device() -> None:
    found = []
    for outputs in (16, 512):
        device = opusim.open_device("gaussian", n_inputs=6, n_outputs=outputs, seed=0, noise={"sigma": 2.0})
        feedback = opusim.FeedbackAlignment(residual(), BOTH, device=device, encoding="planes")
        for seed in range(3):
            x, y = rows((400, 16), seed)
            feedback.fit_readout(lambda f=feedback, x=x, y=y: loss_of(f, x, y), plain=0.0)
        assert device.usage.frames > 0
        found.append(alignment(feedback, *rows((400, 16), seed=7)))
        device.close()
    assert found[0] < 0.9 < 0.97 < found[1]


def test_it_moves_nothing_but_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.5), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 6))
    feedback = opusim.FeedbackAlignment(model, ["3"])
    x, y = rows((30, 16))
    gradients(feedback, x, y)
    before = {name: t.clone() for name, t in model.state_dict().items() if "running" not in name}
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = torch.random.get_rng_state()
    feedback.fit_readout(lambda: loss_of(feedback, x, y))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items() if "num_batches" not in n)
    assert all(torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept, strict=True))


def test_a_saved_read_out_goes_on() -> None:
    x, y = rows((40, 16))
    one, other = (opusim.FeedbackAlignment(residual(), BOTH) for _ in range(2))
    one.fit_readout(lambda: loss_of(one, x, y))
    other.shape(x[:2])
    other.start_readout().load_state_dict(one.start_readout().state_dict())
    for feedback in (one, other):
        feedback.fit_readout(lambda feedback=feedback: loss_of(feedback, *rows((40, 16), seed=1)))
    assert all(map(torch.equal, gradients(one, x, y), gradients(other, x, y)))
    different = opusim.FeedbackAlignment(convolutions(), ["1"])
    different.shape(rows((2, 1, 8, 8))[0])
    with pytest.raises(ValueError, match="state: has tensors of shapes"):
        different.start_readout().load_state_dict(one.start_readout().state_dict())


def test_what_it_refuses(tmp_path: Path) -> None:
    feedback = opusim.FeedbackAlignment(residual(), ["blocks.0"])
    with pytest.raises(RuntimeError, match=r"call shape\(x\) with two records first"):
        feedback.start_readout()
    with pytest.raises(ValueError, match="no forward pass of the model led to"):
        feedback.fit_readout(lambda: torch.zeros((), requires_grad=True).exp())
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    points = opusim.FeedbackAlignment(model, ["1"])
    fit = partial(points.fit_readout, lambda: points(torch.randn(4, 8)).square().mean())
    with private_loop(tmp_path / "open", parts(model)):
        with pytest.raises(ValueError, match="in a private loop already"):
            private_loop(tmp_path / "second", parts(model))
        with pytest.raises(RuntimeError, match="fit_readout: a private loop trains the model"):
            fit()
    fit()
    hidden = Custom(lambda m, x: model(x), own=nn.ParameterList(model.parameters()))  # outside the registry
    with pytest.raises(TypeError, match="which is no submodule of it"):
        private_loop(tmp_path / "hidden", parts(hidden))


@pytest.mark.parametrize("trainer", ["bp", "pdfa"])
def test_a_run_refuses_a_module_that_carries_points(trainer: str, tmp_path: Path) -> None:
    """A callback could fit the read-out to private records."""
    x, y = rows((60, 16))
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 6))
    points = opusim.FeedbackAlignment(model, ["1"])
    config = {"trainer": {"kind": trainer}, "data": {"n_classes": 6}, "epochs": 1}
    config["sampler"] = {"batch_size": 20}
    with pytest.raises(ValueError, match="model has feedback points already; call remove"):
        opusim.train(config, data=(x, y), model=model, folder=tmp_path / "run")
    opusim.train(config, data=(x, y), model=points.remove(), folder=tmp_path / "plain")
