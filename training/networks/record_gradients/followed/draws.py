"""Random draws in a pass that is followed."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from training.networks.record_gradients.followed.rules import Operation

_SEED = 2**31 + 48611
"""Seed of torch's generator in a pass that is followed; no module is likely to take it."""


def seed_pass() -> None:
    """Seed the global generators, so that passes draw alike."""
    torch.manual_seed(_SEED)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def own_draws(op: Operation) -> bool:
    """Whether an operator draws from a generator of the module's own, or from torch's after the module seeded it."""
    if torch.Tag.nondeterministic_seeded not in op.func.tags or op["dropout_p"] == 0:
        return False
    given = [leaf for leaf in tree_leaves(op.arguments) if isinstance(leaf, torch.Generator)]
    return any(each is not torch.default_generator for each in given) or torch.initial_seed() != _SEED
