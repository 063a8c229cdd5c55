"""Another accountant's epsilon next to ours: a class of an installed package, found by an entry point.

    [project.entry-points."opusim.accountants"]
    my_accountant = "my_package:MyAccountant"

    class MyAccountant:
        def epsilon(self, mechanisms, *, delta): ...

`mechanisms` lists what was paid for as plain values: kind, parameters, and `steps`, how often it ran. What the method
returns is stated as claimed, never as proven, and no budget counts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from accounting.guarantee import Assumption, Guarantee, Status
from accounting.mechanism import Mechanism
from opusim import plugins

ENTRY_POINT_GROUP = "opusim.accountants"


class Accountant(Protocol):
    """What an entry point's class is asked; it is built without arguments."""

    def epsilon(self, mechanisms: Sequence[Mapping[str, Any]], *, delta: float) -> float:
        """Return epsilon of all mechanisms together, each of which ran `steps` times."""


@dataclass(frozen=True, kw_only=True)
class NamedAccountant:
    """An accountant that a package brings.

    Attributes:
        name: Of the entry point.
        package: The package.
        accountant: An object of its class.
    """

    name: str
    package: str
    accountant: Accountant

    @classmethod
    def load(cls, name: str) -> Self:
        """Return the accountant of a name.

        Raises:
            ValueError: No package brings the name, or its class cannot be used.
        """
        known = plugins.names(ENTRY_POINT_GROUP)
        if name not in known:
            listed = f"must be one of {', '.join(known)}" if known else "none is installed"
            raise ValueError(
                f"accountant = {name!r}: {listed}; install the package that brings it, or leave it out: epsilon of "
                "opusim's own accountant is always stated"
            )
        found = plugins.load(ENTRY_POINT_GROUP, name, accept=_problem)
        package = plugins.package(ENTRY_POINT_GROUP, name)
        try:
            return cls(name=name, package=package, accountant=found())
        except plugins.FOREIGN_ERRORS as error:
            raise _unusable(name, package, error) from error

    def claimed(self, mechanisms: Sequence[Mechanism], proven: Guarantee) -> Guarantee:
        """Return what the accountant says of what a proven guarantee is about.

        Args:
            mechanisms: What was paid for.
            proven: Ours, of the same mechanisms.

        Raises:
            ValueError: The accountant raises an error, or returns no epsilon.
        """
        try:
            epsilon = float(
                self.accountant.epsilon([one.to_json() for one in mechanisms], delta=proven.delta)
            )
        except plugins.FOREIGN_ERRORS as error:
            raise _unusable(self.name, self.package, error) from error
        if not epsilon >= 0:
            raise _unusable(self.name, self.package, f"epsilon = {epsilon}, which must be at least 0")
        lower = proven.epsilon_lower
        checked = Assumption(
            text="this epsilon is at least the lower bound that opusim found for the same mechanisms",
            holds=None if lower is None else epsilon >= lower,
        )
        trusted = Assumption(text=f"accountant {self.name} of package {self.package} is right about them")
        return Guarantee(
            epsilon=epsilon,
            delta=proven.delta,
            unit=proven.unit,
            adjacency=proven.adjacency,
            release=proven.release,
            status=Status.CLAIMED,
            mechanism=proven.mechanism,
            source=f"accountant {self.name} of package {self.package}",
            assumptions=(checked, trusted, *proven.assumptions),
            reason=None if math.isfinite(epsilon) else f"accountant {self.name} gives no finite epsilon",
        )


def _problem(found: Any) -> str | None:
    fits = isinstance(found, type) and callable(getattr(found, "epsilon", None))
    return None if fits else "is no class with a method epsilon(mechanisms, *, delta)"


def _unusable(name: str, package: str, problem: object) -> plugins.PluginError:
    told = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else str(problem)
    return plugins.PluginError(
        f"accountant = {name!r} of package {package!r}: {' '.join(told.split())}; repair that package, or leave "
        "accountant out"
    )
