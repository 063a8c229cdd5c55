"""What does a record-protected step of a transformer, a ResNet and a CNN cost over backpropagation, and over Opacus?

The built-in `transformer-lm` (four post-norm blocks, width 128, 256 bytes; 16 sequences of 128 tokens), `resnet-small`
with group norm (64 images of 3x32x32) and `conv-small` with group norm (16 channels; 64 images of 1x28x28); SGD, clip
norm 1, noise multiplier 1, one thread, processor time, medians of interleaved repeats and of their ratios to
backpropagation. Opacus (extra `baselines`) is asked for three forms: gradients of single records by hooks, by expanded
weights, and ghost clipping. It takes no embedding of positions without a batch, so that these parameters are constant
in every method. Memory is that of three steps in a process of its own: the peak of resident memory above what it held
before, once a step of two records has compiled kernels and what is free has gone back to the system. Models given as
arguments are measured again; the rows of others stay. Required: at most the time of Opacus's fastest form, and at most
its memory.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved_turns
from opusim.randomness.streams import noise_stream
from training.networks.models import ConvolutionalNetwork, ResNet
from training.networks.record_gradients.tape import RecordTape
from training.networks.sequence_models import TransformerLM
from training.protections.record import RecordGradients

MODULE, NAME = "benchmarks.speed.module_record_step", "module_record_step"
MODELS = ("transformer-lm", "resnet-small", "conv-small")
METHODS = ("bp", "opusim", "opacus, hooks", "opacus, ew", "opacus, ghost")
REPEATS = 9


def work_of(name: str, records: int | None = None) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, a batch of the given or the usual size, and its targets."""
    torch.manual_seed(0)
    if name == "transformer-lm":
        tokens = torch.randint(0, 256, (records or 16, 129))
        model = TransformerLM((128,), 256, width=128, depth=4, heads=4)
        model.embedding.positions.requires_grad_(False)
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = records or 64
    if name == "conv-small":
        images = torch.randn(count, 1, 28, 28)
        return ConvolutionalNetwork((1, 28, 28), 10, norm="group"), images, torch.arange(count) % 10
    return ResNet((3, 32, 32), 10, norm="group"), torch.randn(count, 3, 32, 32), torch.arange(count) % 10


def losses(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each record."""
    found = nn.functional.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="none")
    return found.view(len(y), -1).mean(dim=1)


def step_of(name: str, method: str, records: int | None = None) -> Callable[[], None]:
    """Return a training step of a method, on one fixed batch."""
    model, x, y = work_of(name, records)
    if method.startswith("opacus"):
        return opacus_step(model, x, y, method.removeprefix("opacus, "))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if method == "bp":

        def plain() -> None:
            optimizer.zero_grad()
            losses(model(x), y).mean().backward()
            optimizer.step()

        return plain
    noise = noise_stream("experiment", 1, "central-noise")
    writer = RecordGradients(clip_norm=1.0, noise_multiplier=1.0, divisor=float(len(x)), noise=noise)
    tape = RecordTape(model.train(), x)

    def private() -> None:
        with tape.recording(len(x)):
            losses(model(x), y).sum().backward()
        writer.set_gradients([tape.contributions])
        optimizer.step()

    return private


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], None]:
    """Return a step of DP-SGD as Opacus's make_private puts it together, without its data loader."""
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleExpandedWeights,
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    warnings.simplefilter("ignore")
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    facts: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": len(x),
        "loss_reduction": "mean",
    }
    if mode == "ghost":
        ghost = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=1.0, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(sgd, **facts)
        criterion = DPLossFastGradientClipping(ghost, optimizer, nn.CrossEntropyLoss(), "mean")
        shape = tuple(y.shape) if y.ndim == 2 else None

        def clipped() -> None:
            optimizer.zero_grad()
            criterion(ghost(x).flatten(0, -2), y.flatten(), shape=shape).backward()
            optimizer.step()

        return clipped
    kind = GradSampleModule if mode == "hooks" else GradSampleModuleExpandedWeights
    sampled, private = kind(model, loss_reduction="mean"), DPOptimizer(sgd, **facts)

    def step() -> None:
        private.zero_grad()
        losses(sampled(x), y).mean().backward()
        private.step()

    return step


def memory_of(name: str, method: str) -> int:
    """Return the memory of three steps in a process of its own, in KiB."""
    arguments = [sys.executable, "-m", MODULE, "--memory", name, method]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


def print_memory(name: str, method: str) -> None:
    """Do three steps on one thread and print by how much resident memory rose at its peak, in KiB."""
    torch.set_num_threads(1)
    step_of(name, method, records=2)()
    step = step_of(name, method)
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(3):
        step()
    print(_status("VmHWM") - before)


def _status(key: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def speed_rows() -> list[Row]:
    """Return what a protected step costs over backpropagation, and what Opacus's fastest form costs."""
    rows = load_results(NAME).get("rows", [])
    found = []
    for model in MODELS:
        own = next((row for row in rows if row["model"] == model and row["work"] == "opusim"), None)
        others = [row for row in rows if row["model"] == model and row["work"].startswith("opacus")]
        if own and others:
            best = min(others, key=lambda row: float(row["ratio"]))
            figure = (
                f"{own['ratio']:.2f} of backpropagation's time, {own['memory_ratio']:.2f} of its memory (Opacus's "
                f"fastest form: {best['ratio']:.2f} and {best['memory_ratio']:.2f})"
            )
            found.append((f"a record-protected step of {model}, one thread", figure, command(MODULE)))
    return found


def main(models: Sequence[str]) -> None:
    torch.set_num_threads(1)
    rows = [row for row in load_results(NAME).get("rows", []) if row["model"] not in models]
    for name in models:
        work = {}
        for method in METHODS:
            try:
                work[method] = step_of(name, method)
                work[method]()
            except Exception as error:  # a form of Opacus that does not take the model
                work.pop(method, None)
                print(f"{name:15s} {method:15s} does not run ({type(error).__name__}: {str(error)[:80]})")
        turns = interleaved_turns(work, repeats=REPEATS, clock=time.process_time, warm_up=1)
        memory = {method: memory_of(name, method) for method in work}
        for method in work:
            entry: dict[str, Any] = {"model": name, "work": method}
            entry["ms"] = 1e3 * statistics.median(turns[method])
            entry["ratio"] = statistics.median(
                own / plain for own, plain in zip(turns[method], turns["bp"], strict=True)
            )
            entry |= {
                "memory_mib": memory[method] / 1024,
                "memory_ratio": memory[method] / max(memory["bp"], 1),
            }
            rows.append(entry)
            print(
                f"{name:15s} {method:15s} {entry['ms']:8.1f} ms  {entry['ratio']:5.2f} of backpropagation's  "
                f"{entry['memory_mib']:6.0f} MiB  {entry['memory_ratio']:5.2f}"
            )
    rows.sort(key=lambda row: MODELS.index(row["model"]))
    save_results(NAME, {"threads": 1, "repeats": REPEATS, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(*sys.argv[2:4])
    else:
        main(sys.argv[1:] or MODELS)
