"""How can a read-out of a fixed medium be learnt? Three rules, by what they cost and how well feedback points.

The GPT of `benchmarks.known_models.nanogpt` after 300 steps of backpropagation; its read-outs start anew and learn from
the same batches, in one of three ways:

- *backpropagation*: least squares on the true gradients of a batch (`FeedbackAlignment.fit_readout`);
- *directional derivatives*: a random direction v at every position of a point, the difference of the record's loss
  along it, and v times that difference in place of the gradient: no backward pass (node perturbation, or GrAPE's
  forward mode);
- *weight mirror*: noise at a point, and its correlation with the device's reading of what it changes in the stream
  before the head (Akrout et al. 2019).

The figure is the cosine of the feedback with the true gradient on another batch, mean over points, without device
noise. A pass is a forward pass, or a backward pass, which counts two.

    OPUSIM_DATA=... python -m benchmarks.known_models.readout_rules     (some minutes of one core)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from benchmarks.known_models.nanogpt import small
from benchmarks.known_models.training import MATRIX_SEED
from benchmarks.results_file import save_results
from opusim import FeedbackAlignment
from opusim.training.feedback.layout import row_std

MODULE, NAME = "benchmarks.known_models.readout_rules", "readout_rules"
STEPS, BATCHES, STEP = 300, (1, 4, 16, 64), 1e-2
PLAIN = "plain feedback"
Rule = Callable[[FeedbackAlignment, Tensor, Tensor, torch.Generator], int]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the summed loss of each record."""
    scores = model(x)
    found = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none")
    return found.view(len(x), -1).sum(dim=1)


def moved(model: nn.Module, name: str, direction: Tensor) -> RemovableHandle:
    """Add a direction to the output of a submodule, within a `with` block."""
    return model.get_submodule(name).register_forward_hook(lambda module, args, out: out + direction)


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Give the outputs of some submodules by name; "NAME.input" is what submodule NAME receives."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        found[name] = args[0] if name.endswith(".input") else out

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name.removesuffix(".input"))
            stack.enter_context(module.register_forward_hook(partial(keep, name)))
        yield found


def by_backpropagation(feedback: FeedbackAlignment, x: Tensor, y: Tensor, generator: torch.Generator) -> int:
    """Fit the read-out to a batch; return the passes that it took."""
    feedback.fit_readout(lambda: losses(feedback, x, y).mean() / x.shape[1], plain=0.0)
    return 3


def by_derivatives(feedback: FeedbackAlignment, x: Tensor, y: Tensor, generator: torch.Generator) -> int:
    """Fit the read-out to differences of the loss along random directions."""
    model = feedback.model
    points = [*feedback.points, "head.input"]
    with torch.no_grad(), watched(model, points) as seen, feedback.backpropagating():
        losses(model, x, y)
    with feedback.backpropagating():
        z = seen["head.input"].clone().requires_grad_()
        value = functional.cross_entropy(model.head(z).flatten(0, 1), y.flatten())  # type: ignore[operator]
        (error,) = torch.autograd.grad(value, z)
    reading = feedback._projector(error.device).read(error.flatten(0, 1))
    for number, name in enumerate(feedback.points):
        v = torch.randn(seen[name].shape, generator=generator)
        with torch.no_grad(), feedback.backpropagating():
            with moved(model, name, STEP * v):
                up = losses(model, x, y)
            with moved(model, name, -STEP * v):
                down = losses(model, x, y)
        slope = (up - down) / (2 * STEP * y.numel())  # of the mean loss
        gradient = (v * slope[:, None, None]).flatten(0, 1)
        h = seen[name].flatten(0, 1)
        scaled = reading * (feedback.gain / h.shape[-1] ** 0.5 / row_std(h))
        feedback.start_readout().fit(number, scaled, gradient, plain=0.0)
    return 1 + 2 * len(feedback.points)


def by_mirror(
    feedback: FeedbackAlignment, x: Tensor, y: Tensor, generator: torch.Generator, *, kept: dict[int, Any]
) -> int:
    """Set the read-out to the correlation of noise at a point with the reading of what it changes."""
    model = feedback.model
    with torch.no_grad(), feedback.backpropagating():
        with watched(model, [*feedback.points, "head.input"]) as plain:
            model(x)
        for number, name in enumerate(feedback.points):
            v = torch.randn(plain[name].shape, generator=generator)
            with moved(model, name, STEP * v), watched(model, ["head.input"]) as other:
                model(x)
            change = ((other["head.input"] - plain["head.input"]) / STEP).flatten(0, 1)
            change *= row_std(plain[name].flatten(0, 1))
            reading = feedback._projector(change.device).read(change)
            total, count = kept.setdefault(number, [torch.zeros(v.shape[-1], reading.shape[1]), 0])
            total += v.flatten(0, 1).T @ reading
            kept[number][1] = count + len(reading)
            scale = feedback.gain / v.shape[-1] ** 0.5 * reading.shape[1]
            feedback.start_readout()._matrices[number] = total / (kept[number][1] * scale)
    return 1 + len(feedback.points)


RULES: dict[str, Callable[[], Rule]] = {
    "backpropagation": lambda: by_backpropagation,
    "directional derivatives": lambda: by_derivatives,
    "weight mirror": lambda: partial(by_mirror, kept={}),
}


def measure() -> None:
    """Learn each read-out, and print and keep how feedback points."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = small()
    model = task.model()
    optimizer = task.optimizer(model)
    for step in range(STEPS):
        x, y = task.batch(0, step)
        optimizer.zero_grad()
        task.loss(model, x, y).backward()
        optimizer.step()
    state, rows = {name: t.clone() for name, t in model.state_dict().items()}, []
    for name, rule in RULES.items():
        model.load_state_dict(state)
        feedback = FeedbackAlignment(model, seed=MATRIX_SEED)
        feedback.shape(x[:2])
        learn, passes, generator = rule(), 0, torch.Generator().manual_seed(1)
        if not rows:
            rows.append({"rule": PLAIN, "batches": 0, "passes": 0, "cosine": cosine(feedback, task)})
        for number in range(max(BATCHES)):
            passes += learn(feedback, *task.batch(1, number), generator)
            if number + 1 in BATCHES:
                row = {"rule": name, "batches": number + 1, "passes": passes}
                rows.append({**row, "cosine": cosine(feedback, task)})
                print(rows[-1], flush=True)
        feedback.remove()
    save_results(NAME, {"steps": STEPS, "rows": rows})


def cosine(feedback: FeedbackAlignment, task: Any) -> float:
    """Return the mean cosine of the feedback with the true gradient on another batch."""
    x, y = task.batch(2, 0)
    found = feedback.diagnose(lambda: task.loss(feedback, x, y))
    return statistics.mean(point.signal_alignment for point in found.points)


if __name__ == "__main__":
    measure()
