"""Waits and time limits of tests that a busy machine must not fail."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

PACES = (1.0, 5.0, 25.0)


def patient(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test that fails with longer time limits: with `pace` = 1, then 5, then 25 times as long.

    A process that gets no processor for a moment misses a limit at one pace; what is broken fails at every pace. For
    tests of time limits only: a fault that shows now and then would pass.
    """

    @functools.wraps(test)
    def repeated(*arguments: Any, **options: Any) -> None:
        for pace in PACES[:-1]:
            try:
                return test(*arguments, pace=pace, **options)
            except (Exception, pytest.fail.Exception):
                continue
        return test(*arguments, pace=PACES[-1], **options)

    signature = inspect.signature(test)
    asked = [each for name, each in signature.parameters.items() if name != "pace"]
    repeated.__signature__ = signature.replace(parameters=asked)  # type: ignore[attr-defined]  # pytest fills in these
    return repeated


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether something holds within some seconds."""
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()
