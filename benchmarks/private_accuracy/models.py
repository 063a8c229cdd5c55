"""A network whose hidden layer is random and stays so: the control of what training that layer is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def frozen_hidden_layer(record_shape: Sequence[int], n_outputs: int, *, width: int) -> nn.Module:
    """Return a network with one hidden layer of tanh, which does not train.

    Args:
        record_shape: Shape of a record.
        n_outputs: Classes.
        width: Hidden units.
    """
    hidden = nn.Linear(math.prod(record_shape), width)
    hidden.requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Flatten(), hidden, nn.Tanh(), nn.Linear(width, n_outputs))
