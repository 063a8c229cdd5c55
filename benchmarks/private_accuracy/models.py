"""The networks of the table that opusim does not hold itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def frozen_hidden_layer(record_shape: Sequence[int], n_outputs: int, *, width: int) -> nn.Module:
    """Return a network with one hidden layer of tanh, which does not train."""
    hidden = nn.Linear(math.prod(record_shape), width)
    hidden.requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Flatten(), hidden, nn.Tanh(), nn.Linear(width, n_outputs))


def tanh_convolutions(
    record_shape: Sequence[int], n_outputs: int, *, widths: tuple[int, int] = (16, 32), hidden: int = 32
) -> nn.Module:
    """Return the small convolutional network of Papernot et al. (AAAI 2021) with tanh, a tempered sigmoid.

    Two convolutions (8 x 8 and 4 x 4, stride 2) with maxima over 2 x 2 places, and one hidden layer: 26,010 parameters
    for images of 28 x 28 pixels. Bounded activations keep gradients near the clip.
    """
    first, second = widths
    sides = [((side + 4 - 8) // 2 - 4) // 2 for side in record_shape[1:]]  # of the last map
    return nn.Sequential(
        nn.Conv2d(record_shape[0], first, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(first, second, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(second * math.prod(sides), hidden),
        nn.Tanh(),
        nn.Linear(hidden, n_outputs),
    )
