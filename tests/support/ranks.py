"""Fork processes that find each other like those that torchrun starts."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opusim.processes.ranks import init_process_group
from tests.support.killing import start_child
from tests.support.ports import free_port

PRELOADED = (
    *("torch._dynamo", "opusim.devices.simulated", "opusim.training.feedback.trainer"),
    *("opusim.training.ulr.trainer", "opusim.training.convex.trainer"),
    "opusim.training.protections.noisy_labels",
)
"""What forked processes would each import again."""


def preload() -> None:
    """Import libraries before processes are forked."""
    torch.set_num_threads(1)
    for name in PRELOADED:
        import_module(name)


def start_ranks(work: Callable[[int], object], processes: int) -> list[int]:
    """Fork processes that do `work(rank)` in a group of their own; return their process numbers in order of ranks.

    A child exits with 0, or with 1 after an exception, which it prints.
    """
    port = str(free_port())
    return [start_child(lambda rank=rank: _join(work, rank, processes, port)) for rank in range(processes)]


def run_ranks(work: Callable[[int], object], processes: int = 2) -> list[int]:
    """Do work in forked processes; return their exit codes, or the negative number of a signal, in order of ranks."""
    children = start_ranks(work, processes)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _join(work: Callable[[int], object], rank: int, processes: int, port: str) -> None:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ.update(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    torch.set_num_threads(1)
    init_process_group()
    work(rank)


def run_named(
    folder: Path, names: Sequence[str], train: Callable[..., object], *, halved: dict[str, Any]
) -> None:
    """Call `train(folder, name, rank)` in two processes for NAME, in K for NAME=K; for NAME=K+J in K, then in J.

    The former K are given `halved` besides, the J `resume=True`. FOLDER/NAME.RANK.error says what went wrong.
    """

    def work(name: str, options: dict[str, Any], rank: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(folder, name, rank, **options)
        except Exception as error:
            (folder / f"{name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()

    for name in names:
        first, _, then = (name.partition("=")[2] or "2").partition("+")
        attempts = [(first, halved), (then, {"resume": True})] if then else [(first, {})]
        for processes, options in attempts:
            codes = run_ranks(partial(work, name, options), int(processes))
            if any(codes):
                raise RuntimeError(f"{name}: the processes ended with {codes}")
