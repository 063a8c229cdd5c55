"""Time pieces of work against each other: in turn, in one process, medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

_PAUSE_S = 0.1


def interleaved(
    work: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    inner: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each piece of work; see `interleaved_turns`."""
    seconds = interleaved_turns(work, repeats=repeats, inner=inner, warm_up=warm_up, clock=clock)
    return {name: statistics.median(values) for name, values in seconds.items()}


def interleaved_turns(
    work: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    inner: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each piece of work, turn by turn; each has its turn in every repeat, so drifts cancel.

    A pause before each turn lets the thread pools of the turn before (torch's, numpy's) stop spinning.

    Args:
        work: Name and function.
        repeats: Counted turns of each.
        inner: Calls in a turn, whose mean counts; steps of a training loop follow each other.
        warm_up: Uncounted turns before.
        clock: Seconds; time.process_time, for work on one thread, does not count those of other processes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-warm_up, repeats):
        for name, function in work.items():
            time.sleep(_PAUSE_S)
            started = clock()
            for _ in range(inner):
                function()
            if repeat >= 0:
                seconds[name].append((clock() - started) / inner)
    return seconds
