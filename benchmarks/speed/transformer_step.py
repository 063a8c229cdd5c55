"""What does a step of a transformer cost with feedback points over a step of backpropagation?

The built-in `transformer-lm`: four post-norm blocks, width 128, four heads, 256 bytes of vocabulary; 16 sequences of
128 tokens; Adam. The error is taken before the vocabulary layer, each token's error is projected, three blocks receive
feedback. Required: photonic DFA on the `gaussian` device takes at most 1.1 times backpropagation's time with one
thread, and at most its memory; with the points switched off a step takes the time of the plain module. Memory is that
of three steps on 64 sequences in a process of its own: the peak of resident memory (VmHWM) above what it held after a
step on two.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from benchmarks.markdown import Row, command
from benchmarks.results_file import load_results, save_results
from benchmarks.timing import interleaved
from opusim import FeedbackAlignment, open_device
from opusim.training.networks.sequence_models import TransformerLM

MODULE, NAME = "benchmarks.speed.transformer_step", "transformer_step"
VOCABULARY, WIDTH, HEADS, BLOCKS = 256, 128, 4, 4
SEQUENCES, TOKENS = 16, 128
REPEATS, STEPS = 15, 2
LIMIT = 1.1
METHODS = ("bp", "points switched off", "dfa", "pdfa, gaussian", "pdfa, camera")


def step_of(method: str, sequences: int = SEQUENCES) -> Callable[[], None]:
    """Return a training step of a method, on one fixed batch."""
    torch.manual_seed(0)
    model: nn.Module = TransformerLM((TOKENS,), VOCABULARY, width=WIDTH, depth=BLOCKS, heads=HEADS)
    tokens = torch.randint(0, VOCABULARY, (sequences, TOKENS + 1))
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


def memory_of(method: str) -> int:
    """Return the memory of three steps in a process of its own, in KiB."""
    arguments = [sys.executable, "-m", MODULE, "--memory", method]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


def print_memory(method: str) -> None:
    """Do three steps on one thread and print by how much resident memory rose at its peak, in KiB."""
    torch.set_num_threads(1)
    step_of(method, sequences=2)()  # compiles kernels
    step = step_of(method, sequences=64)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(3):
        step()
    print(status("VmHWM") - before)


def status(key: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def speed_rows() -> list[Row]:
    """Return what a photonic step costs over backpropagation."""
    return [
        (
            f"a step of a transformer of four blocks, {entry['work']}, one thread",
            f"{entry['ratio']:.2f} of backpropagation's time, {entry['memory_ratio']:.2f} of its memory",
            command(MODULE),
        )
        for entry in load_results(NAME).get("rows", [])
        if entry["work"].startswith("pdfa")
    ]


def main() -> None:
    torch.set_num_threads(1)
    work = {method: step_of(method) for method in METHODS}
    seconds = interleaved(work, repeats=REPEATS, inner=STEPS, clock=time.process_time)
    memory = {method: memory_of(method) for method in METHODS}
    rows = []
    for method in METHODS:
        ratio, share = seconds[method] / seconds["bp"], memory[method] / memory["bp"]
        entry = {"work": method, "ms": 1e3 * seconds[method], "ratio": ratio}
        rows.append({**entry, "memory_mib": memory[method] / 1024, "memory_ratio": share})
        print(
            f"{method:22s} {1e3 * seconds[method]:7.1f} ms  {ratio:5.2f} of backpropagation's   "
            f"{memory[method] / 1024:6.0f} MiB  {share:5.2f}"
        )
    facts = {
        "threads": 1,
        "repeats": REPEATS,
        "steps_in_a_turn": STEPS,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
    }
    save_results(
        NAME, {**facts, "limit": f"pdfa, gaussian: ratio <= {LIMIT}, memory_ratio <= 1", "rows": rows}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(sys.argv[2])
    else:
        main()
