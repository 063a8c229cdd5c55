"""What does a photonic DFA step cost over a plain backpropagation step of the same network?

784-512-512-10 tanh, batch 256, SGD with momentum. The reference is what everyone writes: autograd through
nn.Sequential, nn.CrossEntropyLoss and torch.optim.SGD. Required: at most its time, with one thread and with two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.bare import feedback_trainer
from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.training.config.sections import OptimizerConfig
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.feedback.config import BpConfig, DfaConfig, FeedbackConfig, PdfaConfig
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer

MODULE, NAME = "benchmarks.speed.pdfa_step", "pdfa_step"
BATCH, REPEATS, STEPS = 256, 15, 40


def new_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))


def autograd_step(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model, loss = new_model().to(x.device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def closed_form_step(x: torch.Tensor, y: torch.Tensor, config: FeedbackConfig) -> Callable[[], None]:
    network = FullyConnected(new_model().to(x.device))
    device = (
        open_device("gaussian", n_inputs=10, n_outputs=1024, torch_device=x.device)
        if config.kind == "pdfa"
        else None
    )
    trainer = feedback_trainer(
        ClosedForm(network, config, device=device), make_optimizer(network.parameters, OptimizerConfig())
    )
    count = iter(range(10**9))
    return lambda: void(trainer.step(x, y, step=next(count)))


def void(value: object) -> None:
    del value


def speed_rows() -> list[Row]:
    """Return the time of photonic DFA's steps over that of autograd's."""
    return [
        (
            f"time of a step 784-512-512-10, {entry['work']}, {entry['threads']} thread(s)",
            f"{entry['ratio']:.2f} of autograd backpropagation",
            command(MODULE),
        )
        for entry in load_results(NAME).get("rows", [])
        if entry["work"].startswith("pdfa")
    ]


def main() -> None:
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    work = {
        "autograd backpropagation": autograd_step(x, y),
        "bp, closed form": closed_form_step(x, y, BpConfig()),
        "dfa": closed_form_step(x, y, DfaConfig()),
        "pdfa, hardware order": closed_form_step(x, y, PdfaConfig()),
        "pdfa, published order (two noises)": closed_form_step(
            x,
            y,
            PdfaConfig(order="published", tau_b=1.0, tau_h_max=1.0, clipped_layers="hidden"),
        ),
    }
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = interleaved(work, repeats=REPEATS, inner=STEPS)
        reference = seconds["autograd backpropagation"]
        for name, value in seconds.items():
            rows.append({"threads": threads, "work": name, "ms": 1e3 * value, "ratio": value / reference})
            print(
                f"{threads} thread(s)  {name:36s} {1e3 * value:7.2f} ms   {value / reference:5.2f} of autograd"
            )
    save_results(
        NAME,
        {"batch": BATCH, "repeats": REPEATS, "steps_in_a_turn": STEPS, "bar": "ratio <= 1", "rows": rows},
    )


if __name__ == "__main__":
    main()
