"""What installed packages add to opusim: devices, trainers, protections, mechanisms and noise laws, by entry point.

`Deferred` imports a module at the first use of a name in it, which spares what a command does not need.

One rule holds for every group. opusim's own entry points win; no package can replace them. A name that two other
packages bring is refused when it is used. A package that cannot be imported, whatever it raises, disturbs no other: the
error names it if it is needed; a list leaves it out and warns once per process.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from opusim.errors import OpusimError

_LOG = logging.getLogger("opusim")
_OURS = "opusim"
FOREIGN_ERRORS = Exception, SystemExit
"""What code of other packages and of users may raise: everything but Ctrl-C; `exit()` must not end our command."""
LoadedT = TypeVar("LoadedT")


class PluginError(OpusimError, ValueError):
    """An entry point that cannot be used; the message, one line, names its package."""


class Deferred:
    """A module that is imported when a name in it is first used, by whichever thread comes first.

    Importing numba and scipy's functions takes as long as a short command; one that only reads a run needs neither.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"Deferred({self._name!r})"

    def __reduce__(self) -> tuple[type[Deferred], tuple[str]]:
        """Copy and pickle the name only."""
        return Deferred, (self._name,)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute and keep it; Python's own lookups, such as `__wrapped__`, import nothing."""
        if name.startswith("__"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


@dataclass(frozen=True)
class _Plugin:
    """An entry point, and the name of the distribution that declares it."""

    point: EntryPoint
    package: str

    def unusable(self, problem: str) -> PluginError:
        """Return the error that says what is wrong with it."""
        source = f"{self.point.value} of package {self.package!r}"
        return PluginError(
            f"{self.point.name!r} cannot be used, {source} {problem}; repair or remove that package"
        )


def names(group: str) -> list[str]:
    """Return the names that are installed in a group, in alphabetical order."""
    return sorted(_installed(group))


def package(group: str, name: str) -> str:
    """Return the distribution that brings a name, or several of them separated by commas; "" if none does."""
    return ", ".join(sorted({plugin.package for plugin in _installed(group).get(name, ())}))


def is_ours(group: str, name: str) -> bool:
    """Whether opusim itself brings a name."""
    return package(group, name) == _OURS


def load(group: str, name: str, *, accept: Callable[[Any], str | None] = lambda found: None) -> Any:
    """Import what a name of `names` stands for in an entry-point group, such as "opusim.trainers".

    PluginError if no package or several bring it, its import fails, or `accept` says what is wrong with the object.
    """
    found = _installed(group).get(name, ())
    if not found:
        raise PluginError(f"{name!r} is not installed in {group}; install the package that brings it")
    if len(found) > 1:
        values = ", ".join(sorted(f"{plugin.point.value} of {plugin.package}" for plugin in found))
        raise PluginError(f"{name!r} is brought by several packages ({values}); remove all but one")
    (plugin,) = found
    try:
        loaded = plugin.point.load()
    except FOREIGN_ERRORS as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise plugin.unusable(f"does not import ({told})") from error
    problem = accept(loaded)
    if problem is not None:
        raise plugin.unusable(problem)
    return loaded


def load_all(group: str, load_one: Callable[[str], LoadedT]) -> dict[str, LoadedT]:
    """Load every name of a group with `load_one`, and warn of each that raises PluginError."""
    found = {}
    for name in names(group):
        try:
            found[name] = load_one(name)
        except PluginError as error:
            _warn(f"opusim: {group}: {error}")
    return found


@functools.cache
def _warn(line: str) -> None:
    """Log a line, but only once per process."""
    _LOG.warning(line)


def _installed(group: str) -> Mapping[str, tuple[_Plugin, ...]]:
    return _scanned(group, tuple(sys.path))


@functools.lru_cache(maxsize=32)
def _scanned(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[_Plugin, ...]]:
    """Return the entry points of a group on a search path, by name; opusim's own replace others of the same name."""
    found: dict[str, dict[str, _Plugin]] = {}
    named = functools.cache(lambda distribution: "" if distribution is None else distribution.name)
    for point in entry_points(group=group):
        same = found.setdefault(point.name, {})
        same.setdefault(point.value, _Plugin(point, named(point.dist)))
    return {
        name: tuple(plugin for plugin in same.values() if plugin.package == _OURS) or tuple(same.values())
        for name, same in found.items()
    }
