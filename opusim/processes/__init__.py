"""Several processes that work on one run: who they are, what they exchange, how an error reaches all of them.

And **pauses** in a long computation, at which its caller may stop it or let something else run first. What computes a
reading that may take minutes calls `pause` between blocks of at most about half a second; what asked for it decides by
`pausing` what happens there. Without `pausing` nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PRODUCTS_PER_BLOCK = 2**33
"""Multiplications of a product of matrices between two pauses: less than half a second on two processor cores."""
_at_pause: ContextVar[Callable[[], None] | None] = ContextVar("opusim_at_pause", default=None)


def launched_processes() -> int:
    """Return how many processes torchrun started, or 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Return the number of this process among those that torchrun started, or 0 without it."""
    return int(os.environ.get("RANK", "0")) if launched_processes() > 1 else 0


class Abandoned(BaseException):
    """Nobody wants the result any more; no Exception, so that only what asked for the computation handles it."""


def pause() -> None:
    """Let the caller of this computation stop it by an exception, or delay it; costs about 50 ns if it does neither."""
    act = _at_pause.get()
    if act is not None:
        act()


@contextmanager
def pausing(act: Callable[[], None]) -> Iterator[None]:
    """Call an act at every pause of what this thread computes within the block.

    Args:
        act: May wait, and raises to stop the computation, such as `Abandoned`.
    """
    token = _at_pause.set(act)
    try:
        yield
    finally:
        _at_pause.reset(token)
