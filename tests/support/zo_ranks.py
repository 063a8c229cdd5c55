"""A zeroth-order run of one process, or of several that torchrun launches: `torchrun ... zo_ranks.py FOLDER MODE`."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import training


def main(folder: str, mode: str) -> None:
    generator = np.random.default_rng(0)
    y = np.arange(80) % 3
    x = generator.normal(size=(80, 6)) + 2 * np.eye(6)[y]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) if mode == "experiment" else None
    config: dict[str, object] = {
        "mode": mode,
        "epochs": 2,
        "threads": 1,
        "model": {"hidden": [8]},
        "data": {"n_classes": 3, "validation_fraction": 0.0},
        "sampler": {"scheme": "poisson", "batch_size": 16},
        "trainer": {"kind": "zo", "directions": 2},
        "optimizer": {"lr": 0.05},
        "protection": {"kind": "record", "noise_multiplier": 1.0},
    }
    if mode == "experiment":
        config["seed"] = 3
    training.train(config, data=(x, y), model=model, folder=folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
