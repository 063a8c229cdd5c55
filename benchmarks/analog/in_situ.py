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

Results are written after each run; a second call measures what is missing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.analog.lifetimes import accuracy, images
from benchmarks.bare import bare
from benchmarks.markdown import command, markdown, section, verdict, with_error
from benchmarks.results_file import load_results, save_results
from opusim import convert, open_device
from opusim.devices.base import NoisyDevice
from opusim.randomness.streams import SeededStream
from opusim.tables import duration, energy, print_table
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
            self.device = learner.noisy_device = stack.enter_context(
                open_device(
                    setting.feedback, n_inputs=shape.n_inputs, n_outputs=shape.n_outputs, seed=seed + 1
                )
            )
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
    return bare(
        UlrTrainer,
        network,
        load_config({"trainer": {"kind": "ulr"}}),
        optimizer=torch.optim.Adam(model.parameters(), lr=RATE),
        update=update,
    )


FORWARD_ONLY = {"ulr": likelihood_ratios}


def measure(epochs: int, *, save: bool) -> list[dict[str, Any]]:
    """Return a row for each setting; those of an earlier call are kept."""
    torch.set_num_threads(1)
    settings = {"epochs": epochs, "programming_step": STEP}
    earlier = load_results(NAME) if save else {}
    rows = list(earlier.get("rows", [])) if earlier.get("settings") == settings else []
    for row in rows:
        row.setdefault("seed", 1)
    known = [{key: row[key] for key in asdict(SETTINGS[0])} for row in rows]
    data = build_dataset(DataConfig(name="fashion-mnist"))
    for setting in SETTINGS:
        if asdict(setting) in known:
            continue
        rows.append({**asdict(setting), **run(setting, data, epochs, seed=setting.seed)})
        print(rows[-1], flush=True)
        if save:
            save_results(NAME, {"settings": settings, "rows": rows})
    return rows


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each setting; accuracies are means over its seeds, all else is that of its first."""
    lines = []
    for forward, backward, feedback in dict.fromkeys(
        (setting.forward, setting.backward, setting.feedback) for setting in SETTINGS
    ):
        found = in_setting(rows, forward, backward, feedback)
        if not found:
            continue
        first = found[min(found)]
        layers, used = first["layers"], first["feedback_usage"]
        work = ("–", "–", "–")
        if layers:
            work = (f"{layers['programmings']:,}", duration(layers["seconds"]), energy(layers["joules"]))
        frames = f"{used['frames']:,}" if used else "–"
        accuracies = [row["accuracy"] for row in found.values()]
        lines.append((forward, backward, feedback, str(len(found)), with_error(accuracies), frames, *work))
    return lines


def in_setting(
    rows: list[dict[str, Any]], forward: str, backward: str, feedback: str
) -> dict[int, dict[str, Any]]:
    """Return the rows of a setting by seed."""
    wanted = (forward, backward, feedback)
    return {row["seed"]: row for row in rows if (row["forward"], row["backward"], row["feedback"]) == wanted}


HEADER = (
    "layers",
    "backward",
    "feedback",
    "seeds",
    "accuracy [%]",
    "feedback frames",
    "programmings",
    "device time",
    "device energy",
)


def in_place(rows: list[dict[str, Any]], device: str) -> str:
    """Return a remark on photonic DFA with layers and feedback on devices, or '' without results."""
    found = [row["accuracy"] for row in in_setting(rows, device, "pdfa", device).values()]
    if not found:
        return ""
    required = f", required {REQUIRED:g} % ({verdict(statistics.mean(found) >= REQUIRED)})"
    return f"`{device}` in place by photonic DFA: {with_error(found)} %{required * (device == 'reram')}"


def against_gaussian(rows: list[dict[str, Any]], device: str) -> str:
    """Return a remark on the accuracy with a crossbar's feedback minus that with the Gaussian device's, or ''."""
    ours, theirs = (in_setting(rows, "digital", "pdfa", feedback) for feedback in (device, "gaussian"))
    differences = [ours[seed]["accuracy"] - theirs[seed]["accuracy"] for seed in ours if seed in theirs]
    if not differences:
        return ""
    return (
        f"feedback by `{device}` against the Gaussian device, required within {WITHIN:g} point: "
        f"{with_error(differences, '+.2f')} points ({verdict(abs(statistics.mean(differences)) <= WITHIN)})"
    )


def page_section() -> str:
    """Return the section of the results page, empty without results."""
    found = load_results(NAME)
    if not found:
        return ""
    rows = found["rows"]
    remarks = [
        remark
        for about in (in_place, against_gaussian)
        for device in ("reram", "pcm")
        if (remark := about(rows, device))
    ]
    settings = found["settings"]
    text = (
        f"FashionMNIST, 784-128-10, {settings['epochs']} epochs ({found['date']}, {command(MODULE)}). A "
        f"layer is programmed again once a weight has moved by {100 * settings['programming_step']:g} % of its row's "
        f"largest. Both devices of the feedback have matrices of their own; the Gaussian one "
        f"shows two frames for each row of errors, the crossbars one. Accuracies are means over seeds ± one "
        f"standard error; frames, programmings, time and energy are those of one seed. Time and energy of "
        f"programming are orders of magnitude. {'; '.join(remarks)}."
    )
    return section("Training in place", text, markdown(HEADER, table(rows)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--no-save", action="store_true", help="leave the results file as it is")
    given = parser.parse_args()
    print_table("Training in place", HEADER, table(measure(given.epochs, save=not given.no_save)))


if __name__ == "__main__":
    main()
