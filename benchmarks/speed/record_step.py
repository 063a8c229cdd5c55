"""What does a record-protected photonic DFA step cost over DP-SGD by Opacus's ghost clipping?

784-512-512-10 tanh, batch 256, SGD with momentum, clip norm 1, noise multiplier 1; the step only, both noises drawn
(the device's and the central one here, the central one there). Required: at least 1.8 times faster, with one thread
and two.
Opacus (extra `baselines`) is asked for its fastest form: ghost clipping, torch's default generator for the noise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.bare import feedback_trainer
from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import BATCH, REPEATS, STEPS, new_model, void
from benchmarks.timing import interleaved
from opusim import open_device
from opusim.randomness.streams import noise_stream
from opusim.training.config.kinds import TRAINERS
from opusim.training.config.sections import OptimizerConfig
from opusim.training.feedback.closed_form import ClosedForm
from opusim.training.networks.network import FullyConnected
from opusim.training.networks.optimizers import make_optimizer
from opusim.training.protections.record import RecordGradients

MODULE, NAME = "benchmarks.speed.record_step", "record_step"
CLIP_NORM, NOISE_MULTIPLIER = 1.0, 1.0
REFERENCE = "Opacus, ghost clipping"


def ghost_training(
    module: nn.Module, *, batch: int, lr: float, momentum: float, noise_multiplier: float
) -> tuple[Callable[[torch.Tensor, torch.Tensor], None], torch.optim.Optimizer]:
    """Return a step of DP-SGD, and the optimizer whose rate a schedule may change.

    Opacus's make_private(grad_sample_mode="ghost") puts it together so, without its data loader.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        module, batch_first=True, loss_reduction="mean", max_grad_norm=CLIP_NORM, use_ghost_clipping=True
    )
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    optimizer = DPOptimizerFastGradientClipping(
        sgd,
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=batch,
        loss_reduction="mean",
    )
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(), "mean")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step, sgd


def ghost_step(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A step of DP-SGD by Opacus on one batch."""
    step, _ = ghost_training(module, batch=len(x), lr=0.01, momentum=0.9, noise_multiplier=NOISE_MULTIPLIER)
    return lambda: step(x, y)


def protected_step(x: torch.Tensor, y: torch.Tensor, mode: str, kind: str) -> Callable[[], None]:
    """A step of this package with per-record clipping and central noise."""
    network = FullyConnected(new_model().to(x.device))
    protection = RecordGradients(
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        divisor=BATCH,
        noise=noise_stream(mode, 0, "central-noise"),
    )
    trainer = feedback_trainer(
        ClosedForm(
            network,
            TRAINERS.validated({"kind": kind}),
            device=open_device("gaussian", n_inputs=10, n_outputs=1024, mode=mode, torch_device=x.device)
            if kind == "pdfa"
            else None,
        ),
        make_optimizer(network.parameters, OptimizerConfig()),
        protection=protection,
    )
    count = iter(range(10**9))
    return lambda: void(trainer.step(x, y, step=next(count)))


def speed_rows() -> list[Row]:
    """Return how much faster than Opacus the steps of photonic DFA are."""
    return [
        (
            f"a step 784-512-512-10, clipped records, central noise, {entry['work']}, {entry['threads']} thread(s)",
            f"{entry['times_faster']:.2f} times faster than Opacus ghost clipping",
            command(MODULE),
        )
        for entry in load_results(NAME).get("rows", [])
        if entry["work"].startswith("pdfa")
    ]


def main() -> None:
    warnings.filterwarnings("ignore", module="opacus")
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    work = {
        REFERENCE: ghost_step(new_model(), x, y),
        "pdfa, record-protected": protected_step(x, y, "experiment", "pdfa"),
        "pdfa, record-protected, release mode": protected_step(x, y, "release", "pdfa"),
        "bp, record-protected": protected_step(x, y, "experiment", "bp"),
    }
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = interleaved(work, repeats=REPEATS, inner=STEPS)
        for name, value in seconds.items():
            faster = seconds[REFERENCE] / value
            rows.append({"threads": threads, "work": name, "ms": 1e3 * value, "times_faster": faster})
            print(
                f"{threads} thread(s)  {name:38s} {1e3 * value:7.2f} ms   {faster:5.2f} times faster than Opacus"
            )
    save_results(
        NAME,
        {
            "batch": BATCH,
            "repeats": REPEATS,
            "steps_in_a_turn": STEPS,
            "bar": "times_faster >= 1.8",
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
