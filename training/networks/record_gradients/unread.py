"""Let the transformers package apply attention masks without reading them into Python.

Its models leave a mask out if it hides nothing in the whole batch, which one record decides for all others, and warn if
a record ends in padding. They do neither while a graph is traced, which `is_tracing` tells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

_PACKAGE, _NAME = "transformers", "is_tracing"


@contextmanager
def unread_masks() -> Iterator[None]:
    """Let models of transformers run within the block as if their graphs were traced; other packages see nothing."""
    modules = _modules(len(sys.modules)) if _PACKAGE in sys.modules else ()
    before = [vars(module)[_NAME] for module in modules]
    try:
        for module in modules:
            vars(module)[_NAME] = _always
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            vars(module)[_NAME] = function


def _always(*_: Any) -> bool:
    return True


@lru_cache(maxsize=1)
def _modules(loaded: int) -> tuple[ModuleType, ...]:
    """Return the loaded modules of the package that ask whether a graph is traced.

    Args:
        loaded: Number of loaded modules of all packages; another one may have come with it.
    """
    found = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    return tuple(module for module in found if isinstance(vars(module).get(_NAME), type(_always)))
