"""What does exactly rounded noise cost over float32 noise that is added?

The noise of the gradients of 784-512-512-10, and the record-protected step of `benchmarks.speed.record_step` with
either, in both modes. Required: at most 15 % of a release step at batch 256 more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import BATCH, new_model
from benchmarks.speed.record_step import protected_step
from benchmarks.timing import interleaved
from opusim.randomness.streams import MODES, NoiseStream, SeededStream, SystemStream, noise_stream

MODULE, NAME = "benchmarks.speed.rounded_noise", "rounded_noise"
REPEATS, STEPS = 15, 20
ADDED, ROUNDED = "added", "exactly rounded"


def added(self: NoiseStream, y: torch.Tensor, std: float) -> torch.Tensor:
    """`NoiseStream.add_rounded` as it was before: float32 noise."""
    return self.add_to(y, std)


def noise_work(mode: str) -> dict[str, Callable[[], None]]:
    """Return either noise of every gradient."""
    stream = noise_stream(mode, 0, "rounded noise")
    gradients = [torch.zeros_like(parameter) for parameter in new_model().parameters()]

    def plain() -> None:
        stream.seek(0)
        for gradient in gradients:
            stream.add_to(gradient, 1.3)

    def rounded() -> None:
        stream.seek(0)
        for gradient in gradients:
            stream.add_rounded(gradient, 1.3)

    return {ADDED: plain, ROUNDED: rounded}


def step_work(mode: str, kind: str) -> dict[str, Callable[[], None]]:
    """Return a step with either noise."""
    step = protected_step(torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,)), mode, kind)

    def before() -> None:
        with (
            patch.object(SeededStream, "add_rounded", added),
            patch.object(SystemStream, "add_rounded", added),
        ):
            step()

    return {ADDED: before, ROUNDED: step}


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [
        (row["work"], row["mode"], f"{row['added_ms']:.2f}", f"{row['rounded_ms']:.2f}", f"{row['more']:.1%}")
        for row in found.get("rows", [])
    ]
    text = (
        f"Noise of the {found.get('numbers', 0):,} gradients of 784-512-512-10, and record-protected steps at batch "
        f"{BATCH}, with float32 noise and with noise that is exactly rounded with its sum ({found.get('date')}, "
        f"{command(MODULE)}). Processor time on one thread. Required: a release step takes at most 15 % more."
    )
    columns = ("work", "mode", "added [ms]", "exactly rounded [ms]", "more")
    return section("Exactly rounded noise", text, markdown(columns, rows)) if rows else ""


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for mode in MODES:
        pieces = {
            "noise": noise_work(mode),
            "step, bp": step_work(mode, "bp"),
            "step, pdfa": step_work(mode, "pdfa"),
        }
        for name, piece in pieces.items():
            seconds = interleaved(piece, repeats=REPEATS, inner=STEPS, clock=time.process_time)
            old, new = 1e3 * seconds[ADDED], 1e3 * seconds[ROUNDED]
            rows.append(
                {"work": name, "mode": mode, "added_ms": old, "rounded_ms": new, "more": new / old - 1}
            )
            print(f"{mode:10s}  {name:10s}  {old:6.2f} ms -> {new:6.2f} ms  {new / old - 1:+.1%}")
    numbers = sum(parameter.numel() for parameter in new_model().parameters())
    save_results(NAME, {"batch": BATCH, "numbers": numbers, "repeats": REPEATS, "rows": rows})


if __name__ == "__main__":
    main()
