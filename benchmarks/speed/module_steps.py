"""What does a step of a transformer, a ResNet or a CNN cost with feedback points, and with records protected?

    python -m benchmarks.speed.module_steps [transformer_step] [module_record_step]     (both by default)

One thread, processor time, medians of interleaved turns. Memory is that of three steps, the median of three
processes.

- `transformer_step`: the built-in `transformer-lm` (four post-norm blocks, width 128, 16 sequences of 128 tokens),
  Adam; the error is taken before the vocabulary layer, each token's error is projected, three blocks receive feedback.
  Required: photonic DFA on the `gaussian` device takes at most 1.1 times backpropagation's time, and at most its memory
  (on 64 sequences); with the points switched off a step takes the time of the plain module.
- `module_record_step`: that model, `resnet-small` and `conv-small` with group norm (64 images), SGD, clip norm 1, noise
  multiplier 1. Opacus (extra `baselines`) is asked for gradients of single records by hooks, by expanded weights, and
  for ghost clipping. It takes no embedding of positions without a batch, so that these parameters are constant in every
  method. Required: at most the time of Opacus's fastest form, and at most its memory.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.options import program_of_parts
from benchmarks.speed.operators import losses, plain_step, private_step
from benchmarks.speed.steps import ghost_step
from benchmarks.timing import Step, interleaved, interleaved_turns, memory_rise, print_memory_rise
from opusim import FeedbackAlignment, open_device
from opusim.randomness.streams import noise_stream
from opusim.training.networks.models import ConvolutionalNetwork, ResNet
from opusim.training.networks.sequence_models import TransformerLM

MODULE = "benchmarks.speed.module_steps"
TOKENS, SEQUENCES, REPEATS = 128, 16, 15
POINTS = ("bp", "points switched off", "dfa", "pdfa, gaussian", "pdfa, camera")
MODELS = ("transformer-lm", "resnet-small", "conv-small")
METHODS = ("bp", "opusim", "opacus, hooks", "opacus, ew", "opacus, ghost")


def point_step(method: str, sequences: int = SEQUENCES) -> Step:
    """Return a training step with feedback points, or without them, on one fixed batch."""
    torch.manual_seed(0)
    model: nn.Module = TransformerLM((TOKENS,), 256, width=128, depth=4, heads=4)
    tokens = torch.randint(0, 256, (sequences, TOKENS + 1))
    points = nullcontext
    if method != "bp":
        model = FeedbackAlignment(model, error_at=TransformerLM.error_at)
        shape = model.shape(tokens[:2, :-1])
        if method.startswith("pdfa"):
            name = method.split(", ")[1]
            model.noisy_device = open_device(name, n_inputs=shape.n_inputs, n_outputs=shape.n_outputs)
        if method == "points switched off":
            points = model.backpropagating
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        with points():
            logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def work_of(name: str, records: int | None = None) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, a batch of the given or the usual size, and its targets."""
    torch.manual_seed(0)
    if name == "transformer-lm":
        tokens = torch.randint(0, 256, (records or SEQUENCES, TOKENS + 1))
        model = TransformerLM((TOKENS,), 256, width=128, depth=4, heads=4)
        model.embedding.positions.requires_grad_(False)
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape, kind = ((1, 28, 28), ConvolutionalNetwork) if name == "conv-small" else ((3, 32, 32), ResNet)
    images = torch.randn(records or 64, *shape)
    return kind(shape, 10, norm="group"), images, torch.arange(len(images)) % 10


def record_step(name: str, method: str, records: int | None = None) -> Step:
    """Return a training step of a method, on one fixed batch."""
    model, x, y = work_of(name, records)
    if method == "opusim":
        return private_step(model, x, y, noise_stream("experiment", 1, "central-noise"))
    if method == "bp":
        return plain_step(model, x, y)
    return opacus_step(model, x, y, method.removeprefix("opacus, "))


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Step:
    """Return a step of DP-SGD as Opacus's make_private puts it together, without its data loader."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    warnings.simplefilter("ignore")
    if mode == "ghost":
        return ghost_step(model, x, y, lr=1e-3, momentum=0.0)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    facts: dict[str, Any] = {"expected_batch_size": len(x), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    kind = GradSampleModule if mode == "hooks" else GradSampleModuleExpandedWeights
    sampled, private = kind(model, loss_reduction="mean"), DPOptimizer(sgd, **facts)

    def step() -> None:
        private.zero_grad()
        losses(sampled(x), y).mean().backward()
        private.step()

    return step


def print_memory(part: str, *arguments: str) -> None:
    """Print by how much memory rises in three steps; a step of two records compiles kernels first."""
    if part == "transformer_step":
        small, whole = (lambda n=n: point_step(arguments[0], n) for n in (2, 64))
    else:
        small, whole = (lambda n=n: record_step(arguments[0], arguments[1], n) for n in (2, None))
    small()()
    step = whole()
    print_memory_rise(lambda: None, lambda: lambda: [step() for _ in range(3)])


def measure_points() -> dict[str, Any]:
    """Return the time and memory of each method over backpropagation's."""
    work = {method: point_step(method) for method in POINTS}
    seconds = interleaved(work, repeats=REPEATS, inner=2, clock=time.process_time)
    memory = {method: memory_rise(MODULE, "transformer_step", method) for method in POINTS}
    rows = [
        {
            "work": method,
            "ms": 1e3 * seconds[method],
            "ratio": seconds[method] / seconds["bp"],
            "memory_mib": memory[method],
            "memory_ratio": memory[method] / memory["bp"],
        }
        for method in POINTS
    ]
    facts = {"threads": 1, "repeats": REPEATS, "steps_in_a_turn": 2, "sequences": SEQUENCES, "tokens": TOKENS}
    return {**facts, "limit": "pdfa, gaussian: ratio <= 1.1, memory_ratio <= 1", "rows": rows}


def measure_records() -> dict[str, Any]:
    """Return the time and memory of each model and method; forms of Opacus that a model refuses are left out."""
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        work: dict[str, Step] = {}
        for method in METHODS:
            try:
                step = record_step(name, method)
                step()
                work[method] = step
            except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
                print(f"{name} {method} does not run ({type(error).__name__}: {str(error)[:80]})")
        turns = interleaved_turns(work, repeats=9, clock=time.process_time, warm_up=1)
        memory = {method: memory_rise(MODULE, "module_record_step", name, method) for method in work}
        rows += [
            {
                "model": name,
                "work": method,
                "ms": 1e3 * statistics.median(turns[method]),
                "ratio": statistics.median(a / b for a, b in zip(turns[method], turns["bp"], strict=True)),
                "memory_mib": memory[method],
                "memory_ratio": memory[method] / max(memory["bp"], 1e-3),
            }
            for method in work
        ]
    return {"threads": 1, "repeats": 9, "rows": rows}


PARTS = {"transformer_step": measure_points, "module_record_step": measure_records}
"""What measures each file of results."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_memory(*sys.argv[2:]) if sys.argv[1:2] == ["--memory"] else program_of_parts(PARTS)
