"""Optimizer, schedule and averaging."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from training.config.section import Section


class OptimizerConfig(Section):
    """A torch optimizer of the SGD or Adam family."""

    largest: ClassVar[dict[str, float]] = {"lr": 1e4}  # parameters of order 1 overflow within ten such steps
    name: Literal["sgd", "adam", "adamw", "nadam", "radam", "adamax"] = "sgd"
    """Class in torch.optim."""
    lr: float = Field(0.01, gt=0.0)
    """Learning rate; 0.002 by default for zo, 1.9 for convex."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (sgd only); 0 for zo and convex, which have none."""
    nesterov: bool = False
    """Nesterov's form of momentum (sgd only)."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (Adam family)."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment (Adam family)."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay as the torch class defines it."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the learning rate falls over the run: not at all, linearly to 0, as half a cosine to 0, or in steps."""
    step_size: float = Field(0.4, gt=0.0, le=1.0)
    """Share of the run after which the rate falls, again and again (schedule step only)."""
    gamma: float = Field(0.85, gt=0.0, le=1.0)
    """Factor by which it falls each time (schedule step only)."""
    averaged_tail: float = Field(0.0, ge=0.0, lt=1.0)
    """The final model is the mean of the parameters over this share of the steps, the last ones; 0 for the last. A run
    that its budget ends early keeps its last parameters."""
