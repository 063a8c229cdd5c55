"""Time pieces of work against each other in turn, in one process; and the memory of one in a process of its own."""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

Step = Callable[[], object]
_PAUSE_S = 0.1


def interleaved(
    work: Mapping[str, Step],
    *,
    repeats: int,
    inner: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each piece of work; see `interleaved_turns`."""
    seconds = interleaved_turns(work, repeats=repeats, inner=inner, warm_up=warm_up, clock=clock)
    return {name: statistics.median(values) for name, values in seconds.items()}


def with_threads(
    work: Mapping[str, Step], *, repeats: int, inner: int = 1, warm_up: int = 2
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the median seconds of each piece of work with one thread, then with two; see `interleaved_turns`."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with threadpool_limits(threads):  # numpy's products
            yield threads, interleaved(work, repeats=repeats, inner=inner, warm_up=warm_up)


def interleaved_turns(
    work: Mapping[str, Step],
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


def printed(module: str, *arguments: object) -> Any:
    """Return the JSON of the last line that a module prints, run with some arguments in a process of its own."""
    call = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def memory_rise(module: str, *arguments: str) -> float:
    """Return the median of what `print_memory_rise` prints in three processes, MiB: the module's, with "--memory".

    One figure varies by a tenth with the allocator.
    """
    return statistics.median(float(printed(module, "--memory", *arguments)) for _ in range(3))


def print_memory_rise(prepare: Callable[[], object], make: Callable[[], Step]) -> None:
    """Print by how much resident memory rises at its peak while some work is made and done on one thread, MiB."""
    torch.set_num_threads(1)
    prepare()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    make()()
    print(resident_mib("VmHWM") - before)


def resident_mib(key: str) -> float:
    """Return a line of /proc/self/status, such as VmHWM, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) / 1024
