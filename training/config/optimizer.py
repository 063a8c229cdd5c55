"""Optimizer, schedule and averaging."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from training.config.section import Section


class OptimizerConfig(Section):
    """A torch optimizer of the SGD or Adam family."""

    name: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax"] = "sgd"
    """Class in torch.optim."""
    lr: float = Field(0.01, gt=0.0)
    """Learning rate."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (sgd only)."""
    nesterov: bool = False
    """Nesterov's form of momentum (sgd only)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (Adam family)."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment (Adam family)."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay as the torch class defines it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run: not at all, linearly, or as half a cosine."""
    averaged_tail: float = Field(0.0, ge=0.0, lt=1.0)
    """The final model is the mean of the parameters over this share of the steps, the last ones; 0 for the last."""
