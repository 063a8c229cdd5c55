"""Train a model of each kind through a noisy device, against the control in which only its top learns."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opusim import FeedbackAlignment, open_device
from opusim.training.feedback.projection import DeviceProjection
from tests.support.record_models import Custom

SIDE, CLASSES, WIDTH = 8, 10, 16
N_TRAIN, BATCH, SIGMA = 1200, 64, 0.5


class Subclass(nn.Module):
    """Attributes and a forward of its own, as in a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(SIDE * SIDE, WIDTH), nn.ReLU()
        self.fc2, self.act2 = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))


class OwnForward(nn.Module):
    """Two inputs by keyword, functional activations, and a mapping as output."""

    def __init__(self) -> None:
        super().__init__()
        half = SIDE * SIDE // 2
        self.left, self.right = nn.Linear(half, WIDTH), nn.Linear(half, WIDTH)
        self.mixed, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, *, pixels: Tensor, scale: float = 1.0) -> dict[str, Any]:
        upper, lower = pixels.chunk(2, dim=1)
        h = torch.cat([self.left(upper).tanh(), self.right(lower).tanh()], dim=1)
        return {"logits": self.head(self.mixed(h).tanh()) * scale, "width": h.shape[1]}


def recurrent() -> nn.Module:
    """A GRU over a digit's rows; its point lies on the outputs of all rows, of which the head reads the last."""
    parts = {"gru": nn.GRU(SIDE, WIDTH, batch_first=True), "head": nn.Linear(WIDTH, CLASSES)}
    return Custom(lambda m, x: m.head(m.gru(x.view(-1, SIDE, SIDE))[0][:, -1]), **parts)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Case(NamedTuple):
    """A model, its feedback points, and whether it takes a keyword and returns a mapping."""

    build: Callable[[], nn.Module]
    options: Mapping[str, Any] = {}
    by_name: bool = False


CASES = {
    "module subclass": Case(Subclass),
    "Conv2d": Case(convolutional, {"spread": "full"}),
    "GRU": Case(recurrent, {"points": "gru"}),
    "own forward": Case(OwnForward, {"points": ["left", "right", "mixed"], "error_at": "head"}, by_name=True),
}


@cache
def records() -> tuple[Tensor, Tensor]:
    """Digits and their classes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def losses(case: Case, model: nn.Module, rows: Tensor | slice) -> Tensor:
    """Cross-entropy of each of some records."""
    x, y = (part[rows] for part in records())
    return cross_entropy(model(pixels=x)["logits"] if case.by_name else model(x), y, reduction="none")


def held_out_losses(case: Case, *, seed: int, learns: bool = True) -> Tensor:
    """Train on the first records and return the loss of each of the others; a control has no feedback."""
    torch.manual_seed(seed)
    model = FeedbackAlignment(case.build(), gain=float(learns), **case.options)
    if learns:
        x = records()[0][:2]
        n_inputs, n_outputs = model.shape(pixels=x) if case.by_name else model.shape(x)
        options = {"n_inputs": n_inputs, "n_outputs": n_outputs, "seed": seed}
        model.noisy_device = open_device("gaussian", **options, noise={"sigma": SIGMA})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        losses(case, model, torch.randint(0, N_TRAIN, (BATCH,))).mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return losses(case, model, slice(N_TRAIN, None))


def standard_errors(gain: Tensor) -> float:
    """A mean in units of its standard error."""
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_the_model_beats_the_control_in_which_only_its_top_learns(name: str) -> None:
    """On records that neither saw, by five standard errors over the records."""
    case = CASES[name]
    gain = held_out_losses(case, seed=1, learns=False) - held_out_losses(case, seed=1)
    assert standard_errors(gain) > 5


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["module subclass", "GRU"])
def test_planted_fault_feedback_of_another_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails if each record receives its neighbour's feedback, which has the same law."""
    read = DeviceProjection.read
    monkeypatch.setattr(DeviceProjection, "read", lambda self, error: read(self, error).roll(1, dims=0))
    with pytest.raises(AssertionError, match="standard_errors"):
        test_the_model_beats_the_control_in_which_only_its_top_learns(name)
