"""Several processes that work on one run: who they are, what they exchange, how an error reaches all of them."""

from __future__ import annotations

import os


def launched_processes() -> int:
    """Return how many processes torchrun started, or 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Return the number of this process among those that torchrun started, or 0 without it."""
    return int(os.environ.get("RANK", "0")) if launched_processes() > 1 else 0
