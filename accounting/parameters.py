"""The parameters of a mechanism: types of its fields with their rules, and what a field's annotation says of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from opusim import checks
from opusim.accounting.guarantee import Adjacency
from opusim.accounting.theorems import leaving_out


@dataclass(frozen=True)
class Absent:
    """In the annotation of a field that ledgers of earlier versions lack: the value that its absence means."""

    means: Any


Count = Annotated[int, partial(checks.integer, minimum=1)]
Positive = Annotated[float, checks.positive]
NonNegative = Annotated[float, checks.non_negative]
SamplingProbability = Annotated[
    float,
    Doc("q in (0, 1], the probability with which each record enters a batch."),
    partial(checks.in_unit_interval, closed="right"),
]
ExactlyRounded = Annotated[
    bool,
    Doc(
        "Whether every number is released with its noise as one exactly rounded number (docs/privacy.md); a ledger of "
        "an opusim before 0.3 says false."
    ),
    Absent(False),
]
DeviceNoise = Annotated[bool, Doc("Whether the credited noise is a device's, of Gaussian law.")]
StatedRelation = Annotated[
    Adjacency,
    Doc(
        "add_or_remove_one if q, the number of steps, the noise and the divisor are constants; zero_out if one of "
        "them was computed from the number of records, which is then public."
    ),
    leaving_out,
    Absent(Adjacency.ZERO_OUT),
]
"""Types of fields with their rules; a field may add its own `Doc`."""


def require_text(remedy: str) -> Callable[..., None]:
    """Return a rule that refuses an empty text; the remedy says what to write."""

    def rule(**texts: str) -> None:
        for name, text in texts.items():
            if not text.strip():
                raise ValueError(f"{name} = '': {remedy}")

    return rule


@dataclass(frozen=True)
class Parameter:
    """A field of a mechanism, as its annotation describes it.

    Attributes:
        name: The field.
        value_type: Its type, without None.
        item: The type of its elements if it is a tuple, else None.
        meaning: The text of its `Doc`.
        rules: Checkers, each called with the value under the field's name.
        default: None if it has none or is None.
        required: Whether it has no default.
        absent: What its absence from a ledger of an earlier version means; nothing if it was always there.
    """

    name: str
    value_type: type
    item: type | None
    meaning: str
    rules: tuple[Callable[..., None], ...]
    default: Any
    required: bool
    absent: tuple[Any, ...]


@functools.cache
def parameters_of(kind: type[Any]) -> tuple[Parameter, ...]:
    """Return the fields of a mechanism, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        hint, extras = hints[field.name], list[Any]()
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        meanings = [extra.documentation for extra in extras if isinstance(extra, Doc)]
        found.append(
            Parameter(
                name=field.name,
                value_type=get_origin(hint) or hint,
                item=next(iter(get_args(hint)), None),
                meaning=meanings[-1] if meanings else "",
                rules=tuple(extra for extra in extras if callable(extra)),
                default=None if field.default is MISSING else field.default,
                required=field.default is MISSING,
                absent=tuple(extra.means for extra in extras if isinstance(extra, Absent)),
            )
        )
    return tuple(found)
