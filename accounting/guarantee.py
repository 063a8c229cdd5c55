"""What is said about a mechanism's privacy: never a bare epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from opusim import checks


class Status(StrEnum):
    """How far a statement can be trusted."""

    PROVEN = "proven"
    """A theorem covers the code as it ran: this sampler, this clipping, this noise, this release."""
    PROVEN_UNDER_DEVICE_MODEL = "proven under a device model"
    """As above, given a stated model of the device's noise."""
    CLAIMED = "claimed"
    """A paper's formula, some of whose hypotheses do not hold here."""
    NONE = "none"
    """No finite guarantee."""


class Unit(StrEnum):
    """What is protected."""

    RECORD = "record"
    """A whole record, features and label."""
    LABEL = "label"
    """The label of a record; the features are public."""


class Adjacency(StrEnum):
    """Which data sets count as neighbours."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    """One has a record more than the other: nothing that is used or released may come from their number."""
    ZERO_OUT = "zero_out"
    """In one of them a record is replaced by a null record, which contributes nothing. Both have the same number of
    records, which is public."""
    REPLACE_ONE = "replace_one"
    """One record has another value. Both have the same number of records, which is public."""


class Release(StrEnum):
    """What the adversary sees."""

    EVERY_UPDATE = "every update"
    EVERY_READING = "every reading"
    LAST_ITERATE = "last iterate"


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A hypothesis of the theorem or formula behind a guarantee.

    Attributes:
        text: The hypothesis, as a sentence.
        holds: True where the code checked or enforces it, False where it fails, None where it is taken on trust.
    """

    text: str
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy, with all that the two numbers mean.

    Attributes:
        epsilon: An upper bound, at least 0; infinity where there is none. Numerical error is included.
        delta: In [0, 1).
        unit: What is protected.
        adjacency: Which data sets count as neighbours.
        release: What the adversary sees.
        status: How far this can be trusted.
        mechanism: What ran, in a few words.
        source: Paper and equation, or theorem.
        assumptions: Every hypothesis, checked, failed or taken on trust.
        epsilon_lower: A lower bound on the same epsilon from the numerics, so that the error is known; None where the
            value is exact.
        formula_value: A paper's formula with its hypotheses taken as given (claimed statements only).
        reason: Why epsilon is infinite; None where it is finite.

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
        self._check_status()

    def _check_status(self) -> None:
        failed = self.failed_assumptions
        if math.isinf(self.epsilon) != (self.reason is not None):
            raise ValueError(
                f"reason = {self.reason!r}: an infinite epsilon needs one, a finite epsilon has none"
            )
        if self.status is Status.NONE and math.isfinite(self.epsilon):
            raise ValueError(f"status = {self.status.value!r}: has no finite epsilon, got {self.epsilon}")
        if failed and self.is_proven:
            raise ValueError(
                f"status = {self.status.value!r}: the assumption {failed[0].text!r} does not hold"
            )

    @property
    def is_proven(self) -> bool:
        """Whether a theorem stands behind it, maybe under a device model; only such statements count for a budget."""
        return self.status in (Status.PROVEN, Status.PROVEN_UNDER_DEVICE_MODEL)

    @property
    def failed_assumptions(self) -> tuple[Assumption, ...]:
        """The hypotheses that do not hold here."""
        return tuple(assumption for assumption in self.assumptions if assumption.holds is False)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; an infinite number becomes the string "inf"."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Guarantee:
        """The guarantee that `to_json` wrote."""
        values = dict(content)
        for key in ("epsilon", "epsilon_lower", "formula_value"):
            if values.get(key) is not None:
                values[key] = float(values[key])
        kinds = {"unit": Unit, "adjacency": Adjacency, "release": Release, "status": Status}
        values |= {key: kind(values[key]) for key, kind in kinds.items()}
        values["assumptions"] = tuple(Assumption(**assumption) for assumption in values["assumptions"])
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
