"""Several processes that work on one run: who they are, what they exchange, how an error reaches all of them.

And **pauses** in a long computation, at which its caller may stop it or let something else run first. What computes a
reading that may take minutes calls `pause` between blocks of at most about half a second; what asked for it decides by
`pausing` what happens there. Without `pausing` nothing happens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PRODUCTS_PER_BLOCK = 2**33
"""Multiplications of a product of matrices between two pauses: less than half a second on two processor cores."""
_at_pause: ContextVar[Callable[[], None] | None] = ContextVar("opusim_at_pause", default=None)


def environment_number(
    name: str, default: float, *, least: float, most: float = math.inf, whole: bool = False, what: str
) -> float:
    """Return the number that an environment variable holds; the default if it is not set or empty.

    Args:
        name: The variable.
        default: A number.
        least: The least value.
        most: The largest value; an infinite one, and NaN, are refused in any case.
        whole: Whether it must be a whole number.
        what: What it counts, in the plural, such as "seconds", for the message.

    Raises:
        ValueError: It holds something else.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isfinite(found) and least <= found <= most and not (whole and found % 1):
        return found
    kind = "whole number" if whole else "number"
    limits = f"at least {least:g}" if most == math.inf else f"in [{least:g}, {most:,.15g}]"
    raise ValueError(f"{name} = {text!r}: must be a {kind} of {what}, {limits}; correct or unset it")


def launched_processes() -> int:
    """Return how many processes torchrun started, or 1 without it.

    Raises:
        ValueError: WORLD_SIZE is no such number.
    """
    return int(environment_number("WORLD_SIZE", 1, least=1, most=2**20, whole=True, what="processes"))


def launched_rank() -> int:
    """Return the number of this process among those that torchrun started, or 0 without it.

    Raises:
        ValueError: RANK is no such number.
    """
    world = launched_processes()
    if world == 1:
        return 0
    return int(
        environment_number("RANK", 0, least=0, most=world - 1, whole=True, what="processes before this one")
    )


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
