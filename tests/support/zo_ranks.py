"""A zeroth-order run of one process or of several that share a batch.

`torchrun ... zo_ranks.py FOLDER MODE` is one process of several; `python -m tests.support.zo_ranks FOLDER MODE N ...`
does runs of N processes each, forked from this one with the variables that torchrun sets, which imports libraries once.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from opusim import training
from tests.support.ranks import run_ranks
from tests.support.shared_runs import config_of


def train(folder: str, mode: str) -> None:
    """Do the work of one process."""
    generator = np.random.default_rng(0)
    y = np.arange(80) % 3
    x = generator.normal(size=(80, 6)) + 2 * np.eye(6)[y]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) if mode == "experiment" else None
    options = {"mode": mode, "optimizer": {"lr": 0.05}, "sampler": {"scheme": "poisson", "batch_size": 16}}
    protection = {"kind": "record", "noise_multiplier": 1.0}
    config = config_of({"kind": "zo", "directions": 2}, **options, protection=protection)
    training.train(config, data=(x, y), model=model, folder=folder)
    if dist.is_initialized():
        dist.destroy_process_group()


def train_in_ranks(folder: str, mode: str, processes: int) -> None:
    """Train in forked processes that find each other like those of torchrun."""
    statuses = run_ranks(lambda rank: train(folder, mode), processes)
    if any(statuses):
        raise RuntimeError(f"{folder}: the processes ended with {statuses}")


def main(arguments: list[str]) -> None:
    """Do the one process, or all runs."""
    torch.set_num_threads(1)
    if len(arguments) == 2:
        train(*arguments)
        return
    for folder, mode, processes in zip(*[iter(arguments)] * 3, strict=True):
        if processes == "1":
            train(folder, mode)  # imports and compiles for the forked ones too
        else:
            train_in_ranks(folder, mode, int(processes))


if __name__ == "__main__":
    main(sys.argv[1:])
