"""The processes that work on one run, the pauses in their computations, and the memory that they may take.

**Pauses** in a long computation let its caller stop it or run something else first. Code that may compute a reading for
minutes calls `pause` between blocks of at most about half a second. Its caller decides by `pausing` what happens there;
without `pausing` nothing happens.

**Memory**: one rule for all sizes. The least memory that a size needs must be free. The estimate is a lower bound, such
as the parameters and gradients of a network, so nothing that fits is refused.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from opusim.plugins import Deferred

checks, tables = Deferred("opusim.checks"), Deferred("opusim.tables")

PRODUCTS_PER_BLOCK = 2**33
"""Multiplications of a product of matrices between two pauses: less than half a second on two processor cores."""
_at_pause: ContextVar[Callable[[], None] | None] = ContextVar("opusim_at_pause", default=None)


def environment_number(
    name: str, default: float, *, least: float, most: float = math.inf, whole: bool = False, what: str
) -> float:
    """Return the number of at least `least` that an environment variable holds; the default if it is not set or empty.

    `what` it counts, in the plural, such as "seconds", is for the message of the ValueError; NaN and infinity raise it.
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
    """Return how many processes torchrun started, or 1 without it."""
    return int(environment_number("WORLD_SIZE", 1, least=1, most=2**20, whole=True, what="processes"))


def launched_rank() -> int:
    """Return the number of this process among those that torchrun started, or 0 without it."""
    world = launched_processes()
    if world == 1:
        return 0
    return int(
        environment_number("RANK", 0, least=0, most=world - 1, whole=True, what="processes before this one")
    )


class Abandoned(BaseException):
    """The caller no longer wants the result; not an Exception, so that only the caller handles it."""


def pause() -> None:
    """Let the caller stop or delay this computation; a pause without `pausing` takes about 50 ns."""
    act = _at_pause.get()
    if act is not None:
        act()


@contextmanager
def pausing(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at every pause of this thread within the block; it may wait, or stop the computation by raising."""
    token = _at_pause.set(act)
    try:
        yield
    finally:
        _at_pause.reset(token)


_EXHAUSTED = (
    *("can't allocate memory", "Cannot allocate memory", "cannot allocate memory", "out of memory"),
    *("failed to map segment", "can't start new thread", "Storage size calculation overflowed"),
)
"""Words of torch, the C library and Python in errors for exhausted memory or address space."""
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Return the bytes that this process may still take; infinity if the system does not tell.

    The least of what the system has free (swap included), of what the control group leaves, and of what `ulimit -v`
    leaves.
    """
    return min(_of_system(), _of_group(), _of_limit())


def require_memory(n_bytes: float, *, why: str, remedy: str, **sizes: Any) -> None:
    """Refuse (ValueError) named sizes that need more memory than is free; "__" in a name stands for a dot."""
    free = available_memory()
    if n_bytes > free:
        named = ", ".join(f"{name.replace('__', '.')} = {checks.short(size)}" for name, size in sizes.items())
        raise ValueError(
            f"{named}: {why} need at least {_size(n_bytes)}, and {_size(free)} of memory are free; {remedy}"
        )


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted; torch's allocators raise RuntimeError for it."""
    known = isinstance(error, (RuntimeError, ImportError))
    return isinstance(error, MemoryError) or (known and any(sign in str(error) for sign in _EXHAUSTED))


def exhausted_message() -> str:
    """Return one line for a user whose command needed more memory than there is."""
    limit = _limit()
    found = "this machine's" if limit is None else f"the {_size(limit)} that `ulimit -v` allows"
    return (
        f"the memory is exhausted ({found}): lower sampler.batch_size or model.hidden, give less data, or raise the "
        "limit"
    )


def _of_system() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = {name: value for name, _, value in (line.partition(":") for line in lines)}
    wanted = ("MemAvailable", "SwapFree")
    return (
        1024.0 * sum(int(kib[name].split()[0]) for name in wanted) if set(wanted) <= kib.keys() else math.inf
    )


def _of_group() -> float:
    """Return the memory that the control group of a container leaves; its file cache counts as free."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        facts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return math.inf if most == "max" else float(int(most) - used + int(facts.get("file", 0)))


def _of_limit() -> float:
    limit = _limit()
    if limit is None:
        return math.inf
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return float(limit)
    return max(0.0, limit - float(pages * os.sysconf("SC_PAGE_SIZE")))


def _limit() -> int | None:
    """Return the limit of this process's address space, or None."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _size(n_bytes: float) -> str:
    return f"{n_bytes:.3g} bytes" if n_bytes >= 2.0**60 else str(tables.data_size(int(n_bytes)))
