"""Kill a process wherever it touches the disk: at every state that the folder passes through, once.

SIGKILL leaves what the kernel holds: the files as they are, nothing of the memory. Two moments between which no file
changes (before and after an fsync, say) leave the same state, so one kill stands for both. A write is also cut in half.
"""

import gc
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOUCHES = ("write", "fsync", "replace", "ftruncate")
Moment = tuple[int, str]
"""The number of a call, and "before", "within" (a write, half of it done) or "after"."""


class Killer:
    """Counts the calls that touch the disk in this process, and kills it at one of them or records all states."""

    def __init__(self, folder: Path, moment: Moment | None = None, *, memory: Callable = str) -> None:
        """Watch this process: record the states of `folder`, and of `memory` besides the files, or kill at a moment."""
        self.count = 0
        self.states: list[tuple[str, str, str]] = []
        self._folder, self._moment, self._memory = folder, moment, memory
        for name in TOUCHES:
            setattr(os, name, self.watched(name, getattr(os, name)))

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `real` and counts as one touch."""

        def call(*arguments: Any, **options: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if self._moment is None:
                before = self._state()
                result = real(*arguments, **options)
                self.states.append((name, before, self._state()))
                return result
            target, when = self._moment
            if number == target and when == "within":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if number == target and when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if number == target:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def _state(self) -> str:
        digest = hashlib.blake2b(repr(self._memory()).encode())
        for path in sorted(self._folder.rglob("*")):
            digest.update(str(path).encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
        return digest.hexdigest()

    def save(self, file: Path) -> None:
        """Write the states for `read_moments`."""
        file.write_text(json.dumps(self.states))


def read_moments(file: Path) -> tuple[int, list[tuple[str, Moment]]]:
    """Return how many moments there are, and the kinds and moments of all different states."""
    states = json.loads(file.read_text())
    found: list[tuple[str, Moment]] = []
    last = None
    writes = 0
    for number, (kind, before, after) in enumerate(states):
        if before != last:
            found.append((kind, (number, "before")))
        if kind == "write":
            found.append((kind, (number, "within")))
            writes += 1
        if after != before:
            found.append((kind, (number, "after")))
        last = after
    return 2 * len(states) + writes, found


def skip_syncs() -> None:
    """Let this process and its children not wait for the disk: SIGKILL loses nothing that the kernel holds."""

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    os.fsync = fsync


def start_child(work: Callable[[], object]) -> int:
    """Fork; return the number of the child, which does the work and exits with 0, or with 1 after an exception."""
    gc.freeze()  # the child's collector leaves the parent's memory shared
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def status_of(work: Callable[[], object]) -> int:
    """Do work in a forked child; return its status as os.waitpid gives it."""
    return os.waitpid(start_child(work), 0)[1]
