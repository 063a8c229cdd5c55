"""Can two threads share the noise of a photonic DFA step?

The step of `benchmarks.speed.pdfa_step` on two threads over autograd's, with the noise of its reading drawn in each
way: by one thread, as opusim does for readings of this size; by a pool of Python threads, as it does for larger ones;
by OpenMP's threads, through numba; ahead, in a thread of its own while the forward pass runs. After a product torch's
threads spin and hold their cores for a while, which other threads wait for. All ways draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import patch

import numba
import numpy as np
import torch

from benchmarks.markdown import command, markdown, section
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.pdfa_step import BATCH, autograd_step, closed_form_step
from benchmarks.timing import interleaved
from opusim.randomness import streams
from opusim.randomness.kernels import CHUNK, add_from_philox
from opusim.randomness.streams import SeededStream, split_key
from opusim.training.feedback.config import DfaConfig, PdfaConfig

MODULE, NAME = "benchmarks.speed.noise_threads", "noise_threads"
THREADS, REPEATS, STEPS = 2, 15, 40
_PART = 32 * CHUNK
"""Numbers that an OpenMP thread takes at a time."""

Add = Callable[[SeededStream, torch.Tensor, float], torch.Tensor]


@numba.njit(parallel=True, nogil=True, error_model="numpy")
def _add_in_parts(
    out: np.ndarray, scale: np.float32, reading: int, step_low: int, step_high: int, k0: int, k1: int
) -> None:
    for part in numba.prange((out.size + _PART - 1) // _PART):
        start = part * _PART
        some = out[start : min(start + _PART, out.size)]
        add_from_philox(some, scale, start // CHUNK, reading, step_low, step_high, k0, k1)


def add_by_openmp(stream: SeededStream, y: torch.Tensor, std: float) -> torch.Tensor:
    """`SeededStream.add_to` by OpenMP's threads."""
    numba.set_num_threads(torch.get_num_threads())
    keys = (stream._next_reading(), *split_key(stream._step), *stream._key)
    _add_in_parts(y.view(-1).numpy(), np.float32(std), *keys)
    return y


class Ahead:
    """Draws the noise of a step in a thread, from the time at which the stream is put at that step."""

    def __init__(self) -> None:
        self._pool, self._drawn = ThreadPoolExecutor(1), Future[np.ndarray]()
        self._buffer = np.zeros(BATCH * 1024, np.float32)

    def seek(self, stream: SeededStream, step: int, reading: int = 0) -> None:
        """`SeededStream.seek`, and begin to draw."""
        stream._step, stream._reading = step, reading
        self._drawn = self._pool.submit(self._draw, (reading, *split_key(step), *stream._key))

    def _draw(self, keys: tuple[int, ...]) -> np.ndarray:
        self._buffer.fill(0.0)
        add_from_philox(self._buffer, np.float32(1.0), 0, *keys)
        return self._buffer

    def add_to(self, stream: SeededStream, y: torch.Tensor, std: float) -> torch.Tensor:
        """`SeededStream.add_to` of what was drawn."""
        stream._next_reading()
        return y.view(-1).add_(torch.from_numpy(self._drawn.result()), alpha=std).view_as(y)


def ways(x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return autograd's step, digital DFA's, and photonic DFA's by each way to draw the noise."""
    step, ahead = closed_form_step(x, y, PdfaConfig()), Ahead()

    def pool() -> None:
        with patch.object(streams, "_CHUNKS_PER_THREAD", 64):
            step()

    def openmp() -> None:
        with patch.object(SeededStream, "add_to", add_by_openmp):
            step()

    def early() -> None:
        with (
            patch.object(SeededStream, "seek", lambda *words: ahead.seek(*words)),
            patch.object(SeededStream, "add_to", lambda *words: ahead.add_to(*words)),
        ):
            step()

    return {
        "autograd backpropagation": autograd_step(x, y),
        "digital DFA, no noise": closed_form_step(x, y, DfaConfig()),
        "one thread": step,
        "a pool of threads": pool,
        "OpenMP's threads": openmp,
        "ahead, in a thread": early,
    }


def check_same_numbers() -> None:
    """Require that all ways draw the numbers that one thread draws.

    Raises:
        RuntimeError: One does not.
    """
    stream, ahead, std = SeededStream(3, "noise threads"), Ahead(), 0.7
    drawn = []
    for add in (SeededStream.add_to, add_by_openmp, ahead.add_to):
        ahead.seek(stream, 5)
        drawn.append(add(stream, torch.zeros(BATCH, 1024), std))
    if not all(torch.allclose(drawn[0], other, rtol=1e-6, atol=0) for other in drawn):
        raise RuntimeError("the ways draw different numbers")


def page_section() -> str:
    """Return what the results page shows; empty without results."""
    found = load_results(NAME)
    rows = [(row["way"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}") for row in found.get("rows", [])]
    text = (
        f"A step 784-512-512-10 of photonic DFA, batch {BATCH}, on {THREADS} threads, by the way in which the noise of "
        f"its reading is drawn ({found.get('date')}, {command(MODULE)})."
    )
    return (
        section("Noise on two threads", text, markdown(("noise by", "ms", "of autograd"), rows))
        if rows
        else ""
    )


def main() -> None:
    torch.set_num_threads(THREADS)
    check_same_numbers()
    x, y = torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,))
    seconds = interleaved(ways(x, y), repeats=REPEATS, inner=STEPS)
    reference = seconds["autograd backpropagation"]
    rows = [{"way": name, "ms": 1e3 * value, "ratio": value / reference} for name, value in seconds.items()]
    for row in rows:
        print(f"{row['way']:28s} {row['ms']:7.2f} ms   {row['ratio']:5.2f} of autograd")
    save_results(NAME, {"batch": BATCH, "threads": THREADS, "repeats": REPEATS, "rows": rows})


if __name__ == "__main__":
    main()
