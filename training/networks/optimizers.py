"""Torch optimizers by name, their learning rates, their state as named tensors, and the mean of the last iterates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opusim.training.config.sections import OptimizerConfig


def _eager(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A torch optimizer without torch's guards for compiled steps, which import the compiler: 1 to 2 seconds.

    The guards do nothing outside of torch.compile, so the updates are the same.
    """
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in ("step", *_GUARDED)}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(optimizer.__name__, (optimizer,), methods)


_GUARDED = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
_CLASSES = {
    "sgd": _eager(torch.optim.SGD),
    "adam": _eager(torch.optim.Adam),
    "adamw": _eager(torch.optim.AdamW),
    "nadam": _eager(torch.optim.NAdam),
    "radam": _eager(torch.optim.RAdam),
    "adamax": _eager(torch.optim.Adamax),
}
_FUSED = ("sgd", "adam", "adamw")
_ROUNDING = 1e-9
"""Allowance for a quotient of floats that rounding puts just below a whole number."""


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the torch optimizer that a configuration names; hyperparameters of another family are ignored."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    else:
        options["betas"] = (config.beta1, config.beta2)
    if config.name in _FUSED:
        options["fused"] = True
    return _CLASSES[config.name](list(parameters), **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, progress: float) -> None:
    """Set the rate of a step after the share p of the run, in [0, 1), by the schedule.

    lr, lr (1 - p), lr (1 + cos(pi p)) / 2, or lr gamma^floor(p / step_size).
    """
    for group in optimizer.param_groups:
        group["lr"] = config.lr * rate_share(config, progress)


def rate_share(config: OptimizerConfig, progress: float) -> float:
    """Return the learning rate of a step over lr; see `set_learning_rate`."""
    shares = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "step": config.gamma ** math.floor(progress / config.step_size + _ROUNDING),
    }
    return shares[config.schedule]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors named "parameter.key"; plain numbers become float64 scalars."""
    tensors = {}
    for parameter, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                tensors[f"{parameter}.{key}"] = tensor
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore an optimizer from `optimizer_tensors`; its hyperparameters stay as they are."""
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parameter, key = name.split(".", 1)
        plain = tensor.ndim == 0 and tensor.dtype == torch.float64
        state.setdefault(int(parameter), {})[key] = tensor.item() if plain else tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class TailAverage:
    """Running mean of the parameters after each of the last steps (Polyak and Juditsky 1992).

    Noise in the updates averages out, and nothing more is released.

    Args:
        share: Share of the run's steps, at its end, that are averaged, in [0, 1); 0 for none.
        total_steps: Steps of the run.
    """

    def __init__(self, share: float, total_steps: int) -> None:
        self._first = total_steps - round(share * total_steps)
        self._total = total_steps
        self._means: dict[str, Tensor] = {}

    def covers(self, step: int) -> bool:
        """Return whether the average includes the parameters after a step; if not, `update` does not read them."""
        return step > self._first

    def update(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Add the parameters after a step, at least 1; after the last step the mean replaces them."""
        if not self.covers(step):
            return
        count = step - self._first
        if count == 1:
            self._means = {name: tensor.clone() for name, tensor in parameters.items()}
            return
        for name, tensor in parameters.items():
            if tensor.is_floating_point():  # a count of batches has no mean
                self._means[name].lerp_(tensor, 1 / count)
            else:
                self._means[name].copy_(tensor)
        if step == self._total:
            with torch.no_grad():
                for name, tensor in parameters.items():
                    tensor.copy_(self._means[name])

    @property
    def state(self) -> dict[str, Tensor]:
        """The means so far, by name."""
        return self._means

    def load(self, state: Mapping[str, Tensor], place: torch.device) -> None:
        """Restore the means from `state`."""
        self._means = {name: tensor.clone().to(place) for name, tensor in state.items()}
