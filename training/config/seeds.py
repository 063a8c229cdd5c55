"""Seeds of a run, one for each purpose."""

from __future__ import annotations

import torch

from opusim.randomness.streams import derive_seed
from training.config.run import RunConfig


def seed_for(config: RunConfig, purpose: str) -> int | None:
    """A seed for one purpose; None in release mode, where nothing is seeded."""
    return derive_seed(config.seed, purpose) if config.mode == "experiment" else None


def generator_for(config: RunConfig, purpose: str) -> torch.Generator:
    """A torch generator for one purpose, seeded by the system in release mode."""
    generator = torch.Generator()
    seed = seed_for(config, purpose)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
