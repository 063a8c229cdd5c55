"""torch optimizers by name, and their state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from training.config.optimizer import OptimizerConfig

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}
_FUSED = ("sgd", "adam", "adamw")
_ROUNDING = 1e-9
"""Steps of the rate by which a quotient of floats may fall short of the whole number that it is."""


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the torch optimizer that a configuration names.

    Args:
        parameters: What it updates.
        config: Name and hyperparameters; those of another family are ignored.
    """
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    else:
        options["betas"] = (config.beta1, config.beta2)
    if config.name in _FUSED:
        options["fused"] = True
    return _CLASSES[config.name](list(parameters), **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, progress: float) -> None:
    """Set the learning rate of a step: lr, lr (1 - p), lr (1 + cos(pi p)) / 2, or lr gamma^floor(p / step_size).

    Args:
        optimizer: Whose rate is set.
        config: lr and its schedule.
        progress: p, the share of the run's steps that are done, in [0, 1).
    """
    shares = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "step": config.gamma ** math.floor(progress / config.step_size + _ROUNDING),
    }
    for group in optimizer.param_groups:
        group["lr"] = config.lr * shares[config.schedule]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named "parameter.key"; plain numbers become float64 scalars."""
    tensors = {}
    for parameter, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                tensors[f"{parameter}.{key}"] = tensor
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that `optimizer_tensors` took; its hyperparameters stay its own."""
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parameter, key = name.split(".", 1)
        plain = tensor.ndim == 0 and tensor.dtype == torch.float64
        state.setdefault(int(parameter), {})[key] = tensor.item() if plain else tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
