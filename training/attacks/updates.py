"""What consecutive weights tell: the gradients behind an update, with momentum and weight decay undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from opusim.errors import ConfigError
from training.config.optimizer import OptimizerConfig

_NESTEROV_STEPS = 40


def steps_needed(options: OptimizerConfig) -> int:
    """Steps before the attacked one that the attacker must see to know the momentum.

    Plain momentum is the last change of the weights. Nesterov's is known through a recursion that forgets its start
    by the factor mu / (1 + mu) < 1/2 a step.

    Raises:
        ConfigError: The optimizer is none that can be undone from weights.
    """
    if options.name != "sgd":
        raise ConfigError(
            "configuration",
            "optimizer.name",
            f"{options.name!r}: the audit undoes the momentum and the weight decay of 'sgd' alone; audit a run with "
            "optimizer.name=sgd (what no theorem protects under sgd is not protected here either)",
        )
    if options.momentum == 0:
        return 0
    return _NESTEROV_STEPS if options.nesterov else 1


def last_gradient(weights: Sequence[Tensor], options: OptimizerConfig, rate: float) -> Tensor:
    """The gradient g of the last of several updates, float64, the weights' shape.

    torch's SGD: b_t = mu b_(t-1) + g_t + wd W_t; W_(t+1) = W_t - rate b_t, with Nesterov's
    W_(t+1) = W_t - rate (g_t + wd W_t + mu b_t).

    Args:
        weights: W_0 .. W_(k+1), consecutive, k at least `steps_needed`.
        options: The optimizer, whose constants are public.
        rate: Learning rate of all these steps.
    """
    exact = [weight.double() for weight in weights]
    changes = [(before - after) / rate for before, after in pairwise(exact)]
    mu = options.momentum
    decay = options.weight_decay * exact[-2]
    if mu == 0:
        return changes[-1] - decay
    if not options.nesterov:
        return changes[-1] - mu * changes[-2] - decay
    momentum = torch.zeros_like(exact[0])
    for change in changes[:-1]:  # change = (1 + mu) b_t - mu b_(t-1)
        momentum = (change + mu * momentum) / (1 + mu)
    return (changes[-1] - mu**2 * momentum) / (1 + mu) - decay


def layer_gradient(gradients: Mapping[str, Tensor], layer: int) -> Tensor:
    """The gradient of a layer (0 ..) as a matrix of shape (n_l, n_(l-1)), one column more for a bias.

    Args:
        gradients: By parameter, "layer1.weight", "layer1.bias", ...
        layer: Its number.
    """
    names = (f"layer{layer + 1}.weight", f"layer{layer + 1}.bias")
    parts = [gradients[name] for name in names if name in gradients]
    return torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1)
