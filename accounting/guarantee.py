"""A privacy statement about a mechanism: never an epsilon without its unit, relation, release and status.

Records become plain JSON values through pydantic; numbers survive the round trip to the last bit.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_type_hints

import lazy_loader

from opusim import checks
from opusim.errors import OpusimError
from opusim.tables import Shown

pydantic = lazy_loader.load("pydantic")  # takes a tenth of a second, which `--help` must not cost

R = TypeVar("R")


def to_json(record: Any) -> dict[str, Any]:
    """Return a dataclass as plain JSON values, its fields in their order; infinity becomes the string "inf"."""
    values = _adapter_of(type(record)).dump_python(record, mode="json")
    return {key: "inf" if value == math.inf else value for key, value in values.items()}


def from_json(kind: type[R], content: Mapping[str, Any]) -> R:
    """Build a dataclass from what `to_json` returned, one value for each field without a default; ignore others.

    Values keep their types: neither true nor "5" is a whole number, and "no" is no truth value. Raises ValueError, in a
    line, if one is missing, NaN, has the wrong type or breaks a rule of the dataclass.
    """
    values = dict(content)
    for key in [key for key, value in values.items() if value == "inf"]:
        hint = get_type_hints(kind).get(key)
        if float in (hint, *get_args(hint)):  # a float, or a float or None
            values[key] = math.inf
    for key, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{key} = nan: must be a number; restore the document")
    try:
        return cast(R, _adapter_of(kind).validate_json(json.dumps(values), strict=True))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        place, value = ".".join(str(part) for part in problem["loc"]), problem["input"]
        shown = "" if isinstance(value, dict | list) else f" = {checks.short(value)}"
        raise ValueError(str(cause) if cause else f"{place}{shown}: {problem['msg']}") from error


_adapter_of: Any = functools.cache(lambda kind: pydantic.TypeAdapter(kind))


class BudgetExceeded(OpusimError):
    """The next step would spend more than the budget; it was not taken."""


class NoGuarantee(OpusimError, ValueError):
    """No theorem covers what was asked; the message names what is missing and what would be covered."""


class LedgerCorrupt(OpusimError, ValueError):
    """A ledger was changed, cut or reordered; the message names file and line."""


class Status(StrEnum):
    """How far a statement can be trusted."""

    PROVEN = "proven"
    """A theorem covers the code as it ran: this sampler, this clipping, this noise, this release."""
    PROVEN_UNDER_DEVICE_MODEL = "proven under a device model"
    """As above, given a stated law of the device's noise."""
    CLAIMED = "claimed"
    """A paper's formula, some of whose hypotheses do not hold here."""
    NONE = "none"
    """No finite guarantee."""


class Unit(StrEnum):
    """What is protected."""

    RECORD = "record"
    """A whole record, features and label."""
    USER = "user"
    """All records of a user; a step uses at most a stated number of them."""
    LABEL = "label"
    """The label of a record; the features are public."""


class Adjacency(StrEnum):
    """Which data sets count as neighbours."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    """One has a record more than the other: nothing used or released may depend on the number of records."""
    ZERO_OUT = "zero_out"
    """In one of them a record is replaced by a null record, which contributes nothing. Both have the same number of
    records, which is public."""
    REPLACE_ONE = "replace_one"
    """One record has another value. Both have the same number of records, which is public."""


class Release(StrEnum):
    """What the attacker sees."""

    EVERY_UPDATE = "every update"
    EVERY_READING = "every reading"
    LAST_ITERATE = "last iterate"


@dataclass(frozen=True, kw_only=True)
class EpsilonBounds:
    """An epsilon enclosed by the numerics: lower <= epsilon(delta) <= upper.

    Attributes:
        lower: 0 if the numerics give no lower bound.
        upper: May be infinite.
        method: How the upper bound was computed, with its resolution.

    Raises:
        NoGuarantee: The bounds contradict each other, or one is NaN.
    """

    lower: float
    upper: float
    method: str

    def __post_init__(self) -> None:
        if not 0 <= self.lower <= self.upper:  # also refuses NaN
            raise NoGuarantee(
                f"numerics: epsilon between {self.lower} and {self.upper} is no interval ({self.method}); report this"
            )


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A hypothesis of the theorem or formula behind a guarantee.

    Attributes:
        text: The hypothesis, as a sentence.
        holds: True if the code checked or enforces it, False if it fails, None if it is taken on trust.
    """

    text: str
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Guarantee(Shown):
    """A statement of (epsilon, delta)-differential privacy, with everything that gives the two numbers a meaning.

    Attributes:
        epsilon: An upper bound, at least 0, numerical error included; infinite if there is none.
        delta: In [0, 1).
        unit: What is protected.
        adjacency: Which data sets count as neighbours.
        release: What the attacker sees.
        status: How far this can be trusted.
        mechanism: What ran, in a few words.
        source: The theorem's name (see `opusim explain`), or the paper and equation, and the numerical method.
        assumptions: Every hypothesis, checked, failed or taken on trust.
        epsilon_lower: A lower bound on the same epsilon, so that the numerical error is known; None if the value is
            exact.
        formula_value: A paper's formula with its hypotheses taken as given (claimed statements only).
        reason: Why epsilon is infinite; None if it is finite.

    Raises:
        ValueError: A number out of range; an infinite epsilon without a reason; a proven statement one of whose
            assumptions fails; a status of none with a finite epsilon.
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    release: Release
    status: Status
    mechanism: str
    source: str
    assumptions: tuple[Assumption, ...] = ()
    epsilon_lower: float | None = None
    formula_value: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:  # refuses NaN as well
            raise ValueError(f"epsilon = {self.epsilon}: must be at least 0 or infinite")
        checks.in_unit_interval(closed="left", delta=self.delta)
        if self.epsilon_lower is not None and not self.epsilon_lower <= self.epsilon:
            raise ValueError(f"epsilon_lower = {self.epsilon_lower}: exceeds epsilon = {self.epsilon}")
        failed = self.failed_assumptions
        if math.isinf(self.epsilon) != (self.reason is not None):
            raise ValueError(
                f"reason = {checks.short(self.reason)}: an infinite epsilon needs one, a finite epsilon has none"
            )
        if self.status is Status.NONE and math.isfinite(self.epsilon):
            raise ValueError(f"status = {self.status.value!r}: has no finite epsilon, got {self.epsilon}")
        if failed and self.is_proven:
            raise ValueError(
                f"status = {self.status.value!r}: the assumption {failed[0].text!r} does not hold"
            )

    def _shown(self) -> dict[str, object]:
        return {
            "epsilon": f"{self.epsilon:.4g}",
            "delta": f"{self.delta:g}",
            "unit": self.unit.value,
            "adjacency": self.adjacency.value,
            "release": repr(self.release.value),
            "status": repr(self.status.value),
            "source": repr(self.source),
            "reason": self.reason,
        }

    @property
    def is_proven(self) -> bool:
        """Whether a theorem supports it, possibly under a device model; a budget counts only such statements."""
        return self.status in (Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL)

    @property
    def theorem(self) -> str | None:
        """The name of the theorem that `source` cites; None if it cites something else."""
        word, _, rest = self.source.partition(" ")
        return rest.split(" ")[0] if word == "theorem" else None

    @property
    def failed_assumptions(self) -> tuple[Assumption, ...]:
        """The hypotheses that fail for this mechanism."""
        return tuple(assumption for assumption in self.assumptions if assumption.holds is False)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite number becomes the string "inf"."""
        return to_json(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Guarantee:
        """Read back what `to_json` returned.

        Raises:
            ValueError: The content is not that of a guarantee.
        """
        return from_json(cls, content)
