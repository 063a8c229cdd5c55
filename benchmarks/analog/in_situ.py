"""How well does a network learn on analog devices, forward and feedback, and what does programming cost?

FashionMNIST, 784-128-10 with tanh, batch 128, 5 epochs, one thread; Adam 0.002, falling to 0 by a cosine. "In place":
both layers run on a device from the first step on; their weights live in a digital accumulator, and a layer is
programmed again once a weight has moved by the programming step, relative to the largest of its row. The backward pass
is straight-through, or photonic DFA with a random matrix on a second device of the same kind; or there is none, and
likelihood ratios take forward passes only. "Digital": the forward pass is exact. Required: `reram` in place by photonic
DFA at least 85 %; digital photonic DFA with a crossbar within 1 point of the OPU, which is the device `gaussian`:
equation 10 of the photonic DFA paper with sigma 0.1. Accuracies in place are those on the device after training.

Zeroth order in place is left out: each of its steps would program both layers twice. The tests train a smaller network
by it.
"""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch import nn

from benchmarks.analog.lifetimes import accuracy, images
from benchmarks.bare import bare
from benchmarks.markdown import verdict, with_error
from benchmarks.results_file import keep_row, load_results, rows_of, save_results, selected
from opusim import convert, open_device
from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import SeededStream
from opusim.tables import duration, energy
from opusim.training.config import load_config
from opusim.training.config.sections import DataConfig
from opusim.training.data import Dataset
from opusim.training.data.catalogue import build_dataset
from opusim.training.feedback.points import FeedbackAlignment
from opusim.training.ulr.estimator import Estimator, ModuleSequence
from opusim.training.ulr.trainer import PlainUpdate, UlrTrainer

MODULE, NAME = "benchmarks.analog.in_situ", "analog_in_situ"
EPOCHS, RATE, BATCH = 5, 2e-3, 128
SEEDS = (1, 2, 3)
"""Of photonic DFA; the other backward passes run once."""
REQUIRED, WITHIN = 85.0, 1.0
STEP = 0.02
"""Of a row's largest weight; smaller ones program more often."""
COPIES, SIGMA = 16, 0.3
"""Of likelihood ratios: antithetic pairs for each record and layer, and standard deviation of their noise."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run.

    Attributes:
        forward: device of both layers, or "digital".
        backward: "straight-through", "pdfa" or "ulr".
        feedback: device of the random matrix, or "none".
        seed: of the weights, the order of records and all devices.
    """

    forward: str
    backward: str
    feedback: str
    seed: int = 1


SETTINGS = (
    *(
        Setting(forward="digital", backward="pdfa", feedback=device, seed=seed)
        for device in ("gaussian", "reram", "pcm")
        for seed in SEEDS
    ),
    *(Setting(forward="reram", backward="pdfa", feedback="reram", seed=seed) for seed in SEEDS),
    *(Setting(forward="pcm", backward="pdfa", feedback="pcm", seed=seed) for seed in SEEDS),
    Setting(forward="digital", backward="straight-through", feedback="none"),
    Setting(forward="reram", backward="straight-through", feedback="none"),
    Setting(forward="pcm", backward="straight-through", feedback="none"),
    Setting(forward="digital", backward="ulr", feedback="none"),
    Setting(forward="reram", backward="ulr", feedback="none"),
    Setting(forward="pcm", backward="ulr", feedback="none"),
)


def run(setting: Setting, data: Dataset, epochs: int, seed: int) -> dict[str, Any]:
    """Train and return the accuracy, and what the devices did."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 10))
    x, y = images(data.train, data)
    with ExitStack() as stack:
        analog = None
        if setting.forward != "digital":
            analog = stack.enter_context(convert(model, setting.forward, seed=seed, programming_step=STEP))
            model = analog.model
        if setting.backward in FORWARD_ONLY:
            learner = FORWARD_ONLY[setting.backward](model, seed)
        else:
            learner = Backward(model, setting, stack, x[:2], seed)
        steps = epochs * len(torch.arange(len(x)).split(BATCH))
        (group,) = learner.optimizer.param_groups
        rate = group["lr"]
        batches = (rows for _ in range(epochs) for rows in torch.randperm(len(x)).split(BATCH))
        for number, rows in enumerate(batches):
            group["lr"] = rate * (1 + math.cos(math.pi * number / steps)) / 2
            learner.step(x[rows], y[rows], step=number)
        used = None if analog is None else analog.usage
        feedback = learner.device if isinstance(learner, Backward) else None
        found = accuracy(model.eval(), data)
    return {
        "accuracy": round(found, 2),
        "layers": None if used is None else used.to_json(),
        "feedback_usage": None if feedback is None else feedback.usage.to_json(),
    }


class Backward:
    """Learn by a backward pass: straight-through, or photonic DFA with the feedback of a device."""

    def __init__(
        self, model: nn.Module, setting: Setting, stack: ExitStack, x: torch.Tensor, seed: int
    ) -> None:
        self.device: NoisyDevice | None = None
        self._learner: nn.Module = model
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        if setting.backward == "pdfa":
            self._learner = learner = FeedbackAlignment(model, points=["2"])
            shape = learner.shape(x)
            window = {"n_inputs": shape.n_inputs, "n_outputs": shape.n_outputs}
            device = open_device(setting.feedback, **window, seed=seed + 1)
            self.device = learner.noisy_device = stack.enter_context(device)
            stack.callback(learner.remove)
        self._learner.train()

    def step(self, x: torch.Tensor, y: torch.Tensor, *, step: int) -> None:
        """Take the optimizer's step number `step` with a batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self._learner(x), y).backward()
        self.optimizer.step()


def likelihood_ratios(model: nn.Module, seed: int) -> UlrTrainer:
    """Return the trainer of antithetic likelihood ratios with Adam; the noise on the outputs is digital."""
    network = ModuleSequence(model, n_inputs=784)
    estimator = Estimator(copies=COPIES, reduction="antithetic", directions="orthogonal")
    update = PlainUpdate(network, estimator, sigma=SIGMA, noise=SeededStream(seed, "output noise"))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    config = load_config({"trainer": {"kind": "ulr"}})
    return bare(UlrTrainer, network, config, optimizer=optimizer, update=update)


FORWARD_ONLY = {"ulr": likelihood_ratios}


def main(epochs: int = EPOCHS) -> None:
    """Train what the results lack."""
    torch.set_num_threads(1)
    settings = {"epochs": epochs, "programming_step": STEP}
    if load_results(NAME).get("settings") != settings:
        save_results(NAME, {"settings": settings, "rows": []})
    data = build_dataset(DataConfig(name="fashion-mnist"))
    for setting in SETTINGS:
        if not rows_of(NAME, **asdict(setting)):
            keep_row(NAME, asdict(setting), **run(setting, data, epochs, seed=setting.seed))


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each setting; accuracies are means over its seeds, all else is that of its first."""
    lines = []
    for setting in dict.fromkeys((each.forward, each.backward, each.feedback) for each in SETTINGS):
        found = in_setting(rows, *setting)
        if found:
            first = found[min(found)]
            layers, used = first["layers"], first["feedback_usage"]
            work = ("–", "–", "–")
            if layers:
                work = (f"{layers['programmings']:,}", duration(layers["seconds"]), energy(layers["joules"]))
            frames = f"{used['frames']:,}" if used else "–"
            accuracies = [row["accuracy"] for row in found.values()]
            lines.append((*setting, str(len(found)), with_error(accuracies), frames, *work))
    return lines


def in_setting(
    rows: list[dict[str, Any]], forward: str, backward: str, feedback: str
) -> dict[int, dict[str, Any]]:
    """Return the rows of a setting by seed."""
    found = selected(rows, forward=forward, backward=backward, feedback=feedback)
    return {row.get("seed", 1): row for row in found}


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Say what each crossbar reaches in place, then how its feedback compares with the Gaussian device's."""
    found = []
    for device in ("reram", "pcm"):
        own = [row["accuracy"] for row in in_setting(rows, device, "pdfa", device).values()]
        required = f", required {REQUIRED:g} % ({verdict(statistics.mean(own) >= REQUIRED)})"
        found.append(
            f"`{device}` in place by photonic DFA: {with_error(own)} %{required * (device == 'reram')}"
        )
    for device in ("reram", "pcm"):
        ours, theirs = (in_setting(rows, "digital", "pdfa", each) for each in (device, "gaussian"))
        apart = [ours[seed]["accuracy"] - theirs[seed]["accuracy"] for seed in ours]
        found.append(
            f"feedback by `{device}` against the Gaussian device, required within {WITHIN:g} point: "
            f"{with_error(apart, '+.2f')} points ({verdict(abs(statistics.mean(apart)) <= WITHIN)})"
        )
    return found


if __name__ == "__main__":
    typer.run(main)
