"""Splitting the work of a kernel over threads, as many as torch uses, in a way that survives a fork.

Kernels release the interpreter lock, so plain threads suffice; numba's own threading layers are not safe to
enter from two threads at once, nor after a fork. Counter-based kernels give the same numbers for every split.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a child inherits the pool object, but not its threads


def run_split(work: Callable[[int, int], None], count: int, *, grain: int) -> None:
    """Calls work(start, stop) on ranges that cover [0, count), in parallel when there is enough to do.

    Args:
        work: the function; must not depend on how the range is cut.
        count: length of the range, at least 0.
        grain: least length worth a thread of its own, at least 1.
    """
    threads = min(torch.get_num_threads(), count // grain)
    if threads < 2:
        work(0, count)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, thread_name_prefix="opusim"))
    cuts = [count * index // threads for index in range(threads + 1)]
    futures = [pool.submit(work, cuts[i], cuts[i + 1]) for i in range(1, threads)]
    work(cuts[0], cuts[1])
    for future in futures:
        future.result()
